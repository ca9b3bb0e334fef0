"""Paired differences between two rows: the same peers of the same seeds, with an interval.

Resampling follows how the runs were made: seeds first, then, within each drawn seed, its peers (a
hierarchical bootstrap; with one seed, its peers alone). The random numbers are the same every time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from dispfl.core.metric import Measure
from dispfl.report.wording import number_range

RESAMPLES = 5000
CONFIDENCE = 0.95
MIN_PAIRS = 6
"""With fewer pairs than this, no interval is given.

Two equal methods would differ in the same direction everywhere in more than 5 % of cases.
"""


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
        low, high = self.interval
        if low <= 0 <= high:
            return Verdict.LEVEL
        if measure.gain(low, 0.0) > 0:
            return Verdict.AHEAD
        return Verdict.BEHIND

    def mean_text(self, measure: Measure) -> str:
        """`-0.031`."""
        return measure.signed_text(self.mean)

    def interval_text(self, measure: Measure) -> str:
        """`[-0.045, -0.017]`; empty if there are too few pairs."""
        if self.interval is None:
            return ""
        low, high = self.interval
        return f"[{measure.signed_text(low)}, {measure.signed_text(high)}]"

    def text(self, measure: Measure) -> str:
        """`-0.031 [-0.045, -0.017]`."""
        return f"{self.mean_text(measure)} {self.interval_text(measure)}".strip()


Scores = Mapping[int, Sequence[float | None]]
"""The scores of a row: by seed, one per peer; None for a peer without a score."""


def paired_difference(row: Scores, reference: Scores) -> Difference | None:
    """Return the difference over the peers and seeds that both have; None if there are none."""
    by_seed = []
    for seed in sorted(row.keys() & reference.keys()):
        differences = _differences(row[seed], reference[seed])
        if len(differences):
            by_seed.append(differences)
    if not by_seed:
        return None
    pairs = sum(map(len, by_seed))
    mean = float(np.mean(list(map(np.mean, by_seed))))
    interval = None
    if pairs >= MIN_PAIRS:
        interval = _interval(by_seed)
    return Difference(mean, interval, pairs, len(by_seed))


def _differences(scores: Sequence[float | None], reference: Sequence[float | None]) -> np.ndarray:
    """Return the difference of each peer that has both scores."""
    differences = []
    for score, reference_score in zip(scores, reference, strict=True):
        if score is not None and reference_score is not None:
            differences.append(score - reference_score)
    return np.array(differences)


def _interval(by_seed: Sequence[np.ndarray]) -> tuple[float, float]:
    """Return the percentile interval of the mean over resampled seeds and their resampled peers."""
    rng = np.random.default_rng(0)
    means = np.zeros(RESAMPLES)
    for drawn in rng.integers(len(by_seed), size=(len(by_seed), RESAMPLES)):
        for number, differences in enumerate(by_seed):
            rows = np.flatnonzero(drawn == number)
            peers = rng.integers(len(differences), size=(len(rows), len(differences)))
            means[rows] += differences[peers].mean(axis=1) / len(by_seed)
    low, high = np.quantile(means, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


def paired_over(differences: Mapping[str, Difference]) -> str:
    """Say what the differences are taken over, and what ahead, behind and level mean."""
    peers = []
    seeds = []
    untested = False
    for difference in differences.values():
        peers.append(difference.peers)
        seeds.append(difference.seeds)
        untested |= difference.interval is None

    over = f"{number_range(peers)} pairs of peers"
    if max(seeds) > 1:
        over += f" in {number_range(seeds)} seeds (seeds, then their peers, resampled)"
    sentence = (
        f"paired difference over {over}, with its 95 % bootstrap interval; ahead or behind where"
        " that excludes 0, otherwise level"
    )
    if untested:
        sentence += f"; untested: fewer than {MIN_PAIRS} pairs"
    return f"{sentence}."
