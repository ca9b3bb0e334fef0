"""How a peer gathers its neighbours' models: from all who answer in time, each checked before it counts."""

import asyncio
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from dispfl.core.packed import PackedMask, PackedModel
from dispfl.core.rng import stream
from dispfl.errors import DispflError, MessageError
from dispfl.methods.base import PeerState
from dispfl.peer.context import Context
from dispfl.peer.door import Reason
from dispfl.peer.pace import Pace
from dispfl.peer.transport import JSON, Ask, Refused, Reply, Transport, Unreachable

SHORTEST_PAUSE, LONGEST_PAUSE = 0.1, 2.0
"""Seconds between two attempts to reach a neighbour; doubled each time."""
LARGEST_NORM = 10.0
"""A neighbour's model may be so many times as long as ours."""


@dataclass(frozen=True)
class Question:
    """What a peer asks all its neighbours in a round."""

    t: int
    mask: PackedMask | None
    """Ours, where the method pulls."""
    body: bytes
    """The same as a message."""
    norm: float
    """The length of our own model."""


@dataclass
class Gathered:
    """What came of asking."""

    asked: list[str]
    heard: dict[str, PackedModel] = field(default_factory=dict)
    arrived: float | None = None
    """When the last answer came."""
    stale: list[int] = field(default_factory=list)
    """Where those are who no longer have what we asked for."""
    why: dict[str, str] = field(default_factory=dict)
    """Why somebody could not be asked, the last time that it was tried."""

    @property
    def missed(self) -> list[str]:
        """Who was asked in vain."""
        return [name for name in self.asked if name not in self.heard]

    def current(self, t: int) -> int | None:
        """The federation's round, if most of those whom we asked have left ours behind."""
        further = [where for where in self.stale if where > t]
        # Of two the lower one, so that one liar of two moves nobody.
        return statistics.median_low(further) if 2 * len(further) > len(self.asked) else None


