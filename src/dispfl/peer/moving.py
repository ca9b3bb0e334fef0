"""A transfer may take any time, but not stand still."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from dispfl.peer.counting import CountingSocket
from dispfl.peer.limits import Limits


class StalledError(TimeoutError):
    """A transfer that brings too little in too long a time."""


@contextlib.asynccontextmanager
async def moving(line: CountingSocket | None, limits: Limits) -> AsyncIterator[None]:
    """Go on as long as every `stall` seconds bring their least bytes on this line, either way; else `StalledError`."""
    limit = asyncio.timeout(None)
    watch = _Watch(line, limits, limit)
    try:
        async with limit:
            try:
                yield
            finally:
                watch.timer.cancel()
    except TimeoutError as problem:
        if limit.expired():
            raise StalledError(f"fewer than {limits.least} bytes in {limits.stall:g} s") from None
        raise problem


class _Watch:
    """Looks every `stall` seconds how much has come, and ends the transfer when that is too little."""

    def __init__(self, line: CountingSocket | None, limits: Limits, limit: asyncio.Timeout) -> None:
        self._line = line
        self._limits = limits
        self._limit = limit
        self._wait()

    def _wait(self) -> None:
        self._before = self._carried
        self.timer = asyncio.get_running_loop().call_later(self._limits.stall, self._look)

    def _look(self) -> None:
        if self._carried - self._before >= self._limits.least:
            self._wait()
        else:
            self._limit.reschedule(asyncio.get_running_loop().time())

    @property
    def _carried(self) -> int:
        return self._line.carried if self._line else 0
