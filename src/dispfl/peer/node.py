"""A real peer: runs rounds with the neighbours that respond, and serves its own models.

It uses no sockets, files, threads or wall clock of its own: transport, store, training and
randomness are passed in, and time is the event loop's. So the same code runs between machines and
in a simulation on a virtual clock.

A round of Algorithm 1, seen from one peer:

    publish our model of round t          for the peers that receive from us
    fetch the models of our neighbours    until all have responded or the deadline has passed
    take the step                         `peer_step`, as in the simulator
    save the result                       so that a crash costs one round at most

A peer that receives no model waits (`peer/waiting.py`) instead of training on alone. Outside of
its hours (`peer/schedule.py`) a peer sleeps.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from dispfl.core.averaging import masked_mean
from dispfl.core.packed import PackedModel
from dispfl.core.report import Report
from dispfl.errors import DispflError, RunError
from dispfl.methods.base import Method, PeerState
from dispfl.peer.client import Client
from dispfl.peer.model_fetch import MAX_BACKOFF, MIN_BACKOFF, RoundResponses
from dispfl.peer.node_context import NodeContext
from dispfl.peer.schedule import duration
from dispfl.peer.server import Server
from dispfl.peer.waiting import Waiting
from dispfl.robust.averages import Robust, protection_text, withstood
from dispfl.round.context import PeerTask, StepResult
from dispfl.round.exchange import published_model

MAX_NAP = 60.0
"""Seconds after which a sleeping node looks at its clock again."""


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
        """Save round t, with the neighbours whose models were received, and the missed ones."""
        ...


@dataclass
class Node:
    """The main loop of one peer."""

    ctx: NodeContext
    client: Client
    training: StepRunner
    store: Store

    def __post_init__(self) -> None:
        self.waiting = Waiting(self.ctx, self.client)
        self._is_exhausted = False
        """Whether the log says that the privacy budget is spent."""

    async def run(self, t: int, state: PeerState, at_round: int | None = None) -> PeerState:
        """Run the rounds from t to the last, and return the last state.

        A new peer joins a running federation at its current round. The members agree on it, unless
        the operator says which one it is.
        """
        await self._start(t)
        try:
            await self._sleep(t)
            self.client.deadlines.start(asyncio.get_running_loop().time())
            t = await self._first_round(t, at_round)
            while t < self.ctx.rounds or await self._is_extended(t):
                await self._sleep(t)
                t, state = await self._round(t, state)

            self.ctx.status.round = t
            await self._serve_last(t, state)
        finally:
            await self.client.close()
        self.ctx.status.state = self._final_state
        return state

    # before the first round

    async def _start(self, t: int) -> None:
        """Listen for requests."""
        ctx = self.ctx
        ctx.status.round = t
        ctx.status.rounds = ctx.rounds
        if t > 0:
            self.client.deadlines.skip_startup()
        await self.client.transport.serve(Server(ctx))
        facts = {"round": t, "rounds": ctx.rounds, "listening": ctx.listening}
        ctx.log("starting", facts)

    async def _first_round(self, t: int, at_round: int | None) -> int:
        """Return the round to begin with: the federation's, or the one that the operator names."""
        if at_round is not None:
            return self._obey(t, at_round)
        return self._follow(t, await self._federation_round(t))

    async def _sleep(self, t: int) -> None:
        """Sleep before round t, if it is outside of this site's hours."""
        ctx = self.ctx
        if ctx.schedule.asleep_for() == 0:
            return
        ctx.status.state = "sleeping"
        ctx.status.waiting = None
        hours = duration(ctx.schedule.asleep_for())
        ctx.log("sleeping", {"round": t, "for": hours})
        while ctx.schedule.asleep_for() > 0:
            seconds = min(ctx.schedule.asleep_for(), MAX_NAP)  # the clock may be set meanwhile
            await asyncio.sleep(seconds)
        ctx.log("awake", {"round": t})

    async def _federation_round(self, t: int) -> int:
        """Return the federation's round if it is too far beyond t for our models to be used, else
        t."""
        members = self.client.members
        pause = MIN_BACKOFF
        while True:
            await members.ask_rounds(t)
            members.stop_if_all_mismatch(t)
            agreed = members.agreed_round(t)
            if agreed is None and self._is_started_up:
                agreed = t  # without an agreement we stay where we are
            if agreed is not None:
                self.waiting.end(agreed)
                return agreed
            reason = members.disagreement(t)
            if reason:
                self.waiting.note(t, reason)
            await asyncio.sleep(pause)
            pause = min(2 * pause, 5 * MAX_BACKOFF)

    def _follow(self, t: int, federation_round: int) -> int:
        """Return the round to continue with, by agreement; a new peer joins there."""
        if t == 0:
            return self._join(federation_round + 1 if federation_round else 0)
        return self._skip_to(t, federation_round)

    def _obey(self, t: int, at_round: int) -> int:
        """Return the round that the operator has named, which is not before t."""
        last_round = self.ctx.rounds - 1
        if not t <= at_round <= last_round:
            raise RunError(
                f"--round must be from {t}, the site's next round, to {last_round}, got"
                f" {at_round}. `dispfl peer reopen` goes back to an earlier round."
            )
        return self._join(at_round) if t == 0 else self._skip_to(t, at_round)

    @property
    def _is_started_up(self) -> bool:
        return self.client.deadlines.is_started_up(asyncio.get_running_loop().time())

    def _join(self, first_round: int) -> int:
        """Announce and return the first round of a new peer: 0, or the next one of a running
        federation."""
        ctx = self.ctx
        rounds = ctx.rounds
        if first_round and first_round >= rounds:
            raise RunError(
                f"The federation is in its last round ({rounds} of {rounds}); {ctx.name} is too"
                " late to join."
            )
        try:
            ctx.membership.join(first_round)
        except (DispflError, OSError) as problem:  # a full disk, for example
            ctx.log("problem", {"detail": str(problem)})
        if first_round:
            ctx.joining = True
            self.client.deadlines.start_joining(asyncio.get_running_loop().time())
            ctx.log("joining", {"round": first_round})
        return first_round

    def _skip_to(self, t: int, federation_round: int) -> int:
        """Return the round to continue with: the federation's, at most the last one."""
        current = max(t, min(federation_round, self.ctx.rounds - 1))
        if current > t:
            self.ctx.log("behind", {"round": t, "current": current})
        return current

    # a round

    async def _round(self, t: int, state: PeerState) -> tuple[int, PeerState]:
        """Run a round, or skip it if the federation is further on; return the next round and the
        state."""
        clock = asyncio.get_running_loop().time
        state = self._begin_round(t, state)
        self._publish(t, state)

        try:
            async with asyncio.timeout(self.ctx.schedule.awake_for()) as hours:
                current, responses = await self._exchange(t, state)
        except TimeoutError:
            if not hours.expired():
                raise
            return t, state  # this site's hours have ended: the round begins again after the sleep
        if current > t:
            return self._follow(t, current), state

        training_began = clock()
        step = await self._train(t, state, responses)
        step_seconds = clock() - training_began
        self.ctx.status.step_seconds = step_seconds
        self.client.deadlines.record_round(responses.waited, step_seconds)
        self.waiting.note_round(responses)

        await self._save(t, step, responses)
        self._report(t, step, responses)
        return t + 1, step.next_state

    async def _exchange(self, t: int, state: PeerState) -> tuple[int, RoundResponses]:
        """Fetch the models of round t; return also the round to continue with, which is a later one
        if the federation is further on."""
        members = self.client.members
        responses = await self.client.fetch_models(t, state)
        members.stop_if_all_mismatch(t)
        members.stop_if_removed()
        if responses.is_stale:
            await members.ask_rounds(t)
            current = members.agreed_round(t) or t
            if current > t:
                return current, responses

        if self.waiting.must_wait(t, responses):
            return await self.waiting.wait(t, state)
        return t, responses

    def _begin_round(self, t: int, state: PeerState) -> PeerState:
        """Return the state that the round begins with."""
        ctx = self.ctx
        self._use_version_of(t)
        ctx.status.round = t
        ctx.status.state = "fetching"
        ctx.status.deadline = self.client.deadlines.deadline
        ctx.guard.start_round()
        if state.model.values.any():
            return state
        # Weights that are all zero were never trained, and must not be averaged in.
        ctx.joining = True
        return with_weights(state, ctx.run.first_weights)

    def _use_version_of(self, t: int) -> None:
        """Take the settings of the spec's version that is in force in round t."""
        ctx = self.ctx
        version = ctx.versions.at(t)
        ctx.status.rounds = ctx.rounds
        ctx.status.spec_version = version.number
        if version.run is ctx.run:
            return
        ctx.run = version.run
        ctx.on_changed_settings(version.run)
        ctx.log("spec changed", {"round": t, "version": version.number})

    def _publish(self, t: int, state: PeerState) -> None:
        """Let other peers request our model, unless this peer has just joined and has none."""
        ctx = self.ctx
        if ctx.joining:
            return
        model = published_model(ctx.run, state)
        receivers = ctx.participants.receivers(t)
        chosen = ctx.participants.chosen(t, state)
        ctx.published.publish(t, model, receivers, ctx.status.silent_peers, chosen)
        ctx.guard.forget_before(ctx.published.oldest or 0)

    async def _train(self, t: int, state: PeerState, responses: RoundResponses) -> StepResult:
        """Take the step with the received models."""
        ctx = self.ctx
        ctx.status.state = "training"
        received = responses.received
        requested = responses.expected
        if ctx.joining:
            method = ctx.run.method
            state = await ctx.compute(lambda: joining_state(method, state, received, requested))
        task = PeerTask(
            ctx.name,
            t,
            requested=requested,
            mixing_weights=self._mixing_weights(t, responses),
            evaluate=ctx.run.evaluates(t),
        )
        return await self.training.step(task, state, received)

    def _mixing_weights(self, t: int, responses: RoundResponses) -> Mapping[str, float] | None:
        """How much each model counts in our average; None: all the same."""
        return self.ctx.participants.mixing_weights(t)

    async def _save(self, t: int, step: StepResult, responses: RoundResponses) -> None:
        """Save the round with the costs of its messages."""
        step = replace(step, messages=tuple(responses.messages))
        await self.store.save(t, step, sorted(responses.received), responses.missed)

    def _report(self, t: int, step: StepResult, responses: RoundResponses) -> None:
        """Update the status, and log the round."""
        ctx = self.ctx
        status = ctx.status
        report = step.report
        if report.score is not None:
            status.score = report.score
        if report.epsilon is not None:
            status.epsilon = report.epsilon
        status.privacy_exhausted = report.exhausted
        for name, distance in (report.distances or {}).items():
            status.peers[name].distance = distance
        for name, affinity in (report.affinities or {}).items():
            status.peers[name].affinity = affinity
            status.peers[name].similarity = (report.similarities or {}).get(name)
        self._report_protection(t, report, responses)

        self._report_failure(t, report)

        fields: dict[str, object] = {
            "round": t,
            "received": len(responses.received),
            "missed": responses.missed,
            "score": report.score,
        }
        if report.discarded:
            fields["discarded"] = report.discarded
        if responses.latencies:
            fields["seconds"] = _latency_texts(responses.latencies)
        if report.distances:
            fields["distances"] = _distance_texts(report.distances)
        if report.affinities:
            fields["affinities"] = _affinity_texts(report.affinities)
        ctx.log("round", fields)

    def _report_failure(self, t: int, report: Report) -> None:
        """Show a step that failed, or once that the privacy budget is spent: then none is taken."""
        ctx = self.ctx
        if report.exhausted:
            if not self._is_exhausted:
                ctx.log("budget spent", {"round": t, "detail": report.failure})
            self._is_exhausted = True
        elif report.failure:
            ctx.status.failed_steps += 1
            ctx.status.last_failure = f"round {t}: {report.failure}"
            detail = f"{report.failure} The model of the last round is kept."
            ctx.log("step failed", {"round": t, "detail": detail})
        else:
            ctx.joining = False

    def _report_protection(self, t: int, report: Report, responses: RoundResponses) -> None:
        """Show how the round's average was protected from Byzantine peers; log each change."""
        status = self.ctx.status
        status.discarded = report.discarded or 0
        if not responses.expected:
            return
        method = self.ctx.run.method
        status.is_protected = withstood(method, responses.expected) > 0
        text = protection_text(method, responses.expected, len(responses.received))
        if text != status.protection:
            status.protection = text
            self.ctx.log("protection", {"round": t, "detail": text})

    # after the last round

    @property
    def _final_state(self) -> str:
        """The state after the last round."""
        return self.ctx.status.final_state

    async def _is_extended(self, t: int) -> bool:
        """Whether a change of the spec adds rounds.

        A change that our operator has confirmed is waited for until the others have, too.
        """
        ctx = self.ctx
        pause = MIN_BACKOFF
        while t >= ctx.rounds:
            confirmed = ctx.versions.changes().confirmed_by(ctx.name)
            if not confirmed:
                return False
            if ctx.status.state != "waiting for signatures":
                ctx.status.state = "waiting for signatures"
                ctx.log("waiting for signatures", {"change": confirmed[0].summary})
            await self.client.members.sync(ctx.participants.other_names(t))
            await asyncio.sleep(pause)
            pause = min(2 * pause, 5 * MAX_BACKOFF)
        return True

    async def _serve_last(self, t: int, state: PeerState) -> None:
        """Serve our last models, after the last round."""
        await self._serve_stragglers(self.client.deadlines.deadline)

    async def _serve_stragglers(self, seconds: float) -> None:
        """Serve our last models until the remaining peers have them or the time is up."""
        ctx = self.ctx
        ctx.status.state = "serving"
        clock = asyncio.get_running_loop().time
        try:
            async with asyncio.timeout(seconds):
                while self.client.notices or self._stragglers(clock()):
                    await asyncio.sleep(MIN_BACKOFF)
        except TimeoutError:
            ctx.log("stopped serving", {"without": sorted(ctx.published.pending())})

    def _stragglers(self, now: float) -> set[str]:
        """Peers that may still fetch a model of ours: not those that are silent or asleep."""
        peers = self.ctx.status.peers
        pending = self.ctx.published.pending() - self.ctx.status.silent_peers
        return {name for name in pending if not peers[name].is_asleep(now)}


