"""What the client and the server of a node share: members, published models, guard and status."""

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from dispfl.core.packed import PackedModel
from dispfl.errors import DispflError, MessageError, RunError
from dispfl.methods.base import PeerState
from dispfl.peer.membership.roster import Roster
from dispfl.peer.membership.sync import Offer, SyncMessage
from dispfl.peer.schedule import Schedule, announced_hours, announced_sleep
from dispfl.peer.setup.spec import fixed_entries, spec_difference
from dispfl.peer.setup.spec_versions import SpecVersions
from dispfl.peer.state.log import EventLog, PeerLog, shortened
from dispfl.peer.state.status import NodeStatus, announced_privacy
from dispfl.peer.transport.base import JSON, Refused
from dispfl.peer.transport.guard import RequestGuard
from dispfl.round.context import RunContext
from dispfl.round.exchange import (
    Graph,
    exchange_graph,
    exchange_row,
    gossip_senders,
    mixing_weights,
    spare_neighbours,
)
from dispfl.round.ledger import BYTES_PER_VALUE
from dispfl.wire.codec import Codec
from dispfl.wire.refusals import Refusal
from dispfl.wire.tensors import max_tensor_bytes

T = TypeVar("T")
MAX_INSTANCE_CHARS = 64
MODELS_PER_BUDGET = 50
"""Dense models that one peer may send and receive in a round: one, resumed 20 times, and more."""


class Membership(Protocol):
    """The members of the federation that this site has accepted."""

    def participants(self, t: int) -> list[str]:
        """The names of all participants of round t, including our own, sorted."""
        ...

    def kept_counts(self, name: str) -> Sequence[int] | None:
        """The number of weights that a member's mask keeps in each layer, by its announced density;
        None if that is unknown."""
        ...

    def join(self, t: int) -> None:
        """Announce that this site takes part from round t on."""
        ...

    def records(self) -> list[JSON]:
        """The signed records of this site, first, and of its members."""
        ...

    def roster(self) -> Roster | None:
        """The roster that this site has accepted, if any."""
        ...

    def merge(self, records: JSON) -> Collection[str] | None:
        """Verify and store records, on any thread. Return the reasons for refused records that no
        honest peer sends."""
        ...

    def lacks_roster(self, version: int, digest: str, administrators: str) -> bool:
        """Whether another peer's roster is newer than ours, or contradicts it."""
        ...

    def merge_roster(self, text: str) -> bool:
        """Verify and store a roster, on any thread; return whether it is new. May raise
        `MessageError`."""
        ...


