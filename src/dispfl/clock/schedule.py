"""When the rounds of a federation happen: a pure function of devices, messages and operations.

A round without a server, for each peer:

1. It starts when it has finished its round before, publishes its model, and requests the models of
   its neighbours. A neighbour responds as soon as it has published its model of the same round.
   Where whole models are sent, it sends them unasked.
2. When the last model has arrived, it computes. There is no other barrier: a peer may be rounds
   ahead of another that it does not hear from. With a deadline (`clock/deadline.py`) it goes on
   without the models that arrive later.

A round with a server: the server sends its model to the cohort; each peer of it computes and
uploads; the next round starts when the last upload has arrived. The server computes in no time.

Transfers of a round share the links fairly. Those of an earlier round go first and later ones share
what is left, so that a round's times do not depend on rounds to come: `Clock.advance` can be called
while a simulation runs, round by round.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from dispfl.clock.availability import DAY, Availability
from dispfl.clock.events import TimedEvents, TimedTransfer, TransferTimes
from dispfl.clock.fleet import Fleet
from dispfl.clock.links import Link
from dispfl.errors import RunError
from dispfl.methods.base import SERVER

LONGEST_ROUND = 10 * 365 * DAY
"""What has not arrived by then never does."""


class ModelMessage(NamedTuple):
    """A model that is sent, and the request for it."""

    sender: str
    receiver: str
    size: int
    """In bytes, as sent."""
    request: int = 0
    """The bytes of the request; 0: the model is sent unasked."""


@dataclass(frozen=True)
class RoundWork:
    """What is computed and sent in a round."""

    operations: Mapping[str, int]
    """The floating-point operations of each peer that takes part."""
    messages: Sequence[ModelMessage] = ()
    has_server: bool = False


@dataclass
class PeerTimes:
    """How a peer spends a round, in nanoseconds."""

    start: int
    end: int = 0
    computing: int = 0
    """Time in which it computes."""
    transferring: int = 0
    """Time in which a model, or a request for it, is on its way to or from the peer, while both
    ends are online."""
    offline: int = 0
    """Time in which its device is offline."""
    sending: int | None = None
    """Where nobody waits: time in which its models leave, while it computes."""
    steps: int | None = None
    """Where nobody waits: how many steps it finishes."""

    @property
    def waiting(self) -> int:
        """The other time."""
        return self.end - self.start - self.computing - self.transferring - self.offline

    def finish(self, end: int, availability: Availability) -> None:
        """End the round of a device that is online so."""
        self.end = end
        self.offline = end - self.start - availability.online_time(self.start, end)


@dataclass(frozen=True)
class RoundTimes:
    """When a round happens."""

    end: int
    """When the last peer has finished it."""
    peers: Mapping[str, PeerTimes]
    """The times of each peer that takes part."""


class Clock:
    """The simulated time of a federation, which `advance` moves on by a round."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.now = 0
        """When the last round has ended for all peers, in nanoseconds."""
        self.events = 0
        """How many events there were so far."""
        self._ready: dict[str, int] = {}
        """When each peer has finished its last round; without an entry: at 0."""
        self._uplinks: dict[str, Link] = {}
        self._downlinks: dict[str, Link] = {}

    def advance(self, work: RoundWork) -> RoundTimes:
        """Return the times of the next round."""
        simulation = self.simulation()
        if work.has_server:
            peers = _server_round(simulation, work, self.now)
        else:
            gossip_peers = self.gossip_peers(simulation, work)
            self.exchange_models(simulation)
            peers = {}
            for name, peer in gossip_peers.items():
                peers[name] = peer.computed(work.operations.get(name, 0))
        return self.end_round(simulation, peers, has_server=work.has_server)

    def simulation(self) -> TimedEvents:
        """Return the events of the next round, which have not happened yet."""
        return TimedEvents(self.fleet, self._uplinks, self._downlinks)

    def ready(self, peer: str) -> int:
        """Return when a peer has finished its last round."""
        return self._ready.get(peer, 0)

    def gossip_peers(self, simulation: TimedEvents, work: RoundWork) -> dict[str, "GossipPeer"]:
        """Return the peers of a round without a server, each with the models that it expects."""
        nodes = dict.fromkeys(work.operations)
        for message in work.messages:
            nodes |= dict.fromkeys((message.sender, message.receiver))
        peers: dict[str, GossipPeer] = {}
        for name in nodes:
            peers[name] = GossipPeer(name, simulation, peers, self.ready(name))
        for message in work.messages:
            peers[message.receiver].expect(message)
        for peer in peers.values():
            simulation.at(peer.times.start, peer.start)
        return peers

    def exchange_models(self, simulation: TimedEvents) -> None:
        """Let the models of a round arrive, unless that takes longer than any round does."""
        simulation.run(max([self.now, *self._ready.values()]) + LONGEST_ROUND)

    def end_round(
        self, simulation: TimedEvents, peers: Mapping[str, PeerTimes], *, has_server: bool
    ) -> RoundTimes:
        """End a round in which peers have spent their time so; return its times."""
        self.events += simulation.events
        self.now = max([self.now, *(times.end for times in peers.values())])
        horizon = self.now
        if not has_server:
            horizon = self._make_ready(peers)
        for link in (*self._uplinks.values(), *self._downlinks.values()):
            link.end_round(horizon)
        return RoundTimes(self.now, peers)

    def _make_ready(self, peers: Mapping[str, PeerTimes]) -> int:
        """Note when peers are ready for the next round; return when the first is.

        A peer that took no part is ready with the first that did.
        """
        first = min((times.end for times in peers.values()), default=self.now)
        for peer in self.fleet.peers:
            if peer in peers:
                self._ready[peer] = peers[peer].end
            else:
                self._ready[peer] = max(first, self._ready.get(peer, 0))
        return min(self._ready.values(), default=first)


