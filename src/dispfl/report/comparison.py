"""Comparisons of runs: score and cost of each row over its seeds, under an equal budget."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean, stdev

from dispfl.core.metric import Measure
from dispfl.errors import ConfigError, RunError
from dispfl.report.differences import Difference, paired_difference
from dispfl.report.runs import Budget, RecordedRun, RunPoint, read_run
from dispfl.report.wording import UNKNOWN
from dispfl.runs.metrics import mean_or_none

DISPFL = {"method": "dispfl"}
"""The names of the rows that others are compared with unless an experiment says otherwise."""
VALIDATION = "validation"
"""The column of the score on validation data."""
TEST_LOSS = "test loss"
"""The column of the loss on test data, which comes last."""


@dataclass(frozen=True, eq=False)
class ComparisonRow:
    """The runs of one method, or of one value of a sweep, over all seeds."""

    name: Mapping[str, str]
    """`{"method": "ditto"}`, or the swept keys with their values."""
    runs: Sequence[RecordedRun]
    position: int = 0
    """Its place among the rows as they were given, which decides its colour."""

    @property
    def label(self) -> str:
        """`ditto`, `method.density=0.2`, `dispfl, topology=ring`; unknown values are left out."""
        parts = []
        for key, value in self.name.items():
            if value == UNKNOWN:
                continue
            if key == "method":
                parts.append(value)
            else:
                parts.append(f"{key}={value}")
        return ", ".join(parts)

    @property
    def config(self) -> Mapping[str, object]:
        """The config of its first run; the others differ in their seed alone."""
        return self.runs[0].config

    def is_named(self, names: Mapping[str, str]) -> bool:
        """Return whether the row has these names: `{"method": "dispfl", "density": "0.5"}`."""
        own_names = {**self.name, "method": self.runs[0].method}
        return names.items() <= own_names.items() or names.items() <= self.name.items()

    @property
    def scored_runs(self) -> list[RecordedRun]:
        """The runs with peers that have a score."""
        return [run for run in self.runs if run.scores]

    @property
    def finals(self) -> list[RunPoint]:
        """The final point of each seed that has one."""
        return [run.final for run in self.runs if run.final]

    @property
    def score(self) -> float | None:
        """Mean over seeds; None if a seed has no score: other seeds' means are not comparable."""
        return self.mean_final(lambda point: point.score)

    @property
    def score_std(self) -> float | None:
        """Sample standard deviation over seeds (n - 1); None with one seed."""
        scores = self._all_finals(lambda point: point.score)
        if scores is None or len(scores) == 1:
            return None
        return stdev(scores)

    def extra(self, name: str) -> float | None:
        """Return another metric or quantity, mean over seeds; None if a seed has none."""
        return self.mean_final(lambda point: point.extras.get(name))

    @property
    def peer_std(self) -> float | None:
        """Standard deviation over peers, mean over the seeds that have a score."""
        stds = [point.peer_std for point in self.finals if point.peer_std is not None]
        return mean_or_none(stds)

    @property
    def rounds_of_runs(self) -> list[int]:
        """Number of finished rounds of each run."""
        return [len(run.records) for run in self.runs]

    @property
    def rounds(self) -> int:
        """Number of rounds of the longest run."""
        return max(self.rounds_of_runs)

    @property
    def connections(self) -> int:
        """The largest number of nodes that one node receives models from in a round."""
        return max(run.connections for run in self.runs)

    @property
    def unfinished(self) -> bool:
        return not all(run.finished for run in self.runs)

    @property
    def paper_mb(self) -> float:
        """Traffic of the busiest node in MB per round, as the paper counts it; mean over seeds."""
        return self._mean(lambda run: run.paper_mb)

    @property
    def wire_mb(self) -> float:
        """The same as sent."""
        return self._mean(lambda run: run.wire_mb)

    @property
    def paper_bytes(self) -> float:
        """Traffic of the busiest node in bytes per round, as the paper counts it."""
        return 1e6 * self.paper_mb

    @property
    def wire_bytes(self) -> float:
        """The same as sent."""
        return 1e6 * self.wire_mb

    @property
    def flops_per_peer(self) -> float:
        """Training FLOPs of a peer per round, mean over seeds."""
        return self._mean(lambda run: run.flops_per_peer)

    @property
    def flops_total(self) -> float:
        """Training FLOPs of all peers per round, mean over seeds."""
        return self._mean(lambda run: run.flops_total)

    @property
    def seconds(self) -> float:
        """Wall time of all rounds, mean over seeds."""
        return self._mean(lambda run: run.points[-1].seconds)

    def _mean(self, number: Callable[[RecordedRun], float]) -> float:
        return fmean(map(number, self.runs))

    @property
    def flops_kind(self) -> str:
        """Whether the row's FLOPs are counted or saved."""
        return self.runs[0].flops_kind

    @property
    def seconds_per_peer(self) -> float | None:
        """Seconds that a peer computes in a round; None if a seed has not measured them."""
        return mean_or_none(self._all_values(lambda run: run.seconds_per_peer))

    @property
    def failures(self) -> int:
        """How many steps were discarded, over all seeds."""
        return sum(len(run.failures) for run in self.runs)

    def rounds_to(self, target: float) -> float | None:
        """Return the rounds needed to reach a score; None if a seed does not reach it."""
        return mean_or_none(self._all_values(lambda run: run.rounds_to(target)))

    def hours_to(self, target: float) -> float | None:
        """Return the simulated hours to a score; None if a seed does not reach it, or no clock."""
        return mean_or_none(self._all_values(lambda run: run.hours_to(target)))

    @property
    def hours(self) -> float | None:
        """Simulated hours of all rounds, mean over seeds; None if a seed has no clock."""
        return mean_or_none(self._all_values(lambda run: run.hours))

    def mean_final(self, number: Callable[[RunPoint], float | None]) -> float | None:
        """Return the mean over seeds of a number of the final point; None if a seed has none."""
        return mean_or_none(self._all_finals(number))

    def _all_finals(self, number: Callable[[RunPoint], float | None]) -> list[float] | None:
        """Return a number of every seed's final point; None if a seed has none."""

        def final_number(run: RecordedRun) -> float | None:
            if run.final is None:
                return None
            return number(run.final)

        return self._all_values(final_number)

    def _all_values(self, number: Callable[[RecordedRun], float | None]) -> list[float] | None:
        """Return a number of every seed.

        None if a seed has none: means over other seeds do not compare.
        """
        values: list[float] = []
        for run in self.runs:
            value = number(run)
            if value is None:
                return None
            values.append(value)
        return values

    @property
    def by_seed(self) -> dict[int, RecordedRun]:
        return {run.seed: run for run in self.runs}

    @property
    def peer_scores(self) -> dict[int, Sequence[float | None]]:
        """By seed, the final score of every peer."""
        return {run.seed: run.final.per_peer for run in self.runs if run.final}

    def has_data_of(self, row: "ComparisonRow") -> bool:
        """Whether runs of the same seed have the same peers with the same data."""
        own_runs = self.by_seed
        their_runs = row.by_seed
        common_seeds = own_runs.keys() & their_runs.keys()
        if not common_seeds:
            return _have_same_data(self.runs[0], row.runs[0])
        return all(_have_same_data(own_runs[seed], their_runs[seed]) for seed in common_seeds)

    def within(self, budget: Budget, limits: Mapping[int, float]) -> "ComparisonRow":
        """Return the row with a limit on the budget of each seed."""
        limited = [run.within(budget, limits.get(run.seed)) for run in self.runs]
        return replace(self, runs=limited)

    def difference_to(self, reference: "ComparisonRow") -> Difference | None:
        """Return the paired difference to a row; None if their peers or data are not the same."""
        if not self.has_data_of(reference):
            return None
        return paired_difference(self.peer_scores, reference.peer_scores)


