"""Client side of the HTTPS transport: the connections to one peer, and attempts of a request."""

import asyncio
import contextlib
import socket
import ssl
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import aiohttp
from aiohttp.abc import AbstractStreamWriter, ResolveResult
from aiohttp.client_proto import ResponseHandler
from aiohttp.client_reqrep import ClientRequest
from aiohttp.connector import Connection
from aiohttp.tracing import Trace
from yarl import URL

from dispfl.peer.membership.address import Address, RelayAddress
from dispfl.peer.transport import http
from dispfl.peer.transport.bandwidth import Bandwidth
from dispfl.peer.transport.base import JSON, Refused, Request, Response
from dispfl.peer.transport.http import (
    ByteCounter,
    CountingSocket,
    Identify,
    Limits,
    PartialBody,
    StalledError,
    chunks,
    os_error_text,
    peer_certificates,
    stall_timeout,
)
from dispfl.peer.transport.https_server import HEADER_NAME, STATUS_REFUSED
from dispfl.peer.transport.relay_client import RelayClient, RelayError
from dispfl.peer.transport.routes import Route, Routes, route_text
from dispfl.wire.refusals import Refusal

_SMALL_BODY = 64 * 1024
"""A larger body is sent only after the server has accepted the header (`Expect: 100-continue`)."""

_NOWHERE = Address("relay.invalid", 443)
"""Stands in URLs for a peer that is reached by relays alone."""

_DIRECT_SECONDS = 3.0
"""Seconds for a direct connection to a peer that is reached by relays as well."""

_MAX_UNREAD = 2
"""Responses of one connection that may wait to be read."""


class AttemptError(Exception):
    """A failed attempt; the message states the reason and follows the peer's name."""


class _RouteError(Exception):
    """One way to a peer that has failed: which, and why."""