class Participants:
    """Who takes part in a round, and who receives models from whom."""

    def __init__(
        self, name: str, versions: SpecVersions, membership: Membership, peer_log: PeerLog
    ) -> None:
        self._name = name
        self._versions = versions
        self._membership = membership
        self._log = peer_log
        self._last_names = [name]
        self._last_links: tuple[int, list[str], int, Graph, list[str]] | None = None
        self._problem: str | None = None
        """Why the last links could not be found."""

    def names(self, t: int) -> list[str]:
        """All participants of round t, sorted; the last ones read if the member list cannot be
        read."""
        try:
            self._last_names = self._membership.participants(t)
        except (DispflError, OSError) as problem:
            self._log.problem(self._name, "problem", str(problem))
        return self._last_names

    def other_names(self, t: int) -> list[str]:
        """All participants of round t but this one."""
        return [name for name in self.names(t) if name != self._name]

    def neighbours(self, t: int) -> list[str]:
        """The peers that we may receive from in round t."""
        graph, _ = self._links(t)
        return list(graph.get(self._name, []))

    def receivers(self, t: int) -> list[str]:
        """The peers that will contact us about our model of round t, beside those we choose."""
        _, receivers = self._links(t)
        spare_receivers = []
        for senders in self._spare_neighbours(t):
            spare_receivers += [peer for peer, sender in senders.items() if sender == self._name]
        return [*receivers, *spare_receivers]

    def spare_senders(self, t: int) -> list[str | None]:
        """The peers that take the place of choices that decline in round t, by place."""
        return [senders.get(self._name) for senders in self._spare_neighbours(t)]

    def senders(self, t: int, state: PeerState) -> list[str]:
        """The peers whose models we request in round t."""
        graph, _ = self._links(t)
        run = self._versions.at(t).run
        return list(gossip_senders(run, graph, self._name, t, state, self.names(t)))

    def chosen(self, t: int, state: PeerState) -> list[str]:
        """Those of them that are no neighbours: our method chooses them."""
        neighbours = self.neighbours(t)
        return [name for name in self.senders(t, state) if name not in neighbours]

    def mixing_weights(self, t: int) -> Mapping[str, float] | None:
        """How much each model counts in our average of round t; None: all the same."""
        run = self._versions.at(t).run
        names = self.names(t)
        return mixing_weights(run, t, exchange_graph(run, t, names), names).get(self._name)

    def _spare_neighbours(self, t: int) -> list[dict[str, str]]:
        if self.topology_problem(t) is not None:
            return []
        return spare_neighbours(self._versions.at(t).run, t, self.names(t))

    def topology_problem(self, t: int) -> str | None:
        """Why the topology does not say who our neighbours in round t are; None if it does."""
        self._links(t)
        return self._problem

    def _links(self, t: int) -> tuple[Graph, list[str]]:
        """Return whom we receive from in round t and who receives from us.

        All peers derive them from the seed. Those of the last round are cached.
        """
        names = self.names(t)
        version = self._versions.at(t)
        if self._last_links is not None and self._last_links[:3] == (t, names, version.number):
            return self._last_links[3:]
        self._problem = None
        try:
            graph, receivers = exchange_row(version.run, t, names, self._name)
        except Exception as problem:  # a user's own topology may not fit every set of peers
            self._problem = _sentence(problem)
            self._last_links = None
            return {self._name: []}, []
        self._last_links = (t, names, version.number, graph, receivers)
        return graph, receivers


def _sentence(problem: Exception) -> str:
    """Return an error's message, with its type where it is not a sentence of ours."""
    if isinstance(problem, DispflError):
        return str(problem)
    return f"{type(problem).__name__}: {problem}"


@dataclass
class _Published:
    model: PackedModel
    waiting: set[str]
    """Peers that receive it and have not fetched it yet."""
    chosen: frozenset[str]
    """Peers that we choose in this round, and that receive it if they choose us."""
    finished: float
    """When the model was finished, by the event loop's clock."""
    agreed: frozenset[str] | None = None
    """Those of them that choose us too; None until all have answered."""


