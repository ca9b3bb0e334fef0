"""Refuses requests that violate the protocol, and bans repeat offenders for a minute."""

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


class AddressLimit:
    """Limits TLS handshakes with the addresses of banned members, which would reconnect at once.

    Further connections wait for their turn. Others behind the same address keep their open
    connections, and connect a little later.
    """

    PER_SECOND = 20.0
    """Handshakes with such an address; each takes milliseconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._until: dict[str, float] = {}
        self._handshakes: dict[str, deque[float]] = {}

    def limit(self, address: str, seconds: float) -> None:
        """Limit an address from now on."""
        now = self._now()
        for expired in [other for other, until in self._until.items() if until <= now]:
            del self._until[expired], self._handshakes[expired]
        self._until[address] = now + seconds
        self._handshakes.setdefault(address, deque(maxlen=int(self.PER_SECOND)))

    def allows(self, address: str) -> bool:
        """Whether another handshake with an address may start now; if so, it is counted."""
        now = self._now()
        if self._until.get(address, 0.0) <= now:
            return True
        handshakes = self._handshakes[address]
        if len(handshakes) == handshakes.maxlen and now - handshakes[0] < 1.0:
            return False
        handshakes.append(now)
        return True


def _loop_time() -> float:
    return asyncio.get_running_loop().time()


@dataclass
class _Budget:
    """What a peer has used of its requests and bytes."""

    start: float
    requests: int = 0
    syncs: int = 0
    size: int = 0


@dataclass
class _Answered:
    """A request that was answered."""

    body_digest: bytes
    resumed: int = 0
    """How often its response was resumed."""


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
        self._record_counts: dict[str, tuple[float, int]] = {}
        """By sender: the start of its current window, and the number of records received since."""
        self._answered: dict[str, dict[int, dict[str, _Answered]]] = defaultdict(dict)
        """By sender, round and nonce."""
        self.addresses = AddressLimit(now)

    def check(self, sender: str) -> None:
        """Refuse a banned peer, and one that has used up its budget, before a body is read."""
        remaining = self._banned_until.get(sender, 0.0) - self._now()
        if remaining > 0:
            message = f"{sender} was refused too often; it is banned for {remaining:.0f} s."
            self.refuse(sender, Refusal.BANNED, message)
        self._unspent_budget(sender)

    def check_nonce(
        self, sender: str, t: int, nonce: str, body: bytes = b"", *, resumes: bool = False
    ) -> None:
        """Refuse a request that was answered before, unless it resumes its response.

        Both may be repeated up to a limit. After a restart of this peer, a request that resumes a
        response counts as a new one.
        """
        answered = self._answered[sender].setdefault(t, {})
        body_digest = hashlib.blake2b(body).digest()
        answers = sum(1 + earlier.resumed for earlier in answered.values())
        if answers >= self.MAX_ANSWERS:
            message = f"{sender} got the model of round {t} {self.MAX_ANSWERS} times."
            self.refuse(sender, Refusal.DUPLICATE, message)

        if nonce not in answered:
            if len(answered) >= self.MAX_REPEATS:
                message = f"{sender} has requested round {t} {len(answered)} times already."
                self.refuse(sender, Refusal.DUPLICATE, message)
            answered[nonce] = _Answered(body_digest)
            return

        earlier = answered[nonce]
        if not resumes:
            message = f"{sender} sent the same request for round {t} twice."
            self.refuse(sender, Refusal.REPLAYED, message)
        if earlier.body_digest != body_digest:
            message = f"{sender} resumes a response for round {t} with another request."
            self.refuse(sender, Refusal.REPLAYED, message)
        if earlier.resumed >= self.MAX_REPEATS:
            message = (
                f"{sender} has resumed the same response for round {t} {earlier.resumed} times"
                " already."
            )
            self.refuse(sender, Refusal.REPLAYED, message)
        earlier.resumed += 1

    def charge(self, sender: str, size: int, *, is_sync: bool) -> None:
        """Count a request with a body of `size` bytes; refuse it if the budget is used up.

        The bytes of a refused sync count, too: they were read.
        """
        budget = self._unspent_budget(sender)
        budget.size += size
        if is_sync and budget.syncs >= self.MAX_SYNCS:
            message = f"{sender} has used up its syncs of this round."
            self.refuse(sender, Refusal.TOO_MANY_REQUESTS, message)
        budget.requests += 1
        budget.syncs += is_sync

    def _unspent_budget(self, sender: str) -> _Budget:
        """Return a peer's budget of this round, or of this minute of a longer one.

        Refuses a peer whose budget is used up.
        """
        now = self._now()
        budget = self._budgets.get(sender)
        if budget is None or now - budget.start >= self.WINDOW:
            budget = self._budgets[sender] = _Budget(now)
        if budget.requests >= self.MAX_REQUESTS or budget.size >= self.max_bytes:
            message = f"{sender} has used up its requests of this round."
            self.refuse(sender, Refusal.TOO_MANY_REQUESTS, message)
        return budget

    def charge_response(self, sender: str, size: int) -> None:
        """Count the bytes of a response."""
        if sender in self._budgets:
            self._budgets[sender].size += size

    def start_round(self) -> None:
        """Give every peer its requests and bytes of a new round."""
        self._budgets.clear()

    def allow_records(self, sender: str, records: int) -> int:
        """Return how many of a sender's records may be verified now."""
        now = self._now()
        start, count = self._record_counts.get(sender, (now, 0))
        if now - start >= self.WINDOW:
            start = now
            count = 0
        allowed = min(records, self.MAX_RECORDS - count)
        self._record_counts[sender] = (start, count + allowed)
        if allowed < records:
            self.count(sender, Refusal.TOO_MANY_RECORDS)
        return allowed

    def forget_before(self, t: int) -> None:
        """Drop the nonces of rounds before t, whose models are no longer kept."""
        for rounds in self._answered.values():
            for old_round in [answered for answered in rounds if answered < t]:
                del rounds[old_round]

    def refuse(self, sender: str, reason: Refusal, message: str) -> NoReturn:
        """Count a refusal and raise it."""
        self.count(sender, reason)
        raise Refused(reason, message)

    def count(self, sender: str, reason: str) -> None:
        """Count a refusal; ban the sender at its `STRIKES`-th offence within `WINDOW` seconds."""
        self.refused.add(sender, reason)
        if reason in HARMLESS:
            return
        now = self._now()
        offences = self._offences[sender]
        offences.append(now)
        if len(offences) == self.STRIKES and now - offences[0] <= self.WINDOW:
            self._banned_until[sender] = now + self.BAN_SECONDS
            offences.clear()
