"""What the client and the server of a node share."""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from dispfl.core.packed import PackedModel
from dispfl.errors import DispflError, MessageError, RunError
from dispfl.methods.base import GossipMethod, PeerState
from dispfl.peer.membership.roster import Roster
from dispfl.peer.membership.sync import Offer, SyncMessage
from dispfl.peer.setup.spec import FederationSpec, spec_digest
from dispfl.peer.state.log import shortened
from dispfl.peer.state.status import NodeStatus, announced_privacy
from dispfl.peer.transport.base import JSON, Refused
from dispfl.peer.transport.guard import RequestGuard
from dispfl.round.context import RunContext
from dispfl.round.exchange import Graph, exchange_row, gossip_senders
from dispfl.round.ledger import BYTES_PER_VALUE
from dispfl.wire.codec import Codec
from dispfl.wire.refusals import Refusal


@dataclass
class _Published:
    model: PackedModel
    waiting: set[str]
    """Peers that receive it and have not fetched it yet."""


class PublishedModels:
    """A peer's published models, by round."""

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
        self, t: int, model: PackedModel, listeners: Iterable[str], gone: Callable[[str], bool]
    ) -> None:
        """Publish the model of round t, and drop older ones that no peer needs; a peer that is
        `gone` needs none."""
        self._rounds[t] = _Published(model, set(listeners))
        for old in sorted(self._rounds):
            wanted = old > t - self.MAX_ROUNDS and not all(map(gone, self._rounds[old].waiting))
            if old <= t - self.MIN_ROUNDS and not wanted:
                del self._rounds[old]
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait_for(self, t: int, seconds: float) -> PackedModel | None:
        """Return the model of round t once it is published; None if that takes longer, or the model
        was dropped."""
        try:
            async with asyncio.timeout(seconds):
                while t not in self._rounds and not self.is_past(t):
                    await self._changed.wait()
        except TimeoutError:
            return None
        found = self._rounds.get(t)
        return found.model if found else None

    def is_past(self, t: int) -> bool:
        """Whether round t was dropped or skipped."""
        return bool(self._rounds) and t < max(self._rounds) and t not in self._rounds

    def mark_fetched(self, t: int, listener: str) -> None:
        """Note that a peer has received the model of round t completely."""
        if t in self._rounds:
            self._rounds[t].waiting.discard(listener)

    def pending(self) -> set[str]:
        """Peers that have not fetched a model that is still kept."""
        return {name for published in self._rounds.values() for name in published.waiting}


T = TypeVar("T")
LOG_WINDOW = 3600.0
MAX_LINES = 100
"""Lines about one peer that are logged within `LOG_WINDOW` seconds."""
_REASONS = frozenset(map(str, Refusal))


