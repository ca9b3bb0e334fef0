"""When the rounds of a federation happen whose peers wait for models until a deadline.

As at real sites:

1. A peer computes when all models that it has asked for have arrived, or a fixed time after its
   round has begun, without the late ones. It does not go on without any model.
2. A late model still arrives. It is averaged in the first step that begins after that, unless a
   newer one of its sender has arrived, or it is more than `MAX_AGE` rounds old.
3. As long as it is on its way, its sender is not asked again, and no round waits for it.

What a round computes depends on which models are late, so its times are known before its steps are
taken: they follow from the sizes of its messages.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dispfl.clock.events import FOREVER, TimedEvents
from dispfl.clock.fleet import Fleet
from dispfl.clock.schedule import Clock, GossipPeer, ModelMessage, PeerTimes, RoundTimes, RoundWork
from dispfl.core.staleness import MAX_AGE


@dataclass(frozen=True)
class Exchange:
    """Which models a peer averages in a round."""

    on_time: Sequence[str]
    """Whose models of this round it averages."""
    late: Sequence[str]
    """Whose models of this round arrive too late."""
    arrived: Sequence[str]
    """Whose models of earlier rounds, which were late, it averages now."""
    on_the_way: Sequence[str]
    """Whose models of earlier rounds may still be averaged later."""

    @property
    def models(self) -> int:
        """How many models it averages."""
        return len(self.on_time) + len(self.arrived)


class LateModel(NamedTuple):
    """A model that has missed its deadline."""

    t: int
    """The round in which it was asked for."""
    arrival: int
    """In nanoseconds."""


class DeadlineClock(Clock):
    """The simulated time of a federation whose peers go on without late models."""

    def __init__(self, fleet: Fleet, deadline: int, operations: Callable[[str, int], int]) -> None:
        super().__init__(fleet)
        self.deadline = deadline
        """How long a peer waits in a round, in nanoseconds."""
        self.rounds = 0
        """How many rounds are over."""
        self.times = RoundTimes(0, {})
        """The times of the last round."""
        self._operations = operations
        """Returns the operations of a peer's step with so many received models."""
        self._late: dict[str, dict[str, LateModel]] = {peer: {} for peer in fleet.peers}
        """The late models of each receiver that it has not averaged, by sender."""

    def asked(self, senders: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
        """Return whom each peer asks in the next round: not those whose models are on their way."""
        asked = {}
        for receiver, names in senders.items():
            start = self.ready(receiver)
            on_the_way = set()
            for sender, model in self._late_models(receiver).items():
                if model.arrival > start:
                    on_the_way.add(sender)
            asked[receiver] = [name for name in names if name not in on_the_way]
        return asked

    def exchange(self, messages: Sequence[ModelMessage]) -> dict[str, Exchange]:
        """Return what each peer averages in the next round, with these messages, and end it."""
        simulation = self.simulation()
        work = RoundWork(dict.fromkeys(self.fleet.peers, 0), sorted(messages))
        peers = self.gossip_peers(simulation, work)
        for name, peer in peers.items():
            peer.wait_until(peer.times.start + self.deadline)
            for model in self._late_models(name).values():
                peer.expect_late(model.arrival)
        self.exchange_models(simulation)
        return self._end(simulation, peers)

    def _end(self, simulation: TimedEvents, peers: Mapping[str, GossipPeer]) -> dict[str, Exchange]:
        exchanges = {}
        times: dict[str, PeerTimes] = {}
        for name, peer in peers.items():
            exchanges[name] = self._exchange_of(peer)
            operations = self._operations(name, exchanges[name].models)
            times[name] = peer.computed(operations)
        self.times = self.end_round(simulation, times, has_server=False)
        self.rounds += 1
        return exchanges

    def _exchange_of(self, peer: GossipPeer) -> Exchange:
        """Return what a peer averages in a round; note the models that are late."""
        begins = peer.begins
        on_time = [sender for sender, arrival in peer.arrivals.items() if arrival <= begins]
        late = [sender for sender in peer.senders if sender not in on_time]
        earlier = self._late_models(peer.name)
        arrived = [sender for sender, model in earlier.items() if model.arrival <= begins]
        on_the_way = [sender for sender in earlier if sender not in arrived]

        kept = {sender: earlier[sender] for sender in on_the_way}
        for sender in late:
            kept[sender] = LateModel(self.rounds, peer.arrivals.get(sender, FOREVER))
        self._late[peer.name] = kept
        return Exchange(
            on_time=sorted(on_time),
            late=sorted(late),
            arrived=sorted(set(arrived) - set(on_time)),
            on_the_way=on_the_way,
        )

    def _late_models(self, receiver: str) -> dict[str, LateModel]:
        """Return the late models that a peer may average in the next round, by sender."""
        recent = {}
        for sender, model in sorted(self._late[receiver].items()):
            if self.rounds - model.t <= MAX_AGE:
                recent[sender] = model
        return recent
