"""The network transport: HTTPS with mutual TLS, one POST per request.

    POST /v1/model                                               protocol version and request kind
    dispfl-header: {"version":1,"header":...}                    the header, as one line of JSON
    (body)                                                       an encoded message

    200, dispfl-header: {"version":1,"header":...,"offset":0}    the response, from byte `offset` on
    403, dispfl-header: {"version":1,"refused":...}              a refusal: reason and message

A request is delivered to the server's handler once. If the connection breaks before any of the
response body is received, `Unreachable` is raised and the caller may retry. If part of the body was
received, the transport resumes it: it repeats the request with the number of bytes it has and their
digest, and the server sends the rest.
"""

import asyncio
import email.utils
import ssl
from collections import defaultdict
from collections.abc import Callable
from typing import Protocol

from dispfl.peer.transport import http
from dispfl.peer.transport.bandwidth import Bandwidth
from dispfl.peer.transport.base import Handler, Request, Response, Unreachable
from dispfl.peer.transport.guard import RequestGuard
from dispfl.peer.transport.http import Identify, Limits, PartialBody, TransportCounters
from dispfl.peer.transport.https_client import AttemptError, PeerConnections
from dispfl.peer.transport.https_server import HttpHandler
from dispfl.peer.transport.listener import Listener, wait_until
from dispfl.peer.transport.relay_client import RelayClient
from dispfl.peer.transport.routes import AVOID_SECONDS, Routes, route_text

_MIN_PROGRESS = 64 * 1024
"""Bytes that an attempt must transfer to reset the count of failed attempts."""
_MAX_BACKOFF = 2.0
"""Most seconds before a broken transfer is resumed."""


class Outboxes(Protocol):
    """Another way to members: what they have stored (`dispfl.peer.outbox.reader`)."""

    def place(self, peer: str) -> str | None:
        """Where the outbox of a member is; None if it has none."""
        ...

    async def request(self, peer: str, request: Request) -> Response:
        """Answer a request from the member's outbox; raise `Refused` or `Unreachable`."""
        ...

    def forget(self, peer: str) -> None:
        """Forget what was read of a revoked member."""
        ...


