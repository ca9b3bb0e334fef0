"""What the client and the server of a node share."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from dispfl.errors import MessageError
from dispfl.methods.base import GossipMethod
from dispfl.peer.guard import RequestGuard
from dispfl.peer.membership.roster import Roster
from dispfl.peer.membership.sync import Offer, SyncMessage
from dispfl.peer.published import PublishedModels
from dispfl.peer.spec import FederationSpec, spec_digest
from dispfl.peer.status import NodeStatus
from dispfl.peer.transport.base import JSON, Refused
from dispfl.round.context import RunContext
from dispfl.round.exchange import exchange_graph
from dispfl.wire.codec import Codec
from dispfl.wire.refusals import Refusal

T = TypeVar("T")


class Membership(Protocol):
    """The members of the federation that this site has accepted."""

    def roster(self, t: int) -> list[str]:
        """The names of all participants of round t, including our own, sorted."""
        ...

    def kept(self, name: str) -> Sequence[int] | None:
        """The number of weights that a member's mask keeps in each layer, by its announced density; None if unknown."""
        ...

    def join(self, t: int) -> None:
        """Announce that this site takes part from round t on."""
        ...

    def records(self) -> list[JSON]:
        """The signed records of this site, first, and of its members."""
        ...

    def signed_roster(self) -> Roster | None:
        """The roster that this site has accepted, if any."""
        ...

    def merge(self, records: JSON) -> Collection[str] | None:
        """Verify and store records, on any thread. Return the reasons for refused records that no honest peer sends."""
        ...

    def lacks_roster(self, version: int, digest: str, administrators: str) -> bool:
        """Whether another peer's roster is newer than ours, or contradicts it."""
        ...

    def merge_roster(self, text: str) -> bool:
        """Verify and store a roster, on any thread; return whether it is new. May raise `MessageError`."""
        ...


async def run_inline(work: Callable[[], Any]) -> Any:
    """Run the work on the event loop's thread."""
    return work()


@dataclass
class NodeContext:
    """One node's settings, its view of the other peers, and its published models."""

    name: str
    run: RunContext
    codec: Codec
    spec: FederationSpec
    membership: Membership
    executor: Callable[[Callable[[], Any]], Awaitable[Any]] = run_inline
    """Runs encoding and verification off the event loop."""
    log: Callable[[str, Mapping[str, object]], None] = lambda event, fields: None
    """Writes an event and its fields to the log."""
    status: NodeStatus = field(default_factory=NodeStatus)
    published: PublishedModels = field(default_factory=PublishedModels)
    guard: RequestGuard = field(default_factory=RequestGuard)
    """Shared with the transport, so that all refusals of a peer are counted together."""
    listening: str = ""
    """The listening address, for the log."""
    joining: bool = False
    """Whether this peer has just joined a running federation and has no model yet."""

    def __post_init__(self) -> None:
        self.spec_digest = spec_digest(self.spec)
        self.status.refused = self.guard.refused
        self._last_problem: dict[str, tuple[str, object]] = {}
        """By peer: the event and reason of the last logged problem."""
        self._offer: Offer | None = None
        self._last_graph: tuple[int, list[str], dict[str, list[str]]] | None = None

    @property
    def method(self) -> GossipMethod:
        """The method, which is a gossip method."""
        assert isinstance(self.run.method, GossipMethod)
        return self.run.method

    def others(self, t: int) -> list[str]:
        """The other participants of round t."""
        return [name for name in self.membership.roster(t) if name != self.name]

    def listeners(self, t: int) -> list[str]:
        """The peers that will request our model of round t."""
        return [name for name, senders in self.graph(t).items() if self.name in senders]

    def graph(self, t: int) -> dict[str, list[str]]:
        """Return who hears whom in round t, which all peers derive from the seed. The last graph is cached."""
        roster = self.membership.roster(t)
        if self._last_graph is None or self._last_graph[:2] != (t, roster):
            self._last_graph = (t, roster, exchange_graph(self.run, t, roster))
        return self._last_graph[2]

    def on_reply(self, name: str, t: JSON) -> None:
        """Note a response of a peer and its current round, if given."""
        self.on_message(name, t)
        self.status.record_reply(name)
        if last := self._last_problem.pop(name, None):
            self.log("connected" if last[0] == "waiting" else "reconnected", {"peer": name})

    def log_problem(self, name: str, event: str, detail: str, reason: str | None = None) -> None:
        """Log a problem with a peer once, until it changes or ends."""
        last = self._last_problem.get(name)
        if (event, reason) == last or (reason == Refusal.BANNED and last and last[0] in ("refused", "spec mismatch")):
            return
        self._last_problem[name] = (event, reason)
        self.log(event, {"peer": name, "reason": reason, "detail": detail})

    def report_spec_mismatch(self, name: str, message: str) -> None:
        """Note that a peer's federation spec differs from ours, whichever side detected it."""
        self.status.mark_spec_mismatch(name, message)
        self.log_problem(name, "spec mismatch", message)

    def on_message(self, name: str, t: JSON) -> None:
        """Note a request or response of a peer and its current round, if given."""
        current = min(t, self.run.rounds) if isinstance(t, int) and t >= 0 else None  # the peer may report any number
        self.status.mark_seen(name, current, asyncio.get_running_loop().time())

    def sync_header(self) -> dict[str, JSON]:
        """The header of a sync request or response."""
        return {"spec": dict(self.spec), "current_round": self.status.round}

    async def offer(self) -> Offer:
        """What this peer passes on to others, prepared off the event loop, once per change."""

        def prepare() -> Offer:
            records, roster, last = self.membership.records(), self.membership.signed_roster(), self._offer
            is_same = last is not None and last.records is records and last.roster is roster
            return last if last is not None and is_same else Offer(records, roster)

        self._offer = await self.compute(prepare)
        return self._offer

    async def read_sync(self, sender: str, body: bytes) -> SyncMessage:
        """Parse a sync body and merge its records; refuse a malformed body and count forged records.

        Both run in the executor.
        """
        try:
            incoming = await self.compute(lambda: SyncMessage.read(body))
        except MessageError as problem:
            self.guard.count(sender, problem.refusal)
            raise Refused(problem.refusal, str(problem)) from None
        if records := incoming.records[: self.guard.allow_records(sender, len(incoming.records))]:
            for reason in await self.compute(lambda: self.membership.merge(records)) or ():
                self.guard.count(sender, reason)
        return incoming

    async def compute(self, work: Callable[[], T]) -> T:
        """Run a longer computation without blocking the event loop."""
        result: T = await self.executor(work)
        return result
