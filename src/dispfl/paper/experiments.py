"""The paper's tables, figures and claims as experiments: one TOML file each, at three scales; some
at one only.

    the tables of `dispfl run`   settings that all runs of the experiment share
    [reproduce]                  the table or figure of the paper, and its runs: every part combined with every row

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
DESCRIPTIONS = ("beside", "targets", "variant")
"""What a part or a row says about itself; its other keys are settings."""


class ReproduceSettings(Settings):
    """The table `[reproduce]` of an experiment file."""

    table: ClassVar[str] = "reproduce"
    shows: str | None = None
    """The table or figure of the paper: `Table 1`; none where it only makes a claim, or where the
    question is ours."""
    title: str
    """What it compares, in one sentence."""
    label: str | None = None
    """The LaTeX label of the paper's table to compare with."""
    figure: Literal["costs", "curves", "drop", "groups", "masks", "sparsity"] | None = None
    """The figure to draw."""
    against: dict[str, str] = Field(default_factory=dict)
    """The labels of the row that the others are compared with, where it is not the first of
    Dis-PFL."""
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
    """Data, partition, model, topology, method, density in the paper's names; drop probability;
    variant."""
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
        return f"{self.about.shows}: {self.about.title}" if self.about.shows else self.about.title

    @property
    def table(self) -> PrintedTable | None:
        """The paper's table, if any."""
        found, label = {table.label: table for table in tables()}, self.about.label
        if label is not None and label not in found:
            raise ConfigError(
                f"reproduce.label {label!r} does not exist. {did_you_mean(label, found)}",
                key="reproduce.label",
            )
        return found[label] if label else None

    def runs(
        self, out: Path, seeds: int | None = None, overrides: Sequence[str] = ()
    ) -> list[PaperRun]:
        """Return all runs: every row of every part at the first seed, then at the next.

        An override applies to all runs whose components have its key.
        """
        self._check_overrides(overrides)
        found = []
        for number in range(seeds or self.about.seeds):
            for about, first in self._experiments(overrides):
                experiment = first.model_copy(update={"seed": first.seed + number})
                key = _row_key(experiment) | self.about.beside | about.get("beside", {})
                cell = GridRun({}, experiment, run_path(out / "runs", experiment))
                variant, targets = about.get("variant", UNKNOWN), tuple(about.get("targets", ()))
                printed = self._printed(key) if variant == UNKNOWN else None
                found.append(
                    PaperRun(
                        cell, _labels(key, experiment) | {"variant": variant}, printed, targets
                    )
                )
        named = _with_names(found)
        self._check_against([{**run.cell.row, "method": run.labels["method"]} for run in named])
        return named

    def _check_against(self, names: Sequence[Mapping[str, str]]) -> None:
        against = self.about.against
        if not any(against.items() <= own.items() for own in names):
            keys = ", ".join(names[0])
            raise ConfigError(
                f"reproduce.against must name a row by {keys}; no row has {against}.",
                key="reproduce.against",
            )

    def _experiments(self, overrides: Sequence[str]) -> Iterator[tuple[SettingsTable, Experiment]]:
        """Yield every row of every part, with the overrides it has keys for, and what both say
        about themselves.

        An unknown key is rejected.
        """
        combined: list[tuple[SettingsTable, list[str]]] = []
        for part in self.about.parts:
            combined += [
                (part | row, [*_as_overrides(part), *_as_overrides(row)]) for row in self.about.rows
            ]
        plain = [compose(self.config, own) for _, own in combined]
        known = {
            override
            for override in overrides
            if any(_has_key(experiment, override) for experiment in plain)
        }
        for (about, own), experiment in zip(combined, plain, strict=True):
            applied = [
                override
                for override in overrides
                if override not in known or _has_key(experiment, override)
            ]
            yield about, compose(self.config, [*own, *applied]) if applied else experiment

    def _check_overrides(self, overrides: Sequence[str]) -> None:
        """Reject overrides that would make different runs the same."""
        varied, of_variants = (
            {own.partition("=")[0] for table in tables for own in _as_overrides(table)}
            for tables in (
                (*self.about.parts, *self.about.rows),
                [row for row in self.about.rows if "variant" in row],
            )
        )
        for override in overrides:
            key = override.partition("=")[0].strip().removesuffix(".name")
            if key in varied & IDENTIFYING_KEYS | of_variants:
                raise ConfigError(
                    f"{self.name} varies {key} itself, so {override} cannot be set; select runs"
                    " with --only.",
                    key=key,
                )

    def _printed(self, key: Mapping[str, Any]) -> PrintedRow | None:
        rows = self.table.rows if self.table else ()
        return next(
            (
                row
                for row in rows
                if all(getattr(row, name) == value for name, value in key.items())
            ),
            None,
        )


