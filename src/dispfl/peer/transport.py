"""The seam between a peer and whatever carries its messages: asks that are answered, or refused, or lost.

`HttpsTransport` carries them between machines, `MemoryTransport` between nodes of one event loop.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from dispfl.errors import DispflError

JSON = str | int | float | bool | None | list["JSON"] | dict[str, "JSON"]


@dataclass(frozen=True)
class Ask:
    """One question from a peer to another."""

    what: str
    """What is asked for: "hello", "model", "status", ...: a short lower-case word."""
    head: Mapping[str, JSON]
    """Small: round, nonce, federation, ...; at most 64 kB as JSON."""
    body: bytes = b""
    """A message of the codec, or nothing."""
    offset: int = 0
    """Above 0: go on with an answer from this byte on, to the same nonce as before."""


@dataclass(frozen=True)
class Reply:
    """The answer to an ask."""

    head: Mapping[str, JSON]
    body: bytes = b""
    sent: Callable[[], None] = field(default=lambda: None, compare=False, repr=False)
    """Called by the transport of whoever answers, once the whole reply has left; never, if it broke off."""


class Refused(DispflError):  # noqa: N818  the name is what happened; it travels to the asker and is raised there again
    """The other peer will not answer this ask."""

    def __init__(self, reason: str, sentence: str) -> None:
        super().__init__(sentence)
        self.reason = reason
        """By name: "stale", "not-a-member", ..."""
        self.sentence = sentence


class Unreachable(DispflError):  # noqa: N818
    """No connection to the other peer, or one that broke or stalled."""

    def __init__(self, peer: str, why: str) -> None:
        super().__init__(f"{peer}: {why}.")
        self.why = why
        """Without the name, for a line that has it already."""


class Handler(Protocol):
    """What a peer does with an ask; may raise `Refused`."""

    async def __call__(self, sender: str, ask: Ask) -> Reply:
        """Answer an ask of the member that the transport has authenticated as `sender`."""
        ...


class Transport(Protocol):
    """Carries asks to other peers, and theirs to us."""

    async def ask(self, peer: str, ask: Ask) -> Reply:
        """The reply of that peer; raises `Refused` or `Unreachable`."""
        ...

    async def serve(self, handler: Handler) -> None:
        """Begin to listen; returns once listening."""
        ...

    async def close(self) -> None:
        """Stop listening and end all connections, within a bounded time."""
        ...