class PublishedModels:
    """The models that other peers may request: those of the current and the last round, and older
    ones that are still needed."""

    MIN_ROUNDS = 2
    """Rounds that are always kept, for slower and restarted peers."""
    MAX_ROUNDS = 8
    """Rounds that are kept at most, which bounds the memory."""

    def __init__(self) -> None:
        self._rounds: dict[int, _Published] = {}
        self._changed = asyncio.Event()

    @property
    def oldest(self) -> int | None:
        """The oldest round that is kept; None before the first `publish`."""
        return min(self._rounds, default=None)

    def publish(
        self,
        t: int,
        model: PackedModel,
        receivers: Iterable[str],
        silent: Collection[str],
        chosen: Iterable[str] = (),
        finished: float = 0.0,
    ) -> None:
        """Publish the model of round t, and drop older ones that only `silent` peers wait for."""
        published = _Published(model, {*receivers, *chosen}, frozenset(chosen), finished)
        self._rounds[t] = published
        if not published.chosen:
            published.agreed = published.chosen
        for old in sorted(self._rounds):
            is_recent = old > t - self.MIN_ROUNDS
            is_needed = old > t - self.MAX_ROUNDS and self._rounds[old].waiting - set(silent)
            if not is_recent and not is_needed:
                del self._rounds[old]
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait_for(self, t: int, seconds: float) -> PackedModel | None:
        """Return the model of round t once it is published; None if it was dropped, or if that
        takes longer."""
        try:
            async with asyncio.timeout(seconds):
                while t not in self._rounds and not self.is_past(t):
                    await self._changed.wait()
        except TimeoutError:
            return None
        published = self._rounds.get(t)
        return published.model if published else None

    async def wait_for_newer(self, t: int, seconds: float) -> tuple[int, PackedModel] | None:
        """Return the newest model and its round, once it is newer than that of round t; None if
        that takes longer."""
        try:
            async with asyncio.timeout(seconds):
                while max(self._rounds, default=-1) <= t:
                    await self._changed.wait()
        except TimeoutError:
            return None
        newest = max(self._rounds)
        return newest, self._rounds[newest].model

    def chooses(self, t: int, name: str) -> bool:
        """Whether we choose a peer in round t, and have not given it up since."""
        if t not in self._rounds:
            return False
        published = self._rounds[t]
        if published.agreed is not None:
            return name in published.agreed
        return name in published.chosen

    def agree(self, t: int, names: Iterable[str]) -> None:
        """Note which of the peers that we choose in round t choose us too."""
        if t in self._rounds:
            self._rounds[t].agreed = frozenset(names)
            self._notify()

    async def wait_for_agreed(self, t: int, seconds: float) -> int | None:
        """Return how many choices of round t agree, once all have answered; None if that takes
        longer, or the round was dropped."""
        try:
            async with asyncio.timeout(seconds):
                while t in self._rounds and self._rounds[t].agreed is None:
                    await self._changed.wait()
        except TimeoutError:
            return None
        agreed = self._rounds[t].agreed if t in self._rounds else None
        return None if agreed is None else len(agreed)

    def finished(self, t: int) -> float:
        """When the model of round t, which is kept, was finished."""
        return self._rounds[t].finished

    def models(self) -> dict[int, PackedModel]:
        """The models that are kept, by round."""
        return {t: published.model for t, published in sorted(self._rounds.items())}

    async def wait_for_change(self, seconds: float) -> None:
        """Wait until another model is published, but not longer than this."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()

    def is_past(self, t: int) -> bool:
        """Whether round t was dropped or skipped."""
        return bool(self._rounds) and t < max(self._rounds) and t not in self._rounds

    def mark_fetched(self, t: int, receiver: str) -> None:
        """Note that a peer has received the model of round t completely."""
        if t in self._rounds:
            self._rounds[t].waiting.discard(receiver)

    def mark_stored(self, t: int) -> set[str]:
        """Note that all peers find the model of round t in our outbox; return those who have not
        fetched it before."""
        if t not in self._rounds:
            return set()
        published = self._rounds[t]
        receivers = published.waiting
        published.waiting = set()
        return receivers

    def pending(self) -> set[str]:
        """Peers that have not fetched a model that is still kept."""
        waiting: set[str] = set()
        for published in self._rounds.values():
            waiting |= published.waiting
        return waiting


async def run_inline(work: Callable[[], Any]) -> Any:
    """Run the work on the event loop's thread."""
    return work()


