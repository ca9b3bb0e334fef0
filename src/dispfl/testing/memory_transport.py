"""In-memory transport between the nodes of one event loop, with a simulated unreliable network.

A delivery model decides whether a request or response is lost, delayed, duplicated or reordered.
Time is that of the event loop: in virtual time an hour takes a moment, and the same seed gives the
same sequence of events.
"""

import asyncio
import itertools
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from dispfl.peer.transport import http
from dispfl.peer.transport.base import Handler, Refused, Request, Response, Unreachable
from dispfl.wire.refusals import Refusal

_PendingResponse = asyncio.Future[Response]


@dataclass(frozen=True)
class Delivery:
    """A message in transit, as the network sees it."""

    sender: str
    receiver: str
    kind: str
    """Kind of the request, also for its response."""
    is_response: bool
    size: int
    """Size of the body in bytes."""


DeliveryModel = Callable[[Delivery, random.Random], Sequence[float]]
"""Returns the delay in seconds of each copy of a message; empty for a lost message."""


def instant(delivery: Delivery, rng: random.Random) -> Sequence[float]:
    """Deliver every message once, without delay."""
    return (0.0,)


class MemoryNetwork:
    """Delivers messages between serving nodes that are not separated by a partition."""

    def __init__(
        self, delivery_model: DeliveryModel = instant, *, seed: int = 0, timeout: float = 30.0
    ) -> None:
        self.delivery_model = delivery_model
        self.timeout = timeout
        """Seconds after which a request without a response fails."""
        self.nodes: dict[str, MemoryTransport] = {}
        """Reachable nodes by name."""
        self._rng = random.Random(seed)
        self._group: dict[str, int] = {}

    def join(self, name: str) -> "MemoryTransport":
        """Create the transport of a node; the node is reachable from `serve` until `close`."""
        return MemoryTransport(self, name)

    def partition(self, *groups: Iterable[str]) -> None:
        """Drop messages between groups; a node in no group still reaches all nodes."""
        self._group = {}
        for number, group in enumerate(groups):
            for name in group:
                self._group[name] = number

    def heal(self) -> None:
        """Remove the partition."""
        self._group = {}

    def is_partitioned(self, sender: str, receiver: str) -> bool:
        """Whether a partition separates two nodes."""
        if sender not in self._group or receiver not in self._group:
            return False
        return self._group[sender] != self._group[receiver]

    def send(self, delivery: Delivery, arrive: Callable[[], None]) -> None:
        """Schedule the copies of a message; a partition on departure or arrival drops them."""

        def arrive_if_connected() -> None:
            if not self.is_partitioned(delivery.sender, delivery.receiver):
                arrive()

        # Drawn in any case, so that a partition does not change the random numbers of later
        # messages.
        delays = self.delivery_model(delivery, self._rng)
        if not self.is_partitioned(delivery.sender, delivery.receiver):
            for delay in delays:
                asyncio.get_running_loop().call_later(delay, arrive_if_connected)


class MemoryTransport:
    """A `Transport` for one node of a `MemoryNetwork`."""

    def __init__(self, network: MemoryNetwork, name: str) -> None:
        self.name = name
        self._network = network
        self._handler: Handler | None = None
        self._requesting: dict[_PendingResponse, str] = {}
        self._handling: dict[asyncio.Task[None], _PendingResponse | None] = {}

    async def request(self, peer: str, request: Request) -> Response:
        """Return the first response that arrives; raise `Refused` or `Unreachable`."""
        http.check_kind(request.kind)
        network = self._network
        copied_request = replace(request, header=http.copy_header(request))
        pending: _PendingResponse = asyncio.get_running_loop().create_future()
        self._requesting[pending] = peer
        delivery = Delivery(
            self.name, peer, request.kind, is_response=False, size=len(request.body)
        )
        copies = itertools.count()

        def deliver() -> None:
            self._deliver(peer, copied_request, pending, is_first=next(copies) == 0)

        network.send(delivery, deliver)
        try:
            async with asyncio.timeout(network.timeout):
                return await pending
        except TimeoutError:
            raise Unreachable(peer, f"no response for {network.timeout:g} s") from None
        finally:
            del self._requesting[pending]
            if not pending.cancel() and not pending.cancelled():  # mark the exception as retrieved
                pending.exception()
            receiver = network.nodes.get(peer)
            if receiver is not None and not network.is_partitioned(self.name, peer):
                receiver._disconnect(pending)

    async def serve(self, handler: Handler) -> None:
        """Make the node reachable."""
        self._handler = handler
        self._network.nodes[self.name] = self

    async def close(self) -> None:
        """Disappear like a killed process: pending requests fail immediately."""
        if self._network.nodes.get(self.name) is self:
            del self._network.nodes[self.name]
        self._handler = None
        for pending in [*self._handling.values(), *self._requesting]:
            if pending is not None:
                _fail(pending, Unreachable(self.name, "the connection broke"))
        tasks = list(self._handling)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _deliver(
        self, peer: str, request: Request, pending: _PendingResponse, is_first: bool
    ) -> None:
        """Deliver a copy of a request; only the first is answered, the others are replays."""
        receiver = self._network.nodes.get(peer)
        if receiver is not None:
            receiver._receive(self.name, request, pending if is_first else None)
        elif is_first:
            _fail(pending, Unreachable(peer, "cannot be reached: the node is not serving"))

    def _receive(self, sender: str, request: Request, pending: _PendingResponse | None) -> None:
        task = asyncio.get_running_loop().create_task(
            self._handle_request(sender, request, pending)
        )
        self._handling[task] = pending
        task.add_done_callback(self._handling.pop)

    async def _handle_request(
        self, sender: str, request: Request, pending: _PendingResponse | None
    ) -> None:
        assert self._handler is not None
        refused = None
        response = Response({})
        try:
            response = await self._handler(sender, request)
            response = replace(response, header=http.copy_header(response))
        except Refused as problem:
            refused = problem
        except Exception as problem:  # a bug in the handler: virtual time raises it at the end
            asyncio.get_running_loop().call_exception_handler(
                {"message": "handler failed", "exception": problem}
            )
            message = f"{self.name} could not respond because of an internal error."
            refused = Refused(Refusal.INTERNAL_ERROR, message)

        def arrive() -> None:
            if pending is None or pending.done():
                return
            if refused:
                pending.set_exception(Refused(refused.reason, refused.message))
            else:
                pending.set_result(response)
                response.on_sent()

        size = len(response.body)
        delivery = Delivery(self.name, sender, request.kind, is_response=True, size=size)
        self._network.send(delivery, arrive)

    def _disconnect(self, pending: _PendingResponse) -> None:
        """Cancel the handler of a request whose client no longer waits."""
        for task, response in list(self._handling.items()):
            if response is pending:
                task.cancel()


def _fail(pending: _PendingResponse, problem: Exception) -> None:
    if not pending.done():
        pending.set_exception(problem)
