"""Comparisons of runs: score and cost of each row over its seeds, after equal rounds, bytes or
FLOPs."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from math import inf
from pathlib import Path

from dispfl.core.metric import Measure
from dispfl.errors import RunError
from dispfl.report.differences import Difference, paired_difference
from dispfl.report.labels import COUNTED, UNKNOWN, flat_settings, flops_kind, prevents_comparison
from dispfl.runs.directory import read_config, read_metrics
from dispfl.runs.metrics import Metrics, main_scores, measure_of, seconds_per_peer_round

GAP = "gap"
"""How much better models are on training data than on test data."""
VALIDATION = "validation"
"""The name of the main metric on validation data in tables."""
DISPFL = {"method": "dispfl"}
"""The names of the rows that others are compared with unless an experiment says otherwise."""
TEST_LOSS = "test loss"
"""The name of the loss on test data in tables."""


class Budget(StrEnum):
    """The quantity that is held equal when runs are compared."""

    ROUNDS = "rounds"
    BYTES = "bytes"
    FLOPS = "flops"
    SECONDS = "seconds"


@dataclass(frozen=True)
class RunPoint:
    """A run after some round: its scores then and its total cost so far."""

    round: int
    """1 is the first."""
    score: float | None
    """The main metric, mean over the peers; None if the round was not evaluated."""
    peer_std: float | None
    paper_mb: float
    """Traffic of each round's busiest node, summed, as the paper counts it (values only)."""
    wire_mb: float
    """Traffic of each round's busiest node, summed, as sent."""
    flops: float
    """Total training FLOPs of all peers."""
    seconds: float
    """Wall time of all rounds so far."""
    peer_seconds: float = 0.0
    """Time that a peer has computed so far, mean over all peers; 0 if it was not measured."""
    others: Mapping[str, float] = field(default_factory=dict)
    """The other metrics and the loss on test data, mean over the peers, by name."""
    per_peer: Sequence[float | None] = ()
    """The main metric of every peer."""

    def spent(self, budget: Budget) -> float:
        """Return the total cost in the unit of a budget."""
        costs = {
            Budget.ROUNDS: float(self.round),
            Budget.BYTES: self.wire_mb,
            Budget.FLOPS: self.flops,
            Budget.SECONDS: self.peer_seconds,
        }
        return costs[budget]


@dataclass(frozen=True)
class SeedRun:
    """One run of a row."""

    seed: int
    path: Path
    measure: Measure
    """What its scores measure."""
    points: Sequence[RunPoint]
    """One per round."""
    flops_per_peer: float
    """Training FLOPs of a peer per round, mean over all rounds."""
    final: RunPoint | None
    """The last evaluated round within the budget; None if there is none."""
    limit: float | None = field(default=None, kw_only=True)
    """The budget; None if there is no limit."""
    failures: int = 0
    """Number of steps that were discarded: a value was not finite, or the privacy budget was
    spent."""
    seconds_per_peer: float | None = None
    """Seconds that a peer computes in a round; None if they were not measured."""
    flops_kind: str = COUNTED
    """Whether its FLOPs are counted, by dense kernels, or saved by small networks."""
    connections: int = 0
    """The largest number of nodes that one node receives models from in a round."""
    method: str = ""
    data: Mapping[str, str] = field(default_factory=dict)
    """The settings that must be equal for peers to be compared one by one."""
    data_digest: str | None = None
    """Of a run made in Python: the digest of its peers' data. None with Byzantine peers, whose data
    may be poisoned."""

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

    def within(self, budget: Budget, limit: float | None) -> "SeedRun":
        """Return the run with `final` set to the last evaluated round within a limit."""
        tolerant = (
            inf if limit is None else limit * (1 + 1e-9)
        )  # equal costs may differ in the last bits of their sums
        points = [
            point
            for point in self.points
            if point.score is not None and point.spent(budget) <= tolerant
        ]
        return replace(self, final=points[-1] if points else None, limit=limit)

    def rounds_to(self, target: float) -> int | None:
        """Return the first evaluated round that is at least as good as a target, or None."""
        reached = (
            p.round
            for p in self.points
            if p.score is not None and self.measure.reaches(p.score, target)
        )
        return next(reached, None)