def labels_of(rows: Iterable[ComparisonRow]) -> list[str]:
    """Return the labels of rows."""
    return [row.label for row in rows]


def traffic_per_round(rows: Iterable[ComparisonRow]) -> list[float]:
    """Return the busiest node's bytes per round in every row, both as counted and as sent."""
    amounts = []
    for row in rows:
        amounts += [row.paper_bytes, row.wire_bytes]
    return amounts


def connections_by_label(rows: Iterable[ComparisonRow]) -> dict[str, int]:
    """Return how many models a node receives in a round at most, by the label of each row."""
    return {row.label: row.connections for row in rows}


def flops_by_label(rows: Iterable[ComparisonRow]) -> dict[str, str]:
    """Return whether FLOPs are counted or saved, by the label of each row."""
    return {row.label: row.flops_kind for row in rows}


def most_seeds(rows: Iterable[ComparisonRow]) -> int:
    """Return the number of seeds of the row with the most."""
    return max(len(row.runs) for row in rows)


def _have_same_data(run: RecordedRun, reference: RecordedRun) -> bool:
    digests = {run.data_digest, reference.data_digest}
    return run.data == reference.data and (None in digests or len(digests) == 1)


@dataclass(frozen=True, eq=False)
class Comparison:
    """Rows of runs that are compared under one budget."""

    rows: Sequence[ComparisonRow]
    budget: Budget = Budget.ROUNDS
    targets: Sequence[float] = ()
    against: Mapping[str, str] = field(default_factory=lambda: DISPFL)
    """The names of the rows that the others are compared with."""
    percent: bool = False
    """Whether scores are printed in percent."""

    @property
    def runs(self) -> list[RecordedRun]:
        runs: list[RecordedRun] = []
        for row in self.rows:
            runs += row.runs
        return runs

    @property
    def measure(self) -> Measure:
        """What the scores measure."""
        measure = self.runs[0].measure
        return measure.in_percent() if self.percent else measure

    @property
    def most_seeds(self) -> int:
        """The number of seeds of the row with the most."""
        return most_seeds(self.rows)

    @property
    def equal_rounds(self) -> int | None:
        """The number of rounds if all rows have the same, else None."""
        rounds = self.rows[0].rounds
        for row in self.rows:
            if row.rounds != rounds:
                return None
        return rounds

    @property
    def lacks_scores(self) -> bool:
        """Whether a row has no score."""
        return any(row.score is None for row in self.rows)

    @property
    def has_seconds(self) -> bool:
        """Whether a row has measured how long a peer computes."""
        return any(row.seconds_per_peer is not None for row in self.rows)

    @property
    def has_hours(self) -> bool:
        """Whether a row has a clock."""
        return any(row.hours is not None for row in self.rows)

    @cached_property
    def extras(self) -> list[str]:
        """The names of the other metrics and quantities; the loss on test data comes last."""
        names: dict[str, None] = {}
        for run in self.runs:
            for point in run.points:
                names |= dict.fromkeys(point.extras)
        return sorted(names, key=lambda name: name == TEST_LOSS)

    @cached_property
    def limits(self) -> dict[int, float]:
        """The budget of each seed; empty if there is none, or if data sets have different ones."""
        limits: dict[int, float] = {}
        for run in self.runs:
            if run.limit is None:
                continue
            if limits.setdefault(run.seed, run.limit) != run.limit:
                return {}
        return limits

    @property
    def limit(self) -> float | None:
        """The budget, mean over seeds."""
        return mean_or_none(self.limits.values())

    @cached_property
    def is_chosen_on_validation(self) -> bool:
        """Whether rows are variants of a method with validation data, on which to choose one.

        Choosing on test data would make the chosen row's test score too good.
        """
        methods = {row.runs[0].method for row in self.rows}
        scores = [row.extra(VALIDATION) for row in self.rows]
        return len(methods) < len(self.rows) and None not in scores

    def deciding_score(self, row: ComparisonRow) -> float | None:
        """Return the score that decides which row is best: on test or on validation data."""
        return row.extra(VALIDATION) if self.is_chosen_on_validation else row.score

    def is_best(self, row: ComparisonRow) -> bool:
        """Whether the row has the best deciding score, as it is printed, of several on its data."""
        rivals = self._with_same_data[row.label]
        score = self.deciding_score(row)
        if score is None or len(rivals) == 1:
            return False
        scores = [self.deciding_score(rival) for rival in rivals]
        best_score = self.measure.best([rival for rival in scores if rival is not None])
        return self.measure.text(score) == self.measure.text(best_score)

    @cached_property
    def references(self) -> dict[str, ComparisonRow]:
        """By label, the row that each one is compared with, peer by peer.

        It is the one named `against`, or the first, of those with the same data.
        """
        references = {}
        for label, rivals in self._with_same_data.items():
            references[label] = _first_named(rivals, self.against)
        return references

    @cached_property
    def differences(self) -> dict[str, Difference]:
        """By label, how each row differs from its reference.

        Rows are left out where no other row has the same peers and data.
        """
        differences = {}
        for row in self.rows:
            reference = self.references[row.label]
            if row is reference:
                continue
            difference = row.difference_to(reference)
            if difference:
                differences[row.label] = difference
        return differences

    @property
    def reference_labels(self) -> list[str]:
        """The labels of the rows that others are compared with: one for each data set and split."""
        labels: dict[str, None] = {}
        for label in self.differences:
            labels[self.references[label].label] = None
        return list(labels)

    @cached_property
    def _with_same_data(self) -> dict[str, list[ComparisonRow]]:
        return {row.label: _with_data_of(row, self.rows) for row in self.rows}


