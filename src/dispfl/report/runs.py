"""Find run directories, and read each one into the one model that tables, plots and pages use."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from math import inf
from pathlib import Path
from statistics import fmean
from typing import Any

from dispfl.config import MADE_IN_PYTHON
from dispfl.core.device_classes import FIT, class_of_each, read_classes
from dispfl.core.metric import Measure
from dispfl.core.names import MAX_PEERS, roster_of
from dispfl.core.quantities import SIMULATED
from dispfl.core.report import QUANTITIES
from dispfl.errors import RunError
from dispfl.report.labels import flat_settings, flops_kind, prevents_comparison, row_labels
from dispfl.runs.directory import (
    label_counts,
    read_config,
    read_labels,
    read_metrics,
    read_summary,
)
from dispfl.runs.links import decode_links, decode_numbers
from dispfl.runs.metrics import (
    check_records,
    last_scores,
    main_scores,
    mean_peer_seconds,
    measure_of,
    seconds_per_peer_round,
)
from dispfl.runs.timing import fleet_of_config

Record = dict[str, Any]
"""A line of the metrics."""
GAP = "gap"
"""How much better models are on training data than on test data."""
SERVER = "server"
ROUNDING = 1e-9
"""Equal costs may differ in the last bits of their sums."""


class Budget(StrEnum):
    """The quantity that is held equal when runs are compared."""

    ROUNDS = "rounds"
    BYTES = "bytes"
    FLOPS = "flops"
    SECONDS = "seconds"
    HOURS = "hours"


@dataclass(frozen=True)
class RunPoint:
    """A run after some round: its scores then and its total cost so far."""

    round: int = 0
    """1 is the first."""
    score: float | None = None
    """The main metric, mean over the peers; None if the round was not evaluated."""
    peer_std: float | None = None
    per_peer: Sequence[float | None] = ()
    """The main metric of every peer."""
    extras: Mapping[str, float] = field(default_factory=dict)
    """The other metrics and quantities that tables show, mean over the peers, by name."""
    paper_mb: float = 0.0
    """Traffic of each round's busiest node, summed, as the paper counts it (values only)."""
    wire_mb: float = 0.0
    """Traffic of each round's busiest node, summed, as sent."""
    flops: float = 0.0
    """Total training FLOPs of all peers."""
    seconds: float = 0.0
    """Wall time of all rounds so far."""
    peer_seconds: float = 0.0
    """Time that a peer has computed so far, mean over all peers; 0 if it was not measured."""
    hours: float = 0.0
    """Simulated time so far; 0 without a clock."""

    def after(self, record: Record) -> "RunPoint":
        """Return the point after one more round."""
        scores = main_scores(record) or {"mean": None, "std": None, "per_peer": []}
        return RunPoint(
            round=record["round"] + 1,
            score=scores["mean"],
            peer_std=scores["std"],
            per_peer=scores["per_peer"],
            extras=_extras(record),
            paper_mb=self.paper_mb + record["busiest"]["paper_mb"],
            wire_mb=self.wire_mb + record["busiest"]["wire_mb"],
            flops=self.flops + record["flops_total"],
            seconds=round(self.seconds + record["seconds"], 3),
            peer_seconds=self.peer_seconds + _mean_seconds(record),
            hours=_hours(record),
        )

    def spent(self, budget: Budget) -> float:
        """Return the total cost in the unit of a budget."""
        match budget:
            case Budget.ROUNDS:
                return float(self.round)
            case Budget.BYTES:
                return self.wire_mb
            case Budget.FLOPS:
                return self.flops
            case Budget.SECONDS:
                return self.peer_seconds
            case Budget.HOURS:
                return self.hours


def _extras(record: Record) -> dict[str, float]:
    """Return the means of all metrics but the main one, and of quantities that have a column."""
    metric = record["metric"]
    extras = {}
    for name, values in record["scores"].items():
        if name != metric:
            extras[name] = values["mean"]
    for quantity in QUANTITIES:
        values = quantity.value(record)
        if quantity.column and values:
            extras[quantity.column.name.format(metric=metric)] = values["mean"]

    trained = record.get("train_score")
    tested = main_scores(record)
    if trained and tested:
        extras[GAP] = measure_of([record]).gain(trained["mean"], tested["mean"])
    return extras


