"""Runs as rows: which runs are seeds of one row, what a row is called, and in what rows differ."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dispfl.analysis.comparison import Comparison, Row, compare
from dispfl.analysis.report.reading import Run, find_runs, read_run
from dispfl.errors import RunError

NAMES = {
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
"""What the paper calls the methods; others are called by their own name."""
NO_DIFFERENCE = {"seed", "threads", "device", "engine", "data.dir", "first_weights_sha256"}
"""Keys in which runs of one row may differ: they change nothing, or follow from the seed."""
DATA_TABLES = ("data.", "partition.")
COLOURS = 9


@dataclass(frozen=True)
class Series:
    """One row: the runs of one setting over its seeds."""

    label: str
    place: int
    """Its place in the order given, which gives it its colour."""
    runs: Sequence[Run]
    row: Row

    @property
    def paint(self) -> str:
        """The classes that give it its colour and, past the ninth, another dash."""
        return f"s{self.place % COLOURS}" + (" again" if self.place >= COLOURS else "")

    @property
    def seeds(self) -> dict[int, Run]:
        return {run.seed: run for run in self.runs}

    @property
    def unfinished(self) -> bool:
        return any(run.summary is None for run in self.runs)

    @property
    def wire_mb(self) -> float:
        """The busiest node's megabytes a round, as sent, mean over seeds."""
        return self.row.mean(lambda run: run.wire_mb)

    @property
    def paper_mb(self) -> float:
        return self.row.mean(lambda run: run.paper_mb)

    @property
    def flops(self) -> float:
        """A peer's training FLOPs a round, mean over seeds."""
        return self.row.mean(lambda run: run.flops_per_peer)


@dataclass(frozen=True)
class Results:
    """All that the page shows."""

    series: Sequence[Series]
    """Best first; those without a score last."""
    comparison: Comparison
    differing: Mapping[str, Mapping[str, str]]
    """The keys outside the method's table in which rows differ, each with the rows' values."""
    left_out: Sequence[Path]
    """Run directories that have nothing to show yet."""
    other_seeds: Mapping[str, Sequence[int]]
    """The seeds of each row that are not shown, because not every row has them."""

    @property
    def metric(self) -> str:
        return self.comparison.metric

    @property
    def runs(self) -> list[Run]:
        return [run for series in self.series for run in series.runs]

    @property
    def comparable(self) -> bool:
        """Whether a higher score in one row means more than in another."""
        return not any(map(separates, self.differing))

    @property
    def common_seeds(self) -> list[int]:
        """The seeds that every row has."""
        seeds = [set(series.seeds) for series in self.series]
        return sorted(set.intersection(*seeds))


def read_results(paths: Iterable[Path]) -> Results:
    """Read all run directories among the paths and lay them out in rows."""
    every = [read_run(path) for path in find_runs(paths)]
    shown = [run for run in every if run.records]
    left_out = [run.path for run in every if not run.records]
    if not shown:
        raise RunError(f"{every[0].path} has no finished round to report; run it first.")
    groups = _rows(shown)
    rows = dict(zip(_labels([runs[0] for runs in groups]), groups, strict=True))
    differing = _differing({label: settings(runs[0]) for label, runs in rows.items()})
    other_seeds: dict[str, list[int]] = {}
    if not any(map(separates, differing)):
        rows, other_seeds = _of_common_seeds(rows)
    comparison = compare([({"method": label}, run.path) for label, runs in rows.items() for run in runs])
    series = [Series(row.label, place, rows[row.label], row) for place, row in enumerate(comparison.rows)]
    series.sort(key=lambda one: float("inf") if one.row.accuracy is None else -one.row.accuracy)
    return Results(series, comparison, differing, left_out, other_seeds)


def separates(key: str) -> bool:
    """Whether rows that differ in this key have other peers, other data or another metric."""
    return key in ("peers", "samples", "metric", "made_in_python") or key.startswith(DATA_TABLES)


def by_density(series: Series) -> dict[float, list[float]]:
    """The scores of all peers of each density, over all seeds; empty where the method lists no groups."""
    found: dict[float, list[float]] = {}
    for run in series.runs:
        for peer, density in (run.densities or {}).items():
            if peer in run.scores:
                found.setdefault(density, []).append(run.scores[peer])
    return dict(sorted(found.items()))


def settings(run: Run) -> dict[str, str]:
    """A run's config as dotted keys with printable values, without those that make no difference."""
    flat: dict[str, str] = {}
    for key, value in run.config.items():
        inside = {f"{key}.{field}": v for field, v in value.items()} if isinstance(value, dict) else {key: value}
        flat |= {name: printable(v) for name, v in inside.items() if name not in NO_DIFFERENCE}
    return flat


def printable(value: Any) -> str:
    """A config's value in a word or two."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return "/".join(map(printable, value))
    return str(value).removesuffix(".0") if isinstance(value, float) else str(value)


def _rows(runs: Iterable[Run]) -> list[list[Run]]:
    rows: dict[tuple[tuple[str, str], ...], list[Run]] = {}
    for run in runs:
        rows.setdefault(tuple(sorted(settings(run).items())), []).append(run)
    return [sorted(row, key=lambda run: run.seed) for row in rows.values()]


def _of_common_seeds(rows: Mapping[str, list[Run]]) -> tuple[dict[str, list[Run]], dict[str, list[int]]]:
    """The runs of the seeds that every row has, and the others' seeds: a mean over easier data would be no lead."""
    common = set.intersection(*({run.seed for run in runs} for runs in rows.values()))
    if not common:
        return dict(rows), {}
    others = {label: [run.seed for run in runs if run.seed not in common] for label, runs in rows.items()}
    kept = {label: [run for run in runs if run.seed in common] for label, runs in rows.items()}
    return kept, {label: seeds for label, seeds in others.items() if seeds}


def _labels(firsts: Sequence[Run]) -> list[str]:
    """The methods' names; where rows share one, with settings that tell them apart."""
    labels: list[str] = []
    for run in firsts:
        own, rivals = settings(run), [settings(other) for other in firsts if other.method == run.method]
        words = [_short(key, own.get(key, "not set")) for key in _telling_apart(rivals)]
        label = " ".join([NAMES.get(run.method, run.method), *words])
        labels.append(f"{label} ({run.method})" if label in labels else label)  # a method of one's own called Dis-PFL
    return labels


def _telling_apart(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """A few keys in which no two rows agree; first those that all rows have, of many values."""
    every = sorted({key for row in rows for key in row})
    every.sort(key=lambda key: (not all(key in row for row in rows), -len({row.get(key) for row in rows})))
    chosen: list[str] = []

    def told_apart(keys: Sequence[str]) -> int:
        return len({tuple(row.get(key) for key in keys) for row in rows})

    for key in every:
        if told_apart([*chosen, key]) > told_apart(chosen):
            chosen.append(key)
    return chosen


def _short(key: str, value: str) -> str:
    """`degree 4` for topology.degree, and `ring` for topology.name."""
    last = key.rpartition(".")[2]
    return value if last == "name" else f"{last} {value}"


def _differing(rows: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, str]]:
    keys = sorted({key for own in rows.values() for key in own if not key.startswith("method.")})
    found = {key: {label: own.get(key, "not set") for label, own in rows.items()} for key in keys}
    return {key: said for key, said in found.items() if len(set(said.values())) > 1}
