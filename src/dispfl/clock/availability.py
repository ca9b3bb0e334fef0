"""When a device is online: always, in turns of random length, in a daily window, or by a trace.

A device that is offline neither computes nor transfers, and goes on where it stopped.
"""

import csv
import io
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from random import Random

from dispfl.errors import ConfigError
from dispfl.files import read_regular

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

    def online_periods(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield the periods between two times in which the device is online."""
        now = start
        while now < end:
            change = self.next_change(now)
            until = end if change is None else min(change, end)
            if self.is_online(now):
                yield now, until
            now = until

    def online_time(self, start: int, end: int) -> int:
        """Return how long the device is online between two times."""
        return sum(until - since for since, until in self.online_periods(start, end))

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


TRACE_COLUMNS = ("device", "on", "off")
MAX_HOURS = 100_000
"""The last time that a trace may have."""


def read_traces(path: Path) -> list[Availability]:
    """Return when each device of a CSV file is online: hours at which it goes on- and offline.

    The file repeats from its last `off` on, so that a run may last longer.
    """
    try:
        text = read_regular(path).decode("utf-8-sig")
        rows = list(csv.DictReader(io.StringIO(text), strict=True))
    except (OSError, ValueError, csv.Error) as problem:
        reason = getattr(problem, "strerror", None) or problem
        raise _bad_trace(path, f"it cannot be read: {reason}") from None
    if not rows or set(rows[0]) != set(TRACE_COLUMNS):
        raise _bad_trace(path, "it must be a CSV file with the columns device, on and off")

    windows: dict[str, list[tuple[int, int]]] = {}
    for number, row in enumerate(rows, start=2):
        window = _window(path, number, row)
        earlier = windows.setdefault(row["device"], [])
        if earlier and window[0] < earlier[-1][1]:
            raise _bad_trace(
                path,
                f"line {number}: {row['device'][:40]} goes online at {row['on']} hours, before it"
                " went offline; give its times in order",
            )
        earlier.append(window)

    period = max(of_device[-1][1] for of_device in windows.values())
    return [Windows(of_device, period) for of_device in windows.values()]


def _window(path: Path, number: int, row: Mapping[str, str | None]) -> tuple[int, int]:
    """Return when a device goes on- and offline in a line of a trace."""
    if None in row:
        raise _bad_trace(path, f"line {number} has more than three values")
    hours = []
    for key in ("on", "off"):
        text = row[key] or ""
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not 0 <= value <= MAX_HOURS:  # nor nan
            raise _bad_trace(
                path,
                f"line {number}: {key} is {text[:40]!r}; give the hours since the start, a"
                f" number from 0 to {MAX_HOURS:,}",
            )
        hours.append(value)
    on, off = hours
    window = (round(on * HOUR), round(off * HOUR))
    if window[1] - window[0] < MILLISECOND:
        raise _bad_trace(
            path,
            f"line {number}: on is {on:g}, which must be at least a millisecond before off,"
            f" {off:g}",
        )
    return window


def _bad_trace(path: Path, problem: str) -> ConfigError:
    return ConfigError(f"availability={path}: {problem}.", key="classes")
