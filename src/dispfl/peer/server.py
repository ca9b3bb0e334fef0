"""The server half of a node: answers `sync`, `choice` and `model` requests of other peers."""

import asyncio
from dataclasses import replace
from typing import NoReturn

from dispfl.core.packed import Mask, PackedModel
from dispfl.errors import MessageError
from dispfl.methods.base import GossipMethod
from dispfl.peer.membership.spec_change import FIRST_VERSION
from dispfl.peer.node_context import NodeContext
from dispfl.peer.state.status import announced_privacy
from dispfl.peer.transport.base import Refused, Request, Response
from dispfl.round.exchange import check_request, encode_model, is_free
from dispfl.wire.refusals import Refusal

HOLD_SECONDS = 1.0
"""Seconds that a request for a later round is held before the response is "wait"."""
MAX_NONCE_CHARS = 64


class Server:
    """The request handler of a node. The transport passes the authenticated name of the sender."""

    def __init__(self, ctx: NodeContext) -> None:
        self.ctx = ctx
        self._begun: dict[tuple[str, str], int] = {}
        """By sender and nonce: the round of the newest model, which a resumed response needs."""

    async def __call__(self, sender: str, request: Request) -> Response:
        """Answer a request, or raise `Refused`."""
        self.ctx.note_contact(sender)
        guard = self.ctx.guard
        guard.check(sender)
        guard.charge(sender, len(request.body), is_sync=request.kind == "sync")
        if request.kind == "sync":
            response = await self._answer_sync(sender, request)
        elif request.kind in ("choice", "model"):
            response = await self._answer_in_round(sender, request)
        else:
            message = f"There is no request {request.kind[:20]!r}."
            self._refuse(sender, Refusal.UNKNOWN_REQUEST, message)
        guard.charge_response(sender, len(response.body))
        return response

    async def _answer_sync(self, sender: str, request: Request) -> Response:
        """Compare specs, merge the sender's records, and answer with ours."""
        ctx = self.ctx
        received_spec = request.header.get("spec")
        if not isinstance(received_spec, dict):
            message = "A sync request needs the federation spec in its header."
            self._refuse(sender, Refusal.MALFORMED, message)
        spec = {str(name): str(value) for name, value in received_spec.items()}
        version = request.header.get("spec_version", FIRST_VERSION)
        difference = ctx.spec_difference(sender, spec, version)
        if difference:
            message = f"{sender} cannot take part with {ctx.name}: {difference}"
            self._refuse(sender, Refusal.SPEC_MISMATCH, message)

        ctx.note_message(sender, request.header.get("current_round"))
        ctx.note_instance(sender, request.header.get("instance"))
        ctx.status.peers[sender].privacy = announced_privacy(request.header.get("privacy"))
        ctx.note_schedule(sender, request.header)
        sync_message = await ctx.read_sync(sender, request.body)
        offer = await ctx.offer()
        body = await ctx.compute(lambda: offer.answer(sync_message))
        header = ctx.sync_header()
        if ctx.status.peers[sender].cloned:
            header["cloned"] = True
        return Response(header, body)

    async def _answer_in_round(self, sender: str, request: Request) -> Response:
        """Answer a question about a round, with our model of it, or with "wait" or "stale"."""
        ctx = self.ctx
        t, nonce = self._read_model_request(sender, request)
        if not self._has_same_spec(sender, request, t):
            return Response({"status": "wait", **ctx.about_us()})
        if not 0 <= t < ctx.rounds:
            message = f"There is no round {t}; the federation has {ctx.rounds} rounds."
            self._refuse(sender, Refusal.NO_SUCH_ROUND, message)
        ctx.note_message(sender, t)
        ctx.status.peers[sender].asleep_until = None  # a site that sleeps does not ask this
        if ctx.schedule.asleep_for() > 0:
            return Response({"status": "asleep", **ctx.about_us()})
        if "newer_than" in request.header:
            return await self._answer_with_newest(sender, request, nonce)
        if ctx.joining and t <= ctx.status.round:
            message = f"{ctx.name} has just joined and has no model yet."
            self._refuse(sender, Refusal.JOINING, message)

        model = await ctx.published.wait_for(t, HOLD_SECONDS)
        if model is None:
            if not ctx.published.is_past(t):
                return Response({"status": "wait", **ctx.about_us()})
            ctx.guard.count(sender, Refusal.STALE)
            return Response({"status": "stale", **ctx.about_us()})

        if request.kind == "choice":
            agrees = ctx.published.chooses(t, sender)
            return Response({"status": "agreed" if agrees else "declined", **ctx.about_us()})
        if "spare_place" in request.header:
            status = await self._status_of_spare_place(sender, request, t)
            if status is not None:
                return Response({"status": status, **ctx.about_us()})
        return await self._answer_with_model(sender, request, t, nonce, model)

    async def _answer_with_newest(self, sender: str, request: Request, nonce: str) -> Response:
        """Answer with our newest model, or with "wait" if the sender has it already.

        A resumed response goes on with the model that it began with.
        """
        ctx = self.ctx
        newer_than = request.header.get("newer_than")
        if not isinstance(newer_than, int) or isinstance(newer_than, bool):
            self._refuse(sender, Refusal.MALFORMED, "A request for the newest model needs a round.")
        if not ctx.run.settings.is_async:
            message = f"The federation has rounds; {ctx.name} sends models of a round only."
            self._refuse(sender, Refusal.MALFORMED, message)
        if request.offset:
            t = self._begun.get((sender, nonce), -1)
            model = ctx.published.models().get(t)
            if model is None:
                return Response({"status": "stale", **ctx.about_us()})
            return await self._answer_with_aged_model(sender, request, t, nonce, model)

        newest = await ctx.published.wait_for_newer(newer_than, HOLD_SECONDS)
        if newest is None:
            return Response({"status": "wait", **ctx.about_us()})
        t, model = newest
        for key in [key for key in self._begun if key[0] == sender]:
            del self._begun[key]
        self._begun[sender, nonce] = t
        return await self._answer_with_aged_model(sender, request, t, nonce, model)

    async def _answer_with_aged_model(
        self, sender: str, request: Request, t: int, nonce: str, model: PackedModel
    ) -> Response:
        """Answer with our newest model, and how many seconds ago it was finished."""
        age = asyncio.get_running_loop().time() - self.ctx.published.finished(t)
        response = await self._answer_with_model(sender, request, t, nonce, model)
        return replace(response, header={**response.header, "age": round(age, 3)})

    async def _status_of_spare_place(self, sender: str, request: Request, t: int) -> str | None:
        """Return "declined", if we have no place for a spare receiver, or "wait"; else None.

        It depends on how many of our own choices agree.
        """
        place = request.header.get("spare_place")
        if not isinstance(place, int) or isinstance(place, bool):
            self._refuse(sender, Refusal.MALFORMED, "A spare place needs a number.")
        published = self.ctx.published
        if request.header.get("needed") is True:
            agreed = await published.wait_for_agreed(t, HOLD_SECONDS)
            if agreed is None:
                return "wait"
            if is_free(place, agreed):
                return None
        published.mark_fetched(t, sender)
        return "declined"

    async def _answer_with_model(
        self, sender: str, request: Request, t: int, nonce: str, model: PackedModel
    ) -> Response:
        ctx = self.ctx
        ctx.guard.check_nonce(sender, t, nonce, request.body, resumes=request.offset > 0)
        if request.offset:
            ctx.peer_log.event(sender, "resuming transfer", round=t, offset=request.offset)
        frame = await self._encode(sender, t, model, request.body)

        def on_sent() -> None:
            ctx.published.mark_fetched(t, sender)
            peer = ctx.status.peers[sender]
            peer.received_bytes += len(request.body)
            peer.sent_bytes += len(frame)

        header = {"status": "model", "round": t, "nonce": nonce, **ctx.about_us()}
        header["values"] = model.values.numel()
        return Response(header, frame, on_sent)

    def _has_same_spec(self, sender: str, request: Request, t: int) -> bool:
        """Whether the sender's spec of round t is ours; refuse it unless it is a newer version.

        We ask for a newer version at our next sync, and the sender waits.
        """
        ctx = self.ctx
        if request.header.get("spec") == ctx.versions.at(t).digest:
            return True
        version = request.header.get("spec_version")
        if not isinstance(version, int) or version <= ctx.versions.latest.number:
            message = f"{sender} and {ctx.name} have different federation specs in round {t}."
            self._refuse(sender, Refusal.SPEC_MISMATCH, message)
        ctx.members_with_newer_spec.add(sender)
        detail = f"{sender} follows version {version} of the federation's spec"
        ctx.peer_log.problem(sender, "newer spec", detail)
        return False

    def _read_model_request(self, sender: str, request: Request) -> tuple[int, str]:
        """Return the round and the nonce of a model request."""
        t = request.header.get("round")
        nonce = request.header.get("nonce")
        incomplete = "A model request needs a round and a nonce in its header."
        if not isinstance(t, int) or isinstance(t, bool):
            self._refuse(sender, Refusal.MALFORMED, incomplete)
        if not isinstance(nonce, str) or len(nonce) > MAX_NONCE_CHARS:
            self._refuse(sender, Refusal.MALFORMED, incomplete)
        return t, nonce

    async def _encode(self, sender: str, t: int, model: PackedModel, body: bytes) -> bytes:
        """Encode our model for this sender.

        A repeated request gets the same bytes, so that transfers can resume.
        """
        ctx = self.ctx
        mask = None
        if ctx.run.pulls:
            try:
                mask = await ctx.compute(lambda: self._decode_mask(sender, body))
            except MessageError as problem:
                self._refuse(sender, problem.refusal, str(problem))
        return await ctx.compute(
            lambda: encode_model(ctx.run, ctx.codec, model, mask, ctx.name, sender, t)
        )

    def _decode_mask(self, sender: str, body: bytes) -> Mask:
        """Decode the mask in a request, and check it against the density that its sender
        announced."""
        mask = self.ctx.codec.decode_request(body)
        kept_counts = self.ctx.membership.kept_counts(sender)
        if kept_counts is not None:
            method = self.ctx.run.method
            falls = isinstance(method, GossipMethod) and method.density_falls
            layout = self.ctx.codec.layout
            check_request(mask, kept_counts, sender, layout, density_falls=falls)
        return mask

    def _refuse(self, sender: str, reason: str, message: str) -> NoReturn:
        if reason == Refusal.SPEC_MISMATCH:
            self.ctx.note_spec_mismatch(sender, message)
        else:
            self.ctx.peer_log.event(sender, "refused request", reason=str(reason), detail=message)
        self.ctx.guard.count(sender, reason)
        raise Refused(reason, message)
