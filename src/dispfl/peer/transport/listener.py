"""Incoming connections: accepting them, limiting their number and closing slow ones.

Sockets are accepted here, before TLS, so that their bytes are counted, the handshake has a deadline
and its failure a reason. An honest peer completes its handshake and its first header quickly. If
too many connections have not, the oldest of them is closed, so a flood of slow connections neither
exhausts memory nor blocks the next honest peer.
"""

import asyncio
import contextlib
import logging
import socket
import ssl
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from aiohttp import web

from dispfl.errors import ConfigError
from dispfl.peer.membership.address import Address
from dispfl.peer.transport import http
from dispfl.peer.transport.base import Refused
from dispfl.peer.transport.guard import AddressLimit
from dispfl.peer.transport.http import (
    UNKNOWN,
    CountingSocket,
    Limits,
    TransportCounters,
    os_error_text,
)
from dispfl.wire.refusals import Refusal

_log = logging.getLogger(__name__)
_BACKLOG = 256
_ACCEPT_RETRY_SECONDS = 0.1
"""Delay before accepting again when the system has no file descriptor left."""
_TURN_SECONDS = 0.01
"""Interval at which a connection from a limited address asks for its turn."""
_MAX_CLOSING = 8
"""Maximum aborted connections that are not closed yet; while there are more, no new one is
accepted."""


