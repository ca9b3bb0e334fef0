"""The course of a number over the rounds, over all seeds of a row."""

import statistics
from collections.abc import Sequence

Moment = tuple[float, float] | None
"""Where a run stood and what it had then; None where it was not measured."""


def over_seeds(seeds: Sequence[Sequence[Moment]]) -> list[tuple[float, float, float]]:
    """Place, mean and sample standard deviation over seeds (0 of one), at every round that all seeds measured."""
    course = []
    for moments in zip(*seeds, strict=False):  # a run that was cut is shorter
        known = [moment for moment in moments if moment is not None]
        if len(known) == len(moments):
            places, values = [place for place, _ in known], [value for _, value in known]
            spread = statistics.stdev(values) if len(values) > 1 else 0.0
            course.append((statistics.fmean(places), statistics.fmean(values), spread))
    return course