def experiments_folder() -> Path:
    """Return the folder of experiment files: inside an installed package, next to `src` in an
    editable install."""
    package = Path(__file__).parents[1]
    found = [
        folder
        for folder in (package / "experiments", package.parents[1] / "experiments")
        if folder.is_dir()
    ]
    if not found:
        raise ConfigError(
            f"{package} has no experiment files; reinstall dispfl, or give an experiment file by"
            " path."
        )
    return found[0]


def experiment_names(scale: Scale) -> list[str]:
    """Return the names of the experiments of a scale."""
    return sorted(path.stem for path in (experiments_folder() / scale).glob("*.toml"))


def find_experiment(name: str, scale: Scale) -> PaperExperiment:
    """Find an experiment by name (`topologies-cifar10`), by table or figure (`table-2`), or by the
    path of a file."""
    if name.endswith(".toml"):
        return read_experiment(Path(name))
    folder, known = experiments_folder() / scale, experiment_names(scale)
    if name in known:
        return read_experiment(folder / f"{name}.toml")
    for other in SCALES:
        if name in experiment_names(other):
            raise ConfigError(
                f"{name} exists at {other} scale only: add --scale {other}.", key="--scale"
            )
    files = (read_experiment(folder / f"{one}.toml") for one in known)
    shown = {_letters(found.about.shows): found for found in files if found.about.shows}
    if _letters(name) not in shown:
        raise ConfigError(f"There is no experiment {name!r}. {did_you_mean(name, known)}")
    return shown[_letters(name)]


def read_experiment(path: Path) -> PaperExperiment:
    """Read an experiment file."""
    config = read_toml(path)
    if "reproduce" not in config:
        raise ConfigError(f"{path} has no table [reproduce]; run a plain config with dispfl run.")
    return PaperExperiment(path.stem, ReproduceSettings(**config.pop("reproduce")), config)


def select_runs(runs: Sequence[PaperRun], only: Sequence[str]) -> list[PaperRun]:
    """Return the runs with these methods, data sets, partitions, ..., given by the paper's names
    (`--only`)."""
    wanted: dict[str, set[str]] = {}
    known = {value: key for run in runs for key, value in run.labels.items() if value != UNKNOWN}
    for name in only:
        if name not in known:
            raise ConfigError(
                f"--only {name!r} matches no label of these runs. {_labels_hint(name, runs)}",
                key="--only",
            )
        wanted.setdefault(known[name], set()).add(name)
    found = [
        run for run in runs if all(run.labels[key] in values for key, values in wanted.items())
    ]
    if not found:
        raise ConfigError(
            f"--only {','.join(only)} selects no run; no run has all of these labels.", key="--only"
        )
    return found


def _labels_hint(name: str, runs: Sequence[PaperRun]) -> str:
    """`Did you mean dispfl?`, or the labels in which the runs differ: `They differ in method:
    dispfl, local.`"""
    values = {
        key: dict.fromkeys(run.labels[key] for run in runs if run.labels[key] != UNKNOWN)
        for key in runs[0].labels
    }
    differing = {key: list(own) for key, own in values.items() if len(own) > 1}
    hint = did_you_mean(name, [label for own in differing.values() for label in own])
    if hint.startswith("Did you mean"):
        return hint
    return (
        "They differ in"
        f" {'; '.join(f'{key}: ' + ', '.join(own) for key, own in differing.items())}."
    )


