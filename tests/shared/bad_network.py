"""A proxy in front of a peer: it delays what passes, resets connections, and can be narrow."""

import asyncio
import contextlib
import random
import socket
import struct
import threading
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any

LOOPBACK = "127.0.0.1"
PIECE = 16 * 1024
LONGEST = 80_000
"""Bytes of an answer after which a doomed connection is reset at the latest."""

MOMENT = 0.05
"""Seconds between the last piece that passes and the reset, which would overtake it."""


@dataclass
class Proxy:
    """Carries connections to the peer that listens on one port; others know it by the proxy's."""

    target: int
    seed: int
    delay: tuple[float, float]
    """Seconds that each piece is under way: from, to."""
    doomed: float
    """The probability that an exchange, an ask and its answer, ends in a reset."""
    bytes_a_second: float = float("inf")
    port: int = 0
    connections: int = 0
    resets: int = 0
    _narrow_until: float = 0.0

    async def open(self) -> asyncio.Server:
        """Begin; the system chooses the port."""
        server = await asyncio.start_server(self._carry, LOOPBACK, 0, limit=PIECE)
        self.port = server.sockets[0].getsockname()[1]
        return server

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        rng = random.Random(f"{self.seed} {self.connections}")
        self.connections += 1
        with contextlib.suppress(asyncio.CancelledError), contextlib.ExitStack() as ending:  # it may be stopped
            ending.callback(_reset, writer)
            try:
                from_peer, to_peer = await asyncio.open_connection(LOOPBACK, self.target, limit=PIECE)
            except OSError:
                return
            ending.callback(_reset, to_peer)
            fate = _Fate(rng, self.doomed)
            await _first_of(
                self._pump(reader, to_peer, rng, fate.asks_pass), self._pump(from_peer, writer, rng, fate.answers_pass)
            )
            self.resets += fate.is_sealed

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        rng: random.Random,
        passes: Callable[[int], bool],
    ) -> None:
        """Carry pieces one way, in order, each for as long as it takes; until the end, or a reset."""
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(64)

        async def set_out() -> None:
            while piece := await reader.read(PIECE):
                await under_way.put((self._due(len(piece), rng), piece))
            await under_way.put((self._due(0, rng), b""))
            await asyncio.Event().wait()

        async def arrive() -> None:
            while True:
                due, piece = await under_way.get()
                await asyncio.sleep(due - asyncio.get_running_loop().time())
                if not piece or not passes(len(piece)):
                    await asyncio.sleep(MOMENT)
                    return
                writer.write(piece)
                await writer.drain()

        await _first_of(set_out(), arrive())

    def _due(self, size: int, rng: random.Random) -> float:
        now = asyncio.get_running_loop().time()
        self._narrow_until = max(now, self._narrow_until) + size / self.bytes_a_second
        return self._narrow_until + rng.uniform(*self.delay)


class _Fate:
    """Whether and when a connection is reset: somewhere within a doomed answer, or before the next ask."""

    def __init__(self, rng: random.Random, doomed: float) -> None:
        self._rng, self._doomed = rng, doomed
        self._is_asking = False
        self._left: int | None = None
        self.is_sealed = False

    def asks_pass(self, size: int) -> bool:
        """Whether a piece of an ask still passes."""
        if not self._is_asking:
            self._is_asking = True
            if self._left is not None:
                self.is_sealed = True
            elif self._rng.random() < self._doomed:
                self._left = self._rng.randrange(LONGEST)
        return not self.is_sealed

    def answers_pass(self, size: int) -> bool:
        """Whether a piece of an answer still passes."""
        self._is_asking = False
        if self._left is not None:
            self._left -= size
            self.is_sealed = self._left < 0
        return not self.is_sealed


async def _first_of(*ways: Coroutine[Any, Any, None]) -> None:
    """Until one of them ends, or breaks; the others end with it."""
    tasks = [asyncio.create_task(way) for way in ways]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _reset(writer: asyncio.StreamWriter) -> None:
    """End a connection with an RST, not a farewell."""
    under = writer.get_extra_info("socket")
    if under is not None and under.fileno() >= 0:
        under.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


class Carrying(threading.Thread):
    """Runs proxies on a thread of their own, until it is told to stop."""

    def __init__(self, proxies: Iterable[Proxy]) -> None:
        super().__init__(daemon=True)
        self._proxies = list(proxies)
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._is_open = threading.Event()

    def open(self) -> None:
        """Begin; returns once the proxies' ports are known."""
        self.start()
        self._is_open.wait()

    def run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._carry())

    async def _carry(self) -> None:
        servers = [await proxy.open() for proxy in self._proxies]
        self._is_open.set()
        await self._stopping.wait()
        for server in servers:
            server.close()

    def stop(self) -> None:
        """End all connections."""
        self._loop.call_soon_threadsafe(self._stopping.set)
        self.join()
