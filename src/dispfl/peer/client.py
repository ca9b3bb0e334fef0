"""The client half of a node: fetches the models of a round's neighbours."""

import asyncio
import contextlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from dispfl.core.packed import Mask, PackedModel
from dispfl.errors import MessageError
from dispfl.methods.base import PeerState
from dispfl.peer.deadlines import Deadlines
from dispfl.peer.member_sync import MemberSync
from dispfl.peer.node_context import NodeContext
from dispfl.peer.transport.base import JSON, Refused, Request, Response, Transport, Unreachable
from dispfl.round.exchange import (
    check_answer,
    check_norm,
    decode_model,
    exchange_costs,
    model_norm,
    requested_mask,
)
from dispfl.round.ledger import BYTES_PER_VALUE, MessageCost
from dispfl.wire.refusals import Refusal

MIN_BACKOFF = 0.1
MAX_BACKOFF = 2.0
"""Seconds between two requests to the same peer; doubled each time."""


@dataclass(frozen=True)
class ModelRequest:
    """The request of one round, the same for all neighbours."""

    t: int
    mask: Mask | None
    """Our next mask, if models are pulled under a mask."""
    body: bytes
    """The encoded mask."""
    norm: float
    """The norm of our own model."""


@dataclass
class RoundResponses:
    """The responses to the requests of one round."""

    requested: list[str]
    unasked: list[str] = field(default_factory=list)
    """Neighbours that were not requested again because they did not respond."""
    received: dict[str, PackedModel] = field(default_factory=dict)
    waited: float = 0.0
    """Seconds until the last model arrived."""
    stale: list[str] = field(default_factory=list)
    """Peers that no longer keep the requested model."""
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

    @property
    def missed(self) -> list[str]:
        """Neighbours and other requested peers without a valid response."""
        return [name for name in (*self.unasked, *self.requested) if name not in self.received]

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


@dataclass
class Client:
    """Sends one node's requests."""

    ctx: NodeContext
    transport: Transport
    deadlines: Deadlines
    rng: random.Random

    def __post_init__(self) -> None:
        self.members = MemberSync(self.ctx, self.transport, self.deadlines, self.rng)

    async def fetch_models(
        self, t: int, state: PeerState, senders: Sequence[str] | None = None
    ) -> RoundResponses:
        """Algorithm 1, line 6: fetch the models of this round's neighbours that respond by the
        deadline.

        They are requested from other `senders` where the neighbours do not respond.
        """
        ctx = self.ctx
        mask = requested_mask(ctx.run, state)
        body = b""
        if mask is not None:
            body = await ctx.compute(lambda: ctx.codec.encode_request(mask))
        request = ModelRequest(t, mask, body, model_norm(state.model))

        neighbours = ctx.participants.senders(t, state)
        senders = neighbours if senders is None else senders
        unasked = [name for name in neighbours if name not in senders]
        responses = RoundResponses(list(senders), unasked)
        async with asyncio.TaskGroup() as group:
            for sender in senders:
                group.create_task(ModelFetch(self, sender, request, responses).run())
            group.create_task(self.members.sync(self._member_to_sync_with(t)))
        return responses

    def _member_to_sync_with(self, t: int) -> list[str]:
        """Choose a random reachable member, if there is one, to spread the records of members.

        Those who follow a version of the spec that we lack come first.
        """
        newer = sorted(self.ctx.members_with_newer_spec)
        self.ctx.members_with_newer_spec.clear()
        if newer:
            return newer[:1]
        silent_peers = self.ctx.status.silent_peers
        other_names = self.ctx.participants.other_names(t)
        reachable = [name for name in other_names if name not in silent_peers]
        return self.rng.sample(reachable, min(1, len(reachable)))


