"""What client and server of the HTTPS transport share: counting sockets, headers, bodies, stall
timeouts and peer certificates.

A counting socket counts the bytes exchanged with the operating system, which is everything above
TCP: bodies, HTTP headers, TLS records and handshakes.
"""

import asyncio
import contextlib
import hashlib
import io
import json
import os
import re
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field, field_validator

from dispfl.errors import ConfigError
from dispfl.peer.transport.bandwidth import MAX_TURN, MIN_RATE, Throttle, parse_bandwidth
from dispfl.peer.transport.base import JSON, Refused, Request, Response
from dispfl.settings import Settings
from dispfl.wire.refusals import Refusal, RefusalCounter

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer


class Limits(Settings):
    """Limits of an `HttpsTransport`. The defaults suit up to about a hundred sites."""

    table: ClassVar[str] = "limits"

    connect_timeout: float = Field(default=10.0, gt=0)
    """Seconds for connecting and the TLS handshake, as client and as server."""
    header_timeout: float = Field(default=10.0, gt=0)
    """Seconds to receive the header of a request, from the handshake or the header's first byte."""
    response_timeout: float = Field(default=120.0, gt=0)
    """Seconds until a response begins, once the request is sent."""
    stall_timeout: float = Field(default=30.0, gt=0)
    """Seconds in which a transfer must progress by `stall_timeout * min_rate` bytes; its total time
    is unlimited."""
    min_rate: float = Field(default=1000.0, ge=0)
    """Minimum rate of a transfer in bytes per second."""
    max_attempts: int = Field(default=4, ge=1)
    """Consecutive attempts without progress after which a broken transfer is given up."""
    backoff: float = Field(default=0.1, ge=0)
    """Seconds before a broken transfer is resumed, doubled after each failed attempt."""
    relay_timeout: float = Field(default=30.0, ge=0)
    """Seconds after which a transfer by a relay that broke is given up: a relay may restart."""
    outbox_interval: float = Field(default=5.0, gt=0)
    """Seconds between two looks into a member's outbox, on average."""
    keepalive_timeout: float = Field(default=600.0, gt=0)
    """Seconds that an idle connection is kept open for the next round."""
    shutdown_grace: float = Field(default=1.0, ge=0)
    """Seconds for responses in progress to finish when the transport is closed."""
    max_connections_to_peer: int = Field(default=2, ge=1)
    """Maximum connections to one member."""
    max_connections_from_peer: int = Field(default=4, ge=1)
    """Maximum connections from one member; those of a previous process may still be open."""
    max_unauthenticated: int = Field(default=32, ge=1)
    """Maximum unauthenticated connections from one address; the oldest is closed when another one
    is accepted."""
    max_connections: int = Field(default=512, ge=1)
    """Maximum incoming connections in total."""
    bandwidth: str | None = None
    """How fast models are sent, and how fast they are received, all together, also to and from
    outboxes: such as "20 Mbit/s" or "2.5 MB/s"; by default as fast as the network allows."""

    @field_validator("bandwidth")
    @classmethod
    def _check_bandwidth(cls, bandwidth: str | None) -> str | None:
        rate = MIN_RATE if bandwidth is None else parse_bandwidth(bandwidth)
        if rate is None or rate < MIN_RATE:
            raise ConfigError(
                f"limits.bandwidth is {bandwidth!r}; give a rate of 0.1 Mbit/s or more, such as"
                ' "20 Mbit/s" or "2.5 MB/s".',
                key="limits.bandwidth",
            )
        return bandwidth

    @property
    def bytes_per_second(self) -> float | None:
        """The bandwidth as a number; None if it is not limited."""
        return parse_bandwidth(self.bandwidth) if self.bandwidth else None

    @property
    def min_bytes(self) -> int:
        """Minimum progress in `stall_timeout` seconds."""
        return max(1, round(self.stall_timeout * self.min_rate))


UNKNOWN = "unknown"
"""The peer name of unauthenticated connections."""


@dataclass
class ByteCounter:
    """Bytes sent to and received from one peer."""

    sent: int = 0
    """Bytes on the sockets."""
    received: int = 0
    body_sent: int = 0
    """Bytes of request and response bodies, included in `sent`."""
    body_received: int = 0


@dataclass
class TransportCounters:
    """Traffic and refusals of a transport since it was created."""

    traffic: dict[str, ByteCounter] = field(default_factory=dict)
    """By peer."""
    refused: RefusalCounter = field(default_factory=RefusalCounter)

    def counter(self, name: str) -> ByteCounter:
        """Return the byte counter of a peer."""
        return self.traffic.setdefault(name, ByteCounter())

    def refuse(self, reason: str, name: str = UNKNOWN) -> None:
        """Count a refusal."""
        self.refused.add(name, reason)


