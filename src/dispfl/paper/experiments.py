"""The paper's tables, figures and claims as experiments: one TOML file each, at up to three scales.

    the tables of `dispfl run`   settings that all runs of the experiment share
    [reproduce]                  the table or figure of the paper, and its runs: every part
                                 combined with every row

Parts and rows override the settings of the file, in the same notation: `{ topology = "ring", method
= "local" }`. `beside`, for the experiment or for a part, names the paper's data or model where the
run uses another one; `targets` of a part are the accuracies for which rounds are counted. `variant`
names a row that the paper's tables do not have, and `against` the row that the others are compared
with.

Run directories are in `OUT/runs`, named by a digest of their settings, so several tables can share
a run.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from dispfl.config import compose, differing_keys, read_toml
from dispfl.errors import ConfigError
from dispfl.experiment import Experiment
from dispfl.paper.printed import WITHOUT_TOPOLOGY, PrintedRow, PrintedTable, tables
from dispfl.report.wording import UNKNOWN
from dispfl.runs.grid import GridRun
from dispfl.settings import Settings, did_you_mean

Scale = Literal["laptop", "desktop", "paper"]
SCALES: tuple[Scale, ...] = ("laptop", "desktop", "paper")
SettingsTable = dict[str, Any]
"""Settings in the notation of a config file."""
IDENTIFYING_KEYS = {
    "data",
    "partition",
    "model",
    "topology",
    "topology.offline_prob",
    "method",
    "method.density",
}
"""Keys that identify a run in a table: an override would make several rows the same."""
IRRELEVANT_KEYS = ("seed", "workers", "data.dir")
"""Keys that do not change the experiment."""
HEADINGS = {"data": "paper's data", "model": "paper's model"}
DESCRIPTIONS = ("beside", "targets", "variant")
"""What a part or a row says about itself; its other keys are settings."""


class ReproduceSettings(Settings):
    """The table `[reproduce]` of an experiment file."""

    table: ClassVar[str] = "reproduce"
    shows: str | None = None
    """The table or figure of the paper: `Table 1`.

    None where the paper only makes a claim, or where the question is ours.
    """
    title: str
    """What it compares, in one sentence."""
    label: str | None = None
    """The LaTeX label of the paper's table to compare with."""
    figure: Literal["costs", "curves", "drop", "groups", "masks", "sparsity"] | None = None
    """The figure to draw."""
    against: dict[str, str] = Field(default_factory=dict)
    """The labels of the row that the others are compared with, if not the first of Dis-PFL."""
    seeds: int = Field(default=1, ge=1)
    minutes: float | None = Field(default=None, gt=0)
    """Approximate time of all runs on two cores, at laptop scale."""
    flops: float | None = Field(default=None, gt=0)
    """Approximate dense FLOPs of all runs, at the other scales."""
    beside: dict[str, str] = Field(default_factory=dict)
    parts: tuple[SettingsTable, ...] = ({},)
    rows: tuple[SettingsTable, ...] = ({},)


@dataclass(frozen=True)
class PaperRun:
    """A run of an experiment and the row of the paper to compare it with."""

    cell: GridRun
    labels: Mapping[str, str]
    """Data, partition, model, topology, method and density in the paper's names; drop; variant."""
    printed: PrintedRow | None
    """The row of the paper's table, where the paper prints numbers."""
    targets: tuple[float, ...]