class ServerConnection(web.RequestHandler):
    """An incoming connection and its requests."""

    def __init__(self, listener: "Listener", sock: CountingSocket, address: str) -> None:
        super().__init__(listener.http, loop=asyncio.get_running_loop(), **listener.http_limits)
        self.sock = sock
        self.address = address
        self.member: str | None = None
        """The authenticated member, from its first request on."""
        self.is_busy = False
        self.is_aborted = False
        """Whether it was aborted here; closing may take a moment."""
        self.is_waiting = True
        """Whether its handshake has not begun, so that nothing else closes its socket."""
        self.idle_since = self._now()
        self._listener = listener
        self._header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """After the TLS handshake: start the timeout of the first header."""
        super().connection_made(transport)
        self._start_header_timer()

    def data_received(self, data: bytes) -> None:
        """Start the header timeout with the first byte of a request."""
        if data and not self.is_busy and self._header_timer is None:
            self._start_header_timer()
        super().data_received(data)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Cancel the header timeout."""
        self._cancel_header_timer()
        super().connection_lost(exc)

    @contextlib.contextmanager
    def handling_request(self) -> Iterator[None]:
        """Suspend the header timeout while a request is handled."""
        self._cancel_header_timer()
        self.is_busy = True
        try:
            yield
        finally:
            self.is_busy = False
            self.idle_since = self._now()

    def authenticate_as(self, member: str) -> None:
        """Assign the connection to a member; refuse it if all of the member's are busy."""
        if self.member != member:
            self._listener.make_room_for_member(member)
            self.member = member
            self.sock.assign_to(self._listener.counters.counter(member))

    def abort(self, reason: str) -> None:
        """Close the connection immediately and count a refusal."""
        if not self.is_aborted:
            self._listener.counters.refuse(reason, self.member or UNKNOWN)
        self.drop()

    def drop(self) -> None:
        """Close the connection immediately without counting a refusal."""
        self.is_aborted = True
        if self.transport is not None:
            self.transport.abort()
        else:  # the handshake is not complete
            with contextlib.suppress(OSError):
                self.sock.shutdown(socket.SHUT_RDWR)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Respond to invalid HTTP with an error status; log unexpected errors of this server."""
        self._cancel_header_timer()
        if status == 400:
            self._listener.counters.refuse(Refusal.MALFORMED, self.member or UNKNOWN)
        elif not isinstance(exc, OSError | web.RequestPayloadError):
            _log.error("A request of %s failed.", self.member or UNKNOWN, exc_info=exc)
        if request.writer.output_size > 0 or self.transport is None:
            raise ConnectionResetError("The connection broke in the middle of a response.")
        response = web.Response(status=status)
        response.force_close()
        return response

    def _start_header_timer(self) -> None:
        self._header_timer = asyncio.get_running_loop().call_later(
            self._listener.limits.header_timeout, self.abort, Refusal.SLOW
        )

    def _cancel_header_timer(self) -> None:
        if self._header_timer:
            self._header_timer.cancel()
            self._header_timer = None

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


class Listener:
    """Accepts connections on one socket and passes their requests to `handler`."""

    def __init__(
        self,
        context: ssl.SSLContext,
        handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
        limits: Limits,
        counters: TransportCounters,
        addresses: AddressLimit,
    ) -> None:
        self.limits = limits
        self.counters = counters
        self.addresses = addresses
        self.connections: dict[CountingSocket, ServerConnection] = {}
        """The open connections, oldest first."""
        self.port = 0
        self.http = web.Server(handler, handler_cancellation=True)
        self.http_limits: dict[str, Any] = {
            "access_log": None,
            "auto_decompress": False,  # protects against decompression bombs
            # longer than the client's, so that the client closes idle connections first
            "keepalive_timeout": limits.keepalive_timeout + 2 * limits.connect_timeout,
            "lingering_time": 1.0,
            "max_line_size": 256,
            "max_headers": 32,
            "max_field_size": http.MAX_HEADER_BYTES + 256,
        }
        self.context = context
        """Used by the next handshakes."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._listening: socket.socket | None = None

    async def open(self, host: str, port: int) -> None:
        """Start listening."""
        loop = asyncio.get_running_loop()
        try:
            address_infos = await loop.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
            family, _, _, _, address = address_infos[0]  # with the zone of an IPv6 address
            is_dualstack = address[0] == "::" and socket.has_dualstack_ipv6()
            listening = socket.create_server(
                address, family=family, backlog=_BACKLOG, dualstack_ipv6=is_dualstack
            )
        except OSError as problem:
            raise ConfigError(
                f"Cannot listen on {Address(host, port)} ({os_error_text(problem)}); choose another"
                " address."
            ) from None
        listening.setblocking(False)
        self.port = listening.getsockname()[1]
        self._listening = listening
        self._start(self._accept(listening))

    def adopt(self, connected: socket.socket, origin: str) -> None:
        """Take a connection that came by a relay, whose name counts as the client's address."""
        self._on_accept(connected, origin)

    async def close(self) -> None:
        """Wait up to `shutdown_grace` for responses in progress, then close all connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._listening is not None:
            self._listening.close()
        await wait_until(lambda: not self._has_busy(), self.limits.shutdown_grace)
        for connection in list(self.connections.values()):
            if connection.is_waiting:  # accepted just before
                connection.sock.close()
            else:
                connection.drop()
        await wait_until(
            lambda: not self.connections and not self.http.connections, self.limits.connect_timeout
        )

    def drop_member(self, member: str) -> None:
        """Close all connections of a member."""
        for connection in self._open_connections():
            if connection.member == member:
                connection.drop()

    def make_room_for_member(self, member: str) -> None:
        """Close a member's longest idle connection if it has reached its limit.

        Refuses the request if all are busy.
        """
        connections = [
            connection for connection in self._open_connections() if connection.member == member
        ]
        if len(connections) < self.limits.max_connections_from_peer:
            return
        idle = [connection for connection in connections if not connection.is_busy]
        if not idle:
            raise Refused(
                Refusal.TOO_MANY_CONNECTIONS,
                f"{member} has {len(connections)} requests in progress already; wait for their"
                " responses.",
            )
        min(idle, key=lambda connection: connection.idle_since).drop()

    def _make_room_for_unauthenticated(self, address: str) -> bool:
        """Close the oldest unauthenticated connections above the limits, else an idle one.

        Returns False if all are busy.
        """
        unauthenticated = [
            connection for connection in self._open_connections() if connection.member is None
        ]
        from_address = [
            connection for connection in unauthenticated if connection.address == address
        ]
        excess = max(0, len(from_address) - self.limits.max_unauthenticated + 1)
        for connection in from_address[:excess]:
            connection.abort(Refusal.SLOW)
            unauthenticated.remove(connection)

        if len(self._open_connections()) < self.limits.max_connections:
            return True
        if unauthenticated:
            unauthenticated[0].abort(Refusal.SLOW)
            return True
        return self._drop_idle()

    def _drop_idle(self) -> bool:
        """Close the longest idle connection of the members with the most; False if all are busy."""
        connections = self._open_connections()
        counts = Counter(connection.member for connection in connections)
        idle = [connection for connection in connections if not connection.is_busy]
        if not idle:
            return False

        def priority(connection: ServerConnection) -> tuple[int, float]:
            return -counts[connection.member], connection.idle_since

        min(idle, key=priority).drop()
        return True

    def _open_connections(self) -> list[ServerConnection]:
        """The connections that were not aborted, oldest first."""
        return [connection for connection in self.connections.values() if not connection.is_aborted]

    def _has_busy(self) -> bool:
        return any(connection.is_busy for connection in self.connections.values())

    def _is_closing_too_many(self) -> bool:
        aborted = sum(connection.is_aborted for connection in self.connections.values())
        return aborted > _MAX_CLOSING

    async def _accept(self, listening: socket.socket) -> None:
        while True:
            await _until_readable(listening)
            try:
                accepted, address = listening.accept()
            except BlockingIOError:  # the client has gone already
                continue
            except OSError:
                await asyncio.sleep(_ACCEPT_RETRY_SECONDS)
                continue
            self._on_accept(accepted, str(address[0]))
            # Without yielding, a flood would be accepted completely before any aborted
            # connection is closed.
            await asyncio.sleep(0)
            await wait_until(lambda: not self._is_closing_too_many(), self.limits.connect_timeout)

    def _on_accept(self, accepted: socket.socket, address: str) -> None:
        if not self._make_room_for_unauthenticated(address):
            self.counters.refuse(Refusal.TOO_MANY_CONNECTIONS)
            accepted.close()
            return
        counter = self.counters.counter(UNKNOWN)
        sock = CountingSocket(
            accepted.family,
            accepted.type,
            accepted.proto,
            accepted.detach(),
            counter=counter,
            on_close=self._forget,
        )
        sock.setblocking(False)
        connection = self.connections[sock] = ServerConnection(self, sock, address)
        self._start(self._handshake(connection))

    def _forget(self, closed: CountingSocket) -> None:
        self.connections.pop(closed, None)

    async def _handshake(self, connection: ServerConnection) -> None:
        connection.is_waiting = False
        try:
            await self._wait_for_turn(connection)
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: connection,
                connection.sock,
                ssl=self.context,
                ssl_handshake_timeout=self.limits.connect_timeout,
                ssl_shutdown_timeout=1.0,
            )
        except OSError as problem:  # includes TLS errors
            if not connection.is_aborted:
                self.counters.refuse(_reason(problem))
            # The traceback and the connection form a cycle that would keep 256 kB of buffers until
            # the next collection.
            problem.__traceback__ = None

    async def _wait_for_turn(self, connection: ServerConnection) -> None:
        """Wait until a handshake with the connection's address is allowed."""
        try:
            while not self.addresses.allows(connection.address):
                await asyncio.sleep(_TURN_SECONDS)
                if connection.is_aborted:
                    raise ConnectionAbortedError
        except BaseException:
            connection.sock.close()
            raise

    def _start(self, coroutine: Any) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _reason(problem: OSError) -> str:
    """Return the reason for a failed handshake."""
    if isinstance(problem, ssl.SSLCertVerificationError):
        return Refusal.UNKNOWN_CERTIFICATE
    if isinstance(problem, ssl.SSLError) and problem.reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return Refusal.NO_CERTIFICATE
    if isinstance(problem, ConnectionAbortedError):
        return Refusal.SLOW
    return Refusal.HANDSHAKE


async def _until_readable(listening: socket.socket) -> None:
    """Wait for a connection.

    asyncio's `sock_accept`, cancelled at that moment, accepts the connection and loses it.
    """
    loop = asyncio.get_running_loop()
    is_readable = asyncio.Event()
    loop.add_reader(listening, is_readable.set)
    try:
        await is_readable.wait()
    finally:
        loop.remove_reader(listening)


async def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    """Wait until the condition holds, at most this many seconds."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while not condition():
                await asyncio.sleep(0.005)
