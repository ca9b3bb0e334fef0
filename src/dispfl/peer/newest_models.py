"""The newest models of other members, fetched in the background: with them, nobody waits."""

import asyncio
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from dispfl.core.packed import PackedModel
from dispfl.core.staleness import Staleness
from dispfl.methods.base import PeerState
from dispfl.peer.model_fetch import ModelRequest, RoundResponses, received_model
from dispfl.peer.transport.base import JSON, Refused, Request, Unreachable
from dispfl.round.exchange import model_norm, shared_part
from dispfl.round.ledger import MessageCost
from dispfl.wire.refusals import Refusal

if TYPE_CHECKING:
    from dispfl.peer.client import Client

FAILURES = 2
"""Requests in a row without a response after which a member is only probed."""
MAX_AGE_SECONDS = 1e9
"""The largest age of a model that a member is believed."""
LONGEST_TRANSFER = 3600.0
"""Seconds after which a request is given up, so that its member can be asked again."""


@dataclass
class StepResponses(RoundResponses):
    """The models that have arrived for a step."""

    staleness: dict[str, int] = field(default_factory=dict)
    """How many steps we have begun since each of them was finished."""
    unreachable: list[str] = field(default_factory=list)

    @property
    def missed(self) -> list[str]:
        """Members that do not respond, unless they have finished; of one without a newer model
        nothing is missed."""
        return self.unreachable


@dataclass
class _Arrived:
    model: PackedModel
    finished: float
    """When its sender finished it, by our clock."""
    latency: float
    messages: tuple[MessageCost, ...]