class GossipPeer:
    """A peer in a round without a server."""

    def __init__(
        self,
        name: str,
        simulation: TimedEvents,
        peers: Mapping[str, "GossipPeer"],
        ready: int,
    ) -> None:
        self.name = name
        self.times = PeerTimes(ready)
        self.senders: list[str] = []
        """Whose models of this round it needs."""
        self.arrivals: dict[str, int] = {}
        """When they have arrived, by sender."""
        self._begins: int | None = None
        self._simulation = simulation
        self._peers = peers
        self._requests: list[ModelMessage] = []
        """What it requests when it starts."""
        self._responses: list[ModelMessage] = []
        """What it sends when it publishes its model."""
        self._missing = 0
        self._has_started = False
        self._transfers = TransferTimes(simulation.fleet, name)
        self._deadline: int | None = None
        """When it stops to wait for the models of this round."""
        self._expects_any = False
        self._has_model = False
        """Whether any model has arrived that it averages in this round."""

    def expect(self, message: ModelMessage) -> None:
        """Note a model that it needs in this round."""
        self._missing += 1
        self._expects_any = True
        self.senders.append(message.sender)
        if message.request:
            self._requests.append(message)
        else:
            self._peers[message.sender]._responses.append(message)

    def wait_until(self, deadline: int) -> None:
        """Go on at a deadline without the models that have not arrived."""
        self._deadline = deadline
        self._simulation.at(deadline, self._begin_when_complete, last=True)

    def expect_late(self, arrival: int) -> None:
        """Note when a model of an earlier round arrives, which it need not wait for."""
        self._expects_any = True
        self._simulation.at(max(arrival, self.times.start), self._receive_late)

    def start(self, now: int) -> None:
        """Publish the model, send it to those who wait for it, and request those of others."""
        self._has_started = True
        for message in self._responses:
            self._respond(message, now)
        self._responses = []
        for message in self._requests:
            self._request(message, now)
        self._begin_when_complete(now)

    @property
    def begins(self) -> int:
        """When it begins to compute, once all that happens in the round has happened."""
        if self._begins is None:
            missing = [sender for sender in self.senders if sender not in self.arrivals]
            raise _never_arrives(self._simulation.fleet, self.name, missing)
        return self._begins

    def computed(self, operations: int) -> PeerTimes:
        """Return its times, with so many operations after the models have arrived."""
        fleet = self._simulation.fleet
        availability = fleet.availability(self.name)
        self.times.computing = fleet.computing_time(self.name, operations)
        self.times.transferring = self._transfers.between(self.times.start, self.begins)
        self.times.finish(availability.finish(self.begins, self.times.computing), availability)
        return self.times

    def _request(self, message: ModelMessage, now: int) -> None:
        sender = self._peers[message.sender]
        transfer = self._transfers.begin(message.sender, now)

        def arrived(now: int) -> None:
            transfer.end = now
            if sender._has_started:
                sender._respond(message, now)
            else:
                sender._responses.append(message)

        self._simulation.send(self.name, message.sender, message.request, now, arrived)

    def _respond(self, message: ModelMessage, now: int) -> None:
        """Send the model to a peer that waits for it."""
        receiver = self._peers[message.receiver]
        transfer = receiver._transfers.begin(self.name, now)
        arrived = partial(receiver._receive, transfer)
        self._simulation.send(self.name, message.receiver, message.size, now, arrived)

    def _receive(self, transfer: TimedTransfer, now: int) -> None:
        transfer.end = now
        self.arrivals[transfer.other] = now
        self._missing -= 1
        self._has_model = True
        self._begin_when_complete(now)

    def _receive_late(self, now: int) -> None:
        self._has_model = True
        self._begin_when_complete(now)

    def _begin_when_complete(self, now: int) -> None:
        """Begin to compute if nothing is missing, or at the deadline, but not without any model."""
        if not self._has_started or self._begins is not None:
            return
        is_over = self._deadline is not None and now >= self._deadline
        if self._missing and not is_over:
            return
        if self._has_model or not self._expects_any:
            self._begins = now


