"""A real peer: takes its rounds with whoever answers, and answers whoever asks.

Nothing here knows of sockets, files, threads or the wall clock: the transport, the store, the learner and the
randomness are handed in, and time is the event loop's. So the very same code runs between machines and, thousands of
times faster than life, in a simulation with a virtual clock.

A round of Algorithm 1, seen from one peer:

    publish our model of round t            for those who hear us
    ask this round's neighbours for theirs  until all have answered or the deadline has passed
    take the step                           `peer_step`, the same as in the simulator
    write it down                           so that a crash costs one round at most
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from dispfl.core.packed import PackedMask, PackedModel
from dispfl.errors import RunError
from dispfl.methods.base import PeerState
from dispfl.peer.answers import Answers
from dispfl.peer.asks import SHORTEST_PAUSE, Asks, Gathered
from dispfl.peer.context import Context
from dispfl.work import Step, Work


class Learner(Protocol):
    """Takes a step without keeping the event loop from answering others."""

    async def step(self, work: Work) -> Step:
        """The peer's step."""
        ...


class Store(Protocol):
    """Where a peer's rounds are written down."""

    def save(self, t: int, step: Step, heard: Sequence[str], missed: Sequence[str]) -> None:
        """Round t is done: who was heard, and who should have been."""
        ...


@dataclass
class Node:
    """One peer of a federation."""

    here: Context
    asks: Asks
    learner: Learner
    store: Store

    async def run(self, t: int, state: PeerState) -> PeerState:
        """Take part from round t on, to the end; or, for one who is new to a federation under way, from its round."""
        here, standing = self.here, self.here.standing
        standing.round, standing.rounds = t, here.setting.rounds
        if t > 0:  # the others were started long ago
            self.asks.pace.first = self.asks.pace.floor
        await self.asks.transport.serve(Answers(here))
        here.tell("starting", {"round": t, "rounds": standing.rounds, "listening": here.listening})
        await self.asks.greet(here.others(t))
        self._stop_if_nobody_agrees(t)
        if (current := standing.others_are_at()) > t + 1:  # further than anyone keeps models for the slower
            if t == 0:
                t, state = self._join(current), replace(state, model=nothing_of(state.model))
            else:
                t = self._skip(t, current)
        while t < here.setting.rounds:
            standing.round = t
            t, state = await self._round(t, state)
        standing.round, standing.state = t, "serving others"
        await self._linger()
        standing.state = "finished"
        return state

    def _stop_if_nobody_agrees(self, t: int) -> None:
        """Stop where all have other terms, or all whom we have reached when we have waited long enough for the rest.

        Who has found one that agrees goes on, whatever others say: no member can stop a peer that way.
        """
        standing, others = self.here.standing, self.here.others(t)
        disagree = [sentence for name in others if (sentence := standing.disagreement(name))]
        if not disagree or any(map(standing.was_met, others)):
            return
        patient_until = self.asks.patient_until
        if len(disagree) == len(others) or (patient_until and asyncio.get_running_loop().time() >= patient_until):
            raise RunError(f"Nobody who is there lets us take part. {disagree[0]}")

    def _join(self, current: int) -> int:
        """The first round of one who is new to a federation under way, announced."""
        here, t, rounds = self.here, current + 1, self.here.setting.rounds
        if t >= rounds:
            raise RunError(
                f"The federation is in its last round ({rounds} of {rounds}); {here.name} comes too late to join it."
            )
        here.joining = True
        here.members.join(t)
        here.tell("joining", {"round": t})
        return t

    async def _round(self, t: int, state: PeerState) -> tuple[int, PeerState]:
        """One round; or the discovery that the federation is further on, and where."""
        here, clock = self.here, asyncio.get_running_loop().time
        here.standing.state, here.standing.deadline = "asking", self.asks.pace.deadline
        if not here.joining:
            here.shelf.publish(t, here.method.publish(state), here.listeners(t), here.standing.is_silent)
            here.door.forget_before(here.shelf.oldest or 0)
        began = clock()
        gathered = await self.asks.gather(t, state)
        self._stop_if_nobody_agrees(t)
        if (current := self._skip(t, gathered.current(t) or t)) > t:
            return current, state
        here.standing.state, learning = "learning", clock()
        step = await self.learner.step(Work(here.name, t, state, gathered.heard, scoring=here.setting.scores(t)))
        self.asks.pace.took((gathered.arrived or began) - began + clock() - learning)
        self._write_down(t, step, gathered)
        here.joining = False
        return t + 1, step.state

    def _skip(self, t: int, current: int) -> int:
        """The round to go on with where the federation is in another; who comes too late takes the last one."""
        current = max(t, min(current, self.here.setting.rounds - 1))
        if current > t:
            self.here.tell("behind", {"round": t, "current": current})
        return current

    def _write_down(self, t: int, step: Step, gathered: Gathered) -> None:
        here, score = self.here, step.report.score
        carried = tuple(here.standing.take_carried(t))
        self.store.save(t, replace(step, carried=carried), sorted(gathered.heard), gathered.missed)
        here.standing.score = here.standing.score if score is None else score
        here.tell("round", {"round": t, "heard": len(gathered.heard), "missed": gathered.missed, "score": score})

    async def _linger(self) -> None:
        """Stay until those who still need our last models have them, or the deadline has passed."""
        here = self.here
        try:
            async with asyncio.timeout(self.asks.pace.deadline):
                while any(not here.standing.is_silent(name) for name in here.shelf.awaited()):
                    await asyncio.sleep(SHORTEST_PAUSE)
        except TimeoutError:
            here.tell("left", {"without": sorted(here.shelf.awaited())})


def nothing_of(model: PackedModel) -> PackedModel:
    """A model without weights: averaged with its neighbours' it gives theirs."""
    return PackedModel(model.values[:0], PackedMask(torch.zeros_like(model.mask.bits), model.mask.size))
