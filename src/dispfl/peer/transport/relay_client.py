"""A site's connections to relays: its calls of others, and the calls of others to it.

A relayed connection ends at a socket pair: one end is a connection of the site's HTTPS client or
server like any other, the bytes of the other end go through the WebSocket to the relay. HTTPS_PROXY
and NO_PROXY apply to these WebSockets.
"""

import asyncio
import contextlib
import random
import socket
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
from yarl import URL

from dispfl.peer.membership.address import RelayAddress
from dispfl.peer.membership.identity import Identity
from dispfl.peer.transport.base import Refused
from dispfl.peer.transport.http import Limits, os_error_text
from dispfl.peer.transport.relay_protocol import (
    CHUNK,
    MAX_MESSAGE_BYTES,
    PARKED_TIMEOUT,
    RELAY_PATH,
    Proof,
    Role,
    read_message,
)
from dispfl.wire.refusals import Refusal

PARKED = 4
"""Connections on which a site waits for calls, at each of its relays."""
MIN_PAUSE = 0.2
MAX_PAUSE = 10.0
"""Seconds before a site connects to its relay again, doubled after each failure."""
USED_PAUSE = 0.1
"""Seconds before a used connection is replaced: a relay cannot make a site connect in a loop."""

_SOCKET_BUFFER = 4 * CHUNK
"""Bytes that wait between a site's TLS and its connection to a relay."""
_CLOSE_SECONDS = 2.0
"""How long a relay has to agree that a connection is closed."""

Adopt = Callable[[socket.socket, str], None]
"""Takes an incoming connection, and a name for where it comes from."""


class RelayError(Exception):
    """A relay that cannot be used: why, and what to do about it."""

    def __init__(self, text: str, advice: str = "") -> None:
        super().__init__(text)
        self.advice = advice


@dataclass
class RelayState:
    """How a site is connected to one of its own relays."""

    parked: int = 0
    """Connections on which it waits for calls."""
    is_connected: bool = False
    """Whether others reach it by this relay."""
    problem: str | None = None
    """Why they do not, if so."""


