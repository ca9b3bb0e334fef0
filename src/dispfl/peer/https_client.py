"""The asking half of the HTTPS transport: the connections to one neighbour, and one attempt at a time to hear it."""

import asyncio
import contextlib
import socket
import ssl
import weakref
from collections.abc import Callable
from typing import Any

import aiohttp
from aiohttp.abc import AbstractStreamWriter
from aiohttp.client_reqrep import ClientRequest
from aiohttp.connector import Connection
from aiohttp.tracing import Trace
from yarl import URL

from dispfl.peer import heads
from dispfl.peer.certified import Who, shown
from dispfl.peer.counting import CountingSocket, Meter
from dispfl.peer.https_server import HEAD, REFUSED
from dispfl.peer.limits import Limits
from dispfl.peer.moving import StalledError, moving
from dispfl.peer.parts import Part, chunks
from dispfl.peer.system_words import system_words
from dispfl.peer.transport import JSON, Ask, Refused, Reply

_SMALL = 64 * 1024
"""A longer body is only sent once the other side has seen the head and wants it."""


class BrokenError(Exception):
    """An attempt that came to nothing, with the end of a sentence that says why."""


class Neighbour:
    """The connections to one peer, kept open over rounds."""

    def __init__(self, name: str, context: ssl.SSLContext, who: Who, limits: Limits, meter: Meter) -> None:
        self.name = name
        self.sockets: dict[int, CountingSocket] = {}
        """By file descriptor."""
        self._limits = limits
        self._meter = meter
        self._places = asyncio.Semaphore(limits.to_one)
        self._session = aiohttp.ClientSession(
            connector=_Pinned(name, who, context, limits, self._make_socket),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=limits.connect),
            auto_decompress=False,
            max_field_size=heads.LIMIT + 256,
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        )

    async def close(self) -> None:
        """End the connections, also those that are in use."""
        await self._session.close()

    async def attempt(self, address: tuple[str, int], ask: Ask, limit: int, part: Part) -> Reply:
        """The reply, begun or gone on with; what arrives of it is added to `part`, also if the rest does not."""
        async with self._places:
            try:
                return await self._attempt(address, ask, limit, part)
            except StalledError as problem:
                raise BrokenError(f"the transfer stalled: {problem}") from problem
            except aiohttp.ClientConnectorCertificateError as problem:
                raise _wrong_certificate(self.name, problem) from None
            except aiohttp.ClientConnectorError as problem:
                where = f"{address[0]}:{address[1]}"
                raise BrokenError(f"cannot be reached at {where}: {system_words(problem)}") from problem
            except TimeoutError as problem:
                raise BrokenError("no answer in time") from problem
            except (aiohttp.ClientError, OSError) as problem:
                raise BrokenError(
                    f"the connection broke: {system_words(problem)} (if this is always so, {self.name} may not have "
                    "accepted our certificate)"
                ) from problem

    async def _attempt(self, address: tuple[str, int], ask: Ask, limit: int, part: Part) -> Reply:
        url = URL.build(scheme="https", host=address[0], port=address[1], path=f"/v{heads.VERSION}/{ask.what}")
        fields: dict[str, JSON] = {"version": heads.VERSION, "head": dict(ask.head)}
        if part.length:
            fields |= {"offset": part.length, "digest": await part.digest()}
        async with contextlib.AsyncExitStack() as stack:
            async with asyncio.timeout(self._limits.connect + self._limits.patience) as until_head:
                body = _Body(ask.body, self, until_head) if ask.body else None
                post = self._session.post(
                    url,
                    data=body,
                    headers={HEAD: heads.pack(fields)},
                    expect100=len(ask.body) > _SMALL,
                    allow_redirects=False,
                )
                response = await stack.enter_async_context(post)
            return await self._read(response, ask.what, limit, part)

    async def _read(self, response: aiohttp.ClientResponse, what: str, limit: int, part: Part) -> Reply:
        fields = heads.unpack(response.headers.get(HEAD, ""))
        if response.status == REFUSED:
            raise Refused(str(fields.get("refused")), str(fields.get("sentence")))
        head, offset, length = fields.get("head"), fields.get("offset"), response.content_length
        if response.status != 200 or not isinstance(head, dict) or type(offset) is not int or length is None:
            raise Refused("malformed", f"{self.name}'s answer is not of this protocol (status {response.status}).")
        if offset + length > limit:
            sentence = f"{self.name}'s answer to {what!r} has {offset + length} bytes; at most {limit} are allowed."
            raise Refused("too-long", sentence)
        if offset == 0:
            part.clear()
        elif offset != part.length:
            raise Refused("malformed", f"{self.name} went on from byte {offset} instead of {part.length}.")
        line = self.line_of(response.connection.transport if response.connection else None)
        async with moving(line, self._limits):
            async for chunk in response.content.iter_any():
                part.add(chunk)
                self._meter.body_received += len(chunk)
        return Reply(head, part.body())

    async def send(self, body: bytes, writer: AbstractStreamWriter) -> None:
        """The body of an ask."""
        line = self.line_of(getattr(writer, "transport", None))
        async with moving(line, self._limits):
            for chunk in chunks(body):
                await writer.write(chunk)
                self._meter.body_sent += len(chunk)

    def patience_from_now(self) -> float:
        """When an answer must have begun, if everything has been sent now."""
        return asyncio.get_running_loop().time() + self._limits.patience

    def line_of(self, transport: asyncio.BaseTransport | None) -> CountingSocket | None:
        """The socket under a connection."""
        found = transport.get_extra_info("socket") if transport else None
        return self.sockets.get(found.fileno()) if found else None

    def _make_socket(self, found: Any) -> CountingSocket:
        family, kind, proto = found[:3]
        made = CountingSocket(family, kind, proto, meter=self._meter, on_close=self._forget)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # a peer that lost its power does not even acknowledge
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * self._limits.stall))
        self.sockets[made.fileno()] = made
        return made

    def _forget(self, closed: CountingSocket) -> None:
        self.sockets.pop(closed.fileno(), None)


