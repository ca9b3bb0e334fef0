"""Parts of the HTTPS transport that client and server share: headers, bodies, stall timeouts, peer
certificates."""

import asyncio
import contextlib
import hashlib
import io
import json
import os
import re
import ssl
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any

from dispfl.peer.transport.base import JSON, Limits, Refused, Request, Response
from dispfl.peer.transport.counting import CountingSocket
from dispfl.wire.refusals import Refusal

PROTOCOL_VERSION = 1
"""Version of the protocol between peers, in the path and the header of every message."""
MAX_HEADER_BYTES = 64 * 1024
"""Maximum size of a header as JSON."""
_KIND = re.compile(r"[a-z][a-z0-9-]{0,31}")


def pack_header(fields: Mapping[str, JSON]) -> str:
    """Encode a header as one line of ASCII; raise `Refused` if it is too long, ValueError or
    TypeError if not JSON."""
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
async def stall_timeout(sock: CountingSocket | None, limits: Limits) -> AsyncIterator[None]:
    """Raise `StalledError` in the block once fewer than `min_bytes` are transferred in
    `stall_timeout` seconds."""
    limit = asyncio.timeout(None)
    watch = _StallWatch(sock, limits, limit)
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

    def __init__(self, sock: CountingSocket | None, limits: Limits, limit: asyncio.Timeout) -> None:
        self._sock = sock
        self._limits = limits
        self._limit = limit
        self._schedule()

    def _schedule(self) -> None:
        self._before = self._total
        self.timer = asyncio.get_running_loop().call_later(self._limits.stall_timeout, self._check)

    def _check(self) -> None:
        if self._total - self._before >= self._limits.min_bytes:
            self._schedule()
        else:
            self._limit.reschedule(asyncio.get_running_loop().time())

    @property
    def _total(self) -> int:
        return self._sock.total_bytes if self._sock else 0


CHUNK_BYTES = 256 * 1024
_LARGE_BODY = 1024 * 1024


def chunks(body: bytes, start: int = 0) -> Iterator[memoryview]:
    """Split a body, from byte `start`, into chunks that share its memory."""
    view = memoryview(body)
    for offset in range(start, len(body), CHUNK_BYTES):
        yield view[offset : offset + CHUNK_BYTES]


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
    """Return the peer's certificate and the issuers it sent; None without TLS or without a
    certificate."""
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
    return text[:1].lower() + text[1:] if not text.isupper() else text.lower()