@dataclass(frozen=True)
class PaperExperiment:
    """One of the paper's tables or figures, at one scale."""

    name: str
    about: ReproduceSettings
    config: Mapping[str, Any]
    """Its file without the table `[reproduce]`."""

    @property
    def title(self) -> str:
        """`Table 1: All nine methods ...`"""
        if not self.about.shows:
            return self.about.title
        return f"{self.about.shows}: {self.about.title}"

    @property
    def table(self) -> PrintedTable | None:
        """The paper's table, if any."""
        label = self.about.label
        if label is None:
            return None
        by_label = {table.label: table for table in tables()}
        if label not in by_label:
            raise ConfigError(
                f"reproduce.label {label!r} does not exist. {did_you_mean(label, by_label)}",
                key="reproduce.label",
            )
        return by_label[label]

    def runs(
        self, out: Path, seeds: int | None = None, overrides: Sequence[str] = ()
    ) -> list[PaperRun]:
        """Return all runs: every row of every part at the first seed, then at the next.

        An override applies to all runs whose components have its key.
        """
        self._check_overrides(overrides)
        runs = []
        for number in range(seeds or self.about.seeds):
            for description, first in self._experiments(overrides):
                experiment = first.model_copy(update={"seed": first.seed + number})
                runs.append(self._run(out, description, experiment))
        named = _with_names(runs)
        self._check_against(named)
        return named

    def _run(self, out: Path, description: SettingsTable, experiment: Experiment) -> PaperRun:
        """Return a run and its row of the paper, from what its part and its row say."""
        key = _row_key(experiment) | self.about.beside | description.get("beside", {})
        variant = description.get("variant", UNKNOWN)
        printed = None
        if variant == UNKNOWN:
            printed = self._printed(key)
        return PaperRun(
            cell=GridRun({}, experiment, run_path(out / "runs", experiment)),
            labels=_labels(key, experiment) | {"variant": variant},
            printed=printed,
            targets=tuple(description.get("targets", ())),
        )

    def _check_against(self, runs: Sequence[PaperRun]) -> None:
        against = self.about.against
        for run in runs:
            names = {**run.cell.row, "method": run.labels["method"]}
            if against.items() <= names.items():
                return
        keys = ", ".join({**runs[0].cell.row, "method": ""})
        raise ConfigError(
            f"reproduce.against must name a row by {keys}; no row has {against}.",
            key="reproduce.against",
        )

    def _experiments(self, overrides: Sequence[str]) -> Iterator[tuple[SettingsTable, Experiment]]:
        """Yield every row of every part, with what both say about themselves.

        Each has the overrides that it has keys for. An unknown key is rejected.
        """
        rows: list[tuple[SettingsTable, list[str], Experiment]] = []
        for part, row in product(self.about.parts, self.about.rows):
            settings = [*_as_overrides(part), *_as_overrides(row)]
            rows.append((part | row, settings, compose(self.config, settings)))

        known_overrides = set()
        for override in overrides:
            if any(_has_key(experiment, override) for _, _, experiment in rows):
                known_overrides.add(override)

        for description, settings, experiment in rows:
            applied = []
            for override in overrides:
                # `compose` rejects those that no row has a key for.
                if override not in known_overrides or _has_key(experiment, override):
                    applied.append(override)
            if applied:
                experiment = compose(self.config, [*settings, *applied])
            yield description, experiment

    def _check_overrides(self, overrides: Sequence[str]) -> None:
        """Reject overrides that would make different runs the same."""
        fixed = set()
        for table in (*self.about.parts, *self.about.rows):
            for key in map(_key_of, _as_overrides(table)):
                if "variant" in table or key in IDENTIFYING_KEYS:
                    fixed.add(key)
        for override in overrides:
            key = _key_of(override).removesuffix(".name")
            if key in fixed:
                raise ConfigError(
                    f"{self.name} varies {key} itself, so {override} cannot be set; select runs"
                    " with --only.",
                    key=key,
                )

    def _printed(self, key: Mapping[str, Any]) -> PrintedRow | None:
        """Return the row of the paper's table with these fields, if any."""
        if self.table is None:
            return None
        for row in self.table.rows:
            if all(getattr(row, name) == value for name, value in key.items()):
                return row
        return None


