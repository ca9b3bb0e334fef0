"""Runs grouped into the rows of a report: labels, differing settings, and wins per peer."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dispfl.core.metric import Measure
from dispfl.errors import RunError
from dispfl.report.comparison import Comparison, ComparisonRow, compare
from dispfl.report.labels import flat_settings, prevents_comparison, row_labels
from dispfl.report.runs import ReportRun, find_runs, read_run

COLOURS = 9
TIE = 1e-9
"""Scores are ratios of counts: smaller differences are rounding errors."""


@dataclass(frozen=True)
class ReportSeries:
    """One row of the report: the runs of one configuration over its seeds."""

    label: str
    colour: int
    """Index of its colour, which is its position in the order given."""
    runs: Sequence[ReportRun]
    row: ComparisonRow

    @property
    def css_class(self) -> str:
        """The CSS classes for its colour and, after the ninth, another dash pattern."""
        return f"s{self.colour % COLOURS}" + (" repeated" if self.colour >= COLOURS else "")

    @property
    def seeds(self) -> dict[int, ReportRun]:
        return {run.seed: run for run in self.runs}

    @property
    def unfinished(self) -> bool:
        return any(run.summary is None for run in self.runs)

    @property
    def wire_mb(self) -> float:
        """Traffic of the busiest node in MB per round, as sent, mean over seeds."""
        return self.row.mean(lambda run: run.wire_mb)

    @property
    def paper_mb(self) -> float:
        """The same as the paper counts it."""
        return self.row.mean(lambda run: run.paper_mb)

    @property
    def flops(self) -> float:
        """Training FLOPs of a peer per round, mean over seeds."""
        return self.row.mean(lambda run: run.flops_per_peer)


@dataclass(frozen=True)
class ReportResults:
    """All data that the page shows."""

    series: Sequence[ReportSeries]
    """Best first; those without a score last."""
    comparison: Comparison
    differing: Mapping[str, Mapping[str, str]]
    """Keys outside the method's table in which rows differ, each with the value of every row."""
    omitted: Sequence[Path]
    """Run directories without a finished round."""
    omitted_seeds: Mapping[str, Sequence[int]]
    """The seeds of each row that are not shown because not every row has them."""

    @property
    def measure(self) -> Measure:
        """What the scores measure."""
        return self.comparison.measure

    @property
    def runs(self) -> list[ReportRun]:
        return [run for series in self.series for run in series.runs]

    @property
    def comparable(self) -> bool:
        """Whether the scores of different rows can be compared."""
        first = self.comparison.rows[0]
        same_data = all(row.has_data_of(first) for row in self.comparison.rows)
        return same_data and not any(map(prevents_comparison, self.differing))

    @property
    def common_seeds(self) -> list[int]:
        """The seeds that every row has."""
        seeds = [set(series.seeds) for series in self.series]
        return sorted(set.intersection(*seeds))


def read_results(paths: Iterable[Path]) -> ReportResults:
    """Read all run directories among the paths and group them into rows."""
    runs = [read_run(path) for path in find_runs(paths)]
    shown = [run for run in runs if run.records]
    omitted = [run.path for run in runs if not run.records]
    if not shown:
        raise RunError(f"{runs[0].path} has no finished round to report; run it first.")
    groups = _group_by_settings(shown)
    rows = dict(zip(row_labels([group[0].config for group in groups]), groups, strict=True))
    differing = _differing({label: flat_settings(group[0].config) for label, group in rows.items()})
    omitted_seeds: dict[str, list[int]] = {}
    if not any(map(prevents_comparison, differing)):
        rows, omitted_seeds = _keep_common_seeds(rows)
    comparison = compare(
        [({"method": label}, run.path) for label, group in rows.items() for run in group]
    )
    series = [
        ReportSeries(row.label, colour, rows[row.label], row)
        for colour, row in enumerate(comparison.rows)
    ]
    series.sort(
        key=lambda one: (one.row.score is None, -comparison.measure.gain(one.row.score or 0.0, 0.0))
    )
    return ReportResults(series, comparison, differing, omitted, omitted_seeds)


