"""Connections from outside: who may come in, how many, and for how long without saying anything.

The socket is accepted here, before TLS, so that its bytes are counted, its handshake has a deadline and its failure a
name. An honest peer has finished its handshake and its first head within moments. So where too many have not, the
oldest of them is cut, and a crowd of slow ones neither fills the place nor keeps the next honest peer out.
"""

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from aiohttp import web

from dispfl.errors import ConfigError
from dispfl.peer import heads
from dispfl.peer.counting import UNKNOWN, Counters, CountingSocket
from dispfl.peer.limits import Limits
from dispfl.peer.system_words import system_words
from dispfl.peer.transport import Refused

_log = logging.getLogger(__name__)
_BACKLOG = 256
_PAUSE = 0.1
"""Seconds before accepting again when the system has no file descriptor left."""
_LEAVING = 8
"""Connections that we have ended and that are not gone yet; while there are more, nobody else is let in."""


class Line(web.RequestHandler):
    """One connection from outside, and the requests on it."""

    def __init__(self, listener: "Listener", counted: CountingSocket, address: str) -> None:
        super().__init__(listener.http, loop=asyncio.get_running_loop(), **listener.http_limits)
        self.counted = counted
        self.address = address
        self.member: str | None = None
        """Whose it is, once it has asked as a member."""
        self.is_busy = False
        self.is_cut = False
        """Whether we have ended it; it may take a moment to be gone."""
        self.idle_since = self._now()
        self._listener = listener
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """TLS stands; a request's head is due."""
        super().connection_made(transport)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        """Once a head has begun, it is due to end."""
        if data and not self.is_busy and self._head_timer is None:
            self._await_head()
        super().data_received(data)

    def connection_lost(self, exc: BaseException | None) -> None:
        """It is over."""
        self._head_is_here()
        super().connection_lost(exc)

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """While a request is answered, its body and its reply have limits of their own."""
        self._head_is_here()
        self.is_busy = True
        try:
            yield
        finally:
            self.is_busy = False
            self.idle_since = self._now()

    def belongs_to(self, member: str) -> None:
        """The connection has asked as this member; refused if it has too many, all busy."""
        if self.member != member:
            self._listener.make_room_for_member(member)
            self.member = member
            self.counted.count_for(self._listener.counters.meter(member))

    def cut(self, reason: str) -> None:
        """End it now, whatever it is doing."""
        if not self.is_cut:
            self._listener.counters.refuse(reason, self.member or UNKNOWN)
        self.hang_up()

    def hang_up(self) -> None:
        """End it now, without blame."""
        self.is_cut = True
        if self.transport is not None:
            self.transport.abort()
        else:  # the handshake is still going on
            with contextlib.suppress(OSError):
                self.counted.shutdown(socket.SHUT_RDWR)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """What is not HTTP gets a short answer, a broken connection none, and a mistake of ours a line in the log."""
        self._head_is_here()
        if status == 400:
            self._listener.counters.refuse("malformed", self.member or UNKNOWN)
        elif not isinstance(exc, OSError | web.RequestPayloadError):
            _log.error("A request of %s could not be answered.", self.member or UNKNOWN, exc_info=exc)
        if request.writer.output_size > 0 or self.transport is None:
            raise ConnectionResetError("The connection broke in the middle of an answer.")
        response = web.Response(status=status)
        response.force_close()
        return response

    def _await_head(self) -> None:
        self._head_timer = asyncio.get_running_loop().call_later(self._listener.limits.head, self.cut, "slow")

    def _head_is_here(self) -> None:
        if self._head_timer:
            self._head_timer.cancel()
            self._head_timer = None

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