class HttpsTransport:
    """A `Transport` over HTTPS.

    `client` and `server` are TLS contexts that require a certificate; `identify` maps a certificate
    to a member; `address` returns the address of a member, None if it has only relays;
    `max_request` and `max_response` limit the size of a body by request kind; `may_connect` decides
    about the IP address of every outgoing connection. If the handler uses the same `guard`,
    offences against the transport and the handler are counted together. Without `listen`, other
    sites connect by `relays` alone. Where a member cannot be reached, its outbox answers, if it has
    one (`outboxes`).
    """

    def __init__(
        self,
        name: str,
        listen: tuple[str, int] | None,
        *,
        client: ssl.SSLContext,
        server: ssl.SSLContext,
        identify: Identify,
        address: Callable[[str], tuple[str, int] | None],
        max_request: Callable[[str], int],
        max_response: Callable[[str], int],
        limits: Limits | None = None,
        guard: RequestGuard | None = None,
        may_connect: Callable[[str], bool] = lambda ip: True,
        relays: RelayClient | None = None,
        outboxes: Outboxes | None = None,
        bandwidth: Bandwidth | None = None,
    ) -> None:
        self.name = name
        self.limits = limits or Limits()
        self.guard = guard or RequestGuard()
        self._bandwidth = bandwidth or Bandwidth(self.limits.bytes_per_second)
        self.counters = TransportCounters(refused=self.guard.refused)
        self._listen = listen
        self._client = client
        self._server = server
        self._identify = identify
        self._address = address
        self._max_request = max_request
        self._max_response = max_response
        self._may_connect = may_connect
        self.relays = relays
        self.outboxes = outboxes
        self._read_outboxes: dict[str, str] = {}
        """By peer that was last reached by its outbox: where that is."""
        self._avoid_until: dict[str, float] = {}
        """By peer with an outbox: until when no connection is tried, after one that failed."""
        self._peers: dict[str, PeerConnections] = {}
        self._routes: dict[str, Routes] = defaultdict(Routes)
        self._listener: Listener | None = None
        self._pending_requests = 0
        self._is_closed = False
        self.is_serving = False
        """Whether connections are accepted."""

    @property
    def port(self) -> int:
        """The port it listens on, chosen by the system if 0 was given."""
        if self._listener:
            return self._listener.port
        return self._listen[1] if self._listen else 0

    def clock_ahead(self, peer: str) -> float | None:
        """Seconds that a peer's clock was ahead of ours in its last response; None if unknown."""
        if peer not in self._peers:
            return None
        date, arrived = self._peers[peer].last_date
        try:
            return email.utils.parsedate_to_datetime(date).timestamp() - arrived
        except (ValueError, TypeError, OverflowError):
            return None

    def route(self, peer: str) -> str | None:
        """How a peer was last reached: "direct", the address of a relay, or "outbox PLACE"; None if
        it was not."""
        if peer in self._read_outboxes:
            return f"outbox {self._read_outboxes[peer]}"
        return route_text(self._routes[peer].current)

    async def serve(self, handler: Handler) -> None:
        """Start listening; return once connections are accepted."""
        http_handler = HttpHandler(
            self.name,
            self._identify,
            self._max_request,
            handler,
            self.limits,
            self.counters,
            self.guard,
            self._bandwidth,
        )
        self._listener = Listener(
            self._server, http_handler, self.limits, self.counters, self.guard.addresses
        )
        if self._listen:
            await self._listener.open(*self._listen)
        if self.relays:
            self.relays.accept_calls(self._listener.adopt)
        self.is_serving = True

    async def request(self, peer: str, request: Request) -> Response:
        """Return the response of an authenticated peer; raise `Refused` or `Unreachable`."""
        http.check_kind(request.kind)
        self._pending_requests += 1
        try:
            return await self._request_on_any_route(peer, request)
        finally:
            self._pending_requests -= 1

    def use_server_context(self, server: ssl.SSLContext) -> None:
        """Use another TLS context from the next incoming connection on."""
        self._server = server
        if self._listener:
            self._listener.context = server

    async def disconnect(self, peer: str) -> None:
        """Close all connections with a peer, also those in the middle of a transfer."""
        if self._listener:
            self._listener.drop_member(peer)
        connections = self._peers.pop(peer, None)
        if connections is not None:
            await connections.close()
        if self.outboxes:
            self.outboxes.forget(peer)

    async def close(self) -> None:
        """Stop listening and close all connections; pending requests fail."""
        self._is_closed = True
        closing = list(self._peers.values())
        self._peers = {}
        if self._listener:
            await self._listener.close()
        for connections in closing:
            await connections.close()
        if self.relays:
            await self.relays.close()

        def is_done() -> bool:
            has_sockets = any(connections.sockets for connections in closing)
            return not self._pending_requests and not has_sockets

        await wait_until(is_done, self.limits.connect_timeout)

    async def _request_on_any_route(self, peer: str, request: Request) -> Response:
        """Send a request; where the peer cannot be reached, read its outbox."""
        outbox = self.outboxes.place(peer) if self.outboxes else None
        if outbox is None:
            self._read_outboxes.pop(peer, None)
            return await self._request(peer, request)

        clock = asyncio.get_running_loop().time
        has_connection = self._address(peer) is not None or self._is_relayed(peer)
        if has_connection and clock() >= self._avoid_until.get(peer, 0.0):
            try:
                response = await self._request(peer, request)
            except (Unreachable, asyncio.CancelledError) as problem:
                self._avoid_until[peer] = clock() + AVOID_SECONDS
                if isinstance(problem, asyncio.CancelledError) or self._is_closed:
                    raise
            else:
                self._read_outboxes.pop(peer, None)
                return response
        assert self.outboxes is not None
        response = await self.outboxes.request(peer, request)
        self._read_outboxes[peer] = outbox
        return response

    async def _request(self, peer: str, request: Request) -> Response:
        """Send a request, and resume its response as long as it progresses."""
        max_response = self._max_response(request.kind)
        partial = PartialBody()
        failures = 0
        clock = asyncio.get_running_loop().time
        last_progress = clock()
        while True:
            length_before = partial.length
            try:
                connections = self._connections_to(peer)
                return await connections.attempt(
                    self._address(peer), request, max_response, partial
                )
            except AttemptError as broken:
                failures += 1
                if partial.length - length_before >= _MIN_PROGRESS:
                    failures = 0
                    last_progress = clock()
                is_last = failures >= self.limits.max_attempts
                if is_last and self._is_relayed(peer):  # the relay may be restarting
                    is_last = clock() - last_progress > self.limits.relay_timeout
                if not partial.length or is_last or self._is_closed:
                    raise Unreachable(peer, str(broken)) from broken
            await asyncio.sleep(min(self.limits.backoff * 2**failures, _MAX_BACKOFF))

    def _is_relayed(self, peer: str) -> bool:
        return self.relays is not None and bool(self.relays.relays_of(peer))

    def _connections_to(self, peer: str) -> PeerConnections:
        if self._is_closed:
            raise AttemptError("this site is shutting down")
        if peer not in self._peers:
            counter = self.counters.counter(peer)
            self._peers[peer] = PeerConnections(
                peer,
                self._client,
                self._identify,
                self.limits,
                counter,
                self._routes[peer],
                self._bandwidth,
                self._may_connect,
                self.relays,
            )
        return self._peers[peer]