NamedRun = tuple[Mapping[str, str], RecordedRun]
"""A run and the name of its row. Runs with the same name are seeds of one row."""


def compare(
    runs: Iterable[tuple[Mapping[str, str], Path]],
    budget: Budget = Budget.ROUNDS,
    targets: Sequence[float] = (),
    against: Mapping[str, str] | None = None,
) -> Comparison:
    """Read run directories and compare them, as `compare_runs` does."""
    named_runs = [(name, read_run(path)) for name, path in runs]
    return compare_runs(named_runs, budget, targets, against)


def compare_runs(
    runs: Iterable[NamedRun],
    budget: Budget = Budget.ROUNDS,
    targets: Sequence[float] = (),
    against: Mapping[str, str] | None = None,
) -> Comparison:
    """Compare runs, peer by peer with the rows that have the names of a reference.

    Except under `rounds`, each seed and data set has its own budget: the smallest total of its runs
    that spend anything, so that the cheapest row keeps all its rounds. Nothing is retrained: a
    row's score is the one it had at that point.
    """
    by_name: dict[tuple[tuple[str, str], ...], list[RecordedRun]] = {}
    for name, run in runs:
        _check_comparable(run, budget)
        by_name.setdefault(tuple(name.items()), []).append(run)
    if not by_name:
        raise RunError("There are no runs to compare.")

    rows = []
    for position, (names, seeds) in enumerate(by_name.items()):
        rows.append(ComparisonRow(dict(names), seeds, position))
    limited = [_limited(row, rows, budget) for row in rows]
    return Comparison(limited, budget, tuple(targets), against or DISPFL)


