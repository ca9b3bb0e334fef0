"""The client half of a node: fetches the neighbours' models of a round, and syncs members."""

import asyncio
import contextlib
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from dispfl.core.packed import PackedMask, PackedModel
from dispfl.errors import MessageError
from dispfl.methods.base import PeerState
from dispfl.peer.membership.sync import SyncMessage, check_part, check_progress, request_roster
from dispfl.peer.node_context import NodeContext
from dispfl.peer.setup.site_config import Deadlines
from dispfl.peer.transport.base import JSON, Refused, Request, Response, Transport, Unreachable
from dispfl.round.exchange import check_answer, check_norm, decode_model, model_norm, requested_mask
from dispfl.wire.refusals import Refusal

MIN_BACKOFF, MAX_BACKOFF = 0.1, 2.0
"""Seconds between two requests to the same peer; doubled each time."""
GREETINGS = 32
"""Members that a starting node greets at most."""


@dataclass(frozen=True)
class ModelRequest:
    """The request of one round, the same for all neighbours."""

    t: int
    mask: PackedMask | None
    """Our next mask, if models are pulled under a mask."""
    body: bytes
    """The encoded mask."""
    norm: float
    """The norm of our own model."""


@dataclass
class RoundResponses:
    """The responses to the requests of one round."""

    requested: list[str]
    received: dict[str, PackedModel] = field(default_factory=dict)
    arrived: float | None = None
    """When the last model arrived, by the event loop's clock."""
    stale: list[str] = field(default_factory=list)
    """Peers that no longer keep the requested model."""
    failures: dict[str, str] = field(default_factory=dict)
    """By peer: why the last request failed."""

    def __post_init__(self) -> None:
        self.awaited = set(self.requested)
        """Peers that are worth waiting for until the deadline, because requests to them do not
        fail."""
        self.behind: set[str] = set()
        """Those of them that respond, but are still in an earlier round."""

    @property
    def missed(self) -> list[str]:
        """Peers without a valid response."""
        return [name for name in self.requested if name not in self.received]

    @property
    def is_stale(self) -> bool:
        """Whether more than half of the requested peers say that this round is long over."""
        return 2 * len(self.stale) > len(self.requested)

    @property
    def is_early(self) -> bool:
        """Whether more than half of the requested peers are still in an earlier round."""
        return 2 * len(self.behind) > len(self.requested)


