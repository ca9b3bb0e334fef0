"""Paired differences between two rows: the same peers of the same seeds, with a 95 % bootstrap
interval.

Resampling follows how the runs were made: seeds first, then, within each drawn seed, its peers (a
hierarchical bootstrap; with one seed, its peers alone). The random numbers are the same every time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from dispfl.core.metric import Measure

RESAMPLES = 5000
CONFIDENCE = 0.95
MIN_PAIRS = 6
"""With fewer pairs than this, two equal methods differ in the same direction everywhere in more
than 5 % of cases."""


class Verdict(StrEnum):
    """What the interval says about a row and its reference."""

    AHEAD = "ahead"
    LEVEL = "level"
    BEHIND = "behind"
    UNTESTED = "untested"


@dataclass(frozen=True)
class Difference:
    """A row's score minus its reference's, mean over the peers of each seed and then over seeds."""

    mean: float
    interval: tuple[float, float] | None
    """95 % bootstrap interval; None if there are too few pairs."""
    peers: int
    """Pairs of scores, over all seeds."""
    seeds: int

    def verdict(self, measure: Measure) -> Verdict:
        """Return whether the row is ahead, behind or, if the interval contains 0, level."""
        if self.interval is None:
            return Verdict.UNTESTED
        worst = min(measure.gain(bound, 0.0) for bound in self.interval)
        best = max(measure.gain(bound, 0.0) for bound in self.interval)
        return Verdict.AHEAD if worst > 0 else Verdict.BEHIND if best < 0 else Verdict.LEVEL

    def text(self, measure: Measure) -> str:
        """`-0.031 [-0.045, -0.017]`."""
        mean = f"{self.mean:+{measure.format}}"
        if self.interval is None:
            return mean
        return f"{mean} [{', '.join(f'{bound:+{measure.format}}' for bound in self.interval)}]"


Scores = Mapping[int, Sequence[float | None]]
"""The scores of a row: by seed, one per peer; None for a peer without a score."""


def paired_difference(row: Scores, reference: Scores) -> Difference | None:
    """Return the difference over the peers and seeds that both have; None if there are none."""
    by_seed = []
    for seed in sorted(row.keys() & reference.keys()):
        pairs = zip(row[seed], reference[seed], strict=True)
        differences = [own - other for own, other in pairs if own is not None and other is not None]
        if differences:
            by_seed.append(np.array(differences))
    if not by_seed:
        return None
    count = sum(map(len, by_seed))
    mean = float(np.mean([differences.mean() for differences in by_seed]))
    return Difference(mean, _interval(by_seed) if count >= MIN_PAIRS else None, count, len(by_seed))


def _interval(by_seed: Sequence[np.ndarray]) -> tuple[float, float]:
    """Return the percentile interval of the mean over resampled seeds of the mean over their
    resampled peers."""
    rng = np.random.default_rng(0)
    means = np.zeros(RESAMPLES)
    for drawn in rng.integers(len(by_seed), size=(len(by_seed), RESAMPLES)):
        for number, differences in enumerate(by_seed):
            rows = np.flatnonzero(drawn == number)
            peers = rng.integers(len(differences), size=(len(rows), len(differences)))
            means[rows] += differences[peers].mean(axis=1) / len(by_seed)
    low, high = np.quantile(means, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


def _range(counts: Sequence[int]) -> str:
    return f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"


def paired_over(differences: Mapping[str, Difference]) -> str:
    """Say what the differences are taken over, and what ahead, behind and level mean."""
    peers, seeds = (
        _range([getattr(one, name) for one in differences.values()]) for name in ("peers", "seeds")
    )
    over = f"{peers} pairs of peers"
    over += f" in {seeds} seeds (seeds, then their peers, resampled)" if seeds != "1" else ""
    untested = any(one.interval is None for one in differences.values())
    few = f"; untested: fewer than {MIN_PAIRS} pairs" if untested else ""
    return (
        f"paired difference over {over}, with its 95 % bootstrap interval; ahead or behind where"
        f" that excludes 0, otherwise level{few}."
    )