@dataclass(frozen=True)
class ComparisonRow:
    """The runs of one method, or of one value of a sweep, over all seeds."""

    name: Mapping[str, str]
    """`{"method": "ditto"}`, or the swept keys with their values."""
    runs: Sequence[SeedRun]

    @property
    def label(self) -> str:
        """`ditto`, or `method.density=0.2`, or `dispfl, topology=ring`; a key without a value is
        left out."""
        known = {key: value for key, value in self.name.items() if value != UNKNOWN}
        return ", ".join(
            value if key == "method" else f"{key}={value}" for key, value in known.items()
        )

    def is_named(self, names: Mapping[str, str]) -> bool:
        """Return whether the row has these names: `{"method": "dispfl", "density": "0.5"}`."""
        known = {**self.name, "method": self.runs[0].method}
        return all(known.get(key) == value for key, value in names.items())

    @property
    def scores(self) -> list[float]:
        """The final score of each seed that has one."""
        return [run.final.score for run in self.runs if run.final and run.final.score is not None]

    @property
    def score(self) -> float | None:
        """Mean over seeds; None if a seed has no score, because means over different seeds are not
        comparable."""
        return statistics.fmean(self.scores) if len(self.scores) == len(self.runs) else None

    @property
    def score_std(self) -> float | None:
        """Sample standard deviation over seeds (n - 1); None with one seed."""
        return (
            statistics.stdev(self.scores) if self.score is not None and len(self.runs) > 1 else None
        )

    def other(self, name: str) -> float | None:
        """Return another metric, or the loss on test data, mean over seeds; None if a seed has not
        measured it."""
        values = [
            run.final.others[name] for run in self.runs if run.final and name in run.final.others
        ]
        return statistics.fmean(values) if len(values) == len(self.runs) else None

    @property
    def peer_std(self) -> float | None:
        """Standard deviation over peers, mean over seeds."""
        known = [
            run.final.peer_std for run in self.runs if run.final and run.final.peer_std is not None
        ]
        return statistics.fmean(known) if known else None

    @property
    def rounds(self) -> int:
        """Number of rounds of the longest run."""
        return max(len(run.points) for run in self.runs)

    @property
    def connections(self) -> int:
        """The largest number of nodes that one node receives models from in a round."""
        return max(run.connections for run in self.runs)

    @property
    def peer_scores(self) -> dict[int, Sequence[float | None]]:
        """By seed, the final score of every peer."""
        return {run.seed: run.final.per_peer for run in self.runs if run.final}

    def has_data_of(self, other: "ComparisonRow") -> bool:
        """Whether runs of the same seed have the same peers with the same data."""
        theirs = {run.seed: run for run in other.runs}
        pairs = [(run, theirs[run.seed]) for run in self.runs if run.seed in theirs] or [
            (self.runs[0], other.runs[0])
        ]
        return all(
            one.data == two.data and _may_equal(one.data_digest, two.data_digest)
            for one, two in pairs
        )

    def difference_to(self, reference: "ComparisonRow") -> Difference | None:
        """Return the paired difference to another row; None if their peers or data are not the
        same."""
        if not self.has_data_of(reference):
            return None
        return paired_difference(self.peer_scores, reference.peer_scores)

    @property
    def flops_kind(self) -> str:
        """Whether the row's FLOPs are counted or saved."""
        return self.runs[0].flops_kind

    @property
    def seconds_per_peer(self) -> float | None:
        """Seconds that a peer computes in a round, mean over seeds; None if a seed has not measured
        them."""
        known = [run.seconds_per_peer for run in self.runs if run.seconds_per_peer is not None]
        return statistics.fmean(known) if len(known) == len(self.runs) else None

    def rounds_to(self, target: float) -> float | None:
        """Return the rounds needed to reach a score, mean over seeds; None if a seed does not reach
        it."""
        reached = [run.rounds_to(target) for run in self.runs]
        known = [rounds for rounds in reached if rounds is not None]
        return statistics.fmean(known) if len(known) == len(reached) else None

    def mean(self, cost: Callable[[SeedRun], float]) -> float:
        """Return the mean of a cost over seeds."""
        return statistics.fmean(cost(run) for run in self.runs)

    def mean_final(self, number: Callable[[RunPoint], float]) -> float | None:
        """Return the mean over seeds of a number of the final point; None if a seed has no such
        point."""
        values = [number(run.final) for run in self.runs if run.final]
        return statistics.fmean(values) if len(values) == len(self.runs) else None