class PeerConnections:
    """The connections to one peer, kept open between rounds."""

    def __init__(
        self,
        name: str,
        context: ssl.SSLContext,
        identify: Identify,
        limits: Limits,
        counter: ByteCounter,
        routes: Routes,
        bandwidth: Bandwidth,
        may_connect: Callable[[str], bool] = lambda ip: True,
        relays: RelayClient | None = None,
    ) -> None:
        self.name = name
        self.routes = routes
        self._bandwidth = bandwidth
        self._relays = relays
        self._may_connect = may_connect
        self.sockets: dict[int, CountingSocket] = {}
        """Open sockets by file descriptor."""
        self.last_date: tuple[str, float] = ("", 0.0)
        """The date in the last response's header, and when it arrived by our clock."""
        self._limits = limits
        self._counter = counter
        self._slots = asyncio.Semaphore(limits.max_connections_to_peer)
        self._session = aiohttp.ClientSession(
            connector=_PinnedConnector(self, identify, context, limits),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=limits.connect_timeout),
            auto_decompress=False,
            max_field_size=http.MAX_HEADER_BYTES + 256,
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        )

    async def close(self) -> None:
        """Close all connections, also those in use."""
        await self._session.close()

    def relays(self) -> Sequence[RelayAddress]:
        """The relays by which the peer is reached."""
        return self._relays.relays_of(self.name) if self._relays else ()

    async def call(self, relay: RelayAddress) -> CountingSocket:
        """Return a connection by a relay; raise `RelayError`."""
        assert self._relays is not None
        raw_socket = await self._relays.call(relay, self._relays.fingerprint_of(self.name))
        sock = CountingSocket(
            raw_socket.family,
            raw_socket.type,
            raw_socket.proto,
            raw_socket.detach(),
            counter=self._counter,
            on_close=self._forget,
        )
        sock.setblocking(False)
        self.sockets[sock.fileno()] = sock
        return sock

    async def attempt(
        self, address: tuple[str, int] | None, request: Request, limit: int, partial: PartialBody
    ) -> Response:
        """Return the response, resumed after `partial`, which keeps what a failed attempt got."""
        try:
            return await self._attempt_on_route(address, request, limit, partial)
        except AttemptError:
            self.routes.note_failure(self.routes.current)
            raise

    async def _attempt_on_route(
        self, address: tuple[str, int] | None, request: Request, limit: int, partial: PartialBody
    ) -> Response:
        async with self._slots:
            try:
                return await self._attempt(address or _NOWHERE, request, limit, partial)
            except StalledError as problem:
                raise AttemptError(f"the transfer stalled: {problem}") from problem
            except aiohttp.ClientConnectorCertificateError as problem:
                raise _wrong_certificate(self.name, problem) from None
            except aiohttp.ClientConnectorError as problem:
                where = Address(*(address or _NOWHERE))
                raise AttemptError(
                    f"cannot be reached at {where}: {os_error_text(problem)}"
                ) from problem
            except TimeoutError as problem:
                raise AttemptError("no response in time") from problem
            except (aiohttp.ClientError, OSError) as problem:
                raise AttemptError(
                    f"the connection broke: {os_error_text(problem)} (if this persists, {self.name}"
                    " may not have accepted our certificate)"
                ) from problem

    async def _attempt(
        self, address: tuple[str, int], request: Request, limit: int, partial: PartialBody
    ) -> Response:
        url = URL.build(
            scheme="https",
            host=address[0],
            port=address[1],
            path=f"/v{http.PROTOCOL_VERSION}/{request.kind}",
        )
        fields: dict[str, JSON] = {"version": http.PROTOCOL_VERSION, "header": dict(request.header)}
        if partial.length:
            fields |= {"offset": partial.length, "digest": await partial.digest()}
        async with contextlib.AsyncExitStack() as stack:
            seconds = self._limits.connect_timeout + self._limits.response_timeout
            async with asyncio.timeout(seconds) as header_deadline:
                body = _Body(request, self, header_deadline) if request.body else None
                post = self._session.post(
                    url,
                    data=body,
                    headers={HEADER_NAME: http.pack_header(fields)},
                    expect100=len(request.body) > _SMALL_BODY,
                    allow_redirects=False,
                )
                http_response = await stack.enter_async_context(post)
            request.on_alive()
            return await self._read(http_response, request, limit, partial)

    async def _read(
        self,
        http_response: aiohttp.ClientResponse,
        request: Request,
        limit: int,
        partial: PartialBody,
    ) -> Response:
        self.last_date = (http_response.headers.get("Date", ""), time.time())
        fields = http.unpack_header(http_response.headers.get(HEADER_NAME, ""))
        if http_response.status == STATUS_REFUSED:
            raise Refused(str(fields.get("refused")), str(fields.get("message")))
        header = fields.get("header")
        offset = fields.get("offset")
        length = http_response.content_length
        is_complete = isinstance(header, dict) and type(offset) is int and length is not None
        if http_response.status != 200 or not is_complete:
            raise Refused(
                Refusal.MALFORMED,
                f"{self.name}'s response does not follow the protocol (status"
                f" {http_response.status}).",
            )
        assert isinstance(header, dict)
        assert isinstance(offset, int)
        assert length is not None
        if offset + length > limit:
            message = (
                f"{self.name}'s response to {request.kind!r} has {offset + length} bytes; at most"
                f" {limit} are allowed."
            )
            raise Refused(Refusal.TOO_LONG, message)
        if offset == 0:
            partial.clear()
        elif offset != partial.length:
            message = f"{self.name} resumed at byte {offset} instead of {partial.length}."
            raise Refused(Refusal.MALFORMED, message)

        connection = http_response.connection
        sock = self.socket_of(connection.transport if connection else None)
        if length:
            request.on_transfer()
        throttle = self._bandwidth.receiving(request.kind)
        async with stall_timeout(sock, self._limits, throttle):
            async for chunk in http_response.content.iter_chunked(throttle.limit.turn):
                await throttle.take(len(chunk))
                partial.add(chunk)
                self._counter.body_received += len(chunk)
        return Response(header, partial.body())

    async def send(self, request: Request, writer: AbstractStreamWriter) -> None:
        """Send the body of a request."""
        sock = self.socket_of(getattr(writer, "transport", None))
        throttle = self._bandwidth.sending(request.kind)
        async with stall_timeout(sock, self._limits, throttle):
            for chunk in chunks(request.body, size=throttle.limit.turn):
                await throttle.take(len(chunk))
                await writer.write(chunk)
                self._counter.body_sent += len(chunk)

    def response_deadline(self) -> float:
        """Return the time by which a response to a request sent now must begin."""
        return asyncio.get_running_loop().time() + self._limits.response_timeout

    def socket_of(self, transport: asyncio.BaseTransport | None) -> CountingSocket | None:
        """Return the socket of a connection."""
        if transport is None:
            return None
        raw_socket = transport.get_extra_info("socket")
        return self.sockets.get(raw_socket.fileno()) if raw_socket else None

    def make_socket(self, address_info: Any) -> CountingSocket:
        """Make the socket of a direct connection."""
        family, socket_type, proto, _, address = address_info
        if not self._may_connect(address[0]):
            raise OSError(f"{address[0]} is not in allow_networks of this site's site.toml")
        sock = CountingSocket(
            family, socket_type, proto, counter=self._counter, on_close=self._forget
        )
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # detects a peer that lost power
            milliseconds = int(1000 * self._limits.stall_timeout)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
        self.sockets[sock.fileno()] = sock
        return sock

    def _forget(self, closed: CountingSocket) -> None:
        self.sockets.pop(closed.fileno(), None)