def _never_arrives(fleet: Fleet, peer: str, others: Sequence[str]) -> RunError:
    """Return the error of a peer whose models, to or from others, are under way for years."""
    always_online = True
    for node in (peer, *others):
        if fleet.availability(node).next_change(0) is not None:
            always_online = False
    if always_online:
        reason = (
            "its link, or that at the other end, is too slow. Raise up and down of their classes,"
            " and server_up and server_down of network, or lower network.latency."
        )
    else:
        reason = (
            "its device and one at the other end are never online at the same time, or too"
            " briefly. Change daily or availability of their classes."
        )
    return RunError(f"Peer {peer} waits ten years for a model: {reason}")


def _server_round(simulation: TimedEvents, work: RoundWork, start: int) -> dict[str, PeerTimes]:
    """Return how each peer of the cohort spends a round with a server."""
    downloads = {}
    uploads = {}
    for message in work.messages:
        if message.sender == SERVER:
            downloads[message.receiver] = message.size
        else:
            uploads[message.sender] = message.size
    cohort = {peer: PeerTimes(start) for peer in downloads}
    fleet = simulation.fleet
    ends: dict[str, int] = {}

    def download(peer: str, start: int) -> None:
        def arrived(now: int) -> None:
            availability = fleet.availability(peer)
            duration = fleet.computing_time(peer, work.operations.get(peer, 0))
            cohort[peer].transferring += availability.online_time(start, now)
            cohort[peer].computing = duration
            simulation.at(availability.finish(now, duration), partial(upload, peer))

        simulation.send(SERVER, peer, downloads[peer], start, arrived)

    def upload(peer: str, began: int) -> None:
        def arrived(now: int) -> None:
            cohort[peer].transferring += fleet.availability(peer).online_time(began, now)
            ends[peer] = now

        if peer in uploads:
            simulation.send(peer, SERVER, uploads[peer], began, arrived)
        else:  # its step was discarded
            ends[peer] = began

    for peer in downloads:
        simulation.at(start, partial(download, peer))
    simulation.run()
    for peer, times in cohort.items():
        if peer not in ends:
            raise _never_arrives(fleet, peer, [SERVER])
        times.finish(max(ends.values()), fleet.availability(peer))
    return cohort
