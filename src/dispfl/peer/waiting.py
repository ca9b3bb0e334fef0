"""What a peer does in a round in which it receives no model: it waits for the federation.

Training on alone would take a site that is cut off to the last round within minutes, and out of the
federation for good. So it pauses, and continues as soon as one of these holds:

    a member sends its model of this round            a neighbour, or another one if none is up
    the topology fits the members                     it did not say who the neighbours are
    more than half of the members are further on      it follows them; fewer may be lying
    the others have finished                          it trains the last rounds alone

Meanwhile it serves its own models, and asks members for their round, ever less often.
"""

import asyncio
import contextlib
from collections.abc import Sequence

from dispfl.methods.base import PeerState
from dispfl.peer.client import Client
from dispfl.peer.member_sync import WaitReason
from dispfl.peer.model_fetch import MIN_BACKOFF, RoundResponses
from dispfl.peer.node_context import NodeContext

MIN_PAUSE = 1.0
MAX_PAUSE = 10.0
"""Seconds between two attempts; doubled each time. A member that contacts us ends a pause."""
ROUNDS_WITHOUT_MODELS = 2
"""Consecutive rounds that are trained alone where members answer that they have no model: those
that have just joined or restarted have one after two rounds."""
LAST_ROUNDS = 2
"""Rounds that are trained alone after the others have finished."""


class Waiting:
    """Decides whether one node may train without a received model, and waits otherwise."""

    def __init__(self, ctx: NodeContext, client: Client) -> None:
        self._ctx = ctx
        self._client = client
        self._company: Sequence[str] = []
        """The members whose models were received last."""
        self._without_models = 0
        """Rounds that were trained since then because members had no model."""
        self._is_finishing = False
        """Whether the others have finished."""
        self._logged: set[str] = set()
        """The topics that were logged in this wait."""

    def may_train_alone(self, responses: RoundResponses) -> bool:
        """Whether to train a round although no requested model was received."""
        if self._ctx.status.alone_in_a_row < self._ctx.alone_rounds:
            return True
        return bool(responses.without_model) and self._without_models < ROUNDS_WITHOUT_MODELS

    def must_wait(self, t: int, responses: RoundResponses) -> bool:
        """Whether to wait, instead of training round t with what was received."""
        if self._ctx.participants.topology_problem(t) is not None:
            return True
        return responses.is_alone and not self.may_train_alone(responses)

    def note_round(self, responses: RoundResponses) -> None:
        """Note with whom a round was trained."""
        status = self._ctx.status
        status.trained_rounds += 1
        if responses.is_alone:
            status.alone_rounds += 1
            status.alone_in_a_row += 1
            self._without_models += bool(responses.without_model)
        elif responses.received:
            status.alone_in_a_row = 0
            self._without_models = 0
            self._company = list(responses.received)

    async def wait(self, t: int, state: PeerState) -> tuple[int, RoundResponses]:
        """Wait until round t can be trained, or is long over.

        Returns the round to continue with, and the responses to the requests for round t.
        """
        ctx = self._ctx
        members = self._client.members
        pause = MIN_PAUSE
        while True:
            neighbours = ctx.participants.senders(t, state)
            responses = RoundResponses([], neighbours)
            answering = await members.ask_rounds(t)
            members.stop_if_all_mismatch(t)
            members.stop_if_removed()
            current = members.agreed_round(t) or t
            if current > t:
                break

            problem = ctx.participants.topology_problem(t)
            if problem is None:
                senders = self._senders(neighbours, answering)
                if senders:
                    responses = await self._client.fetch_models(t, state, senders)
                if not responses.is_alone or self.may_train_alone(responses):
                    break
            if self._others_have_finished(t):
                self._log_finishing(t)
                break
            reason = members.disagreement(t) or members.revocations() or self._silence(t, answering)
            if problem is not None:
                reason = WaitReason("topology", f"no neighbours: {problem}")
            self.note(t, reason)
            await self._pause(pause)
            pause = min(2 * pause, MAX_PAUSE)
        self.end(current)
        return current, responses

    def _senders(self, neighbours: Sequence[str], answering: Sequence[str]) -> list[str]:
        """Choose whom to request a model from: neighbours that answer, else other members."""
        reachable = [name for name in neighbours if name in answering]
        if reachable:
            return reachable
        return self._client.rng.sample(answering, min(len(neighbours), len(answering)))

    def _log_finishing(self, t: int) -> None:
        if not self._is_finishing:
            detail = "the others have finished; the last rounds are trained alone"
            self._ctx.log("alone", {"round": t, "detail": detail})
        self._is_finishing = True

    async def _pause(self, seconds: float) -> None:
        """Sleep, but not much longer than until a member contacts us."""
        await asyncio.sleep(MIN_BACKOFF)
        self._ctx.contact.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._ctx.contact.wait()

    def _others_have_finished(self, t: int) -> bool:
        """Whether round t is one of the last, and the others have left or are about to.

        Those are more than half of all members, or of those with whom we trained last.
        """
        rounds = self._ctx.rounds
        if t < rounds - LAST_ROUNDS:
            return False
        members = self._client.members
        everybody = members.reported_rounds(members.names())
        company = members.reported_rounds(self._company)
        for reported in (everybody, company):
            finished = [claim for claim in reported if claim >= rounds - 1]
            if 2 * len(finished) > len(reported):
                return True
        return False

    def _silence(self, t: int, answering: Sequence[str]) -> WaitReason:
        """Say why no model arrives."""
        now = asyncio.get_running_loop().time()
        peers = self._ctx.status.peers
        if not answering:
            return WaitReason("silence", "no member answers")
        if all(peers[name].is_asleep(now) for name in answering):
            return WaitReason("asleep", "all members that answer sleep outside of their hours")
        text = f"no member that answers has sent its model of round {t}"
        return WaitReason("no model", text)

    # what is shown

    def note(self, t: int, reason: WaitReason) -> None:
        """Show why this node waits; each kind of reason is logged once."""
        status = self._ctx.status
        status.state = "waiting"
        status.waiting = reason.text
        if reason.topic not in self._logged:
            self._logged.add(reason.topic)
            self._ctx.log("waiting", {"round": t, "detail": reason.text})

    def end(self, t: int) -> None:
        """Show that this node continues."""
        self._ctx.status.waiting = None
        if self._logged:
            self._ctx.log("continuing", {"round": t})
        self._logged.clear()
