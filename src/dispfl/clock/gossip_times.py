"""When the steps of asynchronous gossip happen: nobody waits for anybody.

Each peer, in a loop:

1. It begins a step with the newest model of each neighbour that has arrived. The staleness of a
   model is the number of steps that the receiver has begun since the model was finished; beyond a
   limit it is dropped. Each model counts once, unless models are reused until newer ones arrive.
2. When the step is over, it sends its model to the peers that the topology draws for this step. As
   many copies as that are under way at a time. Others wait, and are replaced by the next model.

What a step computes and what a model's message takes do not depend on what is learned, so the times
follow from the fleet alone. They are divided into rounds of equal length, which end with scores.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from dispfl.clock.events import TimedEvents, TimedTransfer, TransferTimes
from dispfl.clock.fleet import Fleet


class TimedStep(NamedTuple):
    """A step of a peer: from the average until the model is trained."""

    peer: str
    number: int
    """How many steps the peer has taken before."""
    start: int
    """In nanoseconds."""
    end: int
    models: Mapping[str, int]
    """The models that are averaged: by sender, the number of the step that it is the result of."""
    staleness: Mapping[str, int]
    """How many steps the peer has begun since each of them was finished."""
    dropped: Sequence[str] = ()
    """The senders of models that had arrived and were too stale."""


class Arrival(NamedTuple):
    """A model that has arrived."""

    sender: str
    receiver: str


@dataclass(frozen=True)
class TimedRound:
    """What happens between two scores."""

    start: int
    """In nanoseconds."""
    end: int
    steps: Sequence[TimedStep]
    """The steps that end in it, in this order."""
    arrivals: Sequence[Arrival]
    needed: Mapping[str, Collection[int]]
    """The models that later steps may average: by sender, the numbers of their steps."""
    sending: Mapping[str, int]
    """How long models of each peer leave, in nanoseconds: while it computes."""


@dataclass(frozen=True)
class GossipWork:
    """What peers compute and send."""

    operations: Callable[[str, int], int]
    """Returns the operations of a peer's step with so many received models."""
    sizes: Mapping[str, int]
    """The bytes of each peer's message."""
    receivers: Callable[[str, int], Sequence[str]]
    """Returns to whom a peer sends its model before its step of this number."""


class GossipTimes:
    """The times of asynchronous gossip, round after round."""

    def __init__(
        self, fleet: Fleet, work: GossipWork, length: int, limit: int, *, reuses: bool
    ) -> None:
        self.fleet = fleet
        self.length = length
        """Nanoseconds of a round."""
        self.rounds = 0
        """How many rounds are over."""
        self._federation = _Federation(TimedEvents(fleet, {}, {}), work, limit, reuses)
        for name in sorted(fleet.peers):
            peer = _AsyncPeer(name, self._federation)
            self._federation.peers[name] = peer
            self._federation.events.at(0, peer.start, last=True)

    @property
    def events(self) -> int:
        """How many events there were so far."""
        return self._federation.events.events

    def advance(self) -> TimedRound:
        """Return what happens in the next round."""
        federation = self._federation
        start = self.rounds * self.length
        self.rounds += 1
        end = self.rounds * self.length
        federation.events.run(end)
        federation.events.forget_use()

        needed: dict[str, set[int]] = {}
        sending = {}
        for name, peer in federation.peers.items():
            for sender, number in peer.models_in_use():
                needed.setdefault(sender, set()).add(number)
            sending[name] = peer.transfers.between(start, end)
            peer.transfers.forget(end)
        finished = TimedRound(start, end, federation.steps, federation.arrivals, needed, sending)
        federation.steps = []
        federation.arrivals = []
        return finished


@dataclass
class _Federation:
    """What all peers share."""

    events: TimedEvents
    work: GossipWork
    limit: int
    """The largest staleness of a model that is averaged."""
    reuses: bool
    """Whether a model is averaged again until a newer one of its sender arrives."""
    peers: dict[str, "_AsyncPeer"] = field(default_factory=dict)
    steps: list[TimedStep] = field(default_factory=list)
    """The steps that ended in this round."""
    arrivals: list[Arrival] = field(default_factory=list)
    """The models that arrived in this round."""


