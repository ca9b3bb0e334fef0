"""The transport interface of a peer: a request gets a response, is refused, or fails.

`HttpsTransport` connects peers over the network, `MemoryTransport` connects nodes of one event
loop.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from dispfl.errors import DispflError

JSON = str | int | float | bool | None | list["JSON"] | dict[str, "JSON"]


@dataclass(frozen=True)
class Request:
    """A request from one peer to another."""

    kind: str
    """Type of the request, a short lower-case word: "sync" or "model"."""
    header: Mapping[str, JSON]
    """Metadata such as round and nonce; at most 64 kB as JSON."""
    body: bytes = b""
    """An encoded message, or empty."""
    offset: int = 0
    """First byte to send of the response; above 0 to resume the response to an earlier request with
    the same nonce."""
    on_alive: Callable[[], None] = field(default=lambda: None, compare=False, repr=False)
    """Called by the client's transport when the peer begins to respond, or to take a large body:
    what follows is a transfer, which may take long."""
    on_transfer: Callable[[], None] = field(default=lambda: None, compare=False, repr=False)
    """Called by the client's transport when the body of a response begins to arrive."""


@dataclass(frozen=True)
class Response:
    """The response to a request."""

    header: Mapping[str, JSON]
    body: bytes = b""
    on_sent: Callable[[], None] = field(default=lambda: None, compare=False, repr=False)
    """Called by the server's transport once the complete response is sent; not called if the
    transfer breaks."""


class Refused(DispflError):  # noqa: N818  an outcome, sent to the client and raised there again
    """The other peer refused a request."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        """A value of `Refusal`, for example "stale", or an unknown string of another version."""
        self.message = message


class Unreachable(DispflError):  # noqa: N818
    """The connection to the other peer failed, broke or stalled."""

    def __init__(self, peer: str, detail: str) -> None:
        super().__init__(f"{peer}: {detail}.")
        self.detail = detail
        """The message without the peer's name."""


class Handler(Protocol):
    """Handles the requests of other peers; may raise `Refused`."""

    async def __call__(self, sender: str, request: Request) -> Response:
        """Respond to a request of the member that the transport has authenticated as `sender`."""
        ...


class Transport(Protocol):
    """Sends requests to other peers and receives theirs."""

    async def request(self, peer: str, request: Request) -> Response:
        """Return the response of a peer; raise `Refused` or `Unreachable`."""
        ...

    async def serve(self, handler: Handler) -> None:
        """Start listening; return once connections are accepted."""
        ...

    async def close(self) -> None:
        """Stop listening and close all connections, within a bounded time."""
        ...