class Listener:
    """Accepts connections, one socket to listen on, and hands their requests to `answer`."""

    def __init__(
        self,
        context: ssl.SSLContext,
        answer: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
        limits: Limits,
        counters: Counters,
    ) -> None:
        self.limits = limits
        self.counters = counters
        self.lines: dict[CountingSocket, Line] = {}
        """The open connections, oldest first."""
        self.port = 0
        self.http = web.Server(answer, handler_cancellation=True)
        self.http_limits: dict[str, Any] = {
            "access_log": None,
            "auto_decompress": False,  # a body is what it is: nothing swells up
            "keepalive_timeout": limits.keepalive + 2 * limits.connect,  # the asker is the one to give up first
            "lingering_time": 1.0,
            "max_line_size": 256,
            "max_headers": 32,
            "max_field_size": heads.LIMIT + 256,
        }
        self._context = context
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self, host: str, port: int) -> None:
        """Listen."""
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            listening = socket.create_server(found[0][4][:2], family=found[0][0], backlog=_BACKLOG)
        except OSError as problem:
            raise ConfigError(
                f"Cannot listen on {host}:{port} ({system_words(problem)}); choose another address."
            ) from None
        listening.setblocking(False)
        self.port = listening.getsockname()[1]
        self._start(self._accept(listening))

    async def close(self) -> None:
        """Let answers under way end for a moment, then end everything."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await until(lambda: not any(line.is_busy for line in self.lines.values()), self.limits.farewell)
        for line in list(self.lines.values()):
            line.hang_up()
        await until(lambda: not self.lines and not self.http.connections, self.limits.connect)

    def make_room_for_member(self, member: str) -> None:
        """Cut the connection that a member has left idle the longest, if it has as many as it may."""
        theirs = [line for line in self.lines.values() if line.member == member and not line.is_cut]
        if len(theirs) < self.limits.from_one:
            return
        idle = [line for line in theirs if not line.is_busy]
        if not idle:
            raise Refused("crowded", f"{member} has {len(theirs)} requests under way already; wait for their answers.")
        min(idle, key=lambda line: line.idle_since).hang_up()

    def _make_room_for_stranger(self, address: str) -> bool:
        """Cut the oldest who have not yet asked as members, if there are too many; False if there is no room at all."""
        strangers = [line for line in self.lines.values() if line.member is None and not line.is_cut]
        here = [line for line in strangers if line.address == address]
        for line in here[: max(0, len(here) - self.limits.strangers + 1)]:
            line.cut("slow")
            strangers.remove(line)
        if sum(not line.is_cut for line in self.lines.values()) < self.limits.connections:
            return True
        if strangers:
            strangers[0].cut("slow")
        return bool(strangers)

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with listening:
            while True:
                try:
                    accepted, address = await loop.sock_accept(listening)
                except OSError:
                    await asyncio.sleep(_PAUSE)
                    continue
                self._welcome(accepted, str(address[0]))
                # A crowd is accepted without a pause, and nothing that was cut would go before all of it is in.
                await asyncio.sleep(0)
                await until(lambda: sum(line.is_cut for line in self.lines.values()) <= _LEAVING, self.limits.connect)

    def _welcome(self, accepted: socket.socket, address: str) -> None:
        if not self._make_room_for_stranger(address):
            self.counters.refuse("crowded")
            accepted.close()
            return
        meter = self.counters.meter(UNKNOWN)
        counted = CountingSocket(
            accepted.family, accepted.type, accepted.proto, accepted.detach(), meter=meter, on_close=self._forget
        )
        counted.setblocking(False)
        line = self.lines[counted] = Line(self, counted, address)
        self._start(self._shake_hands(line))

    def _forget(self, closed: CountingSocket) -> None:
        self.lines.pop(closed, None)

    async def _shake_hands(self, line: Line) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: line,
                line.counted,
                ssl=self._context,
                ssl_handshake_timeout=self.limits.connect,
                ssl_shutdown_timeout=1.0,
            )
        except OSError as problem:  # TLS errors are some, too
            if not line.is_cut:
                self.counters.refuse(_reason(problem))
            # Its frames and the connection hold each other, and 256 kB of buffers, until Python looks for circles.
            problem.__traceback__ = None

    def _start(self, coroutine: Any) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _reason(problem: OSError) -> str:
    """Why a handshake failed, by name."""
    if isinstance(problem, ssl.SSLCertVerificationError):
        return "unknown-certificate"
    if isinstance(problem, ssl.SSLError) and problem.reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return "no-certificate"
    if isinstance(problem, ConnectionAbortedError):
        return "slow"
    return "handshake"


async def until(is_so: Callable[[], bool], seconds: float) -> None:
    """Wait until it is so, but not longer than this."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while not is_so():
                await asyncio.sleep(0.005)