class _Body(aiohttp.payload.Payload):
    """The body of a request; while it is sent, only the stall timeout applies."""

    def __init__(
        self, request: Request, connections: PeerConnections, header_deadline: asyncio.Timeout
    ) -> None:
        super().__init__(request.body, content_type="application/octet-stream")
        self._size = len(request.body)
        self._request = request
        self._connections = connections
        self._header_deadline = header_deadline

    async def write(self, writer: AbstractStreamWriter) -> None:
        """Send the body and restart the header deadline."""
        self._set_deadline(None)
        if len(self._request.body) > _SMALL_BODY:  # the server has accepted the header
            self._request.on_alive()
        await self._connections.send(self._request, writer)
        self._set_deadline(self._connections.response_deadline())

    def _set_deadline(self, when: float | None) -> None:
        with contextlib.suppress(RuntimeError):  # a refusal may arrive before the body is sent
            self._header_deadline.reschedule(when)

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        """Required by the base class; the body is binary."""
        raise TypeError("The body of a request is binary.")


class _BoundedResponses(ResponseHandler):
    """A connection that is closed if the server fills the memory with responses nobody reads.

    aiohttp queues them, also on an idle connection. An honest server sends one, and "100 Continue"
    before it.
    """

    def data_received(self, data: bytes) -> None:
        """Parse what has arrived."""
        super().data_received(data)
        if len(self._buffer) > _MAX_UNREAD and self.transport is not None:
            self.transport.abort()


