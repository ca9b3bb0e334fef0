"""From the configs of runs: their labels in tables, plots and reports, and notes on their costs."""

from collections.abc import Mapping, Sequence
from typing import Any

from dispfl.report.wording import join_and, plural

METHOD_LABELS = {
    "dispfl": "Dis-PFL",
    "local": "Local",
    "fedavg": "FedAvg",
    "fedavg-ft": "FedAvg-FT",
    "ditto": "Ditto",
    "fedfomo": "FedFOMO",
    "subfedavg": "SubFedAvg",
    "dpsgd": "D-PSGD",
    "dpsgd-ft": "D-PSGD-FT",
    "fedprox": "FedProx",
    "scaffold": "SCAFFOLD",
    "fedper": "FedPer",
    "fedrep": "FedRep",
    "fedbn": "FedBN",
    "apfl": "APFL",
    "fedala": "FedALA",
    "dfedavgm": "DFedAvgM",
    "dfedsam": "DFedSAM",
    "dfedpgp": "DFedPGP",
    "da-dpfl": "DA-DPFL",
    "ssfl": "SSFL",
}
"""The names of the methods in their papers; other methods keep their own name."""
IGNORED_KEYS = {
    "seed",
    "workers",
    "device",
    "engine",
    "data.dir",
    "data_sha256",
    "initial_weights_sha256",
}
"""Keys in which runs of one row may differ: they do not affect results, or follow from the seed."""
DATA_TABLES = ("data.", "partition.")
DATA_KEYS = {"peers", "unseen_peers", "samples", "metric", "made_in_python"}
"""Keys outside of tables that say which peers, data and metrics a run has."""
NOT_SET = "not set"
"""The text of a setting that a config does not have, where others have it."""
COUNTED = "counted"
SAVED = "saved"
MAX_NAMED = 3
"""Labels that a sentence names before it counts the others."""


def flops_kind(config: Mapping[str, Any]) -> str:
    """Return whether a run's FLOPs are saved or counted.

    They are saved where peers train small networks, and counted where dense kernels do the work.
    """
    if config["method"].get("structure") == "channels":
        return SAVED
    return COUNTED


def flops_note(kinds: Mapping[str, str]) -> str:
    """Say which rows' FLOPs are counted and which are saved; `kinds` are by label."""
    saved = []
    for label, kind in kinds.items():
        if kind == SAVED:
            saved.append(label)
    if not saved:
        return "FLOPs are counted: the kernels are dense."
    reason = "peers train small networks that compute only these"
    if len(saved) == len(kinds):
        return f"FLOPs are saved: {reason}."
    return (
        f"FLOPs of {join_and(saved)} are saved: {reason}; those of the others are counted: the"
        " kernels are dense."
    )


def connections_note(counts: Mapping[str, int]) -> str:
    """Say how many models a node receives in a round at most; `counts` are by label."""
    labels: dict[int, list[str]] = {}
    for label, count in sorted(counts.items(), key=lambda pair: pair[1]):
        if count:
            labels.setdefault(count, []).append(label)
    if not labels:
        return ""
    if len(labels) == 1:
        (count,) = labels
        models = plural(count, "model")
        return f"Compared at equal connections: no node receives more than {models} in a round."

    most_common = max(labels, key=lambda count: len(labels[count]))
    if len(labels[most_common]) > 2:
        del labels[most_common]
        labels[most_common] = ["the others"]
    parts = []
    for count, names in labels.items():
        parts.append(f"{plural(count, 'model')} with {join_and(first_labels(names))}")
    return f"Not at equal connections: a node receives at most {join_and(parts)} in a round."


def first_labels(labels: Sequence[str]) -> list[str]:
    """Return a few labels and the number of the others."""
    if len(labels) <= MAX_NAMED:
        return list(labels)
    more = len(labels) - MAX_NAMED + 1
    return [*labels[: MAX_NAMED - 1], f"{more} other rows"]


def prevents_comparison(key: str) -> bool:
    """Return whether rows that differ in this key have different peers, data or metrics."""
    return key in DATA_KEYS or key.startswith(DATA_TABLES)


def flat_settings(config: Mapping[str, Any]) -> dict[str, str]:
    """Return a run's config as dotted keys with formatted values, without the ignored keys."""
    flat: dict[str, str] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            for field, field_value in value.items():
                flat[f"{key}.{field}"] = format_setting(field_value)
        else:
            flat[key] = format_setting(value)
    for key in IGNORED_KEYS:
        flat.pop(key, None)
    return flat


def format_setting(value: Any) -> str:
    """Return a config value as short text."""
    match value:
        case True:
            return "yes"
        case False:
            return "no"
        case list():
            return "/".join(map(format_setting, value))
        case float():
            return str(value).removesuffix(".0")
    return str(value)


def row_labels(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the label of each config: `Dis-PFL`, `Dis-PFL (channels, density 0.2)`.

    Configs of the same method and kind of mask are distinguished by the settings in which they
    differ. Configs that differ in their seed alone have the same label.
    """
    all_settings = list(map(flat_settings, configs))
    rivals: dict[tuple[str, bool], list[dict[str, str]]] = {}
    for settings in all_settings:
        family = rivals.setdefault(_family(settings), [])
        if settings not in family:
            family.append(settings)
    distinguishing = {}
    for method, rows in rivals.items():
        distinguishing[method] = distinguishing_keys(rows)

    labels: list[str] = []
    owners: dict[str, dict[str, str]] = {}
    for settings in all_settings:
        label = _label(settings, distinguishing[_family(settings)])
        if owners.setdefault(label, settings) != settings:
            # A custom method that is called Dis-PFL.
            label = f"{label} ({settings['method.name']})"
        labels.append(label)
    return labels


def _label(settings: Mapping[str, str], distinguishing_keys: Sequence[str]) -> str:
    name, channels = _family(settings)
    details = []
    if channels:
        details.append("channels")
    for key in distinguishing_keys:
        details.append(short_setting(key, settings.get(key, NOT_SET)))
    label = METHOD_LABELS.get(name, name)
    if not details:
        return label
    return f"{label} ({', '.join(details)})"


def _family(settings: Mapping[str, str]) -> tuple[str, bool]:
    """Return the method, and whether it masks channels."""
    return settings["method.name"], settings.get("method.structure") == "channels"


def distinguishing_keys(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Return a few keys in which no two rows agree.

    Keys that all rows have and with many values are preferred.
    """

    all_keys = set[str]().union(*rows)
    common_keys = all_keys.intersection(*rows)

    def distinct(keys: Sequence[str]) -> int:
        combinations = set()
        for row in rows:
            combinations.add(tuple(map(row.get, keys)))
        return len(combinations)

    def preference(key: str) -> tuple[bool, int, str]:
        return key not in common_keys, -distinct([key]), key

    chosen: list[str] = []
    for key in sorted(all_keys, key=preference):
        if distinct([*chosen, key]) > distinct(chosen):
            chosen.append(key)
    return chosen


def short_setting(key: str, value: str) -> str:
    """`degree 4` for topology.degree, and `ring` for topology.name."""
    field = key.rpartition(".")[2]
    if field == "name":
        return value
    return f"{field} {value}"
