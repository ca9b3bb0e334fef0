"""A real peer: runs rounds with the neighbours that respond, and serves its own models.

It uses no sockets, files, threads or wall clock of its own: transport, store, training and
randomness are passed in, and time is the event loop's. So the same code runs between machines and
in a simulation on a virtual clock.

A round of Algorithm 1, seen from one peer:

    publish our model of round t          for the peers that receive from us
    fetch the models of our neighbours    until all have responded or the deadline has passed
    take the step                         `peer_step`, as in the simulator
    save the result                       so that a crash costs one round at most
"""

import asyncio
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from dispfl.core.averaging import masked_mean
from dispfl.core.packed import PackedMask, PackedModel
from dispfl.errors import DispflError, RunError
from dispfl.methods.base import Method, PeerState
from dispfl.peer.client import MAX_BACKOFF, MIN_BACKOFF, Client, RoundResponses
from dispfl.peer.node_context import NodeContext
from dispfl.peer.server import Server
from dispfl.robust.averages import Robust
from dispfl.round.context import PeerTask, StepResult
from dispfl.round.exchange import published_model


class StepRunner(Protocol):
    """Takes training steps without blocking the event loop."""

    async def step(
        self, task: PeerTask, state: PeerState, received: Mapping[str, PackedModel]
    ) -> StepResult:
        """Return the result of a step."""
        ...


class Store(Protocol):
    """Stores finished rounds without blocking the event loop."""

    async def save(
        self, t: int, step: StepResult, received: Sequence[str], missed: Sequence[str]
    ) -> None:
        """Save round t, with the neighbours that were received and those that were missed."""
        ...


@dataclass
class Node:
    """The main loop of one peer."""

    ctx: NodeContext
    client: Client
    training: StepRunner
    store: Store

    async def run(self, t: int, state: PeerState) -> PeerState:
        """Run the rounds from t to the last; a new peer joins a running federation at its current
        round."""
        ctx, status = self.ctx, self.ctx.status
        status.round, status.rounds = t, ctx.run.rounds
        if t > 0:  # resumed: the startup period is over
            self.client.deadlines.startup = self.client.deadlines.min
        await self.client.transport.serve(Server(ctx))
        ctx.log("starting", {"round": t, "rounds": status.rounds, "listening": ctx.listening})
        self.client.start()
        current = await self._federation_round(t)
        t = self._join(current) if t == 0 else self._skip(t, current)
        while t < ctx.run.rounds:
            status.round = t
            t, state = await self._round(t, state)
        status.round, status.state = t, "serving"
        await self._serve_stragglers()
        status.state = "finished"
        return state

    async def _federation_round(self, t: int) -> int:
        """Return the federation's round if it is too far beyond t for us to be received, else t."""
        status, client, pause = self.ctx.status, self.client, MIN_BACKOFF
        greeted = client.greeted(t)
        while True:
            await client.sync_members([name for name in greeted if not status.was_seen(name)])
            self._stop_if_all_mismatch(t)
            voters = [name for name in greeted if status.spec_mismatch(name) is None]
            claims = [status.round_of(name) for name in voters if status.was_seen(name)]
            if (
                agreed := agreed_round(t, claims, len(voters), is_final=client.has_started_up)
            ) is not None:
                return agreed
            await asyncio.sleep(pause)
            pause = min(2 * pause, 5 * MAX_BACKOFF)

    def _stop_if_all_mismatch(self, t: int) -> None:
        """Stop if all members have another spec, or all reachable ones at the end of the startup
        period.

        One matching peer is enough to continue, so that no other member can stop this peer.
        """
        status, others = self.ctx.status, self.ctx.others(t)
        mismatches = [message for name in others if (message := status.spec_mismatch(name))]
        if not mismatches or any(map(status.was_seen, others)):
            return
        if len(mismatches) == len(others) or self.client.has_started_up:
            raise RunError(f"No reachable peer accepts our settings. {mismatches[0]}")

    def _join(self, current: int) -> int:
        """Announce and return the first round of a new peer: 0, or the next one of a running
        federation."""
        ctx, t, rounds = self.ctx, current + 1 if current else 0, self.ctx.run.rounds
        if current and t >= rounds:
            raise RunError(
                f"The federation is in its last round ({rounds} of {rounds}); {ctx.name} is too"
                " late to join."
            )
        try:
            ctx.membership.join(t)
        except (
            DispflError,
            OSError,
        ) as problem:  # a full disk, for example
            ctx.log("problem", {"detail": str(problem)})
        if t > 0:
            ctx.joining = True
            self.client.start(joining=True)
            ctx.log("joining", {"round": t})
        return t

    async def _round(self, t: int, state: PeerState) -> tuple[int, PeerState]:
        """Run a round, or skip it if the federation is further on. Return the next round and the
        state."""
        ctx, clock = self.ctx, asyncio.get_running_loop().time
        ctx.status.state, ctx.status.deadline = "fetching", self.client.deadlines.deadline
        ctx.guard.start_round()
        if (
            not state.model.values.any()
        ):  # weights that are all zero were never trained and must not be averaged in
            ctx.joining, state = (
                True,
                replace(state, model=masked(ctx.run.first_weights, state.next_mask)),
            )
        if not ctx.joining:
            ctx.published.publish(
                t, published_model(ctx.run, state), ctx.listeners(t), ctx.status.is_silent
            )
            ctx.guard.forget_before(ctx.published.oldest or 0)
        began = clock()
        responses = await self.client.fetch_models(t, state)
        self._stop_if_all_mismatch(t)
        if (
            responses.is_stale
            and (current := self._skip(t, await self.client.current_round(t))) > t
        ):
            return current, state
        ctx.status.state, training_began = "training", clock()
        task = PeerTask(ctx.name, t, evaluate=ctx.run.evaluates(t))
        if ctx.joining:
            state = await ctx.compute(
                lambda: joining_state(ctx.run.method, state, responses.received)
            )
        step = await self.training.step(task, state, responses.received)
        self.client.deadlines.record_round(
            (responses.arrived or began) - began, clock() - training_began
        )
        await self._save(t, step, responses)
        ctx.joining = ctx.joining and step.report.failure is not None
        return t + 1, step.next_state

    def _skip(self, t: int, current: int) -> int:
        """Return the round to continue with: `current`, at most the last one."""
        current = max(t, min(current, self.ctx.run.rounds - 1))
        if current > t:
            self.ctx.log("behind", {"round": t, "current": current})
        return current

    async def _save(self, t: int, step: StepResult, responses: RoundResponses) -> None:
        ctx, score = self.ctx, step.report.score
        messages = tuple(ctx.status.take_messages(t))
        await self.store.save(
            t, replace(step, messages=messages), sorted(responses.received), responses.missed
        )
        ctx.status.score = ctx.status.score if score is None else score
        ctx.status.epsilon = (
            ctx.status.epsilon if step.report.epsilon is None else step.report.epsilon
        )
        ctx.status.privacy_exhausted = step.report.exhausted
        if failure := step.report.failure:
            ctx.status.record_failure(t, failure)
            ctx.log(
                "step failed",
                {"round": t, "detail": f"{failure} The model of the last round is kept."},
            )
        fields: dict[str, object] = {
            "round": t,
            "received": len(responses.received),
            "missed": responses.missed,
            "score": score,
        }
        if distances := step.report.distances:
            ctx.status.record_distances(distances)
            fields["distances"] = [
                f"{name}={distance}" for name, distance in _rounded(distances).items()
            ]
        ctx.log("round", fields)

    async def _serve_stragglers(self) -> None:
        """Serve our last models until the remaining peers have them or the deadline has passed."""
        ctx = self.ctx
        try:
            async with asyncio.timeout(self.client.deadlines.deadline):
                while any(not ctx.status.is_silent(name) for name in ctx.published.pending()):
                    await asyncio.sleep(MIN_BACKOFF)
        except TimeoutError:
            ctx.log("stopped serving", {"without": sorted(ctx.published.pending())})