class RelayClient:
    """Connects one site with relays.

    `relays_of` and `fingerprint_of` say how another member is reached by relays; `own` are the
    relays of this site; `on_change` is called when the site becomes reachable by one of them, or
    loses it.
    """

    def __init__(
        self,
        identity: Identity,
        limits: Limits,
        *,
        relays_of: Callable[[str], Sequence[RelayAddress]] = lambda name: (),
        fingerprint_of: Callable[[str], str] = lambda name: "",
        own: Sequence[RelayAddress] = (),
        ca_bundle: str | None = None,
        may_connect: Callable[[str], bool] = lambda ip: True,
    ) -> None:
        self.relays_of = relays_of
        self.fingerprint_of = fingerprint_of
        self.states = {relay: RelayState() for relay in own}
        self.on_change: Callable[[RelayAddress, RelayState], None] = lambda relay, state: None
        self._identity = identity
        self._limits = limits
        self._ca_bundle = ca_bundle
        self._may_connect = may_connect
        self._session: aiohttp.ClientSession | None = None
        self._tls: ssl.SSLContext | None = None
        self._waiting: set[asyncio.Task[None]] = set()
        self._splices: set[asyncio.Task[None]] = set()

    async def call(self, relay: RelayAddress, fingerprint: str) -> socket.socket:
        """Return a connection with the site of this certificate; raise `RelayError`."""
        websocket = await self.open(relay, Role.CALL, fingerprint)
        connection, inner = _socket_pair()
        self._splice(websocket, inner)
        return connection

    def accept_calls(self, adopt: Adopt) -> None:
        """Let other sites call this one by its relays, until `close`."""
        for relay in self.states:
            for _ in range(PARKED):
                self._waiting.add(asyncio.create_task(self._accept_calls(relay, adopt)))

    async def close(self) -> None:
        """Stop waiting for calls, and close all connections once what was sent is passed on."""
        for task in self._waiting:
            task.cancel()
        await asyncio.gather(*self._waiting, return_exceptions=True)
        if self._splices:
            await asyncio.wait(self._splices, timeout=self._limits.connect_timeout)
        for task in self._splices:
            task.cancel()
        await asyncio.gather(*self._splices, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    async def open(
        self, relay: RelayAddress, role: Role, to: str = ""
    ) -> aiohttp.ClientWebSocketResponse:
        """Open a connection to a relay and prove our key; raise `RelayError`."""
        if not self._may_connect(relay.host):
            raise RelayError(f"{relay.host} is not in allow_networks of this site's site.toml")
        try:
            async with asyncio.timeout(self._limits.connect_timeout):
                websocket = await self._connect(relay)
                try:
                    await self._introduce(websocket, relay, role, to)
                except BaseException:
                    await websocket.close()
                    raise
        except (aiohttp.ClientError, OSError) as problem:
            raise _explained(problem, relay) from problem
        except Refused as refused:
            raise _refusal(refused, relay) from None
        return websocket

    async def _connect(self, relay: RelayAddress) -> aiohttp.ClientWebSocketResponse:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit=0, force_close=True, socket_factory=self._make_socket
                ),
                cookie_jar=aiohttp.DummyCookieJar(),
                trust_env=True,
            )
        # HTTPS_PROXY is for addresses that begin with https:, not with wss:.
        url = URL.build(scheme="https", host=relay.host, port=relay.port, path=RELAY_PATH)
        trust: ssl.SSLContext | aiohttp.Fingerprint
        if relay.fingerprint:
            trust = aiohttp.Fingerprint(bytes.fromhex(relay.fingerprint))
        else:
            trust = self._public_tls()
        return await self._session.ws_connect(
            url,
            ssl=trust,
            max_msg_size=MAX_MESSAGE_BYTES,
            timeout=aiohttp.ClientWSTimeout(ws_close=_CLOSE_SECONDS),
        )

    def _public_tls(self) -> ssl.SSLContext:
        """Trust the system's authorities, and those of the site's own file."""
        if self._tls is None:
            self._tls = ssl.create_default_context()
            if self._ca_bundle:
                try:
                    self._tls.load_verify_locations(self._ca_bundle)
                except (OSError, ssl.SSLError) as problem:
                    self._tls = None
                    raise RelayError(
                        f"ca_bundle of site.toml, {self._ca_bundle}, cannot be read:"
                        f" {os_error_text(problem)}",
                        "It must be a PEM file of certificates.",
                    ) from None
        return self._tls

    async def _introduce(
        self,
        websocket: aiohttp.ClientWebSocketResponse,
        relay: RelayAddress,
        role: Role,
        to: str,
    ) -> None:
        """Answer the relay's challenge, and wait until it is ready."""
        challenge = (await _receive(websocket)).get("challenge")
        if not isinstance(challenge, str):
            raise Refused(Refusal.MALFORMED, "it sends no challenge")
        proof = Proof.sign(self._identity, relay.address, challenge, role, to)
        await websocket.send_str(proof.to_text())
        status = (await _receive(websocket)).get("status")
        expected = "parked" if role == Role.PARK else "connected"
        if status != expected:
            raise Refused(Refusal.MALFORMED, f"it does not say that we are {expected}")

    def _make_socket(self, address_info: Any) -> socket.socket:
        family, socket_type, proto, _, address = address_info
        if not self._may_connect(address[0]):
            raise OSError(f"{address[0]} is not in allow_networks of this site's site.toml")
        sock = socket.socket(family, socket_type, proto)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            milliseconds = int(1000 * self._limits.stall_timeout)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
        return sock

    # being called

    async def _accept_calls(self, relay: RelayAddress, adopt: Adopt) -> None:
        """Wait for one call after the other, each on a connection of its own."""
        pause = MIN_PAUSE
        while True:
            try:
                websocket = await self.open(relay, Role.PARK)
            except RelayError as problem:
                self._note_problem(relay, str(problem))
                await asyncio.sleep(pause * (0.5 + random.random()))
                pause = min(2 * pause, MAX_PAUSE)
                continue
            pause = MIN_PAUSE
            self._note_parked(relay)
            is_called = False
            try:
                is_called = await until_called(websocket)
            finally:
                self.states[relay].parked -= 1
                if not is_called:
                    await websocket.close()
            if is_called:  # also by one who sends nothing: the listener has limits for that
                connection, inner = _socket_pair()
                self._splice(websocket, inner)
                adopt(connection, str(relay.address))
            await asyncio.sleep(USED_PAUSE)

    def _note_parked(self, relay: RelayAddress) -> None:
        state = self.states[relay]
        state.parked += 1
        state.problem = None
        if not state.is_connected:
            state.is_connected = True
            self.on_change(relay, state)

    def _note_problem(self, relay: RelayAddress, problem: str) -> None:
        """Note why the relay cannot be used, unless other connections to it are open."""
        state = self.states[relay]
        if state.parked:
            return
        is_new = state.is_connected or state.problem is None
        state.is_connected = False
        state.problem = problem
        if is_new:
            self.on_change(relay, state)

    def _splice(self, websocket: aiohttp.ClientWebSocketResponse, inner: socket.socket) -> None:
        inner.setblocking(False)
        splice = _splice(websocket, inner, 2 * self._limits.stall_timeout)
        task = asyncio.create_task(splice)
        self._splices.add(task)
        task.add_done_callback(self._splices.discard)


