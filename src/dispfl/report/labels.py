"""From the configs of runs: their labels in tables, plots and reports, and whether FLOPs are
counted or saved."""

from collections.abc import Mapping, Sequence
from typing import Any

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
}
"""The paper's names of the methods; other methods keep their own name."""
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
COUNTED, SAVED = "counted", "saved"
UNKNOWN = "–"
"""A cell without a value."""


def flops_kind(config: Mapping[str, Any]) -> str:
    """Return whether a run's FLOPs are saved, because peers train small networks, or counted, by
    dense kernels."""
    return SAVED if config["method"].get("structure") == "channels" else COUNTED


def flops_note(kinds: Mapping[str, str]) -> str:
    """Return a sentence that says which rows' FLOPs are counted and which are saved; `kinds` are by
    label."""
    saved = [label for label, kind in kinds.items() if kind == SAVED]
    if not saved:
        return "FLOPs are counted: the kernels are dense."
    small = "peers train small networks that compute only these"
    if len(saved) == len(kinds):
        return f"FLOPs are saved: {small}."
    return (
        f"FLOPs of {join_and(saved)} are saved: {small}; those of the others are counted: the"
        " kernels are dense."
    )


def connections_note(counts: Mapping[str, int]) -> str:
    """Return a sentence on how many models a node receives in a round at most; `counts` are by
    label."""
    labels: dict[int, list[str]] = {}
    for label, count in counts.items():
        labels.setdefault(count, []).append(label)
    sending = {count: own for count, own in sorted(labels.items()) if count}
    if not sending:
        return ""
    if len(sending) == 1:
        (count,) = sending
        return (
            f"Compared at equal connections: no node receives more than {_models(count)} in a"
            " round."
        )
    most = max(sending, key=lambda count: len(sending[count]))
    if len(sending[most]) > 2:
        sending.pop(most)
        sending[most] = ["the others"]
    parts = [f"{_models(count)} with {join_and(_first(own))}" for count, own in sending.items()]
    return f"Not at equal connections: a node receives at most {join_and(parts)} in a round."


def _first(labels: Sequence[str], most: int = 3) -> list[str]:
    """Return a few labels and the number of the others."""
    more = len(labels) - most + 1
    return [*labels] if more < 2 else [*labels[: most - 1], f"{more} other rows"]


def _models(count: int) -> str:
    return "1 model" if count == 1 else f"{count} models"


def prevents_comparison(key: str) -> bool:
    """Return whether rows that differ in this key have different peers, data or metrics."""
    return key in (
        "peers",
        "unseen_peers",
        "samples",
        "metric",
        "made_in_python",
    ) or key.startswith(DATA_TABLES)


def join_and(words: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def flat_settings(config: Mapping[str, Any]) -> dict[str, str]:
    """Return a run's config as dotted keys with formatted values, without the ignored keys."""
    flat: dict[str, str] = {}
    for key, value in config.items():
        fields = (
            {f"{key}.{field}": v for field, v in value.items()}
            if isinstance(value, Mapping)
            else {key: value}
        )
        flat |= {name: format_value(v) for name, v in fields.items() if name not in IGNORED_KEYS}
    return flat


def format_value(value: Any) -> str:
    """Return a config value as short text."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return "/".join(map(format_value, value))
    return str(value).removesuffix(".0") if isinstance(value, float) else str(value)


def row_labels(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the label of each config: `Dis-PFL`, `Dis-PFL (channels)`, `Dis-PFL (channels, density
    0.2)`.

    Configs of the same method and kind of mask are told apart by the settings in which they differ.
    Configs that differ in their seed alone have the same label.
    """
    labels: dict[_Settings, str] = {}
    for settings in (rows := list(dict.fromkeys(map(_hashable, configs)))):
        name, channels = _kind(settings)
        rivals = [dict(other) for other in rows if _kind(other) == (name, channels)]
        details = ["channels"] if channels else []
        details += [
            _short(key, dict(settings).get(key, "not set")) for key in _distinguishing_keys(rivals)
        ]
        label = METHOD_LABELS.get(name, name) + (f" ({', '.join(details)})" if details else "")
        labels[settings] = (
            f"{label} ({name})" if label in labels.values() else label
        )  # a custom method called Dis-PFL
    return [labels[_hashable(config)] for config in configs]


_Settings = tuple[tuple[str, str], ...]


def _hashable(config: Mapping[str, Any]) -> _Settings:
    return tuple(sorted(flat_settings(config).items()))


def _kind(settings: _Settings) -> tuple[str, bool]:
    """Return the method, and whether it masks channels."""
    flat = dict(settings)
    return flat["method.name"], flat.get("method.structure") == "channels"


def _distinguishing_keys(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Return a few keys in which no two rows agree, preferring those that all rows have and with
    many values."""
    keys = sorted({key for row in rows for key in row})
    keys.sort(
        key=lambda key: (not all(key in row for row in rows), -len({row.get(key) for row in rows}))
    )
    chosen: list[str] = []

    def distinct(keys: Sequence[str]) -> int:
        return len({tuple(row.get(key) for key in keys) for row in rows})

    for key in keys:
        if distinct([*chosen, key]) > distinct(chosen):
            chosen.append(key)
    return chosen


def _short(key: str, value: str) -> str:
    """`degree 4` for topology.degree, and `ring` for topology.name."""
    last = key.rpartition(".")[2]
    return value if last == "name" else f"{last} {value}"