class _OneLookup(aiohttp.ThreadedResolver):
    """Looks up one name at a time.

    A lookup occupies a thread of the process for as long as the name server takes, and a member may
    announce other names meanwhile.
    """

    _is_busy = False

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Return the addresses of a host."""
        if self._is_busy:
            raise OSError("an earlier lookup of its name has not ended")
        self._is_busy = True
        try:
            return await super().resolve(host, port, family)
        finally:
            self._is_busy = False


class _PinnedConnector(aiohttp.TCPConnector):
    """Connects to one member, and verifies its identity before every request."""

    def __init__(
        self,
        peer: PeerConnections,
        identify: Identify,
        context: ssl.SSLContext,
        limits: Limits,
    ) -> None:
        super().__init__(
            ssl=context,
            limit=limits.max_connections_to_peer,
            keepalive_timeout=limits.keepalive_timeout,
            socket_factory=peer.make_socket,
            resolver=_OneLookup(),
        )
        bounded: type[ResponseHandler] = _BoundedResponses
        self._factory = partial(bounded, loop=asyncio.get_running_loop())
        self._peer = peer
        self._context = context
        self._limits = limits
        self._identify = identify
        self._verified: weakref.WeakSet[asyncio.Transport] = weakref.WeakSet()
        self._routes_in_use: weakref.WeakKeyDictionary[asyncio.Transport, Route] = (
            weakref.WeakKeyDictionary()
        )

    async def connect(
        self, req: ClientRequest, traces: list[Trace], timeout: aiohttp.ClientTimeout
    ) -> Connection:
        """Return a connection to the member; refuse any other server."""
        while True:
            connection = await super().connect(req, traces, timeout)
            transport = connection.transport
            if transport and self._is_the_member(transport):
                self._verified.add(transport)
                self._peer.routes.current = self._routes_in_use.get(transport)
                return connection
            was_verified = transport in self._verified
            connection.close()
            if not was_verified:  # else the member has replaced its certificate meanwhile
                raise _wrong_certificate(self._peer.name)

    def _is_the_member(self, transport: asyncio.Transport) -> bool:
        certificates = peer_certificates(transport)
        return certificates is not None and self._identify(*certificates) == self._peer.name

    async def _create_connection(
        self, req: ClientRequest, traces: list[Trace], timeout: aiohttp.ClientTimeout
    ) -> ResponseHandler:
        """Connect by the first way that leads to the member."""
        assert req.url.raw_host is not None
        assert req.port is not None
        address: Address | None = Address(req.url.raw_host, req.port)
        if address == _NOWHERE:
            address = None
        relays = self._peer.relays()
        if address is not None and not relays:
            protocol = await super()._create_connection(req, traces, timeout)
            self._note_route(protocol, address)
            return protocol

        problems = []
        wrong_certificate = None
        for route in self._peer.routes.ordered(address, relays):
            try:
                protocol = await self._connect_by(route, req, traces, timeout)
            except Refused as refused:
                wrong_certificate = refused
            except _RouteError as problem:
                problems.append(str(problem))
            else:
                self._note_route(protocol, route)
                return protocol
            self._peer.routes.note_failure(route)
        self._peer.routes.current = None
        if wrong_certificate is not None:
            raise wrong_certificate
        raise AttemptError(f"cannot be reached {'; '.join(problems)}")

    async def _connect_by(
        self, route: Route, req: ClientRequest, traces: list[Trace], timeout: aiohttp.ClientTimeout
    ) -> ResponseHandler:
        """Connect by one way; raise `_RouteError`, or `Refused` if another server is there."""
        is_relayed = isinstance(route, RelayAddress)
        where = f"by {route_text(route)}" if is_relayed else f"at {route}"
        seconds = self._limits.connect_timeout
        if not is_relayed:
            seconds = min(seconds, _DIRECT_SECONDS)
        try:
            async with asyncio.timeout(seconds):
                if isinstance(route, RelayAddress):
                    protocol = await self._connect_by_relay(route)
                else:
                    protocol = await super()._create_connection(req, traces, timeout)
        except aiohttp.ClientConnectorCertificateError as problem:
            raise _wrong_certificate(self._peer.name, problem, where) from None
        except TimeoutError:
            raise _RouteError(f"{where}: no answer in time") from None
        except (aiohttp.ClientError, RelayError, OSError) as problem:
            raise _RouteError(f"{where}: {os_error_text(problem)}") from problem

        transport = protocol.transport
        assert isinstance(transport, asyncio.Transport)
        if not self._is_the_member(transport):
            transport.abort()
            raise _wrong_certificate(self._peer.name, where=where)
        return protocol

    async def _connect_by_relay(self, relay: RelayAddress) -> ResponseHandler:
        sock = await self._peer.call(relay)
        try:
            _, protocol = await asyncio.get_running_loop().create_connection(
                self._factory, sock=sock, ssl=self._context, server_hostname=_NOWHERE.host
            )
        except ssl.SSLCertVerificationError as problem:
            raise _wrong_certificate(self._peer.name, problem, f"by {route_text(relay)}") from None
        except BaseException:
            sock.close()
            raise
        assert isinstance(protocol, ResponseHandler)
        return protocol

    def _note_route(self, protocol: ResponseHandler, route: Route) -> None:
        transport = protocol.transport
        if isinstance(transport, asyncio.Transport):
            self._routes_in_use[transport] = route
        self._peer.routes.note_success(route)


_WRONG_DATES = ("certificate is not yet valid", "certificate has expired")
"""What OpenSSL says of certificates whose dates do not fit this machine's clock."""


def _wrong_certificate(name: str, problem: BaseException | None = None, where: str = "") -> Refused:
    """The refusal of a server that is not the member; `where` says how it was reached."""
    message = f"{name}'s certificate is not the accepted one"
    if where:
        message += f" {where}"
    cause = getattr(problem, "certificate_error", problem)  # aiohttp wraps it
    detail = getattr(cause, "verify_message", "")
    if detail in _WRONG_DATES:
        message = (
            f"{name}'s certificate is not valid now by this machine's clock, which shows"
            f" {time.strftime('%Y-%m-%d')} ({detail}); `dispfl peer doctor` says whose clock is"
            " wrong."
        )
        return Refused(Refusal.WRONG_CERTIFICATE, message)
    if detail:
        message += f" ({detail})"
    message += "; compare fingerprints with `dispfl peer status`."
    return Refused(Refusal.WRONG_CERTIFICATE, message)
