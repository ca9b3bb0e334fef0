"""The client half of a node: fetches the models of a round's neighbours."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dispfl.methods.base import PeerState
from dispfl.peer.deadlines import Deadlines
from dispfl.peer.member_sync import MemberSync
from dispfl.peer.model_fetch import (
    ModelFetch,
    ModelRequest,
    RoundResponses,
    SparePlace,
)
from dispfl.peer.node_context import NodeContext
from dispfl.peer.probing import Prober
from dispfl.peer.transport.base import Transport
from dispfl.round.exchange import model_norm, needed_places, requested_mask, shared_part


@dataclass
class Client:
    """Sends one node's requests."""

    ctx: NodeContext
    transport: Transport
    deadlines: Deadlines
    rng: random.Random

    def __post_init__(self) -> None:
        self.members = MemberSync(self.ctx, self.transport, self.deadlines, self.rng)
        self.prober = Prober(self.ctx, self.members)
        self._open_fetches: dict[str, ModelFetch] = {}
        """Requests to slow members of earlier rounds, one for each, that are not answered yet."""
        self.notices: set[asyncio.Task[None]] = set()
        """Messages that no round waits for: that we need no model."""
        self._sync: asyncio.Task[None] | None = None

    async def fetch_models(
        self, t: int, state: PeerState, senders: Sequence[str] | None = None
    ) -> RoundResponses:
        """Algorithm 1, line 6: fetch the models of this round's neighbours that respond by the
        deadline.

        They are requested from other `senders` where the neighbours do not respond. Slow members
        are not waited for: their requests stay open.
        """
        ctx = self.ctx
        mask = requested_mask(ctx.run, state)
        body = b""
        if mask is not None:
            body = await ctx.compute(lambda: ctx.codec.encode_request(mask))
        norm = model_norm(shared_part(ctx.run, state.model))
        chosen = ctx.participants.chosen(t, state)
        began = asyncio.get_running_loop().time()
        request = ModelRequest(t, mask, body, norm, began, frozenset(chosen))

        expected_senders = ctx.participants.senders(t, state)
        senders = expected_senders if senders is None else senders
        unasked = [name for name in expected_senders if name not in senders]
        responses = RoundResponses(list(senders), unasked)
        self.sync_in_background(t)
        fetches = [self._fetch(name, request, responses) for name in senders]
        try:
            fetches += await self._fetch_from_spares(request, fetches, responses)
            await self._wait_for(fetches)
        except asyncio.CancelledError:  # this site's hours have ended
            for fetch in fetches:
                fetch.task.cancel()
            raise

        for fetch in fetches:
            await self._collect(fetch, responses)
        return responses

    async def _fetch_from_spares(
        self, request: ModelRequest, fetches: Sequence[ModelFetch], responses: RoundResponses
    ) -> list[ModelFetch]:
        """Once all chosen peers have answered, fetch models in place of those that decline.

        Spare neighbours that are not needed are told so: they need not wait for our request.
        """
        t = request.t
        chosen = [fetch for fetch in fetches if fetch.sender in request.chosen]
        for fetch in chosen:
            await fetch.decide()
        agreed = [fetch.sender for fetch in chosen if fetch.is_agreed]
        self.ctx.published.agree(t, agreed)

        spare_senders = self.ctx.participants.spare_senders(t)
        needed = needed_places(len(spare_senders), len(chosen) - len(agreed))
        request = replace(request, chosen=frozenset())
        spare_fetches = []
        for number, name in enumerate(spare_senders):
            if name is None or name in agreed:
                continue
            place = SparePlace(number, is_needed=number in needed)
            spare_request = replace(request, spare=place)
            if place.is_needed:
                responses.requested.append(name)
                responses.awaited.add(name)
                spare_fetches.append(self._fetch(name, spare_request, responses))
            else:
                self._tell_not_needed(name, spare_request)
        return spare_fetches

    def _tell_not_needed(self, name: str, request: ModelRequest) -> None:
        """Tell a spare neighbour, as soon as it is in this round, that we need no model of it."""
        notice = ModelFetch(self, name, request, RoundResponses([])).task
        self.notices.add(notice)
        notice.add_done_callback(self.notices.discard)

    def _fetch(self, sender: str, request: ModelRequest, responses: RoundResponses) -> ModelFetch:
        """Request a model, unless an earlier request to this slow member may still be answered.

        A chosen peer is asked again: without its agreement another takes its place.
        """
        fetch = self._open_fetches.pop(sender, None)
        if fetch is not None:
            may_serve = fetch.may_serve(request.t, self.ctx.versions.at(request.t))
            if may_serve and sender not in request.chosen:
                fetch.responses = responses
                return fetch
            fetch.task.cancel()
        return ModelFetch(self, sender, request, responses)

    async def _wait_for(self, fetches: Sequence[ModelFetch]) -> None:
        """Wait for all members but the slow and the unreachable ones."""
        if not any(fetch.is_awaited for fetch in fetches):
            for fetch in fetches:  # nobody is left but slow members
                fetch.is_awaited = fetch.is_slow
        while pending := [fetch.settled for fetch in fetches if fetch.is_pending]:
            await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        if any(fetch.model is not None for fetch in fetches):
            return
        # Without any model the round cannot go on: wait for those that still arrive.
        while arriving := [fetch.task for fetch in fetches if fetch.is_arriving]:
            await asyncio.wait(arriving, return_when=asyncio.FIRST_COMPLETED)
            if any(fetch.model is not None for fetch in fetches):
                return

    async def _collect(self, fetch: ModelFetch, responses: RoundResponses) -> None:
        """Take the model, if it has arrived; leave requests to slow members open."""
        peer = self.ctx.status.peers[fetch.sender]
        if fetch.is_declined:
            responses.declined.append(fetch.sender)
            return
        if fetch.model is None:
            peer.missed += not peer.is_asleep(asyncio.get_running_loop().time())
            if fetch.task.done():
                return
            if fetch.is_slow or fetch.is_arriving:
                self._open_fetches[fetch.sender] = fetch
                return
            fetch.task.cancel()
            await asyncio.wait([fetch.task])
            return
        peer.answered += 1
        responses.take(fetch.sender, fetch.model, fetch.latency, fetch.messages)

    def sync_in_background(self, t: int) -> None:
        """Sync with a member, if the last sync has ended: no round waits for it."""
        if self._sync is None or self._sync.done():
            self._sync = asyncio.create_task(self.members.sync(self._member_to_sync_with(t)))

    def ask_rounds_in_background(self, t: int) -> None:
        """Ask members for their rounds until it is clear whether t is over, in place of a sync."""
        if self._sync is None or self._sync.done():
            self._sync = asyncio.create_task(self._ask_rounds(t))

    async def _ask_rounds(self, t: int) -> None:
        await self.members.ask_rounds(t)

    async def close(self) -> None:
        """End what goes on in the background."""
        await self.prober.close()
        tasks = [fetch.task for fetch in self._open_fetches.values()]
        tasks += self.notices
        if self._sync:
            tasks.append(self._sync)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

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