class _Model(NamedTuple):
    """A model that is sent."""

    number: int
    """The number of the step that it is the result of."""
    finished: int
    """When that step was over, in nanoseconds."""


class _AsyncPeer:
    """A peer that waits for nobody."""

    def __init__(self, name: str, federation: _Federation) -> None:
        self.name = name
        self.transfers = TransferTimes(federation.events.fleet, name)
        """The copies of its models that have not left."""
        self._federation = federation
        self._starts: list[int] = []
        """When its last steps began: as many as may count for a staleness."""
        self._arrived: dict[str, _Model] = {}
        """The newest model of each sender."""
        self._averaged: Mapping[str, int] = {}
        """The models of the step under way."""
        self._number = 0
        """How many steps it has taken."""
        self._model = _Model(-1, 0)
        """Its newest model; nobody receives the one that it starts with."""
        self._waiting: list[str] = []
        """The receivers of copies of the newest model that have not left."""
        self._places = 0
        """How many copies may be on the links at a time."""
        self._on_links = 0
        """How many are."""
        self._on_the_way: Counter[int] = Counter()
        """How many copies have not arrived, by the number of the model."""

    def start(self, now: int) -> None:
        """Begin a step with what has arrived."""
        limit = self._federation.limit
        fresh = {}
        staleness = {}
        dropped = []
        for sender, model in sorted(self._arrived.items()):
            steps = self._steps_since(model.finished)
            if steps <= limit:
                fresh[sender] = model
                staleness[sender] = steps
            else:
                dropped.append(sender)
        self._arrived = fresh if self._federation.reuses else {}
        self._averaged = {sender: model.number for sender, model in fresh.items()}
        self._starts = [*self._starts[-limit:], now] if limit else [now]

        fleet = self._federation.events.fleet
        operations = self._federation.work.operations(self.name, len(fresh))
        duration = max(1, fleet.computing_time(self.name, operations))
        end = fleet.availability(self.name).finish(now, duration)
        step = TimedStep(self.name, self._number, now, end, self._averaged, staleness, dropped)
        self._federation.events.at(end, partial(self._finish, step))

    def _steps_since(self, time: int) -> int:
        """Return how many of its last steps have begun since a time."""
        return len(self._starts) - bisect_left(self._starts, time)

    def _finish(self, step: TimedStep, now: int) -> None:
        """Send the new model, in place of copies of the one before that have not left."""
        self._federation.steps.append(step)
        self._averaged = {}
        self._model = _Model(step.number, now)
        self._number += 1
        self._waiting = list(self._federation.work.receivers(self.name, self._number))
        self._places = len(self._waiting)
        self._send(now)
        self._federation.events.at(now, self.start, last=True)

    def _send(self, now: int) -> None:
        """Send copies of the newest model while there are places."""
        while self._waiting and self._on_links < self._places:
            receiver = self._waiting.pop(0)
            self._on_links += 1
            self._on_the_way[self._model.number] += 1
            size = self._federation.work.sizes[self.name]
            arrived = partial(self._arrive, receiver, self._model)
            left = partial(self._leave, self.transfers.begin(receiver, now))
            self._federation.events.send(self.name, receiver, size, now, arrived, left)

    def _leave(self, transfer: TimedTransfer, now: int) -> None:
        """Give the place of a copy that has left the links to one that waits."""
        transfer.end = now
        self._on_links -= 1
        self._federation.events.at(now, self._send)  # a newer model may be finished at this time

    def _arrive(self, receiver: str, model: _Model, now: int) -> None:
        self._on_the_way[model.number] -= 1
        if not self._on_the_way[model.number]:
            del self._on_the_way[model.number]
        self._federation.arrivals.append(Arrival(self.name, receiver))
        self._federation.peers[receiver].receive(self.name, model)

    def receive(self, sender: str, model: _Model) -> None:
        """Keep the newest model of each sender."""
        newest = self._arrived.get(sender)
        if newest is None or newest.number < model.number:
            self._arrived[sender] = model

    def models_in_use(self) -> list[tuple[str, int]]:
        """Return the models that it averages, may average, or sends: whose, and their numbers."""
        models = list(self._averaged.items())
        models += [(sender, model.number) for sender, model in self._arrived.items()]
        models += [(self.name, number) for number in self._on_the_way]
        if self._waiting:
            models.append((self.name, self._model.number))
        return models