def _socket_pair() -> tuple[socket.socket, socket.socket]:
    """Two connected sockets with room for a few messages."""
    pair = socket.socketpair()
    for end in pair:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER)
    return pair


async def until_called(websocket: aiohttp.ClientWebSocketResponse) -> bool:
    """Wait on a parked connection for a call; return whether there is one."""
    try:
        message = await _receive(websocket, PARKED_TIMEOUT)  # which begins anew with each ping
        return message.get("status") == "called"
    except (TimeoutError, Refused):
        return False


async def _splice(
    websocket: aiohttp.ClientWebSocketResponse,
    inner: socket.socket,
    stall_seconds: float,
) -> None:
    """Pass bytes on between a relay and a socket, until one of them ends."""
    loop = asyncio.get_running_loop()

    async def to_relay() -> None:
        while chunk := await loop.sock_recv(inner, CHUNK):
            async with asyncio.timeout(stall_seconds):
                await websocket.send_bytes(chunk)

    async def from_relay() -> None:
        while (message := await websocket.receive()).type == aiohttp.WSMsgType.BINARY:
            await loop.sock_sendall(inner, message.data)

    directions = [asyncio.create_task(to_relay()), asyncio.create_task(from_relay())]
    try:
        await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for direction in directions:
            direction.cancel()
        await asyncio.gather(*directions, return_exceptions=True)
        inner.close()
        with contextlib.suppress(aiohttp.ClientError, OSError):
            await websocket.close()


async def _receive(
    websocket: aiohttp.ClientWebSocketResponse, timeout: float | None = None
) -> dict[str, Any]:
    """Return the next message of the relay's protocol; raise `Refused` if it is a refusal."""
    message = await websocket.receive(timeout)
    if message.type != aiohttp.WSMsgType.TEXT:
        raise Refused(Refusal.MALFORMED, "it ends the connection")
    fields = read_message(message.data)
    if "refused" in fields:
        raise Refused(str(fields["refused"])[:100], str(fields.get("message"))[:300])
    return fields


def _refusal(refused: Refused, relay: RelayAddress) -> RelayError:
    if refused.reason == Refusal.NOT_CONNECTED:
        return RelayError("the member is not connected to it")
    if refused.reason == Refusal.NOT_A_MEMBER:
        return RelayError(
            f"it refuses us: {refused.message}",
            "Send this site's invite to the relay's owner, who adds it with --members.",
        )
    if refused.reason == Refusal.SIGNATURE:
        return RelayError(
            f"it refuses us: {refused.message}",
            f"Its owner must start it with --advertise {relay.address}.",
        )
    return RelayError(f"it refuses us: {refused.message}")


def _explained(problem: Exception, relay: RelayAddress) -> RelayError:
    """Say why a relay cannot be reached, and what to do."""
    match problem:
        case aiohttp.ClientHttpProxyError(status=401 | 407):
            return RelayError(
                f"the proxy wants another user or password (status {problem.status})",
                "Set HTTPS_PROXY=http://USER:PASSWORD@HOST:PORT.",
            )
        case aiohttp.ClientHttpProxyError():
            return RelayError(
                f"the proxy does not connect us (status {problem.status})",
                f"Ask its administrator to allow CONNECT to {relay.address}.",
            )
        case aiohttp.ClientProxyConnectionError():
            return RelayError(
                f"the proxy cannot be reached: {os_error_text(problem)}", "Check HTTPS_PROXY."
            )
        case aiohttp.ServerFingerprintMismatch():
            return RelayError(
                "its certificate is not the one in its address",
                "Ask its owner for the present address. A proxy that inspects TLS replaces the"
                " certificate: then use a relay with a public one, and ca_bundle in site.toml.",
            )
        case aiohttp.ClientConnectorCertificateError():
            detail = getattr(problem.certificate_error, "verify_message", "")
            return RelayError(
                f"its certificate is not trusted ({detail})",
                "If a proxy inspects TLS, set ca_bundle in site.toml to the certificate of its"
                " authority; if the relay has made its certificate itself, its address ends with"
                " #sha256=FINGERPRINT.",
            )
        case aiohttp.WSServerHandshakeError():
            return RelayError(
                f"there is no relay (status {problem.status})",
                "Check its address. If a proxy inspects TLS, its administrator must let it pass on"
                " WebSockets (in Squid: http_upgrade_request_protocols), or exempt this relay.",
            )
        case TimeoutError():
            text = "no answer in time"
        case _:
            text = f"it cannot be reached: {os_error_text(problem)}"
    advice = f"Does it run? Is {relay.address} open? If only a proxy leads out, set HTTPS_PROXY."
    return RelayError(text, advice)
