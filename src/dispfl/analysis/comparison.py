"""Runs beside each other: what each row of runs reached, at what cost, after equal rounds, bytes or FLOPs."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from math import inf
from pathlib import Path

from dispfl.errors import RunError
from dispfl.runs.directory import read_config, read_metrics


class Budget(StrEnum):
    """What is equal when runs are compared."""

    ROUNDS = "rounds"
    BYTES = "bytes"
    FLOPS = "flops"


@dataclass(frozen=True)
class Point:
    """A run after some round: what it has reached and what it has spent so far."""

    round: int
    """1 is the first."""
    accuracy: float | None
    """Mean over the peers; None where the round was not scored."""
    peer_std: float | None
    paper_mb: float
    """The busiest node's traffic so far, in the paper's currency."""
    wire_mb: float
    """The same as sent."""
    flops: float
    """Training FLOPs of the whole federation so far."""
    seconds: float

    def spent(self, budget: Budget) -> float:
        """How much of the currency of a budget."""
        return {Budget.ROUNDS: float(self.round), Budget.BYTES: self.wire_mb, Budget.FLOPS: self.flops}[budget]


@dataclass(frozen=True)
class SeedRun:
    """One run of a row."""

    seed: int
    path: Path
    points: Sequence[Point]
    """After every round."""
    flops_per_peer: float
    """A peer's training FLOPs a round, mean over all rounds; so the properties below."""
    counted: Point | None
    """The last scored round within the budget; None if there is none."""
    failures: int = 0
    """Steps that were given up because their numbers stopped being finite."""

    @property
    def paper_mb(self) -> float:
        """The busiest node's megabytes a round, in the paper's currency."""
        return self.points[-1].paper_mb / len(self.points)

    @property
    def wire_mb(self) -> float:
        """The busiest node's megabytes a round, as sent."""
        return self.points[-1].wire_mb / len(self.points)

    @property
    def flops_total(self) -> float:
        """Training FLOPs of the whole federation a round."""
        return self.points[-1].flops / len(self.points)

    def within(self, budget: Budget, limit: float) -> "SeedRun":
        """The same run, of which only what it reached within a budget counts."""
        enough = limit * (1 + 1e-9)  # equal costs may differ in the last bits of their sums
        scored = [point for point in self.points if point.accuracy is not None and point.spent(budget) <= enough]
        return replace(self, counted=scored[-1] if scored else None)

    def rounds_to(self, target: float) -> int | None:
        """The first scored round that reaches an accuracy; None if none does."""
        return next((p.round for p in self.points if p.accuracy is not None and p.accuracy >= target), None)


@dataclass(frozen=True)
class Row:
    """The runs of one method, or of one value of a sweep, over all seeds."""

    name: Mapping[str, str]
    """`{"method": "ditto"}`, or the swept keys with their values."""
    runs: Sequence[SeedRun]

    @property
    def label(self) -> str:
        """`ditto`, or `method.density=0.2`."""
        only_method = self.name.keys() == {"method"}
        return ", ".join(value if only_method else f"{key}={value}" for key, value in self.name.items())

    @property
    def accuracies(self) -> list[float]:
        """The accuracy that counts, of each seed that has one."""
        return [run.counted.accuracy for run in self.runs if run.counted and run.counted.accuracy is not None]

    @property
    def accuracy(self) -> float | None:
        """Mean over seeds; None unless every seed has one, for a mean over other seeds would not compare."""
        return statistics.fmean(self.accuracies) if len(self.accuracies) == len(self.runs) else None

    @property
    def accuracy_std(self) -> float | None:
        """Sample standard deviation over seeds (n - 1); None with one seed."""
        return statistics.stdev(self.accuracies) if self.accuracy is not None and len(self.runs) > 1 else None

    @property
    def peer_std(self) -> float | None:
        """Standard deviation over peers, mean over seeds."""
        known = [run.counted.peer_std for run in self.runs if run.counted and run.counted.peer_std is not None]
        return statistics.fmean(known) if known else None

    @property
    def rounds(self) -> int:
        """How many rounds each run has."""
        return max(len(run.points) for run in self.runs)

    def rounds_to(self, target: float) -> float | None:
        """Rounds until an accuracy is reached, mean over seeds; None if a seed never reaches it."""
        reached = [run.rounds_to(target) for run in self.runs]
        known = [rounds for rounds in reached if rounds is not None]
        return statistics.fmean(known) if len(known) == len(reached) else None

    def mean(self, cost: Callable[[SeedRun], float]) -> float:
        """The mean over seeds of a cost of the runs."""
        return statistics.fmean(cost(run) for run in self.runs)

    def counted(self, number: Callable[[Point], float]) -> float | None:
        """The mean over seeds of a number of the round that counts; None if a seed has no such round."""
        values = [number(run.counted) for run in self.runs if run.counted]
        return statistics.fmean(values) if len(values) == len(self.runs) else None


