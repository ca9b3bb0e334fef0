"""The parts of one round, done by Ray's workers, whatever happens to them."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import ray

from dispfl.engines.ray_crew import Crew, get
from dispfl.engines.ray_worker import LOST, STEPS_AT_ONCE, Told
from dispfl.work import Outcome, Part


class RayRound:
    """The parts of a round, and which of them every worker has still to do."""

    def __init__(self, crew: Crew, parts: Sequence[Part], take: Callable[[str, Told], Outcome]) -> None:
        self.crew, self.take = crew, take
        self.parts = {part.peer: part for part in parts}
        self.left: dict[int, deque[str]] = {}
        self.running: dict[Any, tuple[int, Any, str]] = {}
        """Steps under way: in which place, by which worker, whose."""
        self.told: set[str] = set()
        self.over = False

    def done(self) -> Iterator[tuple[str, Outcome]]:
        """Outcomes, until all are there and written down."""
        self.crew.again = self.again
        self._assign(self.crew)
        yield from self._rest()

    def again(self, place: int) -> None:
        """A new worker does what the lost one had done, but for what is on the disk."""
        self.running = {pending: whose for pending, whose in self.running.items() if whose[0] != place}
        self._assign([place])
        if self.over:  # lost later, with what it had judged
            deque(self._rest(), maxlen=0)

    def _assign(self, places: Iterable[int]) -> None:
        mine = {place: [peer for peer in self.crew.peers(place) if peer in self.parts] for place in places}
        on_disk = self.crew.ask_each(mine, "prepare", lambda place: ([self.parts[peer] for peer in mine[place]],))
        for place, peers in mine.items():
            finished = self.told.intersection(on_disk[place])
            self.left[place] = deque(peer for peer in peers if peer not in finished)

    def _rest(self) -> Iterator[tuple[str, Outcome]]:
        self.over = False
        while not self.over:
            while self._submit():
                yield from self._collect()
            self.over = not self.parts or self._written()

    def _submit(self) -> bool:
        """Keep every worker busy; whether anything is under way."""
        busy = dict.fromkeys(self.left, 0)
        for place, _, _ in self.running.values():
            busy[place] += 1
        for place, peers in self.left.items():
            while peers and busy[place] < STEPS_AT_ONCE:
                peer = peers.popleft()
                worker, pending = self.crew.call(place, "step", peer)
                self.running[pending] = place, worker, peer
                busy[place] += 1
        return bool(self.running)

    def _collect(self) -> Iterator[tuple[str, Outcome]]:
        finished, _ = ray.wait(list(self.running))
        for pending in finished:
            if pending not in self.running:  # of a worker that is lost
                continue
            place, worker, peer = self.running.pop(pending)
            try:
                told = get(pending)
            except LOST as lost:
                self.crew.replace(place, worker, lost)
                continue
            if told is None:  # it could not ask a worker that is gone; who is, is noticed when all are spoken to
                self.left[place].appendleft(peer)
                self.crew.introduce()
            elif peer not in self.told:
                self.told.add(peer)
                yield peer, self.take(peer, told)

    def _written(self) -> bool:
        """Whether all workers have their peers' new states on the disk."""
        self.crew.ask_all("flush", next(iter(self.parts.values())).t)
        return not any(self.left.values())
