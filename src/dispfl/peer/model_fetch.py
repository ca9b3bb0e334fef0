"""One request for a neighbour's model: repeated until it is answered, checked, and timed."""

import asyncio
import contextlib
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dispfl.core.packed import Mask, PackedModel
from dispfl.core.staleness import MAX_AGE
from dispfl.core.tensors import total_bytes
from dispfl.errors import MessageError
from dispfl.peer.setup.spec_versions import SpecVersion
from dispfl.peer.transport.base import JSON, Refused, Request, Response, Unreachable
from dispfl.round.exchange import (
    check_answer,
    check_norm,
    decode_model,
    exchange_costs,
)
from dispfl.round.ledger import BYTES_PER_VALUE, MessageCost
from dispfl.wire.refusals import Refusal

if TYPE_CHECKING:
    from dispfl.peer.client import Client
    from dispfl.peer.node_context import NodeContext

MIN_BACKOFF = 0.1
MAX_BACKOFF = 2.0
"""Seconds between two requests to the same peer; doubled each time."""


@dataclass(frozen=True)
class SparePlace:
    """A place in which a neighbour may take that of a chosen peer."""

    number: int
    is_needed: bool
    """Whether a choice has declined; otherwise the neighbour is only told not to wait for us."""


@dataclass(frozen=True)
class ModelRequest:
    """The request of one round, the same for all neighbours but the spare ones."""

    t: int
    mask: Mask | None
    """Our next mask, if models are pulled under a mask."""
    body: bytes
    """The encoded mask."""
    norm: float
    """The norm of our own model."""
    began: float
    """When the round's requests began, by the event loop's clock."""
    chosen: frozenset[str] = frozenset()
    """Peers that are no neighbours: they are asked first whether they choose us too."""
    spare: SparePlace | None = None
    """The place of a spare neighbour, which may take that of a chosen peer."""


@dataclass
class RoundResponses:
    """The responses to the requests of one round."""

    requested: list[str]
    unasked: list[str] = field(default_factory=list)
    """Neighbours that were not requested again because they did not respond."""
    received: dict[str, PackedModel] = field(default_factory=dict)
    latencies: dict[str, float] = field(default_factory=dict)
    """By peer: seconds until its model arrived."""
    stale: list[str] = field(default_factory=list)
    """Peers that no longer keep the requested model."""
    declined: list[str] = field(default_factory=list)
    """Peers that we chose and that do not choose us, and spare neighbours whose places are
    taken."""
    without_model: list[str] = field(default_factory=list)
    """Peers that have no model of this round because they have just joined or restarted."""
    failures: dict[str, str] = field(default_factory=dict)
    """By peer: why the last request failed."""
    messages: list[MessageCost] = field(default_factory=list)
    """The costs of the requests and the received models."""

    def __post_init__(self) -> None:
        self.awaited = set(self.requested)
        """Peers that are worth waiting for until the deadline, because requests to them do not
        fail."""
        self.behind: set[str] = set()
        """Those of them that respond, but are still in an earlier round."""

    def take(
        self, name: str, model: PackedModel, latency: float, messages: Sequence[MessageCost]
    ) -> None:
        """Add a received model."""
        self.received[name] = model
        self.latencies[name] = latency
        self.messages += messages

    @property
    def waited(self) -> float:
        """Seconds until half of the received models had arrived: no slow peer extends them."""
        if not self.latencies:
            return 0.0
        return statistics.median_low(self.latencies.values())

    @property
    def expected(self) -> int:
        """How many of the requested models we are entitled to: those that were not declined."""
        return len(self.requested) - len(self.declined)

    @property
    def missed(self) -> list[str]:
        """Neighbours and other requested peers without a valid response."""
        answered = {*self.received, *self.declined}
        return [name for name in (*self.unasked, *self.requested) if name not in answered]

    @property
    def is_alone(self) -> bool:
        """Whether models were requested and none was received."""
        return bool(self.missed) and not self.received

    @property
    def is_stale(self) -> bool:
        """Whether more than half of the requested peers say that this round is long over."""
        return 2 * len(self.stale) > len(self.requested)

    @property
    def is_early(self) -> bool:
        """Whether more than half of the requested peers are still in an earlier round."""
        return 2 * len(self.behind) > len(self.requested)


