"""Whose clock is wrong: each is compared with the median of all clocks, ours included."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

MAX_DIFFERENCE = 5.0
"""Seconds between two clocks from which on logs are hard to compare; a date has whole seconds."""


@dataclass(frozen=True)
class WrongClock:
    """A clock that differs from the others."""

    name: str | None
    """The member whose clock it is; None: this machine's."""
    ahead: float
    """Seconds that it is ahead of the others, negative if it is behind."""
    is_certain: bool
    """Whether it is known which clock is wrong: of two, either may be."""


def wrong_clock(ahead: Mapping[str, float]) -> WrongClock | None:
    """Return the clock that differs most, by how far members' clocks are ahead of ours.

    None if all agree. If our clock differs from most others, it is ours, whoever else is wrong.
    """
    if not ahead:
        return None
    median = statistics.median([0.0, *ahead.values()])
    if len(ahead) == 1:
        [seconds] = ahead.values()
        if abs(seconds) < MAX_DIFFERENCE:
            return None
        return WrongClock(None, -seconds, is_certain=False)
    if abs(median) >= MAX_DIFFERENCE:
        return WrongClock(None, -median, is_certain=True)
    name = max(ahead, key=lambda member: abs(ahead[member] - median))
    difference = ahead[name] - median
    if abs(difference) < MAX_DIFFERENCE:
        return None
    return WrongClock(name, difference, is_certain=True)