def experiments_folder() -> Path:
    """Return the folder of experiment files.

    It is inside an installed package, and next to `src` in an editable install.
    """
    package = Path(__file__).parents[1]
    for parent in (package, package.parents[1]):
        if (parent / "experiments").is_dir():
            return parent / "experiments"
    raise ConfigError(
        f"{package} has no experiment files; reinstall dispfl, or give an experiment file by path."
    )


def experiment_names(scale: Scale) -> list[str]:
    """Return the names of the experiments of a scale."""
    return sorted(path.stem for path in (experiments_folder() / scale).glob("*.toml"))


def find_experiment(name: str, scale: Scale) -> PaperExperiment:
    """Find an experiment by name (`topologies-cifar10`), table or figure (`table-2`), or path."""
    if name.endswith(".toml"):
        return read_experiment(Path(name))
    folder = experiments_folder() / scale
    names = experiment_names(scale)
    if name in names:
        return read_experiment(folder / f"{name}.toml")
    for available in SCALES:
        if name in experiment_names(available):
            raise ConfigError(
                f"{name} exists at {available} scale only: add --scale {available}.", key="--scale"
            )
    for file_name in names:
        experiment = read_experiment(folder / f"{file_name}.toml")
        if experiment.about.shows and _letters(experiment.about.shows) == _letters(name):
            return experiment
    raise ConfigError(f"There is no experiment {name!r}. {did_you_mean(name, names)}")


def read_experiment(path: Path) -> PaperExperiment:
    """Read an experiment file."""
    config = read_toml(path)
    if "reproduce" not in config:
        raise ConfigError(f"{path} has no table [reproduce]; run a plain config with dispfl run.")
    return PaperExperiment(path.stem, ReproduceSettings(**config.pop("reproduce")), config)


def select_runs(runs: Sequence[PaperRun], only: Sequence[str]) -> list[PaperRun]:
    """Return the runs with these labels (`--only`): methods, data sets, partitions, ..."""
    labels = _distinct_labels(runs)
    selected: dict[str, set[str]] = {}
    for name in only:
        selected.setdefault(_key_with(name, labels), set()).add(name)

    matching = []
    for run in runs:
        if all(run.labels[key] in names for key, names in selected.items()):
            matching.append(run)
    if not matching:
        raise ConfigError(
            f"--only {','.join(only)} selects no run; no run has all of these labels.", key="--only"
        )
    return matching


def _key_with(name: str, labels: dict[str, list[str]]) -> str:
    """Return the last label that has a value; refuse one that none has."""
    for key, values in reversed(labels.items()):
        if name in values and name != UNKNOWN:
            return key
    raise ConfigError(
        f"--only {name!r} matches no label of these runs. {_labels_hint(name, labels)}",
        key="--only",
    )


def _distinct_labels(runs: Sequence[PaperRun]) -> dict[str, list[str]]:
    """Return the values of each label, in order of appearance."""
    labels: dict[str, list[str]] = {}
    for run in runs:
        for key, value in run.labels.items():
            values = labels.setdefault(key, [])
            if value not in values:
                values.append(value)
    return labels


def _labels_hint(name: str, labels: Mapping[str, Sequence[str]]) -> str:
    """`Did you mean dispfl?`, or `They differ in method: dispfl, local.`"""
    differing: list[str] = []
    parts = []
    for key, values in labels.items():
        names = [value for value in values if value != UNKNOWN]
        if len(names) > 1:
            differing += names
            parts.append(f"{key}: {', '.join(names)}")
    hint = did_you_mean(name, differing)
    if hint.startswith("Did you mean"):
        return hint
    return f"They differ in {'; '.join(parts)}."


