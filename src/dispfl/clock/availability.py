"""When a device is online: always, in turns of random length, or in a daily window.

A device that is offline neither computes nor transfers, and goes on where it stopped.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from random import Random

MILLISECOND = 10**6
"""In nanoseconds."""
HOUR = 3600 * 10**9
DAY = 24 * HOUR


class Availability:
    """A device that is always online."""

    def is_online(self, time: int) -> bool:
        """Whether the device is online at a time."""
        return True

    def next_change(self, time: int) -> int | None:
        """Return when it next goes on- or offline after a time; None: never."""
        return None

    def finish(self, start: int, duration: int) -> int:
        """Return when something is finished that takes this long while the device is online."""
        now = start
        left = duration
        while True:
            change = self.next_change(now)
            if self.is_online(now):
                if change is None or now + left <= change:
                    return now + left
                left -= change - now
            assert change is not None, "a device that stays offline"
            now = change


ALWAYS = Availability()


class Turns(Availability):
    """A device that goes on- and offline in turns; the first turn begins online, at time 0.

    `draw` gives the length of the next turn, of which there is no end.
    """

    def __init__(self, draw: Callable[[bool], int]) -> None:
        self._draw = draw
        self._starts: list[int] = [0]
        """When turns start, in order; those at even positions are online."""

    def _turn(self, time: int) -> int:
        """Return the position of the turn at a time."""
        while self._starts[-1] <= time:
            is_online = len(self._starts) % 2 == 1
            self._starts.append(self._starts[-1] + max(1, self._draw(is_online)))
        return bisect_right(self._starts, time) - 1

    def is_online(self, time: int) -> bool:
        return self._turn(time) % 2 == 0

    def next_change(self, time: int) -> int | None:
        return self._starts[self._turn(time) + 1]


def random_turns(mean_online: int, mean_offline: int, seed: int) -> Turns:
    """Return turns of exponentially distributed lengths, in whole milliseconds.

    The logarithm's last bit, which machines may disagree on, does not change those.
    """
    random = Random(seed)

    def draw(is_online: bool) -> int:
        mean = mean_online if is_online else mean_offline
        return round(random.expovariate(1) * mean / MILLISECOND) * MILLISECOND

    return Turns(draw)


class Windows(Availability):
    """A device that is online in the same windows of every period, such as each night."""

    def __init__(self, windows: Sequence[tuple[int, int]], period: int = DAY) -> None:
        self._changes: list[int] = []
        """Beginnings and ends in turn, within a period."""
        for begin, end in windows:
            if self._changes and self._changes[-1] == begin:
                self._changes[-1] = end  # adjacent
            else:
                self._changes += [begin, end]
        self._period = period

    def is_online(self, time: int) -> bool:
        return bisect_right(self._changes, time % self._period) % 2 == 1

    def next_change(self, time: int) -> int | None:
        passed = time % self._period
        position = bisect_right(self._changes, passed)
        if position < len(self._changes):
            return time - passed + self._changes[position]
        return time - passed + self._period + self._changes[0]