def run_path(runs: Path, experiment: Experiment) -> Path:
    """Return the run directory: readable names, and a digest of all settings that differ from the
    defaults."""
    config = experiment.to_toml()
    differing = differing_keys(Experiment(), experiment)
    settings = {key: value for key, (_, value) in differing.items() if key not in IRRELEVANT_KEYS}
    digest = hashlib.blake2b(
        json.dumps(settings, sort_keys=True).encode(), digest_size=4
    ).hexdigest()
    data, partition, method, topology = (
        config[key]["name"] for key in ("data", "partition", "method", "topology")
    )
    density, offline_prob = config["method"].get("density"), config["topology"]["offline_prob"]
    densities = (
        [] if density is None else [f"{density:g}" if isinstance(density, float) else "groups"]
    )
    dropping = [f"drop{offline_prob:g}"] if offline_prob else []
    name = "-".join([method, *densities, topology, *dropping, digest])
    return runs / f"{data}-{partition}" / name / f"seed-{experiment.seed}"


def _row_key(experiment: Experiment) -> dict[str, Any]:
    """Return the fields that identify an experiment's row in the paper's tables; as in
    `PrintedRow`, some are None."""
    config = experiment.to_toml()
    method, density = config["method"]["name"], config["method"].get("density", 1.0)
    return {
        "data": config["data"]["name"],
        "partition": config["partition"]["name"],
        "model": config["model"]["name"],
        "topology": None if method in WITHOUT_TOPOLOGY else config["topology"]["name"],
        "method": method,
        "density": (
            None
            if method == "subfedavg"
            else tuple(density)
            if isinstance(density, list)
            else density
        ),
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
    offline_prob = UNKNOWN if key["topology"] is None else f"{experiment.topology.offline_prob:g}"
    return {
        **{name: value or UNKNOWN for name, value in key.items()},
        "density": density,
        "drop": offline_prob,
    }


def _with_names(runs: Sequence[PaperRun]) -> list[PaperRun]:
    """Return the same runs, each named by the labels in which they differ; where all have a
    variant, by that."""
    everywhere = {key: {run.labels[key] for run in runs} for key in runs[0].labels}
    several = {
        key
        for key, values in everywhere.items()
        if len(values if key == "variant" else values - {UNKNOWN}) > 1
    }
    if UNKNOWN in everywhere["variant"]:
        several.add("method")
    else:
        several -= {"method", "density", "topology"}
    differing = [key for key in everywhere if key in several]
    heading = {"data": "paper's data", "model": "paper's model"}
    return [
        replace(
            run,
            cell=replace(
                run.cell, row={heading.get(key, key): run.labels[key] for key in differing}
            ),
        )
        for run in runs
    ]


def _as_overrides(settings: SettingsTable) -> Iterator[str]:
    """Yield settings as `key=value`, the name of a table before its other keys."""
    for key, value in settings.items():
        if key in DESCRIPTIONS:
            continue
        table = (
            value
            if isinstance(value, Mapping)
            else {"name": value}
            if key in Experiment.CHOICES
            else None
        )
        if table is None:
            yield f"{key}={json.dumps(value)}"
            continue
        if "name" in table:
            yield f"{key}={json.dumps(table['name'])}"
        yield from (
            f"{key}.{field}={json.dumps(context)}"
            for field, context in table.items()
            if field != "name"
        )


def _has_key(experiment: Experiment, override: str) -> bool:
    """Return whether the components of an experiment have the key of an override: a ring has no
    `topology.degree`."""
    table, dot, field = override.partition("=")[0].strip().partition(".")
    owner = getattr(experiment, table, None)
    return not dot or (isinstance(owner, Settings) and field in type(owner).model_fields)


def _letters(text: str) -> str:
    """Reduce `table 1`, `Table-1` and `table1` to the same text."""
    return "".join(letter for letter in text.lower() if letter.isalnum())
