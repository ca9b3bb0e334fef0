"""How many bytes of models a site sends and receives in a second, divided fairly."""

import asyncio
import re
import threading
from dataclasses import dataclass, field

_BANDWIDTH = re.compile(r"(\d+(?:\.\d+)?) *([kMG]?)(bit|B)/s")
_PREFIXES = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9}
MIN_RATE = 12_500.0
"""The smallest rate in bytes per second, 0.1 Mbit/s: about ten transfers at the same time are then
as fast as `Limits.min_rate` demands."""
_TURNS_PER_SECOND = 20
_MIN_TURN = 4 * 1024
MODEL = "model"
"""The kind of requests whose transfers are limited."""
MAX_TURN = 256 * 1024
"""Bytes of a turn where the rate is high, or not limited."""


def parse_bandwidth(text: str) -> float | None:
    """Return bytes per second for `20 Mbit/s` or `2.5 MB/s`; None if it is written otherwise."""
    match = _BANDWIDTH.fullmatch(text.strip())
    if match is None:
        return None
    number, prefix, unit = match.groups()
    bits = 1 if unit == "bit" else 8
    return float(number) * _PREFIXES[prefix] * bits / 8


class RateLimit:
    """Divides a rate among all transfers in one direction.

    A transfer asks for its next bytes when the last ones are through, and turns are taken in the
    order in which they were asked for. So concurrent transfers get the same share, and a single one
    gets all. No more than one turn is saved up.
    """

    def __init__(self, bytes_per_second: float | None) -> None:
        self.rate = bytes_per_second
        self.turn = MAX_TURN
        """Bytes that a transfer should ask for at a time."""
        if bytes_per_second is not None:
            fair_turn = int(bytes_per_second / _TURNS_PER_SECOND)
            self.turn = min(MAX_TURN, max(_MIN_TURN, fair_turn))
        self._free_at = 0.0
        self._lock = threading.Lock()

    def reserve(self, size: int, now: float) -> float:
        """Reserve the next `size` bytes, on any thread; return how many seconds to wait for them.

        `now` is the time of the event loop's clock.
        """
        if self.rate is None:
            return 0.0
        with self._lock:
            start = max(now, self._free_at)
            self._free_at = start + size / self.rate
        return start - now


@dataclass
class Throttle:
    """One transfer under a `RateLimit`."""

    limit: RateLimit
    _has_waited: bool = field(default=False, init=False)

    async def take(self, size: int) -> None:
        """Wait until `size` bytes may be transferred."""
        loop = asyncio.get_running_loop()
        seconds = self.limit.reserve(size, loop.time())
        if seconds > 0:
            self._has_waited = True
            await asyncio.sleep(seconds)
            self._has_waited = True

    def has_waited(self) -> bool:
        """Whether the transfer has waited for its turn since the last call: then it is not the
        other site that is slow."""
        has_waited = self._has_waited
        self._has_waited = False
        return has_waited


class Bandwidth:
    """The limits of a site, in both directions."""

    def __init__(self, bytes_per_second: float | None = None) -> None:
        self._up = RateLimit(bytes_per_second)
        self._down = RateLimit(bytes_per_second)
        self._unlimited = RateLimit(None)

    def sending(self, kind: str) -> Throttle:
        """A transfer to another site, for a request of this kind."""
        return Throttle(self._up if kind == MODEL else self._unlimited)

    def receiving(self, kind: str) -> Throttle:
        """A transfer from another site, for a request of this kind."""
        return Throttle(self._down if kind == MODEL else self._unlimited)