def agreed_round(t: int, claims: Sequence[int], members: int, *, is_final: bool) -> int | None:
    """Return the federation's round by the claims of some of its members, or t if it is not too far
    beyond.

    A single member may lie, and may be the first one that responds. So half of the members must be
    at t, or more than half beyond; before that the result is None, or the lower median of the
    claims if it `is_final`.
    """
    further = [
        claim for claim in claims if claim > t + 1
    ]  # the others keep their models for two rounds
    if not further or 2 * (len(claims) - len(further)) >= members:
        return t
    if 2 * len(further) <= members and not is_final:
        return None
    current = statistics.median_low(claims)
    return current if current > t + 1 else t


def joining_state(
    method: Method, state: PeerState, received: Mapping[str, PackedModel]
) -> PeerState:
    """Return the state that a joining peer begins with: the average of the received models under
    its own mask, by the federation's robust rule where it has one.

    A weight that nobody holds keeps its first value, so a peer that receives from nobody begins
    like all others did, with the shared first weights.
    """
    first = state.model.unpack()[0]
    weights = method.robust_start(first, received) if isinstance(method, Robust) else None
    if weights is None:
        models = (PackedModel.pack(*received[name].unpack()) for name in sorted(received))
        weights = masked_mean(models, first)
    return replace(state, model=masked(weights, state.next_mask))


def masked(weights: Tensor, mask: PackedMask) -> PackedModel:
    """Return the part of the flat weights that a mask keeps."""
    return PackedModel.pack(weights, mask.unpack(), mask)


def _rounded(distances: Mapping[str, float | None]) -> dict[str, str]:
    """Return the distances as text, the farthest first; those of models without common weights are
    unknown."""
    known = sorted(distances, key=lambda name: -(distances[name] or 0.0))
    return {name: "unknown" if (far := distances[name]) is None else f"{far:.3g}" for name in known}
