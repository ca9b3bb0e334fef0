"""A proxy in front of a peer that delays data, resets connections and limits the bandwidth."""

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
CHUNK = 16 * 1024
MAX_BYTES_BEFORE_RESET = 80_000
"""Bytes of a response after which a connection chosen for a reset is reset at the latest."""
RESET_DELAY = 0.05
"""Seconds between the last forwarded chunk and the reset, which would otherwise arrive first."""


@dataclass
class Proxy:
    """Forwards connections to the peer on port `target`; other peers connect to the proxy's
    port."""

    target: int
    seed: int
    delay: tuple[float, float]
    """Minimum and maximum delay of each chunk in seconds."""
    reset_prob: float
    """Probability that a request and its response end with a reset."""
    bytes_per_second: float = float("inf")
    port: int = 0
    connections: int = 0
    resets: int = 0
    _busy_until: float = 0.0

    async def open(self) -> asyncio.Server:
        """Start listening on a port chosen by the system."""
        server = await asyncio.start_server(self._forward, LOOPBACK, 0, limit=CHUNK)
        self.port = server.sockets[0].getsockname()[1]
        return server

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        rng = random.Random(f"{self.seed} {self.connections}")
        self.connections += 1
        with (
            contextlib.suppress(asyncio.CancelledError),
            contextlib.ExitStack() as stack,
        ):  # the proxy may be stopped
            stack.callback(_reset, writer)
            try:
                from_peer, to_peer = await asyncio.open_connection(
                    LOOPBACK, self.target, limit=CHUNK
                )
            except OSError:
                return
            stack.callback(_reset, to_peer)
            schedule = _ResetSchedule(rng, self.reset_prob)
            await _first_of(
                self._pump(reader, to_peer, rng, schedule.forward_request),
                self._pump(from_peer, writer, rng, schedule.forward_response),
            )
            self.resets += schedule.is_reset

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        rng: random.Random,
        may_forward: Callable[[int], bool],
    ) -> None:
        """Forward chunks in one direction, in order and delayed, until the end or a reset."""
        in_transit: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(64)

        async def receive() -> None:
            while chunk := await reader.read(CHUNK):
                await in_transit.put((self._due(len(chunk), rng), chunk))
            await in_transit.put((self._due(0, rng), b""))
            await asyncio.Event().wait()

        async def deliver() -> None:
            while True:
                due, chunk = await in_transit.get()
                await asyncio.sleep(due - asyncio.get_running_loop().time())
                if not chunk or not may_forward(len(chunk)):
                    await asyncio.sleep(RESET_DELAY)
                    return
                writer.write(chunk)
                await writer.drain()

        await _first_of(receive(), deliver())

    def _due(self, size: int, rng: random.Random) -> float:
        now = asyncio.get_running_loop().time()
        self._busy_until = max(now, self._busy_until) + size / self.bytes_per_second
        return self._busy_until + rng.uniform(*self.delay)


class _ResetSchedule:
    """Decides when a connection is reset: within a response chosen for a reset, or before the next
    request."""

    def __init__(self, rng: random.Random, reset_prob: float) -> None:
        self._rng, self._reset_prob = rng, reset_prob
        self._in_request = False
        self._remaining: int | None = None
        self.is_reset = False

    def forward_request(self, size: int) -> bool:
        """Whether to forward a chunk of a request."""
        if not self._in_request:
            self._in_request = True
            if self._remaining is not None:
                self.is_reset = True
            elif self._rng.random() < self._reset_prob:
                self._remaining = self._rng.randrange(MAX_BYTES_BEFORE_RESET)
        return not self.is_reset

    def forward_response(self, size: int) -> bool:
        """Whether to forward a chunk of a response."""
        self._in_request = False
        if self._remaining is not None:
            self._remaining -= size
            self.is_reset = self._remaining < 0
        return not self.is_reset


async def _first_of(*coroutines: Coroutine[Any, Any, None]) -> None:
    """Run coroutines until one of them ends or fails, then cancel the others."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close a connection with an RST instead of a FIN."""
    sock = writer.get_extra_info("socket")
    if sock is not None and sock.fileno() >= 0:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


class ProxyThread(threading.Thread):
    """Runs proxies in a thread until `stop` is called."""

    def __init__(self, proxies: Iterable[Proxy]) -> None:
        super().__init__(daemon=True)
        self._proxies = list(proxies)
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._is_open = threading.Event()

    def open(self) -> None:
        """Start; return once the proxies' ports are known."""
        self.start()
        self._is_open.wait()

    def run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        servers = [await proxy.open() for proxy in self._proxies]
        self._is_open.set()
        await self._stopping.wait()
        for server in servers:
            server.close()

    def stop(self) -> None:
        """Close all connections and end the thread."""
        self._loop.call_soon_threadsafe(self._stopping.set)
        self.join()