class ModelFetch:
    """Fetches one neighbour's model of a round, with retries until its time is up.

    A peer that responds gets the whole deadline. An unreachable one is only retried for the probe
    timeout, and as long as others are waited for anyway: a node that waited longer for it would
    miss its own deadline at the others. A node that is ahead of most others waits for them: alone,
    it would run further and further ahead.
    """

    def __init__(
        self, client: Client, sender: str, request: ModelRequest, responses: RoundResponses
    ) -> None:
        self._client = client
        self._ctx = client.ctx
        self._deadlines = client.deadlines
        self._sender = sender
        self._peer = client.ctx.status.peers[sender]
        self._request = request
        self._responses = responses
        self._clock = asyncio.get_running_loop().time
        self._is_probe = self._peer.unreachable or self._peer.spec_mismatch is not None
        """A peer that did not respond the last time gets one request and the probe timeout."""
        self._failing_since: float | None = None

        now = self._began = self._clock()
        end = self._first_deadline(now)
        self._timeout = asyncio.timeout_at(end)
        self._full_deadline = max(end, now + self._deadlines.deadline)
        """When the time of a peer that responds is up."""
        self._longest_wait = now + self._deadlines.patience
        """Until when peers that are behind are waited for."""
        if self._is_probe:
            responses.awaited.discard(sender)

    def _first_deadline(self, now: float) -> float:
        """Return when the time of a peer is up that does not respond at all."""
        if self._is_probe:
            return now + self._deadlines.probe_timeout
        end = now + self._deadlines.deadline
        if self._deadlines.may_be_starting(self._peer, now):
            end = max(end, self._deadlines.startup_until)
        return end

    async def run(self) -> None:
        """Fetch the model, and add it to the responses; log the reason if that fails."""
        sender = self._sender
        responses = self._responses
        model = None
        replies_before = self._peer.replies
        try:
            async with self._timeout:
                model = await self._request_until_answered()
        except TimeoutError:
            if self._peer.replies == replies_before:
                detail = responses.failures.get(sender, "no response by the deadline")
                self._mark_unreachable(detail)
            else:  # a slow peer, which is waited for again in the next round
                self._ctx.peer_log.event(sender, "late", round=self._request.t)
        except Refused as refused:
            await self._log_refusal(refused)
        except Exception as problem:  # a problem with one peer must not end the node
            self._client.members.mark_failed(sender, problem)

        responses.awaited.discard(sender)
        responses.behind.discard(sender)
        if model is None:
            self._peer.missed += 1
            return
        self._peer.answered += 1
        responses.received[sender] = model
        responses.waited = self._clock() - self._began

    async def _request_until_answered(self) -> PackedModel | None:
        """Request the model until there is a response; a probe sends one request."""
        rng = self._client.rng
        pause = MIN_BACKOFF
        while True:
            nonce = f"{rng.getrandbits(128):032x}"
            try:
                response = await self._client.transport.request(self._sender, self._message(nonce))
            except Unreachable as problem:
                self._note_failure(problem.detail)
                if not self._is_worth_retrying():
                    self._mark_unreachable(problem.detail)
                    return None
            except Refused as refused:
                is_resumed_too_often = refused.reason == Refusal.REPLAYED
                if not is_resumed_too_often and not await self._learns_new_spec(refused):
                    raise
            else:
                self._ctx.note_response(self._sender, response.header)
                self._responses.failures.pop(self._sender, None)
                status = response.header.get("status")
                if status == "stale":
                    self._note_stale()
                    return None
                if status != "wait":
                    return await self._decode(nonce, response)
                self._extend_wait()
            await asyncio.sleep(pause * (0.5 + rng.random()))
            pause = min(2 * pause, MAX_BACKOFF)

    async def _learns_new_spec(self, refused: Refused) -> bool:
        """Whether a refusal leads to a change of the spec that this peer has and we lacked."""
        if refused.reason != Refusal.SPEC_MISMATCH:
            return False
        versions = self._ctx.versions
        digest = versions.at(self._request.t).digest
        await self._client.members.sync([self._sender])
        return versions.at(self._request.t).digest != digest

    def _message(self, nonce: str) -> Request:
        is_failing = self._is_probe or self._failing_since is not None
        seconds = self._deadlines.probe_timeout if is_failing else self._deadlines.deadline
        version = self._ctx.versions.at(self._request.t)
        header: dict[str, JSON] = {
            "spec": version.digest,
            "spec_version": version.number,
            "round": self._request.t,
            "nonce": nonce,
            "hold": seconds / 2,
        }
        return Request("model", header, self._request.body, on_alive=self._on_alive)

    def _on_alive(self) -> None:
        """Give a peer that begins to respond the whole deadline."""
        self._failing_since = None
        self._responses.awaited.add(self._sender)
        with contextlib.suppress(RuntimeError):  # the time is up
            self._timeout.reschedule(self._full_deadline)

    def _note_failure(self, detail: str) -> None:
        self._responses.failures[self._sender] = detail
        self._client.members.log_waiting(self._sender, detail)
        if self._failing_since is None:
            self._failing_since = self._clock()

    def _is_worth_retrying(self) -> bool:
        """Whether to retry an unreachable peer: drop it before our own deadline at others
        expires."""
        now = self._clock()
        if self._deadlines.may_be_starting(self._peer, now):
            return True
        self._responses.awaited.discard(self._sender)
        if self._is_probe or self._peer.spec_mismatch:
            return False
        assert self._failing_since is not None
        is_in_time = now < self._failing_since + self._deadlines.probe_timeout
        return is_in_time or bool(self._responses.awaited)

    def _note_stale(self) -> None:
        if self._peer.round > self._request.t:
            self._responses.stale.append(self._sender)
        if self._peer.round == self._request.t + 1:  # such a peer keeps it, unless it restarted
            self._responses.without_model.append(self._sender)

    def _extend_wait(self) -> None:
        """Wait longer for a peer that has not published this round yet."""
        deadlines = self._deadlines
        responses = self._responses
        # It may itself wait for others until the startup period is over.
        self._full_deadline = max(self._full_deadline, deadlines.startup_until + deadlines.min)
        if self._peer.round < self._request.t:
            responses.behind.add(self._sender)
        if responses.is_early:
            longer = min(self._clock() + deadlines.deadline, self._longest_wait)
            self._full_deadline = max(self._full_deadline, longer)
        self._on_alive()

    async def _decode(self, nonce: str, response: Response) -> PackedModel | None:
        """Decode and check the model in a response; None if it is refused."""
        ctx = self._ctx
        sender = self._sender
        request = self._request
        kept_counts = ctx.membership.kept_counts(sender)

        def decode() -> PackedModel:
            model = decode_model(ctx.codec, response.body, request.mask)
            if kept_counts is not None:
                check_answer(model.mask, kept_counts, sender, ctx.codec.layout)
            return model

        try:
            if (response.header.get("round"), response.header.get("nonce")) != (request.t, nonce):
                raise MessageError(
                    Refusal.WRONG_RESPONSE, f"{sender}'s response belongs to another request."
                )
            model = await ctx.compute(decode)
            check_norm(model, request.norm, sender)
        except MessageError as problem:
            ctx.guard.count(sender, problem.refusal)
            ctx.peer_log.event(sender, "bad response", round=request.t, detail=str(problem))
            return None

        values = model.values.numel() if kept_counts is None else sum(kept_counts)
        self._count_bytes(len(request.body), len(response.body), values)
        return model

    def _count_bytes(self, request_size: int, response_size: int, values: int) -> None:
        """Count the request and its response, a model of so many values."""
        self._peer.sent_bytes += request_size
        self._peer.received_bytes += response_size
        self._responses.messages += exchange_costs(
            self._ctx.name, self._sender, request_size, BYTES_PER_VALUE * values, response_size
        )

    async def _log_refusal(self, refused: Refused) -> None:
        """Log a refusal; after a spec mismatch, a sync reports which setting differs."""
        ctx = self._ctx
        sender = self._sender
        peer = self._peer
        peer.refusals += 1
        if refused.reason == Refusal.JOINING:
            self._responses.without_model.append(sender)
        if refused.reason != Refusal.SPEC_MISMATCH:
            ctx.peer_log.problem(sender, "refused", refused.message, refused.reason)
        elif peer.spec_mismatch is None:
            replies_before = peer.replies
            await self._client.members.sync([sender])
            if peer.replies == replies_before:  # the sync did not succeed
                ctx.note_spec_mismatch(sender, refused.message)

    def _mark_unreachable(self, detail: str) -> None:
        """Drop the peer; until it responds again, it only gets the probe timeout."""
        self._peer.mark_unreachable()
        self._ctx.peer_log.problem(self._sender, "unreachable", detail)