def _mean_seconds(record: Record) -> float:
    """Return the seconds that a peer computed in a round.

    They are the mean over all peers, of which some may not have trained; null: no peer trained.
    """
    measured = record.get("peer_seconds")
    if not measured:
        return 0.0
    per_peer = measured["per_peer"]
    return float(sum(filter(None, per_peer)) / len(per_peer))


def _hours(record: Record) -> float:
    """Return the simulated time at the end of a round; 0 without a clock."""
    simulated = record.get(SIMULATED)
    return float(simulated["hours"]) if simulated else 0.0


@dataclass(frozen=True)
class Links:
    """Who received whose model in a round."""

    received: Mapping[str, Sequence[str]]
    """By each node that took part: those whose models it received."""
    missed: Mapping[str, Sequence[str]]
    """By node: those whose models it requested in vain, or refused."""

    @property
    def has_server(self) -> bool:
        return SERVER in self.received

    @property
    def count(self) -> int:
        """How many models were received."""
        return sum(map(len, self.received.values()))


@dataclass(frozen=True, eq=False)
class RecordedRun:
    """The contents of a run directory, and what follows from them."""

    path: Path
    config: Mapping[str, Any]
    records: Sequence[Record]
    """The lines of the metrics."""
    summary: Record | None = None
    """None while the run is not finished."""
    budget: Budget = Budget.ROUNDS
    limit: float | None = None
    """How much of the budget counts; None: all rounds."""

    @property
    def finished(self) -> bool:
        return self.summary is not None

    @property
    def seed(self) -> int:
        return int(self.config["seed"])

    @property
    def method(self) -> str:
        return str(self.config["method"]["name"])

    @cached_property
    def given_label(self) -> str | None:
        """The label of its row, if a comparison or a sweep was given one."""
        return read_labels(self.path.parent.parent).get(self.path.parent.name)

    @property
    def made_in_python(self) -> bool:
        return MADE_IN_PYTHON in self.config

    @property
    def roster(self) -> list[str]:
        return roster_of(self.config)

    @cached_property
    def settings(self) -> dict[str, str]:
        """The config as dotted keys with formatted values."""
        return flat_settings(self.config)

    @property
    def data(self) -> dict[str, str]:
        """The settings that must be equal for peers to be compared one by one."""
        return {key: text for key, text in self.settings.items() if prevents_comparison(key)}

    @property
    def data_digest(self) -> str | None:
        """Of a run made in Python: the digest of its peers' data.

        None with Byzantine peers, whose data may be poisoned.
        """
        if self.config.get("byzantine"):
            return None
        return self.config.get("data_sha256")

    @cached_property
    def measure(self) -> Measure:
        """What its scores measure."""
        return measure_of(self.records)

    @cached_property
    def points(self) -> list[RunPoint]:
        """One per round."""
        points = []
        point = RunPoint()
        for record in self.records:
            point = point.after(record)
            points.append(point)
        return points

    @cached_property
    def final(self) -> RunPoint | None:
        """The last evaluated round within the budget; None if there is none."""
        limit = inf
        if self.limit is not None:
            limit = self.limit * (1 + ROUNDING)
        for point in reversed(self.points):
            if point.score is not None and point.spent(self.budget) <= limit:
                return point
        return None

    def within(self, budget: Budget, limit: float | None) -> "RecordedRun":
        """Return the run with another budget."""
        return replace(self, budget=budget, limit=limit)

    def rounds_to(self, target: float) -> int | None:
        """Return the first evaluated round that is at least as good as a target, or None."""
        reached = self._reaches(target)
        return reached.round if reached else None

    def hours_to(self, target: float) -> float | None:
        """Return the simulated hours to the end of that round; None without it, or a clock."""
        reached = self._reaches(target)
        return reached.hours if reached and self.hours else None

    def _reaches(self, target: float) -> RunPoint | None:
        for point in self.points:
            if point.score is not None and self.measure.reaches(point.score, target):
                return point
        return None

    @property
    def hours(self) -> float | None:
        """The simulated time of all rounds; None without a clock."""
        return self.points[-1].hours or None if self.points else None

    @cached_property
    def device_class_of(self) -> Mapping[str, str]:
        """The class of each peer's device in the fleet of its clock; empty without one."""
        fleet = fleet_of_config(self.config)
        return fleet.class_of if fleet else {}

    @cached_property
    def scores(self) -> dict[str, float]:
        """Each peer's score in the last evaluated round; peers without a score are omitted."""
        values = last_scores(self.records)
        if values is None:
            return {}
        return self._by_peer(values["per_peer"])

    @cached_property
    def peer_seconds(self) -> dict[str, float]:
        """The seconds that each peer computes in a round, where they were measured."""
        return self._by_peer(mean_peer_seconds(self.records) or [])

    def _by_peer(self, per_peer: Sequence[float | None]) -> dict[str, float]:
        by_peer = {}
        for peer, value in zip(self.roster, per_peer, strict=False):
            if value is not None:
                by_peer[peer] = value
        return by_peer

    @property
    def seconds_per_peer(self) -> float | None:
        """Seconds that a peer computes in a round; None if they were not measured."""
        return seconds_per_peer_round(self.records)

    @property
    def densities(self) -> dict[str, float] | None:
        """Each peer's density if they differ: by class, or in equal groups in roster order."""
        density = self.config["method"].get("density")
        if density is None:
            return None
        densities = density if isinstance(density, list) else [density]
        if density == FIT:
            if not self.summary:  # they are known when the run has finished
                return None
            densities = self.summary["densities"]
        classes = read_classes(self.config)
        by_peer = {}
        for index, peer in enumerate(self.roster):
            by_peer[peer] = densities[index * len(densities) // self.config["peers"]]
            if peer in self.class_of:
                by_peer[peer] = classes[self.class_of[peer]].density or by_peer[peer]
        return by_peer if len(set(by_peer.values())) > 1 else None

    @cached_property
    def class_of(self) -> dict[str, str]:
        """The name of each peer's class; empty without classes."""
        return class_of_each(self.config)

    @property
    def paper_mb(self) -> float:
        """Traffic of the busiest node in MB per round, as the paper counts it."""
        return self.points[-1].paper_mb / len(self.points)

    @property
    def wire_mb(self) -> float:
        """Traffic of the busiest node in MB per round, as sent."""
        return self.points[-1].wire_mb / len(self.points)

    @property
    def flops_total(self) -> float:
        """Training FLOPs of all peers per round."""
        return self.points[-1].flops / len(self.points)

    @property
    def flops_per_peer(self) -> float:
        """Training FLOPs of a peer per round."""
        return fmean(record["flops_per_peer"] for record in self.records)

    @property
    def flops_kind(self) -> str:
        """Whether its FLOPs are counted, by dense kernels, or saved by small networks."""
        return flops_kind(self.config)

    @property
    def connections(self) -> int:
        """The largest number of nodes that one node receives models from in a round."""
        return int(max(record["busiest"]["connections"] for record in self.records))

    @property
    def failures(self) -> list[tuple[int, str, str]]:
        """Round (1 is the first), peer and reason of each failed step."""
        failures = []
        for record in self.records:
            for peer, reason in record["failures"].items():
                failures.append((record["round"] + 1, peer, str(reason)))
        return failures

    @property
    def traffic(self) -> dict[str, tuple[float, float]] | None:
        """Each node's bytes per round, up and down; None if the metrics do not record it."""
        total = dict.fromkeys(self.roster, (0.0, 0.0))
        for record in self.records:
            if "traffic" not in record:
                return None
            for node, (up, down) in record["traffic"].items():
                up_before, down_before = total.get(node, (0.0, 0.0))
                total[node] = (up_before + up, down_before + down)
        rounds = len(self.records)
        return {node: (up / rounds, down / rounds) for node, (up, down) in total.items()}

    def links(self, t: int) -> "Links | None":
        """Return who received whose model in round t, -1 for the last; None if not recorded."""
        record = self.records[t]
        if not record.get("links"):
            return None
        nodes = self.roster
        if record["links"].count(";") == len(nodes):
            nodes.append(SERVER)
        with self._damage_named(record):
            missed = record.get("missed_links")
            return Links(
                decode_links(record["links"], nodes), decode_links(missed, nodes) if missed else {}
            )

    @contextmanager
    def _damage_named(self, record: Mapping[str, Any]) -> Iterator[None]:
        """Name the line of the metrics that cannot be read."""
        try:
            yield
        except RunError as problem:
            file = self.path / "metrics.jsonl"
            raise RunError(
                f"{file}, round {record['round']}: {problem} Restore the file, or start the run"
                " again."
            ) from problem

    def similarities(self, t: int) -> dict[str, dict[str, float]]:
        """Return how similar the senders of round t are to each receiver; empty if unknown."""
        record = self.records[t]
        if not record.get("similarities"):
            return {}
        links = self.links(t)
        if links is None:
            return {}
        with self._damage_named(record):
            return decode_numbers(record["similarities"], links.received)

    def label_counts(self) -> list[list[int]] | None:
        """Return each peer's number of training samples per class; None if no split was saved."""
        counts = label_counts(self.path)
        if counts is None:
            return None
        peers = self.config["peers"]
        if counts.dim() != 2 or len(counts) != peers or not counts.numel():
            raise RunError(
                f"The split in {self.path} does not have {peers} peers; restore it, or start the"
                " run again."
            )
        return [list(map(int, of_peer)) for of_peer in counts.tolist()]


def load_run(path: Path) -> RecordedRun:
    """Read a run directory, of which little may be written yet."""
    return RecordedRun(path, read_config(path), read_metrics(path), read_summary(path))


def read_run(path: Path) -> RecordedRun:
    """Read a run directory and check everything that tables and reports use."""
    run = load_run(path)
    _check_config(path / "config.toml", run.config)
    check_records(path / "metrics.jsonl", run.records, run.config["peers"])
    return run


def read_runs(paths: Iterable[Path]) -> list[RecordedRun]:
    """Read all run directories among these paths and in folders among them."""
    return list(map(read_run, find_runs(paths)))


def run_labels(runs: Iterable[RecordedRun]) -> list[str]:
    """Return the label of each run: the given one, or one by which it differs from the others."""
    runs = list(runs)
    labels: list[str] = []
    owners: dict[str, Mapping[str, str]] = {}
    for run, label in zip(runs, row_labels([run.config for run in runs]), strict=True):
        given_label = run.given_label
        if given_label is not None:
            label = given_label
            if owners.setdefault(label, run.settings) != run.settings:
                label = f"{given_label} ({run.path.parent.name})"
        labels.append(label)
    return labels


def _check_config(file: Path, config: Mapping[str, Any]) -> None:
    for key in ("seed", "rounds", "peers"):
        if type(config.get(key)) is not int:
            raise RunError(f"{file} is not the config of a run: {key} must be an integer.")
    if not 1 <= config["peers"] <= MAX_PEERS:
        raise RunError(
            f"{file} is not the config of a run: peers must be 1 to {MAX_PEERS:,}, got"
            f" {config['peers']}."
        )
    method = config.get("method")
    if not isinstance(method, dict) or not isinstance(method.get("name"), str):
        raise RunError(f"{file} is not the config of a run: method.name must be a string.")


def find_runs(paths: Iterable[Path]) -> list[Path]:
    """Return the run directories among these paths and in folders among them, each once."""
    unique: dict[Path, Path] = {}
    for path in paths:
        if not path.exists():
            raise RunError(
                f"{path} does not exist; name a run directory, or a folder that contains some."
            )
        runs = _runs_in(path)
        if not runs:
            raise RunError(
                f"{path} neither is nor contains a run directory: there is no config.toml."
            )
        for run in runs:
            unique.setdefault(run.resolve(), run)
    return list(unique.values())


def _runs_in(path: Path) -> list[Path]:
    if (path / "config.toml").exists():
        return [path]
    folders = {file.parent for file in path.rglob("config.toml")}
    outermost = [folder for folder in folders if folders.isdisjoint(folder.parents)]  # no sites
    return sorted(outermost, key=_natural_order)


def _natural_order(path: Path) -> tuple[str, int, str]:
    """Sort folders by name, and `seed-2` before `seed-10`."""
    start, _, number = path.name.rpartition("-")
    if number.isdecimal():
        return str(path.parent), int(number), start
    return str(path.parent), 0, path.name


def relative_to_page(page: Path, path: Path) -> str:
    """Return a run directory relative to the page's folder.

    Both can be moved then, and no home directory is shown.
    """
    relative = os.path.relpath(path.resolve(), page.resolve().parent)
    if relative == ".":
        return path.resolve().name
    return relative