@dataclass
class NodeContext:
    """One node's settings, its view of the other peers, and its published models."""

    name: str
    run: RunContext
    """The context of the present round: a signed change of the spec may replace it."""
    codec: Codec
    versions: SpecVersions
    """The versions of the spec."""
    membership: Membership
    executor: Callable[[Callable[[], Any]], Awaitable[Any]] = run_inline
    """Runs encoding and verification off the event loop."""
    log: EventLog = lambda event, fields: None
    """Writes an event and its fields to the log."""
    status: NodeStatus = field(default_factory=NodeStatus)
    published: PublishedModels = field(default_factory=PublishedModels)
    guard: RequestGuard = field(default_factory=RequestGuard)
    """Shared with the transport, so that all refusals of a peer are counted together."""
    listening: str = ""
    """The listening address, for the log."""
    joining: bool = False
    """Whether this peer has just joined a running federation and has no model yet."""
    on_changed_settings: Callable[[RunContext], None] = lambda run: None
    """Called before the first round with changed settings."""
    instance: str = ""
    """A random name of this process, by which others notice a copy of the site; empty: none."""
    alone_rounds: int = 0
    """Consecutive rounds that this peer may train without a received model."""

    schedule: Schedule = field(default_factory=Schedule)
    """When this peer trains and exchanges models."""

    def __post_init__(self) -> None:
        self.peer_log = PeerLog(self.log)
        self.participants = Participants(self.name, self.versions, self.membership, self.peer_log)
        self.status.refused = self.guard.refused
        value_bytes = BYTES_PER_VALUE * self.codec.layout.size
        tensor_bytes = max_tensor_bytes(self.codec.tensors)
        self.guard.max_bytes += MODELS_PER_BUDGET * (value_bytes + tensor_bytes)
        self.members_with_newer_spec: set[str] = set()
        """Members to sync with first: they follow a version of the spec that we lack."""
        self.contact = asyncio.Event()
        """Set by every request of another peer."""
        self._contacts: dict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self._offer: Offer | None = None

    def contact_of(self, name: str) -> asyncio.Event:
        """An event that every request of this peer sets."""
        return self._contacts[name]

    def note_contact(self, name: str) -> None:
        """Note that a peer has sent a request."""
        self.status.peers[name].last_request = asyncio.get_running_loop().time()
        self.contact.set()
        if name in self._contacts:
            self._contacts[name].set()

    async def compute(self, work: Callable[[], T]) -> T:
        """Run a longer computation without blocking the event loop."""
        result: T = await self.executor(work)
        return result

    def about_us(self) -> dict[str, JSON]:
        """What we say of ourselves in sync messages and in responses."""
        about: dict[str, JSON] = {"current_round": self.status.round}
        about |= self.schedule.announcement()
        privacy = self.run.settings.privacy
        if privacy.enabled:
            is_left = not self.status.privacy_exhausted
            about["privacy"] = {"epsilon": privacy.epsilon, "delta": privacy.delta, "left": is_left}
        return about

    # versions of the spec

    @property
    def rounds(self) -> int:
        """The number of rounds, by the newest version of the spec."""
        return self.versions.latest.run.settings.rounds

    def spec_difference(self, sender: str, spec: Mapping[str, str], version: JSON) -> str | None:
        """Describe how a sender's spec differs from ours; None if both can take part.

        Sites with different versions of the spec exchange its changes first. What no change may
        touch is equal in all versions.
        """
        own_spec = dict(self.versions.latest.spec)
        if version != self.versions.latest.number:
            own_spec = fixed_entries(own_spec)
            spec = fixed_entries(spec)
        return spec_difference(own_spec, spec, f"at {self.name}", f"at {sender}")

    # what other peers say of themselves

    def note_message(self, name: str, t: JSON) -> None:
        """Note a request or response of a peer, and the round that it reports, if any."""
        reported_round = None
        if isinstance(t, int) and t >= 0:
            reported_round = min(t, self.rounds)  # a peer may report any number
        self.status.peers[name].mark_seen(reported_round, asyncio.get_running_loop().time())

    def note_instance(self, name: str, instance: JSON) -> None:
        """Note which process has sent a request, and log a site that runs twice."""
        if not isinstance(instance, str) or len(instance) > MAX_INSTANCE_CHARS:
            return
        peer = self.status.peers[name]
        was_cloned = peer.cloned
        peer.mark_instance(instance)
        if peer.cloned and not was_cloned:
            detail = f"two processes with the key of {name} run at the same time: one is a copy"
            self.peer_log.event(name, "cloned site", detail=detail)

    def _note_clone(self, name: str) -> None:
        """Note that a member has met another process with our key; it may be wrong."""
        if name in self.status.clone_seen_by:
            return
        self.status.clone_seen_by.append(name)
        detail = (
            f"{name} says that another process with this site's key runs, too. Stop one of them; if"
            " it is not yours, the key is stolen: have the others revoke this site."
        )
        self.peer_log.event(name, "cloned site", detail=detail)

    def note_revocation(self, name: str, message: str) -> None:
        """Note that a member says that it has revoked us."""
        self.status.peers[name].revocation = shortened(message)

    def note_response(self, name: str, header: Mapping[str, JSON]) -> None:
        """Note a peer's response, and what it says of itself: its round and its privacy."""
        if header.get("cloned") is True:
            self._note_clone(name)
        self.note_message(name, header.get("current_round"))
        peer = self.status.peers[name]
        peer.privacy = announced_privacy(header.get("privacy"))
        self.note_schedule(name, header)
        peer.mark_replied()
        self.peer_log.responded(name)

    def note_schedule(self, name: str, header: Mapping[str, JSON]) -> None:
        """Note the hours of a peer, and until when it sleeps, and log when that begins."""
        peer = self.status.peers[name]
        now = asyncio.get_running_loop().time()
        was_asleep = peer.is_asleep(now)
        seconds = announced_sleep(header.get("asleep_for"))
        peer.hours = announced_hours(header.get("hours"))
        peer.asleep_until = now + seconds if seconds else None
        if seconds and not was_asleep:
            self.peer_log.event(name, "asleep", seconds=round(seconds))

    def note_spec_mismatch(self, name: str, message: str) -> None:
        """Note that a peer's federation spec differs from ours, whichever side detected it."""
        peer = self.status.peers[name]
        peer.spec_mismatch = peer.spec_mismatch or shortened(message)
        self.peer_log.problem(name, "spec mismatch", message)

    # membership sync

    def sync_header(self) -> dict[str, JSON]:
        """The header of a sync request or response."""
        latest = self.versions.latest
        return {
            "spec": dict(latest.spec),
            "spec_version": latest.number,
            "instance": self.instance,
            **self.about_us(),
        }

    async def offer(self) -> Offer:
        """What this peer passes on to others, prepared off the event loop, once per change."""

        def prepare() -> Offer:
            records = self.membership.records()
            roster = self.membership.roster()
            changes = self.versions.changes()
            last = self._offer
            is_same_list = last is not None and last.records is records and last.roster is roster
            if last is not None and is_same_list and last.changes is changes:
                return last
            return Offer(records, roster, last, changes)

        self._offer = await self.compute(prepare)
        return self._offer

    async def read_sync(self, sender: str, body: bytes) -> SyncMessage:
        """Parse a sync body and merge its records, off the event loop.

        Refuses a malformed body and counts forged records.
        """
        try:
            message = await self.compute(lambda: SyncMessage.read(body))
        except MessageError as problem:
            self.guard.count(sender, problem.refusal)
            raise Refused(problem.refusal, str(problem)) from None

        allowed = self.guard.allow_records(sender, len(message.records))
        records = [record for record in message.records[:allowed] if self._is_possible(record)]
        if len(records) < allowed:
            self.guard.count(sender, Refusal.MALFORMED)
        if not records:
            return message

        try:
            forged = await self.compute(lambda: self.membership.merge(records))
        except (RunError, OSError) as problem:  # a full disk, say: the sender sends them again
            self.peer_log.problem(self.name, "problem", str(problem))
        else:
            for reason in forged or ():
                self.guard.count(sender, reason)
        return message

    def _is_possible(self, record: JSON) -> bool:
        """Whether a record's first round is one of the federation's, or the one after: never."""
        content = record.get("record") if isinstance(record, dict) else None
        first_round = content.get("first_round") if isinstance(content, dict) else None
        return not isinstance(first_round, int) or first_round <= self.rounds