def joining_state(
    method: Method, state: PeerState, received: Mapping[str, PackedModel], requested: int
) -> PeerState:
    """Return the state that a joining peer begins with: the average of the received models under
    its own mask, by the federation's robust rule where it has one.

    A weight that nobody holds keeps its first value, so a peer that receives no model, or fewer of
    the requested ones than its rule needs, begins like all others did, with the shared first
    weights.
    """
    first_weights = state.model.unpack()[0]
    weights = None
    if isinstance(method, Robust):
        weights = method.robust_start(first_weights, received, requested)
    if weights is None:
        models = (PackedModel.pack(*received[name].unpack()) for name in sorted(received))
        weights = masked_mean(models, first_weights)
    return with_weights(state, weights)


def with_weights(state: PeerState, weights: Tensor) -> PeerState:
    """Return a state with other weights, of which it keeps those under its next mask."""
    model = PackedModel.pack(weights, state.next_mask)
    return replace(state, model=replace(model, tensors=state.model.tensors))


def _distance_texts(distances: Mapping[str, float | None]) -> list[str]:
    """Return `bob=0.12`, the farthest first; models without common weights are `unknown`."""
    texts = []
    for name in sorted(distances, key=lambda name: -(distances[name] or 0.0)):
        distance = distances[name]
        texts.append(f"{name}=unknown" if distance is None else f"{name}={distance:.3g}")
    return texts


def _affinity_texts(affinities: Mapping[str, float]) -> list[str]:
    """Return `bob=0.93`, those who count most first."""
    by_affinity = sorted(affinities, key=lambda name: (-affinities[name], name))
    return [f"{name}={affinities[name]:.2f}" for name in by_affinity]


def _latency_texts(latencies: Mapping[str, float]) -> list[str]:
    """Return `bob=0.12`, sorted by name."""
    return [f"{name}={latencies[name]:.2f}" for name in sorted(latencies)]
