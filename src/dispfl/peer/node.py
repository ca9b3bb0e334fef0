"""A real peer: runs rounds with the neighbours that respond, and serves its own models.

It uses no sockets, files, threads or wall clock of its own: transport, store, training and randomness are passed in,
and time is the event loop's. So the same code runs between machines and in a simulation on a virtual clock.

A round of Algorithm 1, seen from one peer:

    publish our model of round t          for the peers that hear us
    fetch the models of our neighbours    until all have responded or the deadline has passed
    take the step                         `peer_step`, as in the simulator
    save the result                       so that a crash costs one round at most
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from dispfl.core.packed import PackedModel
from dispfl.errors import RunError
from dispfl.methods.base import PeerState
from dispfl.peer.client import MIN_BACKOFF, Client, RoundResponses
from dispfl.peer.context import NodeContext
from dispfl.peer.server import Server
from dispfl.round.context import PeerTask, StepResult
from dispfl.round.exchange import published_model


class StepRunner(Protocol):
    """Takes training steps without blocking the event loop."""

    async def step(self, task: PeerTask, state: PeerState, received: Mapping[str, PackedModel]) -> StepResult:
        """Return the result of a step."""
        ...


class Store(Protocol):
    """Stores finished rounds without blocking the event loop."""

    async def save(self, t: int, step: StepResult, heard: Sequence[str], missed: Sequence[str]) -> None:
        """Save round t, with the neighbours that were heard and those that were missed."""
        ...


@dataclass
class Node:
    """The main loop of one peer."""

    ctx: NodeContext
    client: Client
    training: StepRunner
    store: Store

    async def run(self, t: int, state: PeerState) -> PeerState:
        """Run the rounds from t to the last; a new peer joins a running federation at its current round."""
        ctx, status = self.ctx, self.ctx.status
        status.round, status.rounds = t, ctx.run.rounds
        if t > 0:  # resumed: the startup period is over
            self.client.deadlines.startup = self.client.deadlines.min
        await self.client.transport.serve(Server(ctx))
        ctx.log("starting", {"round": t, "rounds": status.rounds, "listening": ctx.listening})
        await self.client.sync_members(ctx.others(t))
        self._stop_if_all_mismatch(t)
        if (current := status.median_round()) > t + 1:  # further than the others keep their models
            if t == 0:
                t, state = self._join(current), replace(state, model=empty_model(state.model))
            else:
                t = self._skip(t, current)
        while t < ctx.run.rounds:
            status.round = t
            t, state = await self._round(t, state)
        status.round, status.state = t, "serving"
        await self._serve_stragglers()
        status.state = "finished"
        return state

    def _stop_if_all_mismatch(self, t: int) -> None:
        """Stop if all members have another spec, or all reachable ones at the end of the startup period.

        One matching peer is enough to continue, so that no other member can stop this peer.
        """
        status, others = self.ctx.status, self.ctx.others(t)
        mismatches = [message for name in others if (message := status.spec_mismatch(name))]
        if not mismatches or any(map(status.was_seen, others)):
            return
        startup_until = self.client.startup_until
        if len(mismatches) == len(others) or (startup_until and asyncio.get_running_loop().time() >= startup_until):
            raise RunError(f"No reachable peer accepts our settings. {mismatches[0]}")

    def _join(self, current: int) -> int:
        """Announce and return the first round of a peer that joins a running federation."""
        ctx, t, rounds = self.ctx, current + 1, self.ctx.run.rounds
        if t >= rounds:
            raise RunError(
                f"The federation is in its last round ({rounds} of {rounds}); {ctx.name} is too late to join."
            )
        ctx.joining = True
        ctx.membership.join(t)
        ctx.log("joining", {"round": t})
        return t

    async def _round(self, t: int, state: PeerState) -> tuple[int, PeerState]:
        """Run a round, or skip it if the federation is further on. Return the next round and the state."""
        ctx, clock = self.ctx, asyncio.get_running_loop().time
        ctx.status.state, ctx.status.deadline = "fetching", self.client.deadlines.deadline
        if not ctx.joining:
            ctx.published.publish(t, published_model(ctx.run, state), ctx.listeners(t), ctx.status.is_silent)
            ctx.guard.forget_before(ctx.published.oldest or 0)
        began = clock()
        responses = await self.client.fetch_models(t, state)
        self._stop_if_all_mismatch(t)
        if (current := self._skip(t, responses.current(t) or t)) > t:
            return current, state
        ctx.status.state, training_began = "training", clock()
        task = PeerTask(ctx.name, t, evaluate=ctx.run.evaluates(t))
        step = await self.training.step(task, state, responses.heard)
        self.client.deadlines.record_round((responses.arrived or began) - began + clock() - training_began)
        await self._save(t, step, responses)
        ctx.joining = ctx.joining and step.next_state.model.mask.kept == 0  # its first step failed: still no model
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
        await self.store.save(t, replace(step, messages=messages), sorted(responses.heard), responses.missed)
        ctx.status.score = ctx.status.score if score is None else score
        fields: dict[str, object] = {
            "round": t,
            "heard": len(responses.heard),
            "missed": responses.missed,
            "score": score,
        }
        if distances := step.report.distances:
            ctx.status.record_distances(distances)
            fields["distances"] = [f"{name}={distance}" for name, distance in _rounded(distances).items()]
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


def _rounded(distances: Mapping[str, float | None]) -> dict[str, str]:
    """Return the distances as text, the farthest first; those of models without common weights are unknown."""
    known = sorted(distances, key=lambda name: -(distances[name] or 0.0))
    return {name: "unknown" if (far := distances[name]) is None else f"{far:.3g}" for name in known}


def empty_model(model: PackedModel) -> PackedModel:
    """A model that keeps no weight: averaged with others it does not change them."""
    return PackedModel.pack(torch.zeros(model.mask.size), torch.zeros(model.mask.size, dtype=torch.bool))
