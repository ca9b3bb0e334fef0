"""Transfers that share up- and downlinks, max-min fairly, in integers.

A transfer uses the uplink of its sender and the downlink of its receiver. Each link has a *level*,
the most that one transfer may take of it: the whole number of bytes per second at which its
transfers use up its capacity, where those that are slower elsewhere leave the rest to the others.

    rate of a transfer = min(level of its uplink, level of its downlink, its own limit)
    level of a link    = fair_level(its capacity, what each transfer gets elsewhere)

The levels that fulfil this are unique, and rates by them are max-min fair: a transfer is slower
than another of the same link only because of its other link. A start, an end or a new capacity
changes the levels of few links, so only those are computed again (`SharedLinks.share`), each until
its neighbours agree. Links are visited first in, first out: then the lowest level is right after
one visit, the second lowest after two, and so on, so that the loop ends.

All numbers are integers: bytes per second, nanoseconds, and for what is left of a transfer their
product, a billionth of a byte. So the times are the same on every machine.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from heapq import merge
from operator import itemgetter

from dispfl.clock.availability import ALWAYS, Availability

SECOND = 10**9
"""In nanoseconds."""
UNLIMITED = 1 << 62
"""Bytes per second of a link, or of a transfer, that nothing limits."""

Steps = list[tuple[int, int]]
"""A quantity over time: from each time on, in order, it has the value beside it; 0 before."""


class Link:
    """The up- or downlink of a node: its capacity over time, and the transfers that share it."""

    __slots__ = (
        "_position",
        "availability",
        "bandwidth",
        "capacity",
        "level",
        "next_change",
        "rate",
        "reserved",
        "transfers",
        "use",
    )  # fmt: skip

    def __init__(self, bandwidth: int, availability: Availability = ALWAYS) -> None:
        self.bandwidth = bandwidth
        """Bytes per second while the node is online."""
        self.availability = availability
        self.reserved: Steps = []
        """What transfers of earlier rounds take of it."""
        self.capacity = bandwidth
        """What is left of it for this round, at the present time."""
        self.level = UNLIMITED
        self.transfers: dict[Transfer, Link] = {}
        """The transfers that share it, each with its other link."""
        self.next_change: int | None = None
        """When its capacity changes next; None: never again, or nobody has asked yet."""
        self.rate = 0
        """What the transfers of this round take of it at the present time."""
        self.use: Steps = []
        """The same over time."""
        self._position = 0

    def update(self, now: int) -> bool:
        """Set capacity and next change to those of a time; return whether the capacity differs."""
        reserved = self.reserved
        while self._position < len(reserved) and reserved[self._position][0] <= now:
            self._position += 1
        capacity = self.bandwidth if self.availability.is_online(now) else 0
        if self._position and capacity < UNLIMITED:
            capacity = max(0, capacity - reserved[self._position - 1][1])

        self.next_change = self.availability.next_change(now)
        if self._position < len(reserved):
            change = reserved[self._position][0]
            self.next_change = min(change, self.next_change or change)
        differs = capacity != self.capacity
        self.capacity = capacity
        return differs

    def note_use(self, now: int) -> None:
        """Note what its transfers take of it from now on."""
        use = self.use
        if use and use[-1][0] == now:
            use[-1] = (now, self.rate)
        elif self.bandwidth < UNLIMITED:
            use.append((now, self.rate))

    def end_round(self, horizon: int) -> None:
        """Reserve what this round has used of it after a time, before which nothing will start."""
        if self.use:
            self.reserved = sum_of_steps(self.reserved, self.use)
        self.reserved = steps_after(self.reserved, horizon)
        self.use = []
        self._position = 0


class Transfer:
    """Bytes on their way from one node to another."""

    __slots__ = ("delivered", "downlink", "end", "left", "limit", "rate", "since", "uplink")

    def __init__(
        self,
        uplink: Link,
        downlink: Link,
        size: int,
        limit: int = UNLIMITED,
        delivered: Callable[[int], None] = lambda now: None,
    ) -> None:
        self.uplink = uplink
        self.downlink = downlink
        self.limit = limit
        """Bytes per second that the way between the two allows one transfer."""
        self.left = size * SECOND
        """Billionths of a byte that were left at the time `since`."""
        self.rate = 0
        """Bytes per second since then."""
        self.since = 0
        self.end: int | None = None
        """When it ends at this rate; None: not at all."""
        self.delivered = delivered
        """What happens when its last byte has left the links."""

    def set_rate(self, rate: int, now: int) -> None:
        """Go on at another rate."""
        self.left -= self.rate * (now - self.since)
        self.since = now
        self.uplink.rate += rate - self.rate
        self.downlink.rate += rate - self.rate
        self.rate = rate
        if self.left <= 0 or rate >= UNLIMITED:
            self.end = now
        elif rate == 0:
            self.end = None
        else:
            self.end = now - (-self.left // rate)  # rounded up


class SharedLinks:
    """The transfers under way, and the links that they share."""

    def __init__(self) -> None:
        self._touched: dict[Link, None] = {}
        """Links whose level may have changed, in the order in which they were touched."""
        self._new: list[Transfer] = []

    def add(self, transfer: Transfer, now: int) -> None:
        """Start a transfer; `share` gives it a rate."""
        transfer.since = now
        transfer.uplink.transfers[transfer] = transfer.downlink
        transfer.downlink.transfers[transfer] = transfer.uplink
        for link in (transfer.uplink, transfer.downlink):
            link.update(now)
            self._touched[link] = None
        self._new.append(transfer)

    def remove(self, transfer: Transfer) -> None:
        """End a transfer; `share` gives its rate to others."""
        for link in (transfer.uplink, transfer.downlink):
            del link.transfers[transfer]
            link.rate -= transfer.rate
            self._touched[link] = None

    def touch(self, link: Link) -> None:
        """Share a link anew whose capacity has changed."""
        self._touched[link] = None

    def share(self, now: int) -> tuple[list[Transfer], Iterable[Link]]:
        """Find the fair rates of this time.

        Return the transfers whose rate has changed or that are new, and the links that were shared
        anew.
        """
        if not self._touched:
            return [], ()
        changed = dict.fromkeys(self._new)
        shared = dict(self._touched)
        queue = deque(self._touched)
        queued = set(queue)
        self._touched = {}
        self._new = []
        while queue:
            link = queue.popleft()
            queued.discard(link)
            before = link.level
            level = _level_of(link)
            if level == before:
                continue
            link.level = level
            shared[link] = None
            for transfer, other in link.transfers.items():
                changed[transfer] = None
                if other not in queued and _may_move(other.level, transfer.limit, before, level):
                    queue.append(other)
                    queued.add(other)

        retimed = []
        for transfer in changed:
            rate = min(transfer.uplink.level, transfer.downlink.level, transfer.limit)
            if rate != transfer.rate or transfer.end is None:
                transfer.set_rate(rate, now)
                retimed.append(transfer)
                shared[transfer.uplink] = None
                shared[transfer.downlink] = None
        for link in shared:
            link.note_use(now)
        return retimed, shared


def _level_of(link: Link) -> int:
    if link.capacity >= UNLIMITED:
        return UNLIMITED
    limits = [min(other.level, transfer.limit) for transfer, other in link.transfers.items()]
    return fair_level(link.capacity, limits)


def fair_level(capacity: int, limits: Sequence[int]) -> int:
    """Return the most that one of several users gets of a capacity, who have limits elsewhere.

    It is without limit if they do not use up the capacity together.
    """
    left = capacity
    users = len(limits)
    for limit in sorted(limits):
        share = left // users
        if limit >= share:
            return share
        left -= limit
        users -= 1
    return UNLIMITED


def _may_move(level: int, limit: int, before: int, after: int) -> bool:
    """Whether the level of a link may change because another link of a transfer has changed its.

    It does not depend on transfers that get at least as much elsewhere, and a link that is not used
    up stays so if one of its transfers gets less.
    """
    before = min(before, limit)
    after = min(after, limit)
    if level == UNLIMITED:
        return after > before
    return min(before, after) < level


def sum_of_steps(first: Steps, second: Steps) -> Steps:
    """Return the sum of two quantities over time."""
    changes = []
    for steps in (first, second):
        value = 0
        of_steps = []
        for time, next_value in steps:
            of_steps.append((time, next_value - value))
            value = next_value
        changes.append(of_steps)

    total = 0
    summed: Steps = []
    for time, change in merge(*changes, key=itemgetter(0)):
        total += change
        if summed and summed[-1][0] == time:
            summed.pop()
        summed.append((time, total))
    return summed


def steps_after(steps: Steps, horizon: int) -> Steps:
    """Return a quantity without what happened before a time; empty if it is 0 from then on."""
    first = 0
    while first + 1 < len(steps) and steps[first + 1][0] <= horizon:
        first += 1
    kept = steps[first:]
    if all(value == 0 for _, value in kept):
        return []
    return kept