class ModelFetch:
    """Fetches one neighbour's model of a round, with retries until its time is up.

    A peer that responds gets the whole deadline. An unreachable one is only retried for the probe
    timeout, and as long as others are waited for anyway: a node that waited longer for it would
    miss its own deadline at the others. One that was unreachable before is requested as soon as it
    answers a probe. A node that is ahead of most others waits for them: alone, it would run further
    and further ahead.
    """

    def __init__(
        self, client: "Client", sender: str, request: ModelRequest, responses: RoundResponses
    ) -> None:
        self.sender = sender
        self.responses = responses
        """Those of the current round, which may be a later one."""
        self.model: PackedModel | None = None
        """The model, once it has arrived."""
        self.latency = 0.0
        """Seconds until it arrived."""
        self.messages: tuple[MessageCost, ...] = ()
        self.is_declined = False
        """Whether the peer does not choose us, or has no place for us."""
        self.is_agreed = False
        """Whether the peer is chosen and chooses us too."""
        self._decided = asyncio.Event()
        """Set once it is known whether it does."""
        self._client = client
        self._ctx = client.ctx
        self._deadlines = client.deadlines
        self._peer = client.ctx.status.peers[sender]
        self._request = request
        self._version = client.ctx.versions.at(request.t)
        self._clock = asyncio.get_running_loop().time
        self._failing_since: float | None = None

        self.is_transferring = False
        """Whether its model has begun to arrive."""
        self.is_slow = self._peer.slow
        """Whether the round does not wait for this member because it is slow."""
        self._start_time()
        is_present = self._peer.is_usable and not self._sleeps_on
        self.is_awaited = is_present and not self.is_slow
        """Whether the round waits for this member."""
        if not self.is_awaited:
            responses.awaited.discard(sender)
        loop = asyncio.get_running_loop()
        self.settled: asyncio.Future[None] = loop.create_future()
        """Done when the round need not wait any longer: the request has ended, or its model still
        arrives at the deadline."""
        self.task = loop.create_task(self._run())
        self.task.add_done_callback(self._settle)

    def may_serve(self, t: int, version: SpecVersion) -> bool:
        """Whether the model may be used in round t, with this version of the spec."""
        if self.task.done() and self.model is None:
            return False
        is_recent = t - self._request.t <= MAX_AGE
        return is_recent and self._version.digest == version.digest

    @property
    def is_pending(self) -> bool:
        """Whether the round has to wait."""
        return self.is_awaited and not self.settled.done()

    @property
    def is_arriving(self) -> bool:
        """Whether the model is being transferred, however late."""
        return self.is_transferring and not self.task.done()

    def _settle(self, *_: object) -> None:
        """Let the round go on."""
        if not self.settled.done():
            self.settled.set_result(None)

    def _start_time(self) -> None:
        """Begin to count the time that this peer has."""
        now = self._clock()
        end = now + self._deadlines.deadline
        if self._request.spare is not None:  # the round has begun before
            end = self._request.began + self._deadlines.deadline
        if self._deadlines.may_be_starting(self._peer, now):
            end = max(end, self._deadlines.startup_until)
        self._began = now
        self._half_time = (now + end) / 2
        self._full_deadline = end
        """When the time of a peer that responds is up."""
        self._longest_wait = now + self._deadlines.patience
        """Until when peers that are behind are waited for."""

    async def _run(self) -> None:
        """Fetch the model; log the reason if that fails."""
        if not self._peer.is_usable:
            await self._client.prober.until_reachable(self.sender)
            self._start_time()
            self.is_awaited = not self.is_slow and not self._sleeps_on
        if self._sleeps_on:
            await self._until_awake()
            self._start_time()
            self.is_awaited = not self.is_slow
        replies_before = self._peer.replies
        try:
            async with asyncio.timeout_at(self._full_deadline) as self._timeout:
                self.model = await self._request_until_answered()
        except TimeoutError:
            self._note_latency()
            if self._peer.replies == replies_before:
                detail = self.responses.failures.get(self.sender, "no response by the deadline")
                self._mark_unreachable(detail)
            else:  # a slow peer, which is waited for again in the next round
                self._ctx.peer_log.event(self.sender, "late", round=self._request.t)
        except Refused as refused:
            await self._log_refusal(refused)
        except Exception as problem:  # a problem with one peer must not end the node
            self._client.members.mark_failed(self.sender, problem)
        finally:
            self._decided.set()
            self.responses.awaited.discard(self.sender)
            self.responses.behind.discard(self.sender)

        if self.model is not None:
            self._note_latency()

    def _note_latency(self) -> None:
        """Note how long the peer took, and log whether it has become slow or quick."""
        self.latency = self._clock() - self._began
        was_slow = self._peer.slow
        self._deadlines.note_latency(self._peer, self.latency)
        if self._peer.slow and not was_slow:
            detail = "rounds no longer wait for it; its models are used when they arrive"
            latency = self._peer.latency
            self._ctx.peer_log.event(self.sender, "slow", seconds=latency, detail=detail)
        elif was_slow and not self._peer.slow:
            self._ctx.peer_log.event(self.sender, "quick again", seconds=self._peer.latency)

    async def _request_until_answered(self) -> PackedModel | None:
        """Request the model until there is a response."""
        rng = self._client.rng
        pause = MIN_BACKOFF
        while True:
            nonce = f"{rng.getrandbits(128):032x}"
            try:
                response = await self._client.transport.request(self.sender, self._message(nonce))
            except Unreachable as problem:
                self.is_transferring = False
                self._note_failure(problem.detail)
                if not self._is_worth_retrying():
                    self._mark_unreachable(problem.detail)
                    return None
            except Refused as refused:
                is_resumed_too_often = refused.reason == Refusal.REPLAYED
                if not is_resumed_too_often and not await self._learns_new_spec(refused):
                    raise
            else:
                self._ctx.note_response(self.sender, response.header)
                self.responses.failures.pop(self.sender, None)
                status = response.header.get("status")
                if status == "stale":
                    self._note_stale()
                    return None
                if status == "asleep" and self._sleeps_on:
                    return None
                if status == "declined" and self._may_decline:
                    self._note_declined()
                    return None
                if status == "agreed" and self._asks_for_agreement:
                    self.is_agreed = True
                    self._decided.set()
                    continue
                if status not in ("wait", "asleep"):
                    return await self._decode(nonce, response)
                self._extend_wait()
            await asyncio.sleep(pause * (0.5 + rng.random()))
            pause = min(2 * pause, MAX_BACKOFF)

    @property
    def _sleeps_on(self) -> bool:
        """Whether the peer sleeps for longer than the shortest deadline.

        Clocks differ, so that of sites with the same hours some wake up a little later.
        """
        asleep_until = self._peer.asleep_until
        return asleep_until is not None and asleep_until > self._began + self._deadlines.min

    async def _until_awake(self) -> None:
        """Wait until the peer's hours begin, or until it contacts us: then it is awake again."""
        contact = self._ctx.contact_of(self.sender)
        while self._peer.is_asleep(self._clock()):
            contact.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(self._peer.asleep_until):
                    await contact.wait()

    async def _learns_new_spec(self, refused: Refused) -> bool:
        """Whether a refusal leads to a change of the spec that this peer has and we lacked."""
        if refused.reason != Refusal.SPEC_MISMATCH:
            return False
        versions = self._ctx.versions
        digest = versions.at(self._request.t).digest
        await self._client.members.sync([self.sender])
        return versions.at(self._request.t).digest != digest

    def _message(self, nonce: str) -> Request:
        version = self._ctx.versions.at(self._request.t)
        header: dict[str, JSON] = {
            "spec": version.digest,
            "spec_version": version.number,
            "round": self._request.t,
            "nonce": nonce,
        }
        if self._asks_for_agreement:
            return Request("choice", header, b"", on_alive=self._on_alive)
        body = self._request.body
        spare = self._request.spare
        if spare is not None:
            header["spare_place"] = spare.number
            header["needed"] = spare.is_needed
            if not spare.is_needed:
                body = b""
        return Request(
            "model", header, body, on_alive=self._on_alive, on_transfer=self._on_transfer
        )

    @property
    def _asks_for_agreement(self) -> bool:
        """Whether the next request asks a chosen peer if it chooses us too."""
        return self.sender in self._request.chosen and not self.is_agreed

    @property
    def _may_decline(self) -> bool:
        return self._asks_for_agreement or self._request.spare is not None

    async def decide(self) -> None:
        """Wait until a chosen peer has said whether it chooses us, too, for half of its time.

        Then it counts as if it had declined: the rest of the time is for spare neighbours. No round
        waits for slow and unreachable members.
        """
        if self.is_awaited:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(self._half_time):
                    await self._decided.wait()
        if not self._decided.is_set():
            self.is_declined = True
            self.task.cancel()

    def _on_alive(self) -> None:
        """Give a peer that begins to respond the whole deadline."""
        self._failing_since = None
        if self.is_awaited:
            self.responses.awaited.add(self.sender)
        with contextlib.suppress(RuntimeError):  # the time is up
            self._timeout.reschedule(self._full_deadline)

    def _on_transfer(self) -> None:
        """Let a model that has begun to arrive do so after the deadline, too.

        The round goes on without it: a later one averages it, as that of a slow member. It may take
        as long as the first round.
        """
        self.is_transferring = True
        asyncio.get_running_loop().call_at(self._full_deadline, self._settle)
        with contextlib.suppress(RuntimeError):  # the time is up
            self._timeout.reschedule(max(self._full_deadline, self._longest_wait))

    def _note_failure(self, detail: str) -> None:
        self.responses.failures[self.sender] = detail
        self._client.members.log_waiting(self.sender, detail)
        if self._failing_since is None:
            self._failing_since = self._clock()

    def _is_worth_retrying(self) -> bool:
        """Whether to retry an unreachable peer: drop it before our own deadline at others
        expires."""
        now = self._clock()
        if self._deadlines.may_be_starting(self._peer, now):
            return True
        self.responses.awaited.discard(self.sender)
        if self._peer.spec_mismatch:
            return False
        assert self._failing_since is not None
        is_in_time = now < self._failing_since + self._deadlines.probe_timeout
        return is_in_time or bool(self.responses.awaited)

    def _note_stale(self) -> None:
        if self._peer.round > self._request.t:
            self.responses.stale.append(self.sender)
        if self._peer.round == self._request.t + 1:  # such a peer keeps it, unless it restarted
            self.responses.without_model.append(self.sender)

    def _note_declined(self) -> None:
        """Note that the peer sends us nothing; one that does not choose us does not request our
        model either."""
        self.is_declined = True
        if self.sender in self._request.chosen:
            self._ctx.published.mark_fetched(self._request.t, self.sender)

    def _extend_wait(self) -> None:
        """Wait longer for a peer that has not published this round yet."""
        deadlines = self._deadlines
        responses = self.responses
        # It may itself wait for others until the startup period is over.
        self._full_deadline = max(self._full_deadline, deadlines.startup_until + deadlines.min)
        if self._peer.round < self._request.t:
            responses.behind.add(self.sender)
        if responses.is_early:
            longer = min(self._clock() + deadlines.deadline, self._longest_wait)
            self._full_deadline = max(self._full_deadline, longer)
        self._on_alive()

    async def _decode(self, nonce: str, response: Response) -> PackedModel | None:
        """Decode and check the model in a response; None if it is refused."""
        request = self._request
        received = await received_model(self._ctx, self.sender, request, response, nonce, request.t)
        if received is None:
            return None
        model, self.messages = received
        return model

    async def _log_refusal(self, refused: Refused) -> None:
        """Log a refusal; after a spec mismatch, a sync reports which setting differs."""
        ctx = self._ctx
        sender = self.sender
        peer = self._peer
        peer.refusals += 1
        if refused.reason == Refusal.JOINING:
            self.responses.without_model.append(sender)
        if refused.reason == Refusal.REVOKED:
            ctx.note_revocation(sender, refused.message)
        if refused.reason != Refusal.SPEC_MISMATCH:
            ctx.peer_log.problem(sender, "refused", refused.message, refused.reason)
        elif peer.spec_mismatch is None:
            replies_before = peer.replies
            await self._client.members.sync([sender])
            if peer.replies == replies_before:  # the sync did not succeed
                ctx.note_spec_mismatch(sender, refused.message)

    def _mark_unreachable(self, detail: str) -> None:
        """Drop the peer, and probe it from now on."""
        self._peer.mark_unreachable()
        self._client.prober.watch(self.sender)
        self._ctx.peer_log.problem(self.sender, "unreachable", detail)