def scores_by_density(series: ReportSeries) -> dict[float, list[float]]:
    """Return the scores of all peers of each density, over all seeds; empty if the method has one
    density."""
    return _by_density(series, lambda run: run.scores)


def seconds_by_density(series: ReportSeries) -> dict[float, list[float]]:
    """Return the same of the seconds that peers compute in a round."""
    return _by_density(series, lambda run: run.peer_seconds)


def _by_density(
    series: ReportSeries, values_of: Callable[[ReportRun], Mapping[str, float]]
) -> dict[float, list[float]]:
    found: dict[float, list[float]] = {}
    for run in series.runs:
        values = values_of(run)
        for peer, density in (run.densities or {}).items():
            if peer in values:
                found.setdefault(density, []).append(values[peer])
    return dict(sorted(found.items()))


@dataclass(frozen=True)
class PeerWins:
    """Number of peers for which each row is the best, over all seeds that every row has."""

    peers: int
    """Peers that have a score in every row."""
    wins: dict[str, int]
    """By row: peers for which it beats all others."""
    ties: dict[str, int]
    """By row: peers for which it shares the best score."""
    losses: dict[str, list[str]]
    """By row: peers that do better in another row."""


def count_wins(results: ReportResults) -> PeerWins | None:
    """Compare the rows peer by peer; None if there is nothing to compare or the rows have different
    peers."""
    scores = _scores_of_common_peers(results)
    if not scores:
        return None
    labels = [series.label for series in results.series]
    wins, ties = dict.fromkeys(labels, 0), dict.fromkeys(labels, 0)
    losses: dict[str, list[str]] = {label: [] for label in labels}
    for peer, by_label in scores:
        highest = results.measure.best(by_label.values())
        best = [label for label in labels if abs(by_label[label] - highest) <= TIE]
        for label in labels:
            if label not in best:
                losses[label].append(peer)
            elif len(best) == 1:
                wins[label] += 1
            else:
                ties[label] += 1
    return PeerWins(len(scores), wins, ties, losses)


def _scores_of_common_peers(results: ReportResults) -> list[tuple[str, dict[str, float]]]:
    """Return each peer of each common seed with its score in every row, if it has them all."""
    if len(results.series) < 2 or not results.comparable:
        return []
    common = []
    for seed in results.common_seeds:
        scores = {series.label: series.seeds[seed].scores for series in results.series}
        for peer in results.series[0].seeds[seed].roster:
            by_label = {label: peers[peer] for label, peers in scores.items() if peer in peers}
            if len(by_label) == len(scores):
                common.append((peer, by_label))
    return common


def _group_by_settings(runs: Iterable[ReportRun]) -> list[list[ReportRun]]:
    groups: dict[tuple[tuple[str, str], ...], list[ReportRun]] = {}
    for run in runs:
        groups.setdefault(tuple(sorted(flat_settings(run.config).items())), []).append(run)
    return [sorted(group, key=lambda run: run.seed) for group in groups.values()]


def _keep_common_seeds(
    rows: Mapping[str, list[ReportRun]],
) -> tuple[dict[str, list[ReportRun]], dict[str, list[int]]]:
    """Return the runs of seeds that every row has, and the other seeds: they would bias a mean."""
    common = set.intersection(*({run.seed for run in runs} for runs in rows.values()))
    if not common:
        return dict(rows), {}
    others = {
        label: [run.seed for run in runs if run.seed not in common] for label, runs in rows.items()
    }
    kept = {label: [run for run in runs if run.seed in common] for label, runs in rows.items()}
    return kept, {label: seeds for label, seeds in others.items() if seeds}


def _differing(rows: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, str]]:
    keys = sorted(
        {key for settings in rows.values() for key in settings if not key.startswith("method.")}
    )
    values = {
        key: {label: settings.get(key, "not set") for label, settings in rows.items()}
        for key in keys
    }
    return {key: by_label for key, by_label in values.items() if len(set(by_label.values())) > 1}