class Membership(Protocol):
    """The members of the federation that this site has accepted."""

    def roster(self, t: int) -> list[str]:
        """The names of all participants of round t, including our own, sorted."""
        ...

    def kept(self, name: str) -> Sequence[int] | None:
        """The number of weights that a member's mask keeps in each layer, by its announced density;
        None if unknown."""
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
        self._offer: Offer | None = None
        self.guard.max_bytes += (
            50 * BYTES_PER_VALUE * self.codec.layout.size
        )  # a model, resumed 20 times, and more
        self._problems: dict[str, set[tuple[str, str | None]]] = defaultdict(set)
        """By peer: events and reasons of the problems since it last responded."""
        self._lines: dict[str, tuple[float, int, int]] = {}
        """By peer: the start of its current hour, the lines that were logged about it since, and
        those left out."""
        self._last_roster = [self.name]
        self._last_row: tuple[int, list[str], tuple[Graph, list[str]]] | None = None

    @property
    def method(self) -> GossipMethod:
        """The method, which is a gossip method."""
        assert isinstance(self.run.method, GossipMethod)
        return self.run.method

    def roster(self, t: int) -> list[str]:
        """All participants of round t, sorted; the last known ones while the member list cannot be
        read."""
        try:
            self._last_roster = self.membership.roster(t)
        except (DispflError, OSError) as problem:
            self.log_problem(self.name, "problem", str(problem))
        return self._last_roster

    def others(self, t: int) -> list[str]:
        """The other participants of round t."""
        return [name for name in self.roster(t) if name != self.name]

    def neighbours(self, t: int) -> list[str]:
        """The peers that we may receive from in round t."""
        return list(self._row(t)[0].get(self.name, []))

    def listeners(self, t: int) -> list[str]:
        """The peers that will request our model of round t."""
        return self._row(t)[1]

    def senders(self, t: int, state: PeerState) -> list[str]:
        """The peers whose models we request in round t."""
        return list(gossip_senders(self.run, self._row(t)[0], self.name, t, state, self.roster(t)))

    def _row(self, t: int) -> tuple[Graph, list[str]]:
        """Return whom we receive from in round t and who receives from us, which all peers derive
        from the seed; the last is cached."""
        roster = self.roster(t)
        if self._last_row is None or self._last_row[:2] != (t, roster):
            try:
                row = exchange_row(self.run, t, roster, self.name)
            except Exception as problem:  # a user's own topology may not fit every roster
                self.log(
                    "problem",
                    {"round": t, "detail": f"No neighbours: {type(problem).__name__}: {problem}"},
                )
                row = {self.name: []}, []
            self._last_row = (t, roster, row)
        return self._last_row[2]

    def on_reply(self, name: str, header: Mapping[str, JSON]) -> None:
        """Note a response of a peer and what it says of itself: its current round and its privacy,
        if given."""
        self.on_message(name, header.get("current_round"))
        self.status.peers[name].privacy = announced_privacy(header.get("privacy"))
        self.status.record_reply(name)
        if problems := self._problems.pop(name, None):
            is_new = all(event == "waiting" for event, _ in problems)
            self.log_about(name, "connected" if is_new else "reconnected")

    def log_problem(self, name: str, event: str, detail: str, reason: str | None = None) -> None:
        """Log a problem with a peer once, until the peer responds; a peer may give any text as a
        reason."""
        known = reason if reason is None or reason in _REASONS else "unknown"
        problems = self._problems[name]
        is_repeated = (event, known) in problems or (
            reason == Refusal.BANNED
            and any(earlier in ("refused", "spec mismatch") for earlier, _ in problems)
        )
        problems.add((event, known))
        if not is_repeated:
            self.log_about(name, event, reason=known, detail=detail)

    def log_about(self, name: str, event: str, **fields: object) -> None:
        """Log an event that a peer has caused; of very many, which would fill the disk, only the
        number is logged."""
        now = asyncio.get_running_loop().time()
        start, lines, omitted = self._lines.get(name, (now, 0, 0))
        start, lines = (now, 0) if now - start >= LOG_WINDOW else (start, lines)
        if lines < MAX_LINES:
            texts = {
                key: shortened(value) if isinstance(value, str) else value
                for key, value in fields.items()
            }
            self.log(event, {"peer": name, **texts, "omitted": omitted or None})
        self._lines[name] = (start, lines + 1, 0 if lines < MAX_LINES else omitted + 1)

    def report_spec_mismatch(self, name: str, message: str) -> None:
        """Note that a peer's federation spec differs from ours, whichever side detected it."""
        self.status.mark_spec_mismatch(name, shortened(message))
        self.log_problem(name, "spec mismatch", message)

    def on_message(self, name: str, t: JSON) -> None:
        """Note a request or response of a peer and its current round, if given."""
        current = (
            min(t, self.run.rounds) if isinstance(t, int) and t >= 0 else None
        )  # the peer may report any number
        self.status.mark_seen(name, current, asyncio.get_running_loop().time())

    def about_us(self) -> dict[str, JSON]:
        """What we say of ourselves in sync messages and in responses."""
        about: dict[str, JSON] = {"current_round": self.status.round}
        privacy = self.run.privacy
        if privacy.enabled:
            left = not self.status.privacy_exhausted
            about["privacy"] = {"epsilon": privacy.epsilon, "delta": privacy.delta, "left": left}
        return about

    def sync_header(self) -> dict[str, JSON]:
        """The header of a sync request or response."""
        return {"spec": dict(self.spec), **self.about_us()}

    async def offer(self) -> Offer:
        """What this peer passes on to others, prepared off the event loop, once per change."""

        def prepare() -> Offer:
            records, roster, last = (
                self.membership.records(),
                self.membership.signed_roster(),
                self._offer,
            )
            is_same = last is not None and last.records is records and last.roster is roster
            return last if last is not None and is_same else Offer(records, roster, last)

        self._offer = await self.compute(prepare)
        return self._offer

    async def read_sync(self, sender: str, body: bytes) -> SyncMessage:
        """Parse a sync body and merge its records; refuse a malformed body and count forged
        records.

        Both run in the executor.
        """
        try:
            incoming = await self.compute(lambda: SyncMessage.read(body))
        except MessageError as problem:
            self.guard.count(sender, problem.refusal)
            raise Refused(problem.refusal, str(problem)) from None
        allowed = incoming.records[: self.guard.allow_records(sender, len(incoming.records))]
        records = [record for record in allowed if self._has_valid_first_round(record)]
        if len(records) < len(allowed):
            self.guard.count(sender, Refusal.MALFORMED)
        try:
            for reason in (
                await self.compute(lambda: self.membership.merge(records)) if records else None
            ) or ():
                self.guard.count(sender, reason)
        except (
            RunError,
            OSError,
        ) as problem:  # our own disk is full, for example: the sender sends them again
            self.log_problem(self.name, "problem", str(problem))
        return incoming

    def _has_valid_first_round(self, record: JSON) -> bool:
        """Whether a record's first round is one of the federation's, or the one after, which means
        never."""
        content = record.get("record") if isinstance(record, dict) else None
        first_round = content.get("first_round") if isinstance(content, dict) else None
        return not isinstance(first_round, int) or first_round <= self.run.rounds

    async def compute(self, work: Callable[[], T]) -> T:
        """Run a longer computation without blocking the event loop."""
        result: T = await self.executor(work)
        return result
