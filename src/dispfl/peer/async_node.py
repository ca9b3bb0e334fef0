"""A real peer of a federation with `schedule = "async"`: it waits for nobody.

A step, seen from one peer:

    publish our newest model              for whoever asks for it
    take what has arrived                 the newest model of each member, each counted once
    ask the neighbours of the next step   in the background, for models newer than those we have
    take the step                         `peer_step`, as in the simulator
    save the result                       so that a crash costs one step at most

Rounds are the peer's own steps: each counts for itself, and ends after as many as agreed.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from dispfl.methods.base import PeerState
from dispfl.peer.model_fetch import RoundResponses
from dispfl.peer.newest_models import NewestModels, StepResponses
from dispfl.peer.node import Node
from dispfl.round.exchange import published_model


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
        """Return the step to begin with: the next one, whatever others do.

        A new peer has no model to publish, and may begin with the average of those of others.
        """
        if at_round is not None:
            t = self._obey(t, at_round)
        elif t == 0:
            self._join(0)
        self.ctx.joining = t == 0
        return t

    async def _round(self, t: int, state: PeerState) -> tuple[int, PeerState]:
        """Take a step with what has arrived; return the next step and the state."""
        ctx = self.ctx
        clock = asyncio.get_running_loop().time
        state = self._begin_round(t, state)
        self._publish(t, state)
        self.client.sync_in_background(t)
        self.client.members.stop_if_all_mismatch(t)
        self.client.members.stop_if_removed()
        if ctx.joining:  # others may be far on
            self.newest.request(t, state)
            await self.newest.settle(self.client.deadlines.probe_timeout)
        responses = self.newest.take(t)
        self.newest.request(min(t + 1, ctx.rounds - 1), state)

        began = clock()
        step = await self._train(t, state, responses)
        ctx.status.step_seconds = clock() - began
        self.waiting.note_round(responses)
        await self._save(t, step, responses)
        self._report(t, step, responses)
        return t + 1, step.next_state

    def _publish(self, t: int, state: PeerState) -> None:
        """Let other peers request our newest model."""
        ctx = self.ctx
        if ctx.joining:
            return
        ctx.published.publish(t, published_model(ctx.run, state), (), ctx.status.silent_peers)
        ctx.guard.forget_before(ctx.published.oldest or 0)

    def _mixing_weights(self, t: int, responses: RoundResponses) -> Mapping[str, float] | None:
        """How much each model counts in our average: less, the staler it is."""
        assert isinstance(responses, StepResponses)
        staleness = self.ctx.run.settings.staleness
        return staleness.mixing_weights(self.ctx.name, responses.staleness)

    async def _serve_last(self, t: int, state: PeerState) -> None:
        """Serve our last model until the others have it, for a short time."""
        ctx = self.ctx
        await self.newest.close()
        if not ctx.joining:
            others = ctx.participants.other_names(t - 1)
            silent = ctx.status.silent_peers
            ctx.published.publish(t, published_model(ctx.run, state), others, silent)
        await self._serve_stragglers(self.client.deadlines.min)
