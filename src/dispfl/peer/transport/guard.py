"""Refuses requests that break the protocol, counts refusals, and bans repeat offenders for a
minute."""

import asyncio
import hashlib
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from dispfl.peer.transport.base import Refused
from dispfl.wire.refusals import Refusal, RefusalCounter

HARMLESS = {
    Refusal.STALE,
    Refusal.JOINING,
    Refusal.BANNED,
    Refusal.TOO_MANY_RECORDS,
    Refusal.TOO_MANY_REQUESTS,
}
"""Refusals that honest peers cause, too; they do not count towards a ban."""


def _loop_time() -> float:
    return asyncio.get_running_loop().time()


@dataclass
class _Budget:
    """What a peer has used of its requests and bytes."""

    start: float
    requests: int = 0
    syncs: int = 0
    size: int = 0


class RequestGuard:
    """Checks nonces and rates of requests, by sender."""

    STRIKES = 10
    """Offences within `WINDOW` seconds after which a peer is banned for `BAN_SECONDS`."""
    WINDOW = 60.0
    BAN_SECONDS = 60.0
    MAX_REPEATS = 20
    """How often a peer may request the same model, and resume the same response."""
    MAX_RECORDS = 5000
    """Member records of one sender that are verified within `WINDOW` seconds: about as many as one
    sync can carry."""

    MAX_ANSWERS = 40
    """How often a peer gets a model of one round, resumed responses included."""
    MAX_REQUESTS = 500
    """Requests of one peer in a round of ours, or in `WINDOW` seconds if the round lasts longer."""
    MAX_SYNCS = 300
    """Those of them that are syncs: enough for the largest roster, in parts."""

    def __init__(self, now: Callable[[], float] = _loop_time) -> None:
        self.max_bytes = 64_000_000
        """Bytes of bodies that one peer may send and receive in the same time; raised for large
        models."""
        self.refused = RefusalCounter()
        self._budgets: dict[str, _Budget] = {}
        self._now = now
        self._offences: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=self.STRIKES))
        self._banned_until: dict[str, float] = {}
        self._records_seen: dict[str, tuple[float, int]] = {}
        """By sender: the start of its current window, and the number of records received since."""
        self._nonces: dict[str, dict[int, dict[str, tuple[bytes, int]]]] = defaultdict(dict)
        """By sender, round and nonce: the digest of the request's body, and how often its response
        was resumed."""

    def check(self, sender: str) -> None:
        """Refuse a peer that is banned, or has used up its requests or bytes, before the body of a
        request is read."""
        remaining = self._banned_until.get(sender, 0.0) - self._now()
        if remaining > 0:
            self.refuse(
                sender,
                Refusal.BANNED,
                f"{sender} was refused too often; it is banned for {remaining:.0f} s.",
            )
        self._unspent_budget(sender)

    def check_nonce(
        self, sender: str, t: int, nonce: str, body: bytes = b"", *, resumes: bool = False
    ) -> None:
        """Refuse a request that was answered before, unless it resumes its response, and repeats
        beyond the limit.

        After a restart of this peer, a request that resumes a response counts as a new one.
        """
        seen, digest = self._nonces[sender].setdefault(t, {}), hashlib.blake2b(body).digest()
        if sum(1 + times for _, times in seen.values()) >= self.MAX_ANSWERS:
            self.refuse(
                sender,
                Refusal.DUPLICATE,
                f"{sender} got the model of round {t} {self.MAX_ANSWERS} times.",
            )
        if nonce not in seen:
            if len(seen) >= self.MAX_REPEATS:
                self.refuse(
                    sender,
                    Refusal.DUPLICATE,
                    f"{sender} has requested round {t} {len(seen)} times already.",
                )
            seen[nonce] = (digest, 0)
            return
        first, times = seen[nonce]
        if not resumes:
            self.refuse(
                sender, Refusal.REPLAYED, f"{sender} sent the same request for round {t} twice."
            )
        if first != digest:
            self.refuse(
                sender,
                Refusal.REPLAYED,
                f"{sender} resumes a response for round {t} with another request.",
            )
        if times >= self.MAX_REPEATS:
            message = f"{sender} has resumed the same response for round {t} {times} times already."
            self.refuse(sender, Refusal.REPLAYED, message)
        seen[nonce] = (digest, times + 1)

    def charge(self, sender: str, size: int, *, is_sync: bool) -> None:
        """Count a request with a body of `size` bytes; refuse it if the sender has used up its
        requests or bytes.

        The bytes of a refused sync count, too: they were read.
        """
        budget = self._unspent_budget(sender)
        budget.size += size
        if is_sync and budget.syncs >= self.MAX_SYNCS:
            self.refuse(
                sender, Refusal.TOO_MANY_REQUESTS, f"{sender} has used up its syncs of this round."
            )
        budget.requests, budget.syncs = budget.requests + 1, budget.syncs + is_sync

    def _unspent_budget(self, sender: str) -> _Budget:
        """Return a peer's budget of this round, or of the current minute of a longer one; refuse it
        if it is spent."""
        budget, now = self._budgets.get(sender), self._now()
        if budget is None or now - budget.start >= self.WINDOW:
            budget = self._budgets[sender] = _Budget(now)
        if budget.requests >= self.MAX_REQUESTS or budget.size >= self.max_bytes:
            self.refuse(
                sender,
                Refusal.TOO_MANY_REQUESTS,
                f"{sender} has used up its requests of this round.",
            )
        return budget

    def charge_response(self, sender: str, size: int) -> None:
        """Count the bytes of a response."""
        if budget := self._budgets.get(sender):
            budget.size += size

    def start_round(self) -> None:
        """Give every peer its requests and bytes of a new round."""
        self._budgets.clear()

    def allow_records(self, sender: str, records: int) -> int:
        """Return how many of a sender's records may be verified now."""
        now = self._now()
        start, count = self._records_seen.get(sender, (now, 0))
        if now - start >= self.WINDOW:
            start, count = now, 0
        allowed = min(records, self.MAX_RECORDS - count)
        self._records_seen[sender] = (start, count + allowed)
        if allowed < records:
            self.count(sender, Refusal.TOO_MANY_RECORDS)
        return allowed

    def forget_before(self, t: int) -> None:
        """Drop the nonces of rounds before t, whose models are no longer kept."""
        for rounds in self._nonces.values():
            for old in [known for known in rounds if known < t]:
                del rounds[old]

    def refuse(self, sender: str, reason: Refusal, message: str) -> NoReturn:
        """Count a refusal and raise it."""
        self.count(sender, reason)
        raise Refused(reason, message)

    def count(self, sender: str, reason: str) -> None:
        """Count a refusal, and ban the sender at its `STRIKES`-th offence within `WINDOW`
        seconds."""
        self.refused.add(sender, reason)
        if reason in HARMLESS:
            return
        offences, now = self._offences[sender], self._now()
        offences.append(now)
        if len(offences) == self.STRIKES and now - offences[0] <= self.WINDOW:
            self._banned_until[sender] = now + self.BAN_SECONDS
            offences.clear()