class NewestModels:
    """The newest model of each member that has arrived since our last step."""

    def __init__(self, client: "Client") -> None:
        self._client = client
        self._ctx = client.ctx
        self._begun: list[float] = []
        """When our last steps began: as many as may count for a staleness."""
        self._arrived: dict[str, _Arrived] = {}
        self._arrived_in_step: set[str] = set()
        """Members whose models have arrived since our last step began."""
        self._rounds: dict[str, int] = {}
        """By member: of which of its rounds the newest model is that we have."""
        self._failures: dict[str, int] = {}
        self._requests: dict[str, asyncio.Task[None]] = {}
        """One open request for each member at most."""

    def take(self, t: int) -> StepResponses:
        """Return what is averaged in step t: what has arrived and is not too stale."""
        ctx = self._ctx
        staleness: Staleness = ctx.run.settings.staleness
        drawn = ctx.participants.neighbours(t)
        responses = StepResponses(drawn)
        for name in drawn:
            peer = ctx.status.peers[name]
            if not peer.is_usable and peer.round < ctx.rounds:
                responses.unreachable.append(name)
        kept = {}
        for name, arrived in sorted(self._arrived.items()):
            steps = len(self._begun) - bisect_left(self._begun, arrived.finished)
            if steps > staleness.limit or not ctx.status.peers[name].is_usable:
                continue
            responses.take(name, arrived.model, arrived.latency, arrived.messages)
            responses.staleness[name] = steps
            kept[name] = replace(arrived, messages=())
        self._arrived = kept if staleness.reuse else {}
        self._arrived_in_step.clear()
        self._begun.append(asyncio.get_running_loop().time())
        self._begun = self._begun[-staleness.limit - 1 :]
        return responses

    def request(self, t: int, state: PeerState) -> None:
        """Ask the neighbours of step t for models that are newer than those we have.

        Each is asked until one has arrived: a slow site averages no more models than others.
        """
        names = self._ctx.participants.neighbours(t)
        self._request([name for name in names if name not in self._arrived_in_step], state)

    def request_last(self, state: PeerState) -> None:
        """Ask the neighbours of the last step that have finished for their last models, while they
        serve them."""
        rounds = self._ctx.rounds
        finished = []
        for name in self._ctx.participants.neighbours(rounds - 1):
            has_finished = self._ctx.status.peers[name].round >= rounds
            if has_finished and self._rounds.get(name, -1) < rounds:
                finished.append(name)
        self._request(finished, state)

    def _request(self, names: Iterable[str], state: PeerState) -> None:
        now = asyncio.get_running_loop().time()
        usable = []
        for name in names:
            peer = self._ctx.status.peers[name]
            if name not in self._requests and peer.is_usable and not peer.is_asleep(now):
                usable.append(name)
        if not usable:
            return
        norm = model_norm(shared_part(self._ctx.run, state.model))
        for name in usable:
            request = ModelRequest(self._ctx.status.round, None, b"", norm, now)
            self._requests[name] = asyncio.create_task(self._fetch(name, request))

    async def settle(self, seconds: float) -> None:
        """Wait until all open requests are answered, but not longer than this."""
        if self._requests:
            await asyncio.wait(list(self._requests.values()), timeout=seconds)

    async def close(self) -> None:
        """Give up the open requests."""
        requests = list(self._requests.values())
        for request in requests:
            request.cancel()
        await asyncio.gather(*requests, return_exceptions=True)

    async def _fetch(self, name: str, request: ModelRequest) -> None:
        """Fetch a member's newest model, if there is one that we do not have."""
        try:
            async with asyncio.timeout(LONGEST_TRANSFER):
                await self._ask(name, request)
        except (Unreachable, TimeoutError) as problem:
            self._note_failure(name, getattr(problem, "detail", "no response"))
        except Refused as refused:
            await self._note_refusal(name, refused)
        except Exception as problem:  # a problem with one member must not end the node
            self._client.members.mark_failed(name, problem)
        else:
            self._failures.pop(name, None)
        finally:
            del self._requests[name]

    async def _ask(self, name: str, request: ModelRequest) -> None:
        ctx = self._ctx
        clock = asyncio.get_running_loop().time
        version = ctx.versions.at(request.t)
        nonce = f"{self._client.rng.getrandbits(128):032x}"
        header: dict[str, JSON] = {
            "spec": version.digest,
            "spec_version": version.number,
            "round": request.t,
            "newer_than": self._rounds.get(name, -1),
            "nonce": nonce,
        }
        answers: list[float] = []  # when it began to respond, in each attempt
        model_request = Request("model", header, on_alive=lambda: answers.append(clock()))
        response = await self._client.transport.request(name, model_request)
        answered = answers[-1] if answers else clock()
        ctx.note_response(name, response.header)
        if response.header.get("status") != "model":
            return
        round_of_model = response.header.get("round")
        newest = self._rounds.get(name, -1)
        if not isinstance(round_of_model, int) or round_of_model <= newest:
            return  # delayed, or replayed
        received = await received_model(ctx, name, request, response, nonce, round_of_model)
        if received is None:
            return
        model, messages = received
        latency = clock() - request.began
        age = _announced_age(response.header.get("age"))
        finished = request.began if age is None else answered - age
        ctx.status.peers[name].answered += 1
        self._rounds[name] = round_of_model
        self._arrived_in_step.add(name)
        self._arrived[name] = _Arrived(model, finished, latency, messages)

    def _note_failure(self, name: str, detail: str) -> None:
        """Stop to ask a member that does not respond, until it answers a probe."""
        self._failures[name] = self._failures.get(name, 0) + 1
        self._client.members.log_waiting(name, detail)
        if self._failures[name] < FAILURES:
            return
        del self._failures[name]
        self._ctx.status.peers[name].mark_unreachable()
        self._client.prober.watch(name)
        self._ctx.peer_log.problem(name, "unreachable", detail)

    async def _note_refusal(self, name: str, refused: Refused) -> None:
        ctx = self._ctx
        ctx.status.peers[name].refusals += 1
        if refused.reason == Refusal.REVOKED:
            ctx.note_revocation(name, refused.message)
        if refused.reason != Refusal.SPEC_MISMATCH:
            ctx.peer_log.problem(name, "refused", refused.message, refused.reason)
            return
        replies_before = ctx.status.peers[name].replies
        await self._client.members.sync([name])  # it tells which setting differs, or brings a newer
        if ctx.status.peers[name].replies == replies_before:
            ctx.note_spec_mismatch(name, refused.message)


def _announced_age(announcement: JSON) -> float | None:
    """Return how many seconds ago a model was finished, as its sender says; None if it says nothing
    sensible, or has only stored it in its outbox."""
    if not isinstance(announcement, int | float) or isinstance(announcement, bool):
        return None
    return announcement if 0 <= announcement <= MAX_AGE_SECONDS else None