def _check_comparable(run: RecordedRun, budget: Budget) -> None:
    if not run.records:
        raise RunError(f"{run.path} has no finished round to compare; run it first.")
    if budget is Budget.SECONDS and not run.points[-1].peer_seconds:
        raise RunError(
            f"{run.path} has no seconds of computing (peer_seconds); compare by rounds, bytes or"
            " flops."
        )
    if budget is Budget.HOURS and run.hours is None:
        raise RunError(
            f"{run.path} has no simulated hours: it was run without a clock. Run it with"
            " fleet=NAME, or see `dispfl time`."
        )


def _limited(row: ComparisonRow, rows: Sequence[ComparisonRow], budget: Budget) -> ComparisonRow:
    """Return a row within the smallest total of the runs on the same data that spend any.

    Each of its seeds has a limit of its own.
    """
    if budget is Budget.ROUNDS:
        return row
    return row.within(budget, smallest_totals(_with_data_of(row, rows), budget))


def smallest_totals(rows: Iterable[ComparisonRow], budget: Budget) -> dict[int, float]:
    """Return, by seed, the smallest total of the runs that spend anything of a budget."""
    totals: dict[int, float] = {}
    for row in rows:
        for run in row.runs:
            total = run.points[-1].spent(budget)
            if total > 0:
                totals[run.seed] = min(total, totals.get(run.seed, total))
    return totals


