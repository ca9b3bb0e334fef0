"""Peer by peer: for whom each row is the best."""

from dataclasses import dataclass

from dispfl.analysis.report.results import Results

TIE = 1e-9
"""Scores are counts over counts: what differs by less is equal but for the last bits."""


@dataclass(frozen=True)
class Tally:
    """For how many peers each row is the best, over all seeds that every row has."""

    peers: int
    """All that have a score in every row."""
    alone: dict[str, int]
    """By row: the peers for which it beats all others."""
    level: dict[str, int]
    """By row: those for which it shares the highest score."""
    beaten: dict[str, list[str]]
    """By row: the peers that do better in another."""


def tally(results: Results) -> Tally | None:
    """Count peer by peer; None where there is nothing to compare, or where the rows' peers are not the same ones."""
    contests = _contests(results)
    if not contests:
        return None
    labels = [series.label for series in results.series]
    alone, level = dict.fromkeys(labels, 0), dict.fromkeys(labels, 0)
    beaten: dict[str, list[str]] = {label: [] for label in labels}
    for peer, reached in contests:
        highest = max(reached.values())
        winners = [label for label in labels if reached[label] >= highest - TIE]
        for label in labels:
            if label not in winners:
                beaten[label].append(peer)
            elif len(winners) == 1:
                alone[label] += 1
            else:
                level[label] += 1
    return Tally(len(contests), alone, level, beaten)


def _contests(results: Results) -> list[tuple[str, dict[str, float]]]:
    """A peer and its score in every row, for each peer of each seed that has them all."""
    if len(results.series) < 2 or not results.comparable:
        return []
    found = []
    for seed in results.common_seeds:
        scores = {series.label: series.seeds[seed].scores for series in results.series}
        for peer in results.series[0].seeds[seed].roster:
            reached = {label: own[peer] for label, own in scores.items() if peer in own}
            if len(reached) == len(scores):
                found.append((peer, reached))
    return found