@dataclass
class Client:
    """Sends one node's requests."""

    ctx: NodeContext
    transport: Transport
    deadlines: Deadlines
    rng: random.Random
    startup_until: float = 0.0
    """The end of the startup period, in which peers that never responded, or are behind, are waited
    for."""
    awaits_unseen: bool = True
    """Whether peers that never responded may still be starting."""

    def start(self, *, joining: bool = False) -> None:
        """Begin the startup period; in a running federation only peers that respond are waited for
        so long."""
        self.startup_until = asyncio.get_running_loop().time() + self.deadlines.startup
        if joining:
            self.awaits_unseen, self.deadlines.startup = False, self.deadlines.min

    @property
    def has_started_up(self) -> bool:
        """Whether the startup period is over."""
        return asyncio.get_running_loop().time() >= self.startup_until

    def greeted(self, t: int) -> list[str]:
        """The members that a node greets when it starts: this round's neighbours and a few others,
        not a thousand."""
        others = self.ctx.others(self.ctx.run.rounds - 1)  # also those that have joined meanwhile
        neighbours = self.ctx.neighbours(t)[:GREETINGS]
        rest = sorted(set(others) - set(neighbours))
        return neighbours + self.rng.sample(rest, min(len(rest), GREETINGS - len(neighbours)))

    async def current_round(self, t: int) -> int:
        """Ask some members for their round; return the median of what they say, the lower one of
        two, or t."""
        asked = self.greeted(t)
        before = {name: self.ctx.status.replies_of(name) for name in asked}
        await self.sync_members(asked)
        claims = [
            self.ctx.status.round_of(name)
            for name in asked
            if self.ctx.status.replies_of(name) > before[name]
        ]
        return max(t, statistics.median_low(claims)) if claims else t

    async def fetch_models(self, t: int, state: PeerState) -> RoundResponses:
        """Algorithm 1, line 6: fetch the models of this round's neighbours that respond by the
        deadline."""
        ctx = self.ctx
        mask = requested_mask(ctx.run, state)
        body = b"" if mask is None else await ctx.compute(lambda: ctx.codec.encode_request(mask))
        request = ModelRequest(t, mask, body, model_norm(state.model))
        responses = RoundResponses(ctx.senders(t, state))
        async with asyncio.TaskGroup() as group:
            for sender in responses.requested:
                group.create_task(self._fetch_from(sender, request, responses))
            if reachable := [name for name in ctx.others(t) if not ctx.status.is_silent(name)]:
                group.create_task(
                    self.sync_members([self.rng.choice(reachable)])
                )  # spreads records of members
        return responses

    async def _fetch_from(
        self, sender: str, request: ModelRequest, responses: RoundResponses
    ) -> None:
        """Fetch one neighbour's model by the deadline; an unreachable or mismatched peer gets the
        probe timeout."""
        ctx, model = self.ctx, None
        spec_mismatch, replies_before = (
            ctx.status.spec_mismatch(sender) is not None,
            ctx.status.replies_of(sender),
        )
        unreachable = ctx.status.is_unreachable(sender) or spec_mismatch
        seconds = self.deadlines.probe_timeout if unreachable else self.deadlines.deadline
        if unreachable:
            responses.awaited.discard(sender)
        elif self._may_be_starting(sender):
            seconds = max(seconds, self.startup_until - asyncio.get_running_loop().time())
        try:
            async with asyncio.timeout(seconds) as limit:
                model = await self._request_model(
                    sender, request, responses, limit, retry=not unreachable
                )
        except TimeoutError:
            if (
                ctx.status.replies_of(sender) == replies_before
            ):  # a slow peer is waited for again in the next round
                self._mark_unreachable(
                    sender, responses.failures.get(sender, "no response by the deadline")
                )
            else:
                ctx.log_about(sender, "late", round=request.t)
        except Refused as refused:
            await self._on_refused(sender, refused)
        except Exception as problem:  # whatever concerns one peer must not end the node
            self._on_failure(sender, problem)
        responses.awaited.discard(sender)
        responses.behind.discard(sender)
        if model is None:
            ctx.status.record_miss(sender)
            return
        ctx.status.record_answer(sender)
        responses.received[sender] = model
        responses.arrived = asyncio.get_running_loop().time()

    async def _request_model(
        self,
        sender: str,
        request: ModelRequest,
        responses: RoundResponses,
        limit: asyncio.Timeout,
        *,
        retry: bool,
    ) -> PackedModel | None:
        """Request the model until there is a response, or once if `retry` is false; `limit` ends
        the attempts.

        A peer that responds gets the whole deadline. Whoever waits that long for one that cannot be
        reached is late for others, so such a peer is only retried for the probe timeout, and as
        long as others are waited for anyway. A site that is ahead of most others waits for them:
        alone, it would run further and further ahead.
        """
        ctx, deadlines, pause, clock = (
            self.ctx,
            self.deadlines,
            MIN_BACKOFF,
            asyncio.get_running_loop().time,
        )
        whole, failing_since = max(limit.when() or 0.0, clock() + deadlines.deadline), None
        longest = clock() + deadlines.patience

        def on_alive() -> None:
            nonlocal failing_since
            failing_since = None
            responses.awaited.add(sender)
            with contextlib.suppress(RuntimeError):  # the time is up
                limit.reschedule(whole)

        while True:
            is_failing = failing_since is not None or not retry
            hold = (deadlines.probe_timeout if is_failing else deadlines.deadline) / 2
            nonce = f"{self.rng.getrandbits(128):032x}"
            header: dict[str, JSON] = {
                "spec": ctx.spec_digest,
                "round": request.t,
                "nonce": nonce,
                "hold": hold,
            }
            asked = Request("model", header, request.body, on_alive=on_alive)
            try:
                response = await self.transport.request(sender, asked)
            except Unreachable as problem:
                responses.failures[sender] = problem.detail
                self._log_waiting(sender, problem.detail)
                failing_since = clock() if failing_since is None else failing_since
                if not self._may_be_starting(sender):
                    responses.awaited.discard(sender)
                    tried_enough = (
                        clock() >= failing_since + deadlines.probe_timeout and not responses.awaited
                    )
                    if tried_enough or not retry or ctx.status.spec_mismatch(sender):
                        self._mark_unreachable(sender, problem.detail)
                        return None
            except Refused as refused:
                if (
                    refused.reason != Refusal.REPLAYED
                ):  # a response that was resumed too often: send a new request
                    raise
            else:
                ctx.on_reply(sender, response.header)
                responses.failures.pop(sender, None)
                if response.header.get("status") == "stale":
                    responses.stale += [sender] if ctx.status.round_of(sender) > request.t else []
                    return None
                if response.header.get("status") != "wait":
                    return await self._decode(sender, request, nonce, response)
                whole = max(
                    whole, self.startup_until + deadlines.min
                )  # it may wait for others until startup is over
                if ctx.status.round_of(sender) < request.t:
                    responses.behind.add(sender)
                whole = (
                    max(whole, min(clock() + deadlines.deadline, longest))
                    if responses.is_early
                    else whole
                )
                on_alive()
            await asyncio.sleep(pause * (0.5 + self.rng.random()))
            pause = min(2 * pause, MAX_BACKOFF)

    def _may_be_starting(self, name: str) -> bool:
        """Whether a peer cannot be reached because people are still starting sites, or this one
        again."""
        status, is_over = self.ctx.status, self.has_started_up or not self.awaits_unseen
        has_run = status.was_seen(name) and not self.deadlines.is_first_round
        return not (is_over or has_run or status.is_unreachable(name) or status.spec_mismatch(name))

    async def _decode(
        self, sender: str, request: ModelRequest, nonce: str, response: Response
    ) -> PackedModel | None:
        """Decode and check the model in a response; None if it is refused."""
        ctx, mask = self.ctx, request.mask
        try:
            if (response.header.get("round"), response.header.get("nonce")) != (request.t, nonce):
                raise MessageError(
                    Refusal.WRONG_RESPONSE, f"{sender}'s response belongs to another request."
                )
            model = await ctx.compute(lambda: decode_model(ctx.codec, response.body, mask))
            if (announced := ctx.membership.kept(sender)) is not None:
                await ctx.compute(
                    lambda: check_answer(model.mask, announced, sender, ctx.codec.layout)
                )
            check_norm(model, request.norm, sender)
        except MessageError as problem:
            ctx.guard.count(sender, problem.refusal)
            ctx.log_about(sender, "bad response", round=request.t, detail=str(problem))
            return None
        values = model.values.numel() if announced is None else sum(announced)
        ctx.status.record_received(
            ctx.name, sender, request.t, len(request.body), len(response.body), values
        )
        return model

    async def sync_members(self, names: Sequence[str]) -> None:
        """Compare federation specs with these peers, exchange own records, and fetch what they have
        and we lack.

        One after the other, because what one of them sends, the others need not send again.
        """
        greetings: dict[str, SyncMessage] = {}
        async with asyncio.TaskGroup() as group:
            for name in names:
                group.create_task(self._greet(name, greetings))
        clock = asyncio.get_running_loop().time
        until = clock() + self.deadlines.min  # the rest is fetched at the next sync
        for name in self.rng.sample(sorted(greetings), len(greetings)):
            with self._problems_logged(name):
                async with asyncio.timeout(max(0.0, until - clock())):
                    await self._fetch_roster(name, greetings[name])
                    await self._fetch_records(name, greetings[name])

    async def _greet(self, name: str, greetings: dict[str, SyncMessage]) -> None:
        with self._problems_logged(name):
            async with asyncio.timeout(self.deadlines.probe_timeout):
                greetings[name] = await self._sync(name, (await self.ctx.offer()).greeting())

    async def _sync(self, name: str, body: bytes) -> SyncMessage:
        """Send one sync request and merge the records in the response."""
        response = await self.transport.request(name, Request("sync", self.ctx.sync_header(), body))
        self.ctx.on_reply(name, response.header)
        return await self.ctx.read_sync(name, response.body)

    async def _fetch_records(self, name: str, greeting: SyncMessage) -> None:
        """Fetch the records that we lack, in pages."""
        if greeting.state in (None, (await self.ctx.offer()).state):
            return
        after: str | None = ""
        while after is not None:
            page = await self._sync(name, (await self.ctx.offer()).request_after(after))
            check_progress(page, after)
            after = page.next

    async def _fetch_roster(self, name: str, greeting: SyncMessage) -> None:
        """Fetch a roster that is newer than ours, or contradicts it, in parts."""
        if greeting.roster is None or not self.ctx.membership.lacks_roster(*greeting.roster):
            return
        parts: list[str] = []
        size = 1
        while sum(map(len, parts)) < size:
            response = await self._sync(name, request_roster(parts))
            check_part(response, parts)
            parts.append(response.part)
            size = response.size
        await self.ctx.compute(lambda: self.ctx.membership.merge_roster("".join(parts)))

    @contextlib.contextmanager
    def _problems_logged(self, name: str) -> Iterator[None]:
        """Log why a sync with a peer failed."""
        try:
            yield
        except Refused as refused:
            self.ctx.status.record_refusal(name)
            if refused.reason == Refusal.SPEC_MISMATCH:
                self.ctx.report_spec_mismatch(name, refused.message)
            else:
                self.ctx.log_problem(name, "refused", refused.message, refused.reason)
        except TimeoutError:
            self._log_waiting(name, "no response in time")
        except Unreachable as problem:
            self._log_waiting(name, problem.detail)
        except MessageError as problem:
            self.ctx.guard.count(name, problem.refusal)
            self.ctx.log_about(name, "sync failed", detail=str(problem))
        except Exception as problem:  # as above
            self._on_failure(name, problem)

    async def _on_refused(self, name: str, refused: Refused) -> None:
        """Log a refusal; after a spec mismatch, a sync tells which setting differs."""
        self.ctx.status.record_refusal(name)
        if refused.reason != Refusal.SPEC_MISMATCH:
            self.ctx.log_problem(name, "refused", refused.message, refused.reason)
        elif self.ctx.status.spec_mismatch(name) is None:
            replies_before = self.ctx.status.replies_of(name)
            await self.sync_members([name])
            if self.ctx.status.replies_of(name) == replies_before:  # the sync did not succeed
                self.ctx.report_spec_mismatch(name, refused.message)

    def _on_failure(self, name: str, problem: Exception) -> None:
        """Continue without a peer that cannot be requested because of an unexpected error, for
        example its address."""
        self.ctx.status.mark_unreachable(name)
        self.ctx.log_problem(name, "failed", f"{type(problem).__name__}: {problem}")

    def _log_waiting(self, name: str, detail: str) -> None:
        """Log that a peer is waited for, if it never responded: it may still be starting."""
        if not self.ctx.status.was_seen(name) and not self.ctx.status.is_unreachable(name):
            self.ctx.log_problem(name, "waiting", detail)

    def _mark_unreachable(self, name: str, detail: str) -> None:
        """Give up on a peer; until it responds again, it only gets the probe timeout."""
        self.ctx.status.mark_unreachable(name)
        self.ctx.log_problem(name, "unreachable", detail)