class _Body(aiohttp.payload.Payload):
    """The body of an ask; while it is on its way, no time is short but the stall's."""

    def __init__(self, body: bytes, neighbour: Neighbour, until_head: asyncio.Timeout) -> None:
        super().__init__(body, content_type="application/octet-stream")
        self._size = len(body)
        self._neighbour = neighbour
        self._until_head = until_head

    async def write(self, writer: AbstractStreamWriter) -> None:
        """Send it."""
        self._wait_until(None)
        await self._neighbour.send(self._value, writer)
        self._wait_until(self._neighbour.patience_from_now())

    def _wait_until(self, when: float | None) -> None:
        with contextlib.suppress(RuntimeError):  # the answer, a refusal, did not wait for the body
            self._until_head.reschedule(when)

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        """Asked for by the base class: these bytes are no text."""
        raise TypeError("The body of an ask is no text.")


class _Pinned(aiohttp.TCPConnector):
    """Connects to one member: whoever else answers, on a new connection or on a kept one, is not asked."""

    def __init__(
        self, name: str, who: Who, context: ssl.SSLContext, limits: Limits, make_socket: Callable[[Any], socket.socket]
    ) -> None:
        super().__init__(
            ssl=context, limit=limits.to_one, keepalive_timeout=limits.keepalive, socket_factory=make_socket
        )
        self._name = name
        self._who = who
        self._kept: weakref.WeakSet[asyncio.Transport] = weakref.WeakSet()

    async def connect(self, req: ClientRequest, traces: list[Trace], timeout: aiohttp.ClientTimeout) -> Connection:
        """A connection to that member, and to nobody else."""
        while True:
            connection = await super().connect(req, traces, timeout)
            transport = connection.transport
            certificates = shown(transport)
            if transport and certificates and self._who(*certificates) == self._name:
                self._kept.add(transport)
                return connection
            was_kept = transport in self._kept
            connection.close()
            if not was_kept:  # a kept one may be of a certificate that was replaced since
                raise _wrong_certificate(self._name)


def _wrong_certificate(name: str, problem: aiohttp.ClientConnectorCertificateError | None = None) -> Refused:
    detail = getattr(problem.certificate_error, "verify_message", "") if problem else ""
    return Refused(
        "wrong-certificate",
        f"{name}'s certificate is not the one that was accepted{f' ({detail})' if detail else ''}; "
        "compare fingerprints with `dispfl peer status`.",
    )
