"""Bodies in parts: cut into chunks to be sent, and put together again where a connection broke in between.

Whoever goes on with a reply says how many bytes it has and what their digest is. The sender makes the same reply again,
and sends the rest if it begins with those very bytes, and all of it if it does not. So a body is never made of two.
"""

import asyncio
import hashlib
import io
from collections.abc import Iterator

CHUNK = 256 * 1024
_LONG = 1024 * 1024


def chunks(body: bytes, start: int = 0) -> Iterator[memoryview]:
    """The body from a byte on, in pieces that share its memory."""
    view = memoryview(body)
    for place in range(start, len(body), CHUNK):
        yield view[place : place + CHUNK]


async def digest(body: bytes, length: int) -> str:
    """Of the first so many bytes; beside the event loop where that takes long."""
    view = memoryview(body)[:length]
    if length < _LONG:
        return _blake2b(view)
    return await asyncio.to_thread(_blake2b, view)


def _blake2b(view: memoryview) -> str:
    return hashlib.blake2b(view, digest_size=32).hexdigest()


class Part:
    """What has arrived of a reply."""

    def __init__(self) -> None:
        self._bytes = io.BytesIO()
        self.length = 0

    def add(self, chunk: bytes) -> None:
        """More of it."""
        self.length += self._bytes.write(chunk)

    def clear(self) -> None:
        """Start anew."""
        self._bytes = io.BytesIO()
        self.length = 0

    def body(self) -> bytes:
        """All that has arrived; BytesIO gives its own memory away, so nothing is copied."""
        return self._bytes.getvalue()

    async def digest(self) -> str:
        """Of all that has arrived."""
        return await digest(self.body(), self.length)