@dataclass(frozen=True)
class Comparison:
    """Rows of runs that are compared under one budget."""

    rows: Sequence[ComparisonRow]
    budget: Budget
    targets: Sequence[float]
    measure: Measure
    """What the scores measure."""
    others: Sequence[str] = ()
    """The names of the other metrics; the loss on test data comes last."""
    against: Mapping[str, str] = field(default_factory=lambda: DISPFL)
    """The names of the rows that the others are compared with."""

    @cached_property
    def limits(self) -> dict[int, float]:
        """The budget of each seed; empty if there is no limit, or if data sets have different
        ones."""
        found: dict[int, set[float]] = {}
        for run in (run for row in self.rows for run in row.runs):
            if run.limit is not None:
                found.setdefault(run.seed, set()).add(run.limit)
        if any(len(limits) > 1 for limits in found.values()):
            return {}
        return {seed: limit for seed, (limit,) in found.items()}

    @property
    def limit(self) -> float | None:
        """The budget, mean over seeds."""
        return statistics.fmean(self.limits.values()) if self.limits else None

    @cached_property
    def best(self) -> list[ComparisonRow]:
        """The rows with the best mean score, as it is printed, among several with the same data."""
        found = []
        for row, same in zip(self.rows, self._same_data, strict=True):
            scores = [other.score for other in same if other.score is not None]
            text = self.measure.text
            if (
                row.score is not None
                and len(same) > 1
                and text(row.score) == text(self.measure.best(scores))
            ):
                found.append(row)
        return found

    @cached_property
    def references(self) -> dict[str, ComparisonRow]:
        """By label, the row that each one is compared with, peer by peer: `against`, or the first,
        of the same data."""
        return {
            row.label: next((other for other in same if other.is_named(self.against)), same[0])
            for row, same in zip(self.rows, self._same_data, strict=True)
        }

    @cached_property
    def differences(self) -> dict[str, Difference]:
        """By label, how each row differs from its reference; nothing where no other row has the
        same peers and data."""
        pairs = [(row, self.references[row.label]) for row in self.rows]
        found = {
            row.label: row.difference_to(reference)
            for row, reference in pairs
            if row is not reference
        }
        return {label: difference for label, difference in found.items() if difference}

    @property
    def reference_labels(self) -> list[str]:
        """The labels of the rows that others are compared with: one for every data set and
        split."""
        return list(dict.fromkeys(self.references[label].label for label in self.differences))

    @cached_property
    def _same_data(self) -> list[list[ComparisonRow]]:
        return [_with_data_of(row, self.rows) for row in self.rows]


NamedRuns = Iterable[tuple[Mapping[str, str], Path]]
"""The name and the directory of each run. Runs with the same name are seeds of one row."""


def compare(
    runs: NamedRuns,
    budget: Budget = Budget.ROUNDS,
    targets: Sequence[float] = (),
    against: Mapping[str, str] | None = None,
) -> Comparison:
    """Read run directories and compare them, peer by peer with the rows that have the names of a
    reference.

    Except under `rounds`, each seed and data set has its own budget: the smallest total of its runs
    that spend anything, so that the cheapest row keeps all its rounds. Nothing is retrained: a
    row's score is the one it had at that point.
    """
    rows: dict[tuple[tuple[str, str], ...], list[SeedRun]] = {}
    for name, path in runs:
        rows.setdefault(tuple(name.items()), []).append(_read(path))
    all_runs = [run for row in rows.values() for run in row]
    if not all_runs:
        raise RunError("There are no runs to compare.")
    if budget is Budget.SECONDS and (
        unknown := [run.path for run in all_runs if not run.points[-1].peer_seconds]
    ):
        raise RunError(
            f"{unknown[0]} has no seconds of computing (peer_seconds); compare by rounds, bytes or"
            " flops."
        )
    whole = [ComparisonRow(dict(name), row) for name, row in rows.items()]
    return Comparison(
        [_limited(row, whole, budget) for row in whole],
        budget,
        tuple(targets),
        all_runs[0].measure,
        _other_metrics(all_runs),
        against or DISPFL,
    )


Sample = tuple[float, float] | None
"""An x and a y value of one run in one round; None if it was not measured."""


def mean_over_seeds(
    seeds: Sequence[Sequence[Sample]],
) -> tuple[list[float], list[float], list[float]]:
    """Return x, mean and sample standard deviation (0 for one seed) at every round that all seeds
    measured."""
    xs, means, stds = [], [], []
    for samples in zip(*seeds, strict=False):  # an interrupted run is shorter
        known = [sample for sample in samples if sample is not None]
        if len(known) == len(samples):
            values = [y for _, y in known]
            xs.append(statistics.fmean(x for x, _ in known))
            means.append(statistics.fmean(values))
            stds.append(statistics.stdev(values) if len(values) > 1 else 0.0)
    return xs, means, stds