def run_path(runs: Path, experiment: Experiment) -> Path:
    """Return the run directory: readable names, and a digest of settings that are not defaults."""
    settings = {}
    for key, (_, value) in differing_keys(Experiment(), experiment).items():
        if key not in IRRELEVANT_KEYS:
            settings[key] = value
    text = json.dumps(settings, sort_keys=True)
    digest = hashlib.blake2b(text.encode(), digest_size=4).hexdigest()

    config = experiment.to_toml()
    parts = [config["method"]["name"]]
    density = config["method"].get("density")
    if isinstance(density, float):
        parts.append(f"{density:g}")
    elif density is not None:
        parts.append("groups")
    parts.append(config["topology"]["name"])
    offline_prob = config["topology"]["offline_prob"]
    if offline_prob:
        parts.append(f"drop{offline_prob:g}")
    folder = f"{config['data']['name']}-{config['partition']['name']}"
    return runs / folder / "-".join([*parts, digest]) / f"seed-{experiment.seed}"


def _row_key(experiment: Experiment) -> dict[str, Any]:
    """Return the fields of `PrintedRow` that identify an experiment's row; some are None."""
    config = experiment.to_toml()
    method = config["method"]["name"]
    topology = config["topology"]["name"]
    if method in WITHOUT_TOPOLOGY:
        topology = None
    density = config["method"].get("density", 1.0)
    if method == "subfedavg":
        density = None
    elif isinstance(density, list):
        density = tuple(density)
    return {
        "data": config["data"]["name"],
        "partition": config["partition"]["name"],
        "model": config["model"]["name"],
        "topology": topology,
        "method": method,
        "density": density,
    }


def _labels(key: Mapping[str, Any], experiment: Experiment) -> dict[str, str]:
    """Return the same fields as text, and the drop probability."""
    match key["density"]:
        case None:
            density = UNKNOWN
        case tuple() as groups:
            density = f"{min(groups):g}–{max(groups):g}"
        case value:
            density = f"{value:g}"
    labels = {name: value or UNKNOWN for name, value in key.items()}
    labels["density"] = density
    labels["drop"] = UNKNOWN
    if key["topology"] is not None:
        labels["drop"] = f"{experiment.topology.offline_prob:g}"
    return labels


def _with_names(runs: Sequence[PaperRun]) -> list[PaperRun]:
    """Return the same runs, each named by the labels in which they differ.

    Where all have a variant, that replaces method, density and topology.
    """
    labels = _distinct_labels(runs)
    keys = []
    for key, values in labels.items():
        names = [value for value in values if value != UNKNOWN or key == "variant"]
        if UNKNOWN not in labels["variant"]:
            needed = len(names) > 1 and key not in ("method", "density", "topology")
        else:
            needed = len(names) > 1 or key == "method"
        if needed:
            keys.append(key)

    named = []
    for run in runs:
        row = {HEADINGS.get(key, key): run.labels[key] for key in keys}
        named.append(replace(run, cell=replace(run.cell, row=row)))
    return named


def _as_overrides(settings: SettingsTable) -> Iterator[str]:
    """Yield settings as `key=value`, the name of a table before its other keys."""
    for key, value in settings.items():
        if key in DESCRIPTIONS:
            continue
        if key in Experiment.CHOICES and not isinstance(value, Mapping):
            value = {"name": value}
        if not isinstance(value, Mapping):
            yield f"{key}={json.dumps(value)}"
            continue
        if "name" in value:
            yield f"{key}={json.dumps(value['name'])}"
        for field, setting in value.items():
            if field != "name":
                yield f"{key}.{field}={json.dumps(setting)}"


def _key_of(override: str) -> str:
    """Return `method.density` of `method.density=0.2`."""
    return override.partition("=")[0].strip()


def _has_key(experiment: Experiment, override: str) -> bool:
    """Return whether an experiment has the key of an override: a ring has no `topology.degree`."""
    table, dot, field = _key_of(override).partition(".")
    owner = getattr(experiment, table, None)
    return not dot or (isinstance(owner, Settings) and field in type(owner).model_fields)


def _letters(text: str) -> str:
    """Reduce `table 1`, `Table-1` and `table1` to the same text."""
    return "".join(filter(str.isalnum, text.lower()))
