"""A real peer of a federation with `schedule = "async"`: it waits for nobody.

A step, seen from one peer:

    number the step                       the next one, or the federation's if that is further on
    publish our newest model              for whoever asks for it
    take what has arrived                 the newest model of each member, each counted once
    take the step                         `peer_step`, as in the simulator
    meanwhile ask neighbours              in the background, for models newer than those we have
    save the result                       so that a crash costs one step at most

The federation's round is the one that more than half of the members have reached
(`member_sync.agreed_round`). So a slow peer takes fewer steps instead of falling behind, and all
anneal their masks, and end, together.
"""

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean

from dispfl.methods.base import PeerState
from dispfl.peer.member_sync import MAX_GREETED, WaitReason
from dispfl.peer.model_fetch import MAX_BACKOFF, MIN_BACKOFF, RoundResponses
from dispfl.peer.newest_models import NewestModels, StepResponses
from dispfl.peer.node import Node
from dispfl.peer.state.status import FINISHED
from dispfl.round.context import StepResult
from dispfl.round.exchange import published_model

LOOK_SECONDS = 1.0
"""Seconds between two looks for members that have finished while a step trains."""
MAX_PAUSE = 30.0
"""Seconds between two requests to a neighbour that has no newer model; doubled each time, from two
on."""


@dataclass
class AsyncNode(Node):
    """The main loop of one peer that waits for nobody."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.newest = NewestModels(self.client)

    async def run(self, t: int, state: PeerState, at_round: int | None = None) -> PeerState:
        """Take the steps from t to the last, and return the last state."""
        try:
            return await super().run(t, state, at_round)
        finally:
            await self.newest.close()

    async def _first_round(self, t: int, at_round: int | None) -> int:
        """Return the step to begin with, after a short look at where the others are.

        A new peer has no model to publish, and may begin with the average of those of others. In
        the startup period it waits for the first of them: on its own it might have taken all its
        steps when the next site is started by hand.
        """
        self.ctx.joining = t == 0
        await self._look_around(t)
        pause = MIN_BACKOFF
        while self.ctx.joining and self._is_first and not self._is_started_up:
            self.waiting.note(t, WaitReason("silence", "no member answers"))
            await asyncio.sleep(pause)
            pause = min(2 * pause, 5 * MAX_BACKOFF)
            await self._look_around(t)
        self.waiting.end(t)
        if at_round is not None:
            return self._obey(t, at_round)
        return self._join(0) if t == 0 else t

    async def _look_around(self, t: int) -> None:
        """Ask members for their rounds, for a short time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.client.deadlines.probe_timeout):
                await self.client.members.ask_rounds(t)
        self.client.members.stop_if_all_mismatch(t)

    @property
    def _is_first(self) -> bool:
        """Whether there are other members, and nothing was heard of any."""
        names = self.client.members.names()
        peers = self.ctx.status.peers
        return bool(names) and not any(peers[name].was_seen for name in names)

    def _federations_step(self, t: int) -> int:
        """Return the number of the step to take next: t, or a later one if the federation is
        further on."""
        agreed = self.client.members.agreed_round(t)
        return t if agreed is None else self._skip_to(t, agreed)

    async def _round(self, t: int, state: PeerState) -> tuple[int, PeerState]:
        """Take a step with what has arrived; return the next step and the state."""
        ctx = self.ctx
        clock = asyncio.get_running_loop().time
        t = self._federations_step(t)
        state = self._begin_round(t, state)
        self._publish(t, state)
        self._sync(t)
        self.client.members.stop_if_all_mismatch(t)
        self.client.members.stop_if_removed()
        if ctx.joining:  # others may be far on
            self.newest.request(t, state)
            await self.newest.settle(self.client.deadlines.probe_timeout)
        responses = self.newest.take(t)

        began = clock()
        asking = asyncio.create_task(self._ask_meanwhile(t, state))
        try:
            step = await self._train(t, state, responses)
        finally:
            asking.cancel()
            await asyncio.wait([asking])
        ctx.status.step_seconds = clock() - began
        self._note_step(t, step, responses)
        await self._save(t, step, responses)
        self._report(t, step, responses)
        return t + 1, step.next_state

    def _publish(self, t: int, state: PeerState) -> None:
        """Let other peers request our newest model."""
        ctx = self.ctx
        if ctx.joining:
            return
        model = published_model(ctx.run, state)
        now = asyncio.get_running_loop().time()
        ctx.published.publish(t, model, (), ctx.status.silent_peers, finished=now)
        ctx.guard.forget_before(ctx.published.oldest or 0)

    def _sync(self, t: int) -> None:
        """Sync with a member, or with more where it depends on silent ones how far the federation
        is."""
        if self.client.members.agreed_round(t) is None:
            self.client.ask_rounds_in_background(t)
        else:
            self.client.sync_in_background(t)

    async def _ask_meanwhile(self, t: int, state: PeerState) -> None:
        """Ask the neighbours of the next step for their newest models.

        Those of the last step are asked for their last ones as soon as they have finished: if this
        step is a long one, they are gone when it ends.
        """
        if t + 1 >= self.ctx.rounds:
            return
        clock = asyncio.get_running_loop().time
        pause = LOOK_SECONDS
        next_request = clock()
        while True:
            if clock() >= next_request:
                self.newest.request(t + 1, state)
                pause = min(2 * pause, MAX_PAUSE)
                next_request = clock() + pause
            self.newest.request_last(state)
            await asyncio.sleep(LOOK_SECONDS)

    def _mixing_weights(self, t: int, responses: RoundResponses) -> Mapping[str, float] | None:
        """How much each model counts in our average: less, the staler it is."""
        assert isinstance(responses, StepResponses)
        staleness = self.ctx.run.settings.staleness
        return staleness.mixing_weights(self.ctx.name, responses.staleness)

    def _note_step(self, t: int, step: StepResult, responses: StepResponses) -> None:
        """Note with whom a step was taken, and how stale their models were."""
        self.waiting.note_round(responses)
        if responses.received:
            self.ctx.status.company_until = t + 1
        step.report.steps = 1
        if responses.staleness:
            step.report.staleness = fmean(responses.staleness.values())

    @property
    def _final_state(self) -> str:
        """The state after the last step: a peer that was with the others in the second half of the
        rounds has the federation's model, however few steps it took."""
        if 2 * self.ctx.status.company_until > self.ctx.rounds:
            return FINISHED
        return super()._final_state

    async def _serve_last(self, t: int, state: PeerState) -> None:
        """Serve our last model, for a short time, to those that average it in their last step, and
        tell the others that we have finished."""
        ctx = self.ctx
        await self.newest.close()
        receivers = ctx.participants.receivers(t - 1)
        if not ctx.joining:
            model = published_model(ctx.run, state)
            now = asyncio.get_running_loop().time()
            ctx.published.publish(t, model, receivers, ctx.status.silent_peers, finished=now)
        strangers = sorted(set(ctx.participants.other_names(t - 1)) - set(receivers))
        told = [*receivers, *self.client.rng.sample(strangers, len(strangers))][:MAX_GREETED]
        await self.client.members.sync(told)
        await self._serve_stragglers(self.client.deadlines.min)

    def _stragglers(self, now: float) -> set[str]:
        """Receivers of our last model that have not begun their last step."""
        peers = self.ctx.status.peers
        last_round = self.ctx.rounds - 1
        return {name for name in super()._stragglers(now) if peers[name].round < last_round}
