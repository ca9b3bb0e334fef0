"""A relay: connects sites that cannot be reached with those that call them.

It needs no trust: what it passes on is the sites' own TLS connection. It serves only the members
that its operator admits, and keeps nothing but counters.
"""

import asyncio
import contextlib
import datetime
import json
import secrets
import ssl
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import aiohttp
from aiohttp import web

from dispfl.peer.membership.address import Address
from dispfl.peer.state.log import EventLog
from dispfl.peer.transport.base import JSON, Refused
from dispfl.peer.transport.guard import AddressLimit
from dispfl.peer.transport.http import UNKNOWN, Limits, TransportCounters
from dispfl.peer.transport.listener import Listener, ServerConnection
from dispfl.peer.transport.relay_protocol import (
    CHALLENGE_BYTES,
    MAX_MESSAGE_BYTES,
    PARKED_TIMEOUT,
    PING_SECONDS,
    RELAY_PATH,
    RELAY_VERSION,
    Proof,
    Role,
)
from dispfl.wire.refusals import Refusal

CALL_SECONDS = 3.0
"""How long a call waits for a connection of the called site."""
PROOF_SECONDS = 10.0
"""How long a site has to prove its key."""
CLOSE_SECONDS = 10.0
"""How long the other end of a connection has to take what was sent before it is closed."""
HOUR = 3600.0


@dataclass(frozen=True)
class RelayLimits:
    """What each member may use of a relay."""

    connections: int = 256
    """Connections of a member: parked ones, its calls, and those of others to it."""
    calls_to_one: int = 16
    """Calls of a member to one other, waiting or connected: so it cannot take all connections on
    which that one waits. A site opens two, and may have to open them again."""
    total_connections: int = 4096
    hourly_bytes: float = 200e9
    """Bytes that a member may send and receive in an hour."""
    idle_seconds: float = 1200.0
    """A connection without bytes for so long is closed: longer than sites keep idle ones."""
    stall_seconds: float = 60.0
    """A site that takes nothing of what it is sent for so long is disconnected."""
    max_seconds: float = 24 * HOUR
    """A connection is closed after so long; transfers resume on another."""

    def for_listener(self) -> Limits:
        """The limits of incoming connections."""
        return Limits(
            max_connections_from_peer=self.connections, max_connections=self.total_connections
        )


@dataclass(eq=False)
class _End:
    """One site's WebSocket."""

    websocket: web.WebSocketResponse
    connection: ServerConnection
    member: str
    fingerprints: Sequence[str]
    """Those that the site has proved; it is called by any of them."""
    partner: "_End | None" = None

    async def close(self) -> None:
        """Close it, after what was sent has been taken."""
        with contextlib.suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(CLOSE_SECONDS):
                await self.websocket.close()
        self.connection.drop()


@dataclass
class RelayCounters:
    """What a relay has done since its start."""

    parked: int = 0
    """Connections on which sites wait for a call, now."""
    connected: int = 0
    """Pairs of sites that are connected, now."""
    calls: int = 0
    """Calls that were connected."""
    missed_calls: int = 0
    """Calls of sites that were not there."""
    passed_on: int = 0
    """Bytes that were passed on."""

    def as_fields(self) -> dict[str, JSON]:
        """The counters for the log."""
        return {
            "parked": self.parked,
            "connected": self.connected,
            "calls": self.calls,
            "missed_calls": self.missed_calls,
            "passed_on_mb": round(self.passed_on / 1e6, 1),
        }


@dataclass(frozen=True)
class RelayCertificate:
    """The certificate that a relay shows."""

    context: ssl.SSLContext
    """The TLS context with it and its key."""
    ends: datetime.datetime


@dataclass
class _HourlyBytes:
    """How many bytes the counter of a member showed when its current hour began."""

    began: float
    at_start: int


