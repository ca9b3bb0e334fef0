"""What a peer answers when others ask: its terms, and its models."""

from typing import NoReturn

from dispfl.core.masks import kept_per_layer
from dispfl.core.packed import PackedModel
from dispfl.core.rng import stream
from dispfl.errors import MessageError
from dispfl.peer.context import Context
from dispfl.peer.door import Reason
from dispfl.peer.terms import difference
from dispfl.peer.transport import Ask, Refused, Reply

HOLD = 10.0
"""Seconds that a question for a round that we have not reached is held at most before the answer is "wait"."""
LONGEST_NONCE = 64


class Answers:
    """Answers one peer's questions after another; a transport calls it with the name that it authenticated."""

    def __init__(self, here: Context) -> None:
        self.here = here

    async def __call__(self, sender: str, ask: Ask) -> Reply:
        """What somebody else wants of us."""
        self.here.door.check(sender)
        if ask.what == "hello":
            return await self._hello(sender, ask)
        if ask.what != "model":
            self._refuse(sender, Reason.UNKNOWN, f"There is no question {ask.what[:20]!r}.")
        return await self._model(sender, ask)

    async def _hello(self, sender: str, ask: Ask) -> Reply:
        here, theirs = self.here, ask.head.get("terms")
        if not isinstance(theirs, dict):
            self._refuse(sender, Reason.MALFORMED, "A greeting needs its terms.")
        terms = {str(name): str(term) for name, term in theirs.items()}
        if differs := difference(here.terms, terms, f"at {here.name}", f"at {sender}"):
            self._refuse(sender, Reason.TERMS, f"{sender} cannot take part with {here.name}: {differs}")
        here.met(sender, ask.head.get("at"))
        news = await here.learn(sender, ask.body)
        return Reply(*await here.compute(lambda: here.hello(news)))

    async def _model(self, sender: str, ask: Ask) -> Reply:
        here, t, nonce = self.here, ask.head.get("round"), ask.head.get("nonce")
        if not isinstance(t, int) or isinstance(t, bool) or not isinstance(nonce, str) or len(nonce) > LONGEST_NONCE:
            self._refuse(sender, Reason.MALFORMED, "A question for a model needs a round and a nonce.")
        if ask.head.get("terms") != here.digest:
            self._refuse(sender, Reason.TERMS, f"{sender} and {here.name} have different terms; a greeting says where.")
        if not 0 <= t < here.setting.rounds:
            self._refuse(sender, Reason.ROUND, f"There is no round {t}; there are {here.setting.rounds}.")
        here.met(sender, t)
        if here.joining:
            self._refuse(sender, Reason.JOINING, f"{here.name} has just joined and has no model yet.")
        model = await here.shelf.wait_for(t, _hold(ask))
        if model is None:
            if past := here.shelf.is_past(t):
                here.door.count(sender, Reason.STALE)
            return Reply({"status": "stale" if past else "wait", "at": here.standing.round})
        here.door.once(sender, t, nonce, ask.body, goes_on=ask.offset > 0)
        if ask.offset:
            here.tell("going on", {"round": t, "peer": sender, "from": ask.offset})
        frame = await self._encode(sender, t, model, ask.body)

        def sent() -> None:
            here.shelf.fetched(t, sender)
            here.standing.served(sender, len(ask.body), len(frame))

        return Reply({"status": "model", "round": t, "nonce": nonce, "at": here.standing.round}, frame, sent)

    async def _encode(self, sender: str, t: int, model: PackedModel, body: bytes) -> bytes:
        """Our model for this asker; the same bytes if it asks again, so that a broken transfer can go on."""
        here = self.here
        rng = stream(here.setting.seed, "rounding", here.name, sender, t)
        if not here.setting.pulls:
            return await here.compute(lambda: here.codec.encode_model(model, rng=rng))
        try:
            request = await here.compute(lambda: here.codec.decode_request(body))
        except MessageError as problem:
            self._refuse(sender, problem.refusal, str(problem))
        if (announced := here.members.kept(sender)) is not None:
            kept = await here.compute(lambda: kept_per_layer(request.unpack(), here.codec.layout))
            if kept != list(announced):
                self._refuse(sender, Reason.DENSITY, f"{sender}'s mask does not keep what {sender} announced.")
        return await here.compute(lambda: here.codec.encode_answer(model, request, rng=rng))

    def _refuse(self, sender: str, reason: str, sentence: str) -> NoReturn:
        if reason == Reason.TERMS:
            self.here.disagree(sender, sentence)
        else:
            self.here.tell("refusing", {"peer": sender, "reason": str(reason), "why": sentence})
        self.here.door.count(sender, reason)
        raise Refused(reason, sentence)


def _hold(ask: Ask) -> float:
    """How long a question may be held: half as long as the asker waits, so that it learns that we are there."""
    wish = ask.head.get("hold")
    return min(HOLD, max(0.0, wish)) if isinstance(wish, int | float) else HOLD
