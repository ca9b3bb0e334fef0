"""Runs grouped into the rows of a report: labels, differing settings, and wins per peer."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dispfl.core.metric import Measure
from dispfl.errors import RunError
from dispfl.report.comparison import (
    Comparison,
    ComparisonRow,
    compare_runs,
    labels_of,
    with_reference,
)
from dispfl.report.labels import NOT_SET, prevents_comparison
from dispfl.report.runs import RecordedRun, read_runs, run_labels
from dispfl.report.wording import join_and

TIE = 1e-9
"""Scores are ratios of counts: smaller differences are rounding errors."""


@dataclass(frozen=True)
class ReportResults:
    """All data that the page shows."""

    rows: Sequence[ComparisonRow]
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
    def runs(self) -> list[RecordedRun]:
        """All runs, row by row."""
        runs: list[RecordedRun] = []
        for row in self.rows:
            runs += row.runs
        return runs

    @property
    def labels(self) -> list[str]:
        return labels_of(self.rows)

    @property
    def flops_per_peer(self) -> list[float]:
        """Training FLOPs of a peer per round, of each row."""
        return [row.flops_per_peer for row in self.rows]

    @property
    def evaluated_rows(self) -> list[ComparisonRow]:
        """The rows with peers that have a score."""
        return [row for row in self.rows if row.scored_runs]

    @property
    def several_seeds(self) -> bool:
        return self.comparison.most_seeds > 1

    @property
    def comparable(self) -> bool:
        """Whether the scores of different rows can be compared."""
        if any(map(prevents_comparison, self.differing)):
            return False
        first = self.comparison.rows[0]
        return all(row.has_data_of(first) for row in self.comparison.rows)

    @property
    def common_seeds(self) -> list[int]:
        """The seeds that every row has."""
        common = set(self.rows[0].by_seed)
        for row in self.rows:
            common.intersection_update(row.by_seed)
        return sorted(common)


def read_results(paths: Iterable[Path]) -> ReportResults:
    """Read all run directories among the paths and group them into rows."""
    return group_runs(read_runs(paths))


def group_runs(runs: Sequence[RecordedRun], against: str | None = None) -> ReportResults:
    """Group runs into rows: those that differ in their seed alone are one."""
    shown = []
    omitted = []
    for run in runs:
        if run.records:
            shown.append(run)
        else:
            omitted.append(run.path)
    if not shown:
        raise RunError(f"{runs[0].path} has no finished round to report; run it first.")

    groups = _group_by_label(shown)
    differing = _differing_settings(groups)
    omitted_seeds: dict[str, list[int]] = {}
    if not any(map(prevents_comparison, differing)):
        omitted_seeds = _omit_uncommon_seeds(groups)

    named_runs = []
    for label, group in groups.items():
        for run in group:
            named_runs.append(({"method": label}, run))
    comparison = compare_runs(named_runs)
    if against is not None:
        [comparison] = with_reference([comparison], against)
    return ReportResults(_best_first(comparison), comparison, differing, omitted, omitted_seeds)


def _group_by_label(runs: Sequence[RecordedRun]) -> dict[str, list[RecordedRun]]:
    """Return the runs that differ in their seed alone, by their common label."""
    groups: dict[str, list[RecordedRun]] = {}
    for label, run in zip(run_labels(runs), runs, strict=True):
        groups.setdefault(label, []).append(run)
    for group in groups.values():
        group.sort(key=lambda run: run.seed)
    return groups


def _differing_settings(
    groups: Mapping[str, Sequence[RecordedRun]],
) -> dict[str, dict[str, str]]:
    """Return the keys outside the method's table in which rows differ, with every row's value."""
    keys: set[str] = set()
    for group in groups.values():
        keys |= group[0].settings.keys()

    differing = {}
    for key in sorted(keys):
        if key.startswith("method."):
            continue
        values = {}
        for label, group in groups.items():
            values[label] = group[0].settings.get(key, NOT_SET)
        if len(set(values.values())) > 1:
            differing[key] = values
    return differing


def _omit_uncommon_seeds(groups: dict[str, list[RecordedRun]]) -> dict[str, list[int]]:
    """Remove the runs of seeds that not every row has, which would bias a mean; return the seeds.

    Without any common seed all runs stay.
    """
    seeds_of_rows = []
    for group in groups.values():
        seeds_of_rows.append({run.seed for run in group})
    common = set.intersection(*seeds_of_rows)
    omitted: dict[str, list[int]] = {}
    if not common:
        return omitted
    for label, group in groups.items():
        for run in list(group):
            if run.seed not in common:
                group.remove(run)
                omitted.setdefault(label, []).append(run.seed)
    return omitted


def _best_first(comparison: Comparison) -> list[ComparisonRow]:
    def rank(row: ComparisonRow) -> tuple[bool, float]:
        score = comparison.deciding_score(row)
        return score is None, -comparison.measure.gain(score or 0.0, 0.0)

    return sorted(comparison.rows, key=rank)


def split_by_traffic(
    rows: Iterable[ComparisonRow],
) -> tuple[list[ComparisonRow], list[ComparisonRow]]:
    """Return the rows that send anything, and those that do not."""
    sending = []
    silent = []
    for row in rows:
        if row.wire_mb:
            sending.append(row)
        else:
            silent.append(row)
    return sending, silent


def silence_note(silent: Sequence[ComparisonRow], link: str = "") -> str:
    """`Local sends nothing`; with the link `, which`: `Local, which sends nothing`."""
    labels = join_and(labels_of(silent))
    if len(silent) == 1:
        return f"{labels}{link} sends nothing"
    return f"{labels}{link} send nothing"


def scores_by_density(row: ComparisonRow) -> dict[float, list[float]]:
    """Return the scores of all peers of each density; empty if the method has one density."""
    return _by_density(row, lambda run: run.scores)


def seconds_by_density(row: ComparisonRow) -> dict[float, list[float]]:
    """Return the same of the seconds that peers compute in a round."""
    return _by_density(row, lambda run: run.peer_seconds)


def _by_density(
    row: ComparisonRow, values_of: Callable[[RecordedRun], Mapping[str, float]]
) -> dict[float, list[float]]:
    by_density: dict[float, list[float]] = {}
    for run in row.runs:
        values = values_of(run)
        for peer, density in (run.densities or {}).items():
            if peer in values:
                by_density.setdefault(density, []).append(values[peer])
    return dict(sorted(by_density.items()))


@dataclass
class PeerWins:
    """Number of peers for which a row is the best, over all seeds that every row has."""

    wins: int = 0
    """Peers for which it beats all others."""
    ties: int = 0
    """Peers for which it shares the best score."""
    losses: list[str] = field(default_factory=list)
    """Peers that do better in another row."""

    @property
    def peers(self) -> int:
        """Peers that have a score in every row."""
        return self.wins + self.ties + len(self.losses)


def count_wins(results: ReportResults) -> dict[str, PeerWins]:
    """Compare the rows peer by peer, by label; empty if the rows have different peers."""
    all_scores = _scores_of_common_peers(results)
    if not all_scores:
        return {}
    counts = {label: PeerWins() for label in results.labels}
    for peer, scores in all_scores:
        winners = _winners(scores, results.measure)
        for label, count in counts.items():
            if label not in winners:
                count.losses.append(peer)
            elif len(winners) == 1:
                count.wins += 1
            else:
                count.ties += 1
    return counts


def _winners(scores: Mapping[str, float], measure: Measure) -> list[str]:
    """Return the labels of the rows with a peer's best score."""
    best_score = measure.best(scores.values())
    winners = []
    for label, score in scores.items():
        if abs(score - best_score) <= TIE:
            winners.append(label)
    return winners


def _scores_of_common_peers(results: ReportResults) -> list[tuple[str, dict[str, float]]]:
    """Return each peer of each common seed with its score in every row, if it has them all."""
    if len(results.rows) < 2 or not results.comparable:
        return []
    common = []
    for seed in results.common_seeds:
        for peer in results.rows[0].by_seed[seed].roster:
            scores = {}
            for row in results.rows:
                run = row.by_seed[seed]
                if peer in run.scores:
                    scores[row.label] = run.scores[peer]
            if len(scores) == len(results.rows):
                common.append((peer, scores))
    return common
