"""The server half of a node: answers `sync` and `model` requests of other peers."""

import asyncio
from typing import NoReturn

from dispfl.core.packed import PackedMask, PackedModel
from dispfl.errors import MessageError
from dispfl.peer.node_context import NodeContext
from dispfl.peer.setup.spec import spec_difference
from dispfl.peer.state.status import announced_privacy
from dispfl.peer.transport.base import Refused, Request, Response
from dispfl.round.exchange import check_request, encode_model
from dispfl.wire.refusals import Refusal

MAX_HOLD = 10.0
"""Seconds that a request for a later round is held before the response is "wait"."""
MAX_NONCE_CHARS = 64


class Server:
    """The request handler of a node. The transport calls it with the authenticated name of the
    sender."""

    def __init__(self, ctx: NodeContext) -> None:
        self.ctx = ctx

    async def __call__(self, sender: str, request: Request) -> Response:
        """Answer a request, or raise `Refused`."""
        self.ctx.status.record_request(sender, asyncio.get_running_loop().time())
        guard = self.ctx.guard
        guard.check(sender)
        guard.charge(sender, len(request.body), is_sync=request.kind == "sync")
        if request.kind == "sync":
            response = await self._sync(sender, request)
        elif request.kind == "model":
            response = await self._model(sender, request)
        else:
            self._refuse(
                sender, Refusal.UNKNOWN_REQUEST, f"There is no request {request.kind[:20]!r}."
            )
        guard.charge_response(sender, len(response.body))
        return response

    async def _sync(self, sender: str, request: Request) -> Response:
        ctx, theirs = self.ctx, request.header.get("spec")
        if not isinstance(theirs, dict):
            self._refuse(
                sender, Refusal.MALFORMED, "A sync request needs the federation spec in its header."
            )
        spec = {str(name): str(value) for name, value in theirs.items()}
        if differs := spec_difference(ctx.spec, spec, f"at {ctx.name}", f"at {sender}"):
            self._refuse(
                sender,
                Refusal.SPEC_MISMATCH,
                f"{sender} cannot take part with {ctx.name}: {differs}",
            )
        ctx.on_message(sender, request.header.get("current_round"))
        ctx.status.peers[sender].privacy = announced_privacy(request.header.get("privacy"))
        incoming, offer = await ctx.read_sync(sender, request.body), await ctx.offer()
        return Response(ctx.sync_header(), await ctx.compute(lambda: offer.answer(incoming)))

    async def _model(self, sender: str, request: Request) -> Response:
        ctx, t, nonce = self.ctx, request.header.get("round"), request.header.get("nonce")
        if (
            not isinstance(t, int)
            or isinstance(t, bool)
            or not isinstance(nonce, str)
            or len(nonce) > MAX_NONCE_CHARS
        ):
            self._refuse(
                sender,
                Refusal.MALFORMED,
                "A model request needs a round and a nonce in its header.",
            )
        if request.header.get("spec") != ctx.spec_digest:
            self._refuse(
                sender,
                Refusal.SPEC_MISMATCH,
                f"{sender} and {ctx.name} have different federation specs.",
            )
        if not 0 <= t < ctx.run.rounds:
            self._refuse(
                sender,
                Refusal.NO_SUCH_ROUND,
                f"There is no round {t}; the federation has {ctx.run.rounds} rounds.",
            )
        ctx.on_message(sender, t)
        if ctx.joining and t <= ctx.status.round:
            self._refuse(
                sender, Refusal.JOINING, f"{ctx.name} has just joined and has no model yet."
            )
        model = await ctx.published.wait_for(t, _hold(request))
        if model is None:
            if past := ctx.published.is_past(t):
                ctx.guard.count(sender, Refusal.STALE)
            return Response({"status": "stale" if past else "wait", **ctx.about_us()})
        ctx.guard.check_nonce(sender, t, nonce, request.body, resumes=request.offset > 0)
        if request.offset:
            ctx.log_about(sender, "resuming transfer", round=t, offset=request.offset)
        frame = await self._encode(sender, t, model, request.body)

        def on_sent() -> None:
            ctx.published.mark_fetched(t, sender)
            ctx.status.record_sent(sender, len(request.body), len(frame))

        return Response(
            {"status": "model", "round": t, "nonce": nonce, **ctx.about_us()}, frame, on_sent
        )

    async def _encode(self, sender: str, t: int, model: PackedModel, body: bytes) -> bytes:
        """Encode our model for this sender. A repeated request gets the same bytes, so that
        transfers can resume."""
        ctx = self.ctx
        mask = None
        if ctx.run.pulls:
            try:
                mask = await ctx.compute(lambda: self._requested_mask(sender, body))
            except MessageError as problem:
                self._refuse(sender, problem.refusal, str(problem))
        return await ctx.compute(
            lambda: encode_model(ctx.run, ctx.codec, model, mask, ctx.name, sender, t)
        )

    def _requested_mask(self, sender: str, body: bytes) -> PackedMask:
        """Decode a request, and check it against the density that its sender announced."""
        mask = self.ctx.codec.decode_request(body)
        if (announced := self.ctx.membership.kept(sender)) is not None:
            check_request(mask, announced, sender, self.ctx.codec.layout)
        return mask

    def _refuse(self, sender: str, reason: str, message: str) -> NoReturn:
        if reason == Refusal.SPEC_MISMATCH:
            self.ctx.report_spec_mismatch(sender, message)
        else:
            self.ctx.log_about(sender, "refused request", reason=str(reason), detail=message)
        self.ctx.guard.count(sender, reason)
        raise Refused(reason, message)


def _hold(request: Request) -> float:
    """Seconds to hold a request for a later round: as requested by the client, at most
    `MAX_HOLD`."""
    hold = request.header.get("hold")
    return min(MAX_HOLD, max(0.0, hold)) if isinstance(hold, int | float) else MAX_HOLD
