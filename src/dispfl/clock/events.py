"""Events in the order of their times, and transfers that share the links of a fleet."""

from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush

from dispfl.clock.fleet import Fleet
from dispfl.clock.links import Link, SharedLinks, Transfer

Action = Callable[[int], None]
"""What happens at a time."""
FOREVER = 1 << 62
"""A time after which nothing happens."""


@dataclass
class TimedTransfer:
    """When something is under way from one device to another."""

    other: str
    """The device at the other end."""
    start: int
    end: int = FOREVER


class TransferTimes:
    """Measures how long at least one transfer of a device is under way, with both ends online."""

    def __init__(self, fleet: Fleet, node: str) -> None:
        self._fleet = fleet
        self._online = fleet.availability(node)
        self._transfers: list[TimedTransfer] = []

    def begin(self, other: str, now: int) -> TimedTransfer:
        """Note a transfer that begins; whoever knows sets its end."""
        transfer = TimedTransfer(other, now)
        self._transfers.append(transfer)
        return transfer

    def forget(self, time: int) -> None:
        """Forget what has ended by a time."""
        self._transfers = [transfer for transfer in self._transfers if transfer.end > time]

    def between(self, start: int, end: int) -> int:
        """Return how long there is a transfer between two times."""
        periods: list[tuple[int, int]] = []
        for transfer in self._transfers:
            other_online = self._fleet.availability(transfer.other)
            first = max(start, transfer.start)
            last = min(end, transfer.end)
            for since, until in self._online.online_periods(first, last):
                periods += other_online.online_periods(since, until)

        total = 0
        covered = start
        for since, until in sorted(periods):
            total += max(0, until - max(since, covered))
            covered = max(covered, until)
        return total


@dataclass
class TimedEvents:
    """What happens on the devices and links of a fleet, in the order of time."""

    fleet: Fleet
    uplinks: dict[str, Link]
    downlinks: dict[str, Link]
    events: int = 0
    _links: SharedLinks = field(default_factory=SharedLinks)
    _queue: list[tuple[int, bool, int, Action | Transfer | Link]] = field(default_factory=list)
    """Events by time and number, the last of each time at its end: an action, the end of a
    transfer, or a change of a link."""
    _changes: dict[Link, int] = field(default_factory=dict)
    """The time of each link's change that is in the queue."""

    def at(self, time: int, event: Action | Transfer | Link, *, last: bool = False) -> None:
        """Let something happen at a time; if `last`, after all that arrives at that time."""
        self.events += 1
        heappush(self._queue, (time, last, self.events, event))

    def send(
        self,
        sender: str,
        receiver: str,
        size: int,
        now: int,
        arrived: Action,
        left: Action = lambda now: None,
    ) -> None:
        """Start a transfer.

        `left` happens when its last byte has left the links, `arrived` when it has arrived.
        """
        uplink = self._link(self.uplinks, sender, self.fleet.uplink)
        downlink = self._link(self.downlinks, receiver, self.fleet.downlink)
        latency = self.fleet.latency(sender, receiver)
        limit = self.fleet.path_limit(sender, receiver)

        def delivered(now: int) -> None:
            self.at(now + latency, arrived)
            left(now)

        self._links.add(Transfer(uplink, downlink, size, limit, delivered), now)

    def _link(self, links: dict[str, Link], node: str, make: Callable[[str], Link]) -> Link:
        if node not in links:
            links[node] = make(node)
        return links[node]

    def run(self, until: int = FOREVER) -> None:
        """Let everything happen up to a time, or until nothing is left."""
        queue = self._queue
        while queue and queue[0][0] <= until:
            now, last = queue[0][:2]
            while queue and queue[0][:2] == (now, last):
                event = heappop(queue)[-1]
                self._happen(event, now)
            self._share(now)

    def forget_use(self) -> None:
        """Forget what was sent so far, where no later round is to be fitted into what is left."""
        for link in (*self.uplinks.values(), *self.downlinks.values()):
            link.use = []

    def _happen(self, event: Action | Transfer | Link, now: int) -> None:
        if isinstance(event, Transfer):
            if event.end == now and event in event.uplink.transfers:  # else its rate has changed
                self._links.remove(event)
                event.delivered(now)
        elif isinstance(event, Link):
            self._changes.pop(event, None)
            if event.transfers and event.update(now):
                self._links.touch(event)
            self._await_change(event)
        else:
            event(now)

    def _share(self, now: int) -> None:
        """Share the links anew; note when transfers end and capacities change."""
        retimed, links = self._links.share(now)
        for transfer in retimed:
            if transfer.end is not None:
                self.at(transfer.end, transfer)
        for link in links:
            self._await_change(link)

    def _await_change(self, link: Link) -> None:
        """Note when the capacity of a link changes next, while transfers use it."""
        if link.transfers and link.next_change is not None:
            noted = self._changes.get(link)
            if noted is None or link.next_change < noted:
                self._changes[link] = link.next_change
                self.at(link.next_change, link)