@dataclass
class Relay:
    """A relay with its listener; `name` is the address by which sites know it.

    `admitted` has the names of the members by the fingerprints of their certificates.
    """

    name: Address
    certificate: RelayCertificate
    admitted: Mapping[str, str]
    limits: RelayLimits = field(default_factory=RelayLimits)
    log: EventLog = lambda event, fields: None

    def __post_init__(self) -> None:
        self.counters = RelayCounters()
        self.traffic = TransportCounters()
        self._parked: dict[str, list[_End]] = defaultdict(list)
        self._calls = Counter[tuple[str, str]]()
        """By member and called certificate: how many calls it has now."""
        self._changed = asyncio.Condition()
        self._hours: dict[str, _HourlyBytes] = {}
        self._listener = Listener(
            self.certificate.context,
            self._handle,
            self.limits.for_listener(),
            self.traffic,
            AddressLimit(_now),
        )

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return self._listener.port

    async def open(self, listen: Address) -> None:
        """Start to listen."""
        await self._listener.open(*listen)

    async def close(self) -> None:
        """Close all connections."""
        await self._listener.close()

    def use_certificate(self, certificate: RelayCertificate) -> None:
        """Show another certificate from the next connection on."""
        self.certificate = certificate
        self._listener.context = certificate.context

    def admit(self, admitted: Mapping[str, str]) -> None:
        """Serve these members from now on, and disconnect those who are no longer among them."""
        removed = self.admitted.keys() - admitted.keys()
        for fingerprint in removed:
            self._listener.drop_member(_label(self.admitted[fingerprint], fingerprint))
        self.admitted = admitted

    # one connection

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        connection = request.protocol
        assert isinstance(connection, ServerConnection)
        with connection.handling_request():
            websocket = web.WebSocketResponse(max_msg_size=MAX_MESSAGE_BYTES, compress=False)
            if request.path != RELAY_PATH or not websocket.can_prepare(request).ok:
                self.traffic.refuse(Refusal.MALFORMED)
                response = web.Response(status=404, text="This is a relay of dispfl.\n")
                response.force_close()
                return response
            await websocket.prepare(request)
            try:
                await self._serve(websocket, connection)
            except Refused as refused:
                self.traffic.refuse(refused.reason, connection.member or UNKNOWN)
                with contextlib.suppress(ConnectionError):
                    await _send(websocket, refused=str(refused.reason), message=refused.message)
            except (TimeoutError, ConnectionError):
                self.traffic.refuse(Refusal.SLOW, connection.member or UNKNOWN)
            await websocket.close()
            return websocket

    async def _serve(self, websocket: web.WebSocketResponse, connection: ServerConnection) -> None:
        proof, fingerprints = await self._authenticate(websocket, connection)
        assert connection.member is not None
        end = _End(websocket, connection, connection.member, fingerprints)
        if proof.role == Role.PARK:
            async with self._parking(end):
                await self._pass_on(end)
            return
        with self._calling(end.member, proof.to):
            called = await self._called(proof.to)
            end.partner = called
            called.partner = end
            self.counters.calls += 1
            self.counters.connected += 1
            try:
                await _send(called.websocket, status="called")
                await _send(websocket, status="connected")
                await self._pass_on(end)
            finally:
                self.counters.connected -= 1

    async def _authenticate(
        self, websocket: web.WebSocketResponse, connection: ServerConnection
    ) -> tuple[Proof, list[str]]:
        """Let the site prove that it has the key of an admitted member."""
        challenge = secrets.token_hex(CHALLENGE_BYTES)
        await _send(websocket, version=RELAY_VERSION, challenge=challenge)
        message = await websocket.receive(PROOF_SECONDS)
        if message.type != aiohttp.WSMsgType.TEXT:
            raise Refused(Refusal.MALFORMED, "The first message must be the proof of a key.")
        proof = Proof.read(message.data)
        fingerprints = proof.fingerprints(self.name, challenge)
        for fingerprint in fingerprints:
            if fingerprint in self.admitted:
                member = _label(self.admitted[fingerprint], fingerprint)
                connection.authenticate_as(member)
                self._check_bytes(member)
                return proof, fingerprints
        raise Refused(
            Refusal.NOT_A_MEMBER,
            f"This relay does not admit the certificate {fingerprints[0][:16]}...; its owner adds"
            " members with their invites or with a roster (--members).",
        )

    @contextlib.asynccontextmanager
    async def _parking(self, end: _End) -> AsyncIterator[None]:
        """Let others call a site."""
        for fingerprint in end.fingerprints:
            self._parked[fingerprint].append(end)
        self.counters.parked += 1
        pings = asyncio.create_task(_ping_while_parked(end))
        try:
            await _send(end.websocket, status="parked")
            async with self._changed:
                self._changed.notify_all()
            yield
        finally:
            pings.cancel()
            self._unpark(end)

    def _unpark(self, end: _End) -> None:
        was_parked = False
        for fingerprint in end.fingerprints:
            ends = self._parked[fingerprint]
            if end in ends:
                ends.remove(end)
                was_parked = True
            if not ends:
                del self._parked[fingerprint]
        self.counters.parked -= was_parked

    @contextlib.contextmanager
    def _calling(self, member: str, fingerprint: str) -> Iterator[None]:
        """Count a call; refuse one too many of a member to the same site."""
        call = (member, fingerprint)
        if self._calls[call] >= self.limits.calls_to_one:
            raise Refused(
                Refusal.TOO_MANY_CONNECTIONS,
                f"{member} has {self.limits.calls_to_one} calls to this site already.",
            )
        self._calls[call] += 1
        try:
            yield
        finally:
            self._calls[call] -= 1
            if not self._calls[call]:
                del self._calls[call]

    async def _called(self, fingerprint: str) -> _End:
        """Take a parked connection of the called site, or wait a moment for one."""
        try:
            async with asyncio.timeout(CALL_SECONDS), self._changed:
                await self._changed.wait_for(lambda: self._parked.get(fingerprint))
        except TimeoutError:
            self.counters.missed_calls += 1
            message = "The called site is not connected to this relay."
            raise Refused(Refusal.NOT_CONNECTED, message) from None
        end = self._parked[fingerprint][0]
        self._unpark(end)
        return end

    async def _pass_on(self, end: _End) -> None:
        """Send to the partner what a site sends, until one of them ends."""
        try:
            async with asyncio.timeout(self.limits.max_seconds):
                await self._pass_on_messages(end)
        finally:
            if end.partner is not None:
                await end.partner.close()

    async def _pass_on_messages(self, end: _End) -> None:
        while True:
            is_parked = end.partner is None
            seconds = PARKED_TIMEOUT if is_parked else self.limits.idle_seconds
            message = await end.websocket.receive(seconds)
            if message.type != aiohttp.WSMsgType.BINARY:
                return
            if end.partner is None:
                raise Refused(Refusal.MALFORMED, "A parked site must wait until it is called.")
            await self._deliver(message.data, end.partner)
            self._check_bytes(end.member)

    async def _deliver(self, content: bytes, end: _End) -> None:
        """Send bytes to a site."""
        async with asyncio.timeout(self.limits.stall_seconds):
            await end.websocket.send_bytes(content)
        self.counters.passed_on += len(content)

    def _check_bytes(self, member: str) -> None:
        """Refuse a member that has used up its bytes of this hour."""
        traffic = self.traffic.counter(member)
        total = traffic.sent + traffic.received
        now = _now()
        hour = self._hours.get(member)
        if hour is None or now - hour.began >= HOUR:
            hour = self._hours[member] = _HourlyBytes(now, total)
        if total - hour.at_start > self.limits.hourly_bytes:
            raise Refused(
                Refusal.TOO_MANY_REQUESTS,
                f"{member} has used up its {self.limits.hourly_bytes / 1e9:g} GB of this hour.",
            )

    async def log_regularly(self, seconds: float = 60.0) -> None:
        """Log the counters whenever they have changed."""
        logged: dict[str, JSON] = {}
        while True:
            fields = self.counters.as_fields() | {"refused": self.traffic.refused.total()}
            if fields != logged:
                logged = fields
                self.log("status", fields)
            await asyncio.sleep(seconds)


async def _ping_while_parked(end: _End) -> None:
    with contextlib.suppress(ConnectionError):
        while end.partner is None:
            await asyncio.sleep(PING_SECONDS)
            if end.partner is None:
                await end.websocket.ping()


async def _send(websocket: web.WebSocketResponse, **fields: JSON) -> None:
    await websocket.send_str(json.dumps(fields, separators=(",", ":")))


def _label(name: str, fingerprint: str) -> str:
    """A member in counters and in the log: names are not unique in several federations."""
    return f"{name} {fingerprint[:16]}"


def _now() -> float:
    return asyncio.get_running_loop().time()
