"""What a transport counts: the bytes that its sockets carried, for and from whom, and what it refused.

A counting socket adds up what the operating system took from it and gave to it. That is everything above TCP: bodies,
HTTP heads, TLS records and handshakes.
"""

import socket
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

UNKNOWN = "unknown"
"""The name of those who have not shown whose certificate they hold."""


@dataclass
class Meter:
    """Bytes to and from one peer."""

    sent: int = 0
    """On the sockets."""
    received: int = 0
    body_sent: int = 0
    """Of these, the bodies of asks and replies."""
    body_received: int = 0


@dataclass
class Counters:
    """What a transport has carried and refused since it was made."""

    carried: dict[str, Meter] = field(default_factory=dict)
    """By peer."""
    refused: Counter[tuple[str, str]] = field(default_factory=Counter)
    """How often, by reason and by whom."""

    def meter(self, name: str) -> Meter:
        """A peer's meter."""
        return self.carried.setdefault(name, Meter())

    def refuse(self, reason: str, name: str = UNKNOWN) -> None:
        """Count a refusal."""
        self.refused[reason, name] += 1


class CountingSocket(socket.socket):
    """A socket that adds what it carries to a meter, and says when it is closed."""

    def __init__(
        self,
        family: int = -1,
        type: int = -1,  # noqa: A002  the name of socket.socket
        proto: int = -1,
        fileno: int | None = None,
        *,
        meter: Meter,
        on_close: Callable[["CountingSocket"], None] = lambda socket: None,
    ) -> None:
        super().__init__(family, type, proto, fileno)
        self.sent = self.received = 0
        self._meter = meter
        self._on_close = on_close

    @property
    def carried(self) -> int:
        """Bytes in both directions."""
        return self.sent + self.received

    def count_for(self, meter: Meter) -> None:
        """What was counted so far, and what will be, is somebody else's."""
        self._add(-self.sent, -self.received)
        self._meter = meter
        self._add(self.sent, self.received)

    def send(self, data: "ReadableBuffer", *flags: int) -> int:
        """As a socket does, counted."""
        count = super().send(data, *flags)
        self.sent += count
        self._add(count, 0)
        return count

    def sendmsg(self, *args: Any) -> int:
        """As a socket does, counted."""
        count = super().sendmsg(*args)
        self.sent += count
        self._add(count, 0)
        return count

    def recv(self, size: int, *flags: int) -> bytes:
        """As a socket does, counted."""
        data = super().recv(size, *flags)
        self.received += len(data)
        self._add(0, len(data))
        return data

    def recv_into(self, buffer: "WriteableBuffer", *size_and_flags: int) -> int:
        """As a socket does, counted."""
        count = super().recv_into(buffer, *size_and_flags)
        self.received += count
        self._add(0, count)
        return count

    def close(self) -> None:
        """As a socket does."""
        if self.fileno() >= 0:
            self._on_close(self)
        super().close()

    def _add(self, sent: int, received: int) -> None:
        self._meter.sent += sent
        self._meter.received += received