def mean_curve(row: ComparisonRow, budget: Budget) -> tuple[list[float], list[float], list[float]]:
    """Return cost, mean score and its standard deviation over seeds, at every round that all seeds
    evaluated."""

    def sample(point: RunPoint) -> Sample:
        return None if point.score is None else (point.spent(budget), point.score)

    return mean_over_seeds([[sample(point) for point in run.points] for run in row.runs])


def _read(path: Path) -> SeedRun:
    config, records = read_config(path), read_metrics(path)
    if not records:
        raise RunError(f"{path} has no finished round to compare; run it first.")
    points, paper_mb, wire_mb, flops, seconds, computed = [], 0.0, 0.0, 0.0, 0.0, 0.0
    for record in records:
        paper_mb += record["busiest"]["paper_mb"]
        wire_mb += record["busiest"]["wire_mb"]
        flops += record["flops_total"]
        seconds = round(seconds + record["seconds"], 3)
        computed += _peer_seconds(record)
        score, std, others, per_peer = _scores(record)
        spent = (paper_mb, wire_mb, flops, seconds, computed)
        points.append(RunPoint(record["round"] + 1, score, std, *spent, others, per_peer))
    flops_per_peer = statistics.fmean(record["flops_per_peer"] for record in records)
    failures = sum(len(record["failures"]) for record in records)
    return SeedRun(
        config["seed"],
        path,
        measure_of(records),
        points,
        flops_per_peer,
        None,
        failures,
        seconds_per_peer_round(records),
        flops_kind(config),
        max(record["busiest"].get("connections", 0) for record in records),
        config["method"]["name"],
        {key: value for key, value in flat_settings(config).items() if prevents_comparison(key)},
        None if config.get("byzantine") else config.get("data_sha256"),
    )


def _scores(
    record: Metrics,
) -> tuple[float | None, float | None, dict[str, float], list[float | None]]:
    """Return mean and standard deviation of the main metric over peers, the others' means, and
    every peer's value."""
    main = main_scores(record) or {"mean": None, "std": None, "per_peer": []}
    others = {
        name: found["mean"] for name, found in record["scores"].items() if name != record["metric"]
    }
    if (trained := record.get("train_score")) and record["metric"] in record["scores"]:
        others[f"train {record['metric']}"] = trained["mean"]
        others[GAP] = measure_of([record]).gain(trained["mean"], main["mean"])
    if record.get("validation"):
        others[VALIDATION] = record["validation"]["mean"]
    if record.get("test_loss"):
        others[TEST_LOSS] = record["test_loss"]["mean"]
    return main["mean"], main["std"], others, main["per_peer"]


def _other_metrics(runs: Iterable[SeedRun]) -> list[str]:
    """Return the names of all metrics but the main one, the loss on test data last."""
    names = dict.fromkeys(name for run in runs for point in run.points for name in point.others)
    return sorted(names, key=lambda name: name == TEST_LOSS)


def _peer_seconds(record: Metrics) -> float:
    """Return the seconds that a peer computed in a round, mean over all peers, of which some may
    not have trained."""
    per_peer = (record.get("peer_seconds") or {"per_peer": [0.0]})[
        "per_peer"
    ]  # null: no peer trained
    return float(sum(value or 0.0 for value in per_peer) / len(per_peer))


def _may_equal(one: str | None, two: str | None) -> bool:
    return one == two or one is None or two is None


def _with_data_of(row: ComparisonRow, rows: Iterable[ComparisonRow]) -> list[ComparisonRow]:
    """Return the rows with the same data; only the row itself if its unknown data may be those of
    different rows."""
    found = [other for other in rows if other.has_data_of(row)]
    known = next((other for other in found if other is not row), row)
    return found if all(other.has_data_of(known) for other in found) else [row]


def _limited(row: ComparisonRow, rows: Iterable[ComparisonRow], budget: Budget) -> ComparisonRow:
    """Return a row within, for each of its seeds, the smallest total of the runs on the same data
    that spend any."""
    limits: dict[int, float] = {}
    rivals = [] if budget is Budget.ROUNDS else _with_data_of(row, rows)
    for run in (run for rival in rivals for run in rival.runs):
        total = run.points[-1].spent(budget)
        if total > 0:
            limits[run.seed] = min(total, limits.get(run.seed, total))
    return ComparisonRow(row.name, [run.within(budget, limits.get(run.seed)) for run in row.runs])