class CountingSocket(socket.socket):
    """A socket that counts its bytes and reports when it is closed."""

    def __init__(
        self,
        family: int = -1,
        type: int = -1,  # noqa: A002  the name of socket.socket
        proto: int = -1,
        fileno: int | None = None,
        *,
        counter: ByteCounter,
        on_close: Callable[["CountingSocket"], None] = lambda socket: None,
    ) -> None:
        super().__init__(family, type, proto, fileno)
        self.sent = self.received = 0
        self._counter = counter
        self._on_close = on_close

    @property
    def total_bytes(self) -> int:
        """Bytes in both directions."""
        return self.sent + self.received

    def assign_to(self, counter: ByteCounter) -> None:
        """Move all bytes of this socket, past and future, to another counter."""
        self._add(-self.sent, -self.received)
        self._counter = counter
        self._add(self.sent, self.received)

    def send(self, data: "ReadableBuffer", *flags: int) -> int:
        """Like `socket.send`, counted."""
        count = super().send(data, *flags)
        self.sent += count
        self._add(count, 0)
        return count

    def sendmsg(self, *args: Any) -> int:
        """Like `socket.sendmsg`, counted."""
        count = super().sendmsg(*args)
        self.sent += count
        self._add(count, 0)
        return count

    def recv(self, size: int, *flags: int) -> bytes:
        """Like `socket.recv`, counted."""
        data = super().recv(size, *flags)
        self.received += len(data)
        self._add(0, len(data))
        return data

    def recv_into(self, buffer: "WriteableBuffer", *size_and_flags: int) -> int:
        """Like `socket.recv_into`, counted."""
        count = super().recv_into(buffer, *size_and_flags)
        self.received += count
        self._add(0, count)
        return count

    def close(self) -> None:
        """Close the socket and call `on_close`."""
        if self.fileno() >= 0:
            self._on_close(self)
        super().close()

    def _add(self, sent: int, received: int) -> None:
        self._counter.sent += sent
        self._counter.received += received


PROTOCOL_VERSION = 1
"""Version of the protocol between peers, in the path and the header of every message."""
MAX_HEADER_BYTES = 64 * 1024
"""Maximum size of a header as JSON."""
_KIND = re.compile(r"[a-z][a-z0-9-]{0,31}")


def pack_header(fields: Mapping[str, JSON]) -> str:
    """Encode a header as one line of ASCII; raise `Refused` if it is too long.

    Raises ValueError or TypeError if it is not JSON.
    """
    line = json.dumps(fields, separators=(",", ":"), allow_nan=False)
    if len(line) > MAX_HEADER_BYTES:
        message = (
            f"A header has at most {MAX_HEADER_BYTES} bytes as JSON, got {len(line)}; move data to"
            " the body."
        )
        raise Refused(Refusal.TOO_LONG, message)
    return line


def unpack_header(line: str) -> dict[str, Any]:
    """Decode an untrusted header; raise `Refused` if it is too long or not a JSON object."""
    try:
        if len(line) > MAX_HEADER_BYTES:
            raise ValueError(f"it has {len(line)} bytes, at most {MAX_HEADER_BYTES} are allowed")
        fields = json.loads(line, parse_constant=_reject_constant)
        if not isinstance(fields, dict):
            raise ValueError("it is not an object")
    except (ValueError, RecursionError) as problem:
        raise Refused(
            Refusal.MALFORMED, f"The message's header cannot be read ({problem})."
        ) from None
    return fields


def copy_header(message: Request | Response) -> dict[str, Any]:
    """Return a deep copy of a message's header, encoded and decoded as for sending."""
    return unpack_header(pack_header(message.header))


def check_kind(kind: str) -> None:
    """Refuse a request whose kind is not a short lower-case word."""
    if not _KIND.fullmatch(kind):
        raise Refused(
            Refusal.MALFORMED,
            f"The kind of a request must be a short lower-case word, got {kind[:64]!r}.",
        )


def _reject_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number")


class StalledError(TimeoutError):
    """A transfer that is slower than the minimum rate."""


