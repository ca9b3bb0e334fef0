"""Which worker gets which peers, so that all are done at the same time."""

from collections.abc import Mapping

WORTH_IT = 1.05
"""Peers move only if the round's longest worker gets so many times faster."""


def dealt(loads: Mapping[str, float], workers: int) -> dict[str, int]:
    """Each peer's worker: the heaviest peers first, each to the worker that has least so far."""
    totals = [0.0] * workers
    places = {}
    for peer in sorted(loads, key=lambda peer: (-loads[peer], peer)):
        places[peer] = min(range(workers), key=lambda worker: (totals[worker], worker))
        totals[places[peer]] += loads[peer]
    return places


def rebalanced(loads: Mapping[str, float], places: Mapping[str, int], workers: int) -> dict[str, int]:
    """The same places, but for a few peers that move from the busiest worker to the idlest, if that is worth it."""
    found, totals = dict(places), _totals(loads, places, workers)
    before = max(totals)
    for _ in loads:
        busiest, idlest = (pick(range(workers), key=lambda w: (totals[w], w)) for pick in (max, min))
        gap = totals[busiest] - totals[idlest]
        movable = [peer for peer, worker in found.items() if worker == busiest and 0 < loads[peer] < gap]
        if not movable:
            break
        peer = min(movable, key=lambda peer: (abs(gap / 2 - loads[peer]), peer))
        found[peer] = idlest
        totals[busiest] -= loads[peer]
        totals[idlest] += loads[peer]
    return found if before > WORTH_IT * max(totals) else dict(places)


def _totals(loads: Mapping[str, float], places: Mapping[str, int], workers: int) -> list[float]:
    totals = [0.0] * workers
    for peer, worker in places.items():
        totals[worker] += loads[peer]
    return totals