@dataclass
class Asks:
    """One peer's questions to others."""

    here: Context
    transport: Transport
    pace: Pace
    rng: random.Random
    patient_until: float | None = None
    """Until when those are waited for who were never met, or say that they are behind: sites are being started."""

    async def gather(self, t: int, state: PeerState) -> Gathered:
        """Line 6 of Algorithm 1: this round's neighbours, as far as they answer in time."""
        here = self.here
        if self.patient_until is None:
            self.patient_until = asyncio.get_running_loop().time() + self.pace.first
        mask = state.next_mask if here.setting.pulls else None
        body = b"" if mask is None else await here.compute(lambda: here.codec.encode_request(mask))
        question = Question(t, mask, body, _norm(state.model))
        around = here.around(t)
        rng = stream(here.setting.seed, "choose", here.name, t)
        gathered = Gathered(list(here.method.choose(state, around, rng=rng)) if around.neighbours else [])
        async with asyncio.TaskGroup() as together:
            for sender in gathered.asked:
                together.create_task(self._hear(sender, question, gathered))
            if there := [name for name in here.others(t) if not here.standing.is_silent(name)]:
                together.create_task(self.greet([self.rng.choice(there)]))  # so that news of members spread
        return gathered

    async def _hear(self, sender: str, question: Question, gathered: Gathered) -> None:
        """One neighbour's model, within the deadline; who cannot answer, or did not the last time, gets a glance."""
        here, model = self.here, None
        disagrees, replies = here.standing.disagreement(sender) is not None, here.standing.replies_of(sender)
        gone = here.standing.is_gone(sender) or disagrees
        seconds = self.pace.glance if gone else self.pace.deadline
        if self.patient_until and not (here.standing.was_met(sender) or disagrees):
            seconds = max(seconds, self.patient_until - asyncio.get_running_loop().time())
        try:
            async with asyncio.timeout(seconds) as limit:
                model = await self._fetch(sender, question, gathered, limit, patient=not gone)
        except TimeoutError:
            if here.standing.replies_of(sender) == replies:  # who is only slower than we are is waited for again
                self._lose(sender, gathered.why.get(sender, "no answer by the deadline"))
            else:
                here.tell("late", {"round": question.t, "peer": sender})
        except Refused as refused:
            await self._refused_by(sender, refused)
        if model is None:
            here.standing.missed(sender)
            return
        here.standing.answered(sender)
        gathered.heard[sender] = model
        gathered.arrived = asyncio.get_running_loop().time()

    async def _fetch(
        self, sender: str, question: Question, gathered: Gathered, limit: asyncio.Timeout, *, patient: bool
    ) -> PackedModel | None:
        """Ask until there is an answer, or the time is up. Somebody who is gone is asked once."""
        here, pause, clock, usual = self.here, SHORTEST_PAUSE, asyncio.get_running_loop().time, limit.when() or 0.0
        hold = (self.pace.deadline if patient else self.pace.glance) / 2
        while True:
            nonce = f"{self.rng.getrandbits(128):032x}"
            head: dict[str, JSON] = {"terms": here.digest, "round": question.t, "nonce": nonce, "hold": hold}
            try:
                reply = await self.transport.ask(sender, Ask("model", head, question.body))
            except Unreachable as problem:
                gathered.why[sender] = problem.why
                if not patient or here.standing.disagreement(sender):
                    self._lose(sender, problem.why)
                    return None
                self._wait_for(sender, problem.why)
                if (until := max(usual, clock() + self.pace.glance)) < (limit.when() or 0.0):
                    limit.reschedule(until)  # it said "wait", but may have left since
            except Refused as refused:
                if refused.reason != Reason.REPLAYED:  # an answer that broke too often: ask anew
                    raise
            else:
                here.replied(sender, reply.head.get("at"))
                gathered.why.pop(sender, None)
                if reply.head.get("status") == "stale":
                    gathered.stale.append(here.standing.round_of(sender))
                    return None
                if reply.head.get("status") != "wait":
                    return await self._accept(sender, question, nonce, reply)
                limit.reschedule(max(limit.when() or 0.0, self.patient_until or 0.0))
            await asyncio.sleep(pause * (0.5 + self.rng.random()))
            pause = min(2 * pause, LONGEST_PAUSE)

    async def _accept(self, sender: str, question: Question, nonce: str, reply: Reply) -> PackedModel | None:
        """The model in a reply, if it is what was asked for and nothing is wrong with it."""
        here, mask = self.here, question.mask
        try:
            if (reply.head.get("round"), reply.head.get("nonce")) != (question.t, nonce):
                raise MessageError(Reason.MIXED_UP, f"{sender}'s answer belongs to another question.")
            if mask is None:
                model = await here.compute(lambda: here.codec.decode_model(reply.body))
            else:
                model = await here.compute(lambda: here.codec.decode_answer(reply.body, mask))
            if _norm(model) > LARGEST_NORM * max(question.norm, 1.0):
                raise MessageError(Reason.NORM, f"{sender}'s weights are far larger than ours.")
        except MessageError as problem:
            here.door.count(sender, problem.refusal)
            here.tell("bad answer", {"round": question.t, "peer": sender, "why": str(problem)})
            return None
        announced = here.members.kept(sender)
        values = model.values.numel() if announced is None else sum(announced)
        here.standing.received(here.name, sender, question.t, len(question.body), len(reply.body), values)
        return model

    async def greet(self, names: Sequence[str]) -> None:
        """Compare terms with whoever is there, and exchange what we know of members."""
        async with asyncio.TaskGroup() as together:
            for name in names:
                together.create_task(self._greet(name))

    async def _greet(self, name: str) -> None:
        try:
            async with asyncio.timeout(self.pace.glance):
                reply = await self.transport.ask(name, Ask("hello", *self.here.hello()))
                self.here.replied(name, reply.head.get("at"))
                news = await self.here.learn(name, reply.body)
                if await self.here.compute(lambda: news.lacks(self.here.members.records())):
                    await self.transport.ask(
                        name, Ask("hello", *await self.here.compute(lambda: self.here.hello(news)))
                    )
        except Refused as refused:
            if refused.reason == Reason.TERMS:
                self.here.disagree(name, refused.sentence)
            else:
                self.here.trouble(name, "refused", refused.sentence, refused.reason)
        except TimeoutError:
            self._wait_for(name, "no answer in time")
        except Unreachable as problem:
            self._wait_for(name, problem.why)
        except DispflError as problem:
            self.here.tell("no greeting", {"peer": name, "why": str(problem)})

    async def _refused_by(self, name: str, refused: Refused) -> None:
        """A peer will not answer; where our terms differ, a greeting says in what."""
        if refused.reason != Reason.TERMS:
            self.here.trouble(name, "refused", refused.sentence, refused.reason)
        elif self.here.standing.disagreement(name) is None:
            replies = self.here.standing.replies_of(name)
            await self._greet(name)
            if self.here.standing.replies_of(name) == replies:  # it did not agree after all
                self.here.disagree(name, refused.sentence)

    def _wait_for(self, name: str, why: str) -> None:
        """Somebody who was never met may still be starting; who was is only gone once it has missed a deadline."""
        if not self.here.standing.was_met(name) and not self.here.standing.is_gone(name):
            self.here.trouble(name, "waiting", why)

    def _lose(self, name: str, why: str) -> None:
        """Somebody did not answer, and is not waited for until it does."""
        self.here.standing.lost(name)
        self.here.trouble(name, "gone", why)


def _norm(model: PackedModel) -> float:
    return float(torch.linalg.vector_norm(model.values))
