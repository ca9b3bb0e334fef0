"""Counters of a transport: bytes sent and received per peer, and refusals.

A counting socket counts the bytes exchanged with the operating system, which is everything above
TCP: bodies, HTTP headers, TLS records and handshakes.
"""

import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dispfl.wire.refusals import RefusalCounter

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

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