@contextlib.asynccontextmanager
async def stall_timeout(
    sock: CountingSocket | None, limits: Limits, throttle: Throttle
) -> AsyncIterator[None]:
    """Raise `StalledError` in the block once a transfer is slower than the minimum rate.

    While it waits for its turn under our own bandwidth, it is not.
    """
    limit = asyncio.timeout(None)
    watch = _StallWatch(sock, limits, limit, throttle)
    try:
        async with limit:
            try:
                yield
            finally:
                watch.timer.cancel()
    except TimeoutError as problem:
        if limit.expired():
            raise StalledError(
                f"fewer than {limits.min_bytes} bytes in {limits.stall_timeout:g} s"
            ) from None
        raise problem


class _StallWatch:
    """Checks the progress every `stall_timeout` seconds and cancels a transfer that is too slow."""

    def __init__(
        self,
        sock: CountingSocket | None,
        limits: Limits,
        limit: asyncio.Timeout,
        throttle: Throttle,
    ) -> None:
        self._throttle = throttle
        self._sock = sock
        self._limits = limits
        self._limit = limit
        self._schedule()

    def _schedule(self) -> None:
        self._before = self._total
        self.timer = asyncio.get_running_loop().call_later(self._limits.stall_timeout, self._check)

    def _check(self) -> None:
        has_progressed = self._total - self._before >= self._limits.min_bytes
        if self._throttle.has_waited() or has_progressed:
            self._schedule()
        else:
            self._limit.reschedule(asyncio.get_running_loop().time())

    @property
    def _total(self) -> int:
        return self._sock.total_bytes if self._sock else 0


_LARGE_BODY = 1024 * 1024


def chunks(body: bytes, start: int = 0, size: int = MAX_TURN) -> Iterator[memoryview]:
    """Split a body, from byte `start`, into chunks that share its memory."""
    view = memoryview(body)
    for offset in range(start, len(body), size):
        yield view[offset : offset + size]


async def body_digest(body: bytes, length: int) -> str:
    """Return the digest of the first `length` bytes; a large body is hashed in a thread."""
    view = memoryview(body)[:length]
    if length < _LARGE_BODY:
        return _blake2b(view)
    return await asyncio.to_thread(_blake2b, view)


def _blake2b(view: memoryview) -> str:
    return hashlib.blake2b(view, digest_size=32).hexdigest()


class PartialBody:
    """The received part of a response body."""

    def __init__(self) -> None:
        self._bytes = io.BytesIO()
        self.length = 0

    def add(self, chunk: bytes) -> None:
        """Append a chunk."""
        self.length += self._bytes.write(chunk)

    def clear(self) -> None:
        """Discard everything received."""
        self._bytes = io.BytesIO()
        self.length = 0

    def body(self) -> bytes:
        """Return everything received, without a copy (BytesIO shares its memory)."""
        return self._bytes.getvalue()

    async def digest(self) -> str:
        """Return the digest of everything received."""
        return await body_digest(self.body(), self.length)


Identify = Callable[[bytes, Sequence[bytes]], str | None]
"""Returns the member's name for a certificate and its issuers, newest first, as DER; None if there
is no such member.

May raise `Refused`.
"""


def peer_certificates(
    transport: asyncio.BaseTransport | None,
) -> tuple[bytes, Sequence[bytes]] | None:
    """Return the peer's certificate and the issuers it sent; None without a certificate."""
    tls = transport.get_extra_info("ssl_object") if transport else None
    leaf = tls.getpeercert(binary_form=True) if tls else None
    if not leaf:
        return None
    chain = [der for der in _chain(tls) if der != leaf]
    return leaf, chain


def _chain(tls: Any) -> list[bytes]:
    if hasattr(tls, "get_unverified_chain"):  # Python 3.13
        return list(tls.get_unverified_chain())
    inner = getattr(tls, "_sslobj", None)  # earlier versions have it only in a private attribute
    certificates = inner.get_unverified_chain() if inner else None
    return [certificate.public_bytes(ssl._ssl.ENCODING_DER) for certificate in certificates or ()]  # type: ignore[attr-defined]


def os_error_text(problem: BaseException) -> str:
    """Return the operating system's error text in lower case, for example `connection refused`."""
    cause = getattr(problem, "os_error", problem)  # aiohttp wraps it
    if isinstance(cause, ssl.SSLError):
        text = (cause.reason or "the TLS handshake failed").replace("_", " ")
    elif isinstance(cause, OSError) and cause.errno:  # getaddrinfo errors are negative
        text = os.strerror(cause.errno) if cause.errno > 0 else str(cause.strerror)
    else:
        text = str(cause) or type(cause).__name__
    if text.isupper():
        return text.lower()
    return text[:1].lower() + text[1:]