async def received_model(
    ctx: "NodeContext", sender: str, request: ModelRequest, response: Response, nonce: str, t: int
) -> tuple[PackedModel, tuple[MessageCost, ...]] | None:
    """Decode and check the model of round t in a response; None if it is refused.

    Return it with the costs of the request and of the response.
    """
    kept_counts = ctx.membership.kept_counts(sender)

    def decode() -> PackedModel:
        model = decode_model(ctx.codec, response.body, request.mask)
        if kept_counts is not None:
            check_answer(model.mask, kept_counts, sender, ctx.codec.layout)
        return model

    try:
        if (response.header.get("round"), response.header.get("nonce")) != (t, nonce):
            raise MessageError(
                Refusal.WRONG_RESPONSE, f"{sender}'s response belongs to another request."
            )
        model = await ctx.compute(decode)
        check_norm(model, request.norm, sender)
        values = _published_values(ctx, sender, response, model, kept_counts)
    except MessageError as problem:
        ctx.guard.count(sender, problem.refusal)
        ctx.peer_log.event(sender, "bad response", round=t, detail=str(problem))
        return None

    # Count the request and its response, a model of so many values.
    peer = ctx.status.peers[sender]
    peer.sent_bytes += len(request.body)
    peer.received_bytes += len(response.body)
    paper = BYTES_PER_VALUE * values + total_bytes(ctx.codec.tensors)
    costs = exchange_costs(ctx.name, sender, len(request.body), paper, len(response.body))
    return model, tuple(costs)


def _published_values(
    ctx: "NodeContext",
    sender: str,
    response: Response,
    model: PackedModel,
    kept_counts: Sequence[int] | None,
) -> int:
    """Return how many values the sender's model has, of which we requested a part.

    It says so itself, and is believed as far as what it sent and announced allows.
    """
    stated = response.header.get("values")
    if not isinstance(stated, int) or isinstance(stated, bool):
        raise MessageError(
            Refusal.MALFORMED, f"{sender}'s response lacks the number of its values."
        )
    most = ctx.codec.layout.size if kept_counts is None else sum(kept_counts)
    return min(max(stated, model.values.numel()), most)
