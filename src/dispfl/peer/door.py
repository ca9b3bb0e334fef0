"""Who is let in: every refusal has a name and is counted, and who earns too many waits outside for a while."""

import hashlib
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from enum import StrEnum
from typing import NoReturn

from dispfl.peer.transport import Refused


class Reason(StrEnum):
    """Why a peer was refused, beside what the codec refuses (`dispfl.wire.refusals.Refusal`)."""

    CUT_OFF = "cut-off"
    """It was refused too often lately."""
    TERMS = "terms"
    """It is of another federation, or of this one with other settings."""
    UNKNOWN = "unknown-question"
    """It asked something that nobody asks."""
    MALFORMED = "malformed"
    """A question lacks a field, or has one of the wrong kind."""
    ROUND = "no-such-round"
    """It asked for a round that the federation does not have."""
    STALE = "stale"
    """It asked for a round whose model is gone: it is far behind."""
    JOINING = "joining"
    """We have no model yet: we are new."""
    REPLAYED = "replayed"
    """It sent a question that it had sent before, or went on with its answer again and again."""
    DUPLICATE = "duplicate"
    """It asked for the same model again and again."""
    DENSITY = "density"
    """Its mask does not keep, in every layer, what it announced."""
    NORM = "norm"
    """Its weights are far larger than ours."""
    NEWS = "too-much-news"
    """It brought more members' records within a minute than are verified."""
    MIXED_UP = "mixed-up"
    """Its answer belongs to another question."""


INNOCENT = {Reason.STALE, Reason.JOINING, Reason.CUT_OFF, Reason.NEWS}
"""What happens to honest peers too, and is no reason to cut them off."""


class Door:
    """Counts refusals, remembers questions, and cuts off who keeps offending."""

    STRIKES = 10
    """So many offences within `WINDOW` seconds and a peer is cut off for `PAUSE` seconds."""
    WINDOW = 60.0
    PAUSE = 60.0
    REPEATS = 20
    """How often the same model may be asked for, and one answer gone on with: connections break, peers start again."""
    RECORDS = 5000
    """How many members' records of one sender are verified in `WINDOW` seconds: about what one greeting can bring."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.refused: dict[str, Counter[str]] = defaultdict(Counter)
        self._now = now
        self._offences: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=self.STRIKES))
        self._outside_until: dict[str, float] = {}
        self._brought: dict[str, tuple[float, int]] = {}
        """When a sender's present window began, and how many records it has brought in it."""
        self._nonces: dict[str, dict[int, dict[str, tuple[bytes, int]]]] = defaultdict(dict)
        """By asker and round: the questions that were answered, each with a digest of its body and with how often its
        answer was gone on with.
        """

    def check(self, sender: str) -> None:
        """Refuse a peer that is cut off."""
        left = self._outside_until.get(sender, 0.0) - self._now()
        if left > 0:
            self.refuse(sender, Reason.CUT_OFF, f"{sender} was refused too often; it may come back in {left:.0f} s.")

    def once(self, sender: str, t: int, nonce: str, body: bytes = b"", *, goes_on: bool = False) -> None:
        """Refuse a question that was answered before, unless it goes on with a broken answer; and either, if too often.

        One that goes on with an answer of our last life, whose questions are forgotten, counts as new.
        """
        seen, asked = self._nonces[sender].setdefault(t, {}), hashlib.blake2b(body).digest()
        if nonce not in seen:
            if len(seen) >= self.REPEATS:
                self.refuse(sender, Reason.DUPLICATE, f"{sender} has asked for round {t} {len(seen)} times already.")
            seen[nonce] = (asked, 0)
            return
        first, times = seen[nonce]
        if not goes_on:
            self.refuse(sender, Reason.REPLAYED, f"{sender} sent the same question for round {t} twice.")
        if first != asked:
            self.refuse(sender, Reason.REPLAYED, f"{sender} goes on with the answer for round {t} to another question.")
        if times >= self.REPEATS:
            sentence = f"{sender} has gone on with the same answer for round {t} {times} times already."
            self.refuse(sender, Reason.REPLAYED, sentence)
        seen[nonce] = (asked, times + 1)

    def ration(self, sender: str, records: int) -> int:
        """How many of so many records that a peer brings are looked at; what is beyond its share comes another time."""
        now = self._now()
        began, had = self._brought.get(sender, (now, 0))
        if now - began >= self.WINDOW:
            began, had = now, 0
        granted = min(records, self.RECORDS - had)
        self._brought[sender] = (began, had + granted)
        if granted < records:
            self.count(sender, Reason.NEWS)
        return granted

    def forget_before(self, t: int) -> None:
        """Forget the questions of rounds whose models are gone: they would be refused as stale."""
        for rounds in self._nonces.values():
            for old in [known for known in rounds if known < t]:
                del rounds[old]

    def refuse(self, sender: str, reason: str, sentence: str) -> NoReturn:
        """Count a refusal and raise it."""
        self.count(sender, reason)
        raise Refused(reason, sentence)

    def count(self, sender: str, reason: str) -> None:
        """Count a refusal; one too many cuts the sender off."""
        self.refused[sender][str(reason)] += 1
        if reason in INNOCENT:
            return
        offences, now = self._offences[sender], self._now()
        offences.append(now)
        if len(offences) == self.STRIKES and now - offences[0] <= self.WINDOW:
            self._outside_until[sender] = now + self.PAUSE
            offences.clear()