@dataclass(frozen=True)
class Comparison:
    """Rows beside each other."""

    rows: Sequence[Row]
    budget: Budget
    limits: Mapping[int, float]
    """How much of the budget's currency there is, by seed; empty where nothing limits."""
    targets: Sequence[float]
    metric: str

    @property
    def limit(self) -> float | None:
        """The mean over seeds of the budget."""
        return statistics.fmean(self.limits.values()) if self.limits else None

    @property
    def best(self) -> list[Row]:
        """The rows of the highest accuracy, to the three decimals that are printed."""
        known = {id(row): round(row.accuracy, 3) for row in self.rows if row.accuracy is not None}
        return [row for row in self.rows if known and known.get(id(row)) == max(known.values())]


Runs = Iterable[tuple[Mapping[str, str], Path]]
"""What makes a run differ from others, and its directory. Runs that do not differ are seeds of one row."""


def compare(runs: Runs, budget: Budget = Budget.ROUNDS, targets: Sequence[float] = ()) -> Comparison:
    """Read run directories and lay them beside each other.

    Under `bytes` and `flops` each seed has a budget of its own: the smallest total of its runs that spend anything, so
    that the cheapest row keeps all its rounds. Nothing is trained again: a row's accuracy is the one it had then.
    """
    rows: dict[tuple[tuple[str, str], ...], list[SeedRun]] = {}
    for name, path in runs:
        rows.setdefault(tuple(name.items()), []).append(_read(path))
    every = [run for row in rows.values() for run in row]
    if not every:
        raise RunError("There are no runs to compare.")
    limits = {} if budget is Budget.ROUNDS else _limits(every, budget)
    return Comparison(
        [Row(dict(name), [r.within(budget, limits.get(r.seed, inf)) for r in row]) for name, row in rows.items()],
        budget,
        limits,
        tuple(targets),
        str(read_config(every[0].path).get("metric", "accuracy")),
    )


def _read(path: Path) -> SeedRun:
    config, records = read_config(path), read_metrics(path)
    if not records:
        raise RunError(f"{path} has no finished round to compare; run it first.")
    points, paper_mb, wire_mb, flops, seconds = [], 0.0, 0.0, 0.0, 0.0
    for record in records:
        paper_mb += record["busiest"]["paper_mb"]
        wire_mb += record["busiest"]["wire_mb"]
        flops += record["flops_total"]
        seconds = round(seconds + record["seconds"], 3)
        score = record["accuracy"] or {"mean": None, "std": None}
        points.append(Point(record["round"] + 1, score["mean"], score["std"], paper_mb, wire_mb, flops, seconds))
    flops_per_peer = statistics.fmean(record["flops_per_peer"] for record in records)
    failures = sum(len(record["failures"]) for record in records)
    return SeedRun(config["seed"], path, points, flops_per_peer, None, failures)


def _limits(runs: Iterable[SeedRun], budget: Budget) -> dict[int, float]:
    """The smallest total of each seed's runs that spend anything."""
    limits: dict[int, float] = {}
    for run in runs:
        total = run.points[-1].spent(budget)
        if total > 0:
            limits[run.seed] = min(total, limits.get(run.seed, total))
    return limits