def _with_data_of(row: ComparisonRow, rows: Iterable[ComparisonRow]) -> list[ComparisonRow]:
    """Return the rows with the same data.

    Only the row itself if its data are unknown and may be those of different rows.
    """
    rivals = [rival for rival in rows if rival.has_data_of(row)]
    for rival in rivals:
        if rival is not row:
            unambiguous = all(map(rival.has_data_of, rivals))
            return rivals if unambiguous else [row]
    return rivals


def _first_named(rows: Sequence[ComparisonRow], names: Mapping[str, str]) -> ComparisonRow:
    """Return the first row with these names; the first of all if none has them."""
    for row in rows:
        if row.is_named(names):
            return row
    return rows[0]


def in_percent(comparison: Comparison) -> Comparison:
    """Return the comparison with scores in percent; refuse scores that are no shares."""
    for run in comparison.runs:
        for point in run.points:
            if point.score is not None and not 0 <= point.score <= 1:
                raise ConfigError(
                    f"--percent is for shares from 0 to 1, but {run.measure.name} is"
                    f" {point.score:g} in {run.path}; omit it.",
                    key="--percent",
                )
    return replace(comparison, percent=True)


def with_reference(comparisons: Sequence[Comparison], text: str) -> list[Comparison]:
    """Return the comparisons with the rows that a text names as their references."""
    referenced = []
    matches = 0
    for comparison in comparisons:
        for row in comparison.rows:
            if text in (row.label, row.runs[0].method, row.runs[0].path.parent.name):
                matches += 1
                comparison = replace(comparison, against=row.name)
                break
        referenced.append(comparison)
    if not matches:
        labels = dict.fromkeys(row.label for each in comparisons for row in each.rows)
        raise ConfigError(
            f"--against {text!r} is none of the rows. There are: {', '.join(labels)}.",
            key="--against",
        )
    return referenced


@dataclass(frozen=True)
class MeanCurve:
    """Means over seeds, at every round that all seeds have."""

    x: list[float]
    mean: list[float]
    std: list[float]
    """Sample standard deviation over seeds; 0 for one seed."""


Sample = tuple[float, float] | None
"""An x and a y value of one run in one round; None if it was not measured."""


def mean_over_seeds(seeds: Sequence[Sequence[Sample]]) -> MeanCurve:
    """Return the means at every round that all seeds measured; an interrupted run is shorter."""
    xs: list[float] = []
    means: list[float] = []
    stds: list[float] = []
    for samples in zip(*seeds, strict=False):
        measured = list(filter(None, samples))
        if len(measured) < len(samples):
            continue
        x_values, y_values = zip(*measured, strict=True)
        xs.append(fmean(x_values))
        means.append(fmean(y_values))
        stds.append(stdev(y_values) if len(y_values) > 1 else 0.0)
    return MeanCurve(xs, means, stds)


def mean_curve(row: ComparisonRow, budget: Budget) -> MeanCurve:
    """Return cost and mean score at every round that all seeds evaluated."""

    seeds = []
    for run in row.runs:
        samples: list[Sample] = []
        for point in run.points:
            if point.score is None:
                samples.append(None)
            else:
                samples.append((point.spent(budget), point.score))
        seeds.append(samples)
    return mean_over_seeds(seeds)
