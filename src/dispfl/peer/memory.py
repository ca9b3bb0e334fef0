"""The transport in memory: asks between nodes of one event loop, through a network that can be as bad as one likes.

A message, an ask or a reply, meets its fate on the way: lost, delayed, sent twice, overtaken by a later one. Time is
the event loop's, so on a virtual clock a bad hour takes a moment, and the same seed gives the same hour.
"""

import asyncio
import itertools
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from dispfl.peer import heads
from dispfl.peer.transport import Ask, Handler, Refused, Reply, Unreachable

_Waiting = asyncio.Future[Reply]


@dataclass(frozen=True)
class Passage:
    """A message on its way, as far as the network can tell."""

    sender: str
    receiver: str
    what: str
    """How the ask is named, also in the reply to it."""
    is_reply: bool
    size: int
    """Bytes of its body."""


Fate = Callable[[Passage, random.Random], Sequence[float]]
"""The seconds after which each copy of a message arrives; none at all for one that is lost."""


def prompt(passage: Passage, rng: random.Random) -> Sequence[float]:
    """The fate of every message in a good network: it arrives, at once."""
    return (0.0,)


class MemoryNetwork:
    """Carries messages between the nodes that are there, unless a partition stands between them."""

    def __init__(self, fate: Fate = prompt, *, seed: int = 0, stall: float = 30.0) -> None:
        self.fate = fate
        self.stall = stall
        """Seconds without an answer after which an ask is given up."""
        self.nodes: dict[str, MemoryTransport] = {}
        """Who can be reached."""
        self._rng = random.Random(seed)
        self._side: dict[str, int] = {}

    def join(self, name: str) -> "MemoryTransport":
        """A transport for a node of this name; it can be reached once it serves, until it closes."""
        return MemoryTransport(self, name)

    def partition(self, *sides: Iterable[str]) -> None:
        """Let nothing through from one side to another; who is on no side still reaches everyone."""
        self._side = {name: number for number, side in enumerate(sides) for name in side}

    def heal(self) -> None:
        """Let everything through again."""
        self._side = {}

    def is_parted(self, one: str, other: str) -> bool:
        """Whether a partition stands between the two."""
        return self._side.get(one, -1) != self._side.get(other, -1) and {one, other} <= self._side.keys()

    def send(self, passage: Passage, arrive: Callable[[], None]) -> None:
        """Let as many copies arrive as fate grants, unless the two are parted now or then."""

        def arrive_if_together() -> None:
            if not self.is_parted(passage.sender, passage.receiver):
                arrive()

        delays = self.fate(passage, self._rng)  # drawn in any case, so that a partition does not shift what follows
        if not self.is_parted(passage.sender, passage.receiver):
            for delay in delays:
                asyncio.get_running_loop().call_later(delay, arrive_if_together)


class MemoryTransport:
    """A `Transport` for one node of a `MemoryNetwork`."""

    def __init__(self, network: MemoryNetwork, name: str) -> None:
        self.name = name
        self._network = network
        self._handler: Handler | None = None
        self._asking: dict[_Waiting, str] = {}
        self._answering: dict[asyncio.Task[None], _Waiting | None] = {}

    async def ask(self, peer: str, ask: Ask) -> Reply:
        """The first reply that arrives; raises `Refused` or `Unreachable`."""
        heads.check_what(ask.what)
        carried, network = replace(ask, head=heads.as_carried(ask)), self._network
        waiting: _Waiting = asyncio.get_running_loop().create_future()
        self._asking[waiting] = peer
        passage = Passage(self.name, peer, ask.what, is_reply=False, size=len(ask.body))
        copies = itertools.count()
        network.send(passage, lambda: self._knock(peer, carried, waiting, is_first=next(copies) == 0))
        try:
            async with asyncio.timeout(network.stall):
                return await waiting
        except TimeoutError:
            raise Unreachable(peer, f"no answer for {network.stall:g} s") from None
        finally:
            del self._asking[waiting]
            if not waiting.cancel() and not waiting.cancelled():  # a copy of the reply that comes later finds nobody
                waiting.exception()
            if (there := network.nodes.get(peer)) and not network.is_parted(self.name, peer):
                there._hang_up(waiting)

    async def serve(self, handler: Handler) -> None:
        """Become reachable."""
        self._handler = handler
        self._network.nodes[self.name] = self

    async def close(self) -> None:
        """Vanish as a killed process does: whoever waits for an answer learns at once that there will be none."""
        if self._network.nodes.get(self.name) is self:
            del self._network.nodes[self.name]
        self._handler = None
        for waiting in [*self._answering.values(), *self._asking]:
            if waiting is not None:
                _fail(waiting, Unreachable(self.name, "the connection broke"))
        answering = list(self._answering)
        for task in answering:
            task.cancel()
        await asyncio.gather(*answering, return_exceptions=True)

    def _knock(self, peer: str, ask: Ask, waiting: _Waiting, is_first: bool) -> None:
        """A copy of our ask arrives. Only the first is answered to us: the others are a stranger's replay."""
        there = self._network.nodes.get(peer)
        if there is not None:
            there._take_in(self.name, ask, waiting if is_first else None)
        elif is_first:
            _fail(waiting, Unreachable(peer, "cannot be reached: nobody listens there"))

    def _take_in(self, sender: str, ask: Ask, waiting: _Waiting | None) -> None:
        task = asyncio.get_running_loop().create_task(self._answer(sender, ask, waiting))
        self._answering[task] = waiting
        task.add_done_callback(self._answering.pop)

    async def _answer(self, sender: str, ask: Ask, waiting: _Waiting | None) -> None:
        assert self._handler is not None
        refused, reply = None, Reply({})
        try:
            reply = await self._handler(sender, ask)
            reply = replace(reply, head=heads.as_carried(reply))
        except Refused as problem:
            refused = problem
        except Exception as problem:  # a mistake in the handler: a simulation must not hide it
            if waiting is None or waiting.done():
                raise
            waiting.set_exception(problem)
            return

        def arrive() -> None:
            if waiting is None or waiting.done():
                return
            if refused:
                waiting.set_exception(Refused(refused.reason, refused.sentence))
            else:
                waiting.set_result(reply)
                reply.sent()

        self._network.send(Passage(self.name, sender, ask.what, is_reply=True, size=len(reply.body)), arrive)

    def _hang_up(self, waiting: _Waiting) -> None:
        """Who asked is no longer there."""
        for task in [task for task, answered in self._answering.items() if answered is waiting]:
            task.cancel()


def _fail(waiting: _Waiting, problem: Exception) -> None:
    if not waiting.done():
        waiting.set_exception(problem)
