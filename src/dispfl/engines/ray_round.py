"""The parts of one round, done by Ray's workers, whatever happens to them."""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import ray
from ray.exceptions import RayActorError, RayTaskError

from dispfl.engines.ray_worker import STEPS_AT_ONCE, Told
from dispfl.errors import RunError
from dispfl.round import Outcome, Part

LOSSES_BORNE = 3
"""So many workers for each place may be lost in one round before the run is given up."""


class Workers(Protocol):
    """Who does the parts."""

    def worker(self, place: int) -> Any:
        """The worker in a place."""
        ...

    def places(self) -> dict[int, list[str]]:
        """The peers of each place."""
        ...

    def take(self, peer: str, told: Told) -> Outcome:
        """What is told of a step."""
        ...

    def replace_worker(self, place: int, lost: BaseException) -> dict[str, Outcome]:
        """A new worker for a place; what its peers have on the disk of this round."""
        ...


class RayRound:
    """The parts of a round, and which of them every worker has still to do."""

    def __init__(self, engine: Workers, parts: Sequence[Part]) -> None:
        self.engine = engine
        self.parts = {part.peer: part for part in parts}
        self.left: dict[int, deque[str]] = {}
        self.running: dict[Any, tuple[int, str]] = {}
        self.told: set[str] = set()
        self.losses = 0

    def done(self) -> Iterator[tuple[str, Outcome]]:
        """Outcomes, until all are there and written down."""
        for place, peers in self.engine.places().items():
            self._assign(place, [peer for peer in peers if peer in self.parts])
        while True:
            while self._submit():
                yield from self._collect()
            if not self.parts or self._written():
                return

    def _assign(self, place: int, peers: Sequence[str]) -> None:
        self.left[place] = deque(peers)
        get([self.engine.worker(place).prepare.remote([self.parts[peer] for peer in peers])])

    def _submit(self) -> bool:
        """Keep every worker busy; whether anything is under way."""
        busy = dict.fromkeys(self.left, 0)
        for place, _ in self.running.values():
            busy[place] += 1
        for place, peers in self.left.items():
            while peers and busy[place] < STEPS_AT_ONCE:
                peer = peers.popleft()
                self.running[self.engine.worker(place).step.remote(peer)] = place, peer
                busy[place] += 1
        return bool(self.running)

    def _collect(self) -> Iterator[tuple[str, Outcome]]:
        finished, _ = ray.wait(list(self.running))
        for pending in finished:
            if pending not in self.running:  # of a worker that is lost
                continue
            place, peer = self.running.pop(pending)
            try:
                [told] = get([pending])
            except RayActorError as lost:
                self._replace(place, lost)
                continue
            if told is None:  # it could not ask a worker that is gone
                self.left[place].appendleft(peer)
                self._look_after_all()
            elif peer not in self.told:
                self.told.add(peer)
                yield peer, self.engine.take(peer, told)

    def _look_after_all(self) -> None:
        for place in self.left:
            try:
                get([self.engine.worker(place).has_judged.remote()])
            except RayActorError as lost:
                self._replace(place, lost)

    def _replace(self, place: int, lost: BaseException) -> None:
        """A new worker does again what the lost one had done, but for what is on the disk."""
        self.losses += 1
        if self.losses > LOSSES_BORNE * len(self.left):
            raise RunError(
                f"{self.losses} Ray workers were lost in one round, the last because of this: {reason(lost)}. The run "
                "stops here and can be resumed; is there enough memory for the number of threads?"
            ) from lost
        self.running = {pending: whose for pending, whose in self.running.items() if whose[0] != place}
        try:
            on_disk = self.engine.replace_worker(place, lost)
        except RayActorError as again:
            self._replace(place, again)
            return
        judging = any(part.shared is not None for part in self.parts.values())
        mine = [peer for peer in self.engine.places()[place] if peer in self.parts]
        self._assign(place, mine if judging else [peer for peer in mine if peer not in on_disk])

    def _written(self) -> bool:
        """Whether all workers have their peers' new states on the disk."""
        t = next(iter(self.parts.values())).t
        for place in list(self.left):
            try:
                get([self.engine.worker(place).flush.remote(t)])
            except RayActorError as lost:
                self._replace(place, lost)
        return not any(self.left.values())


def get(pending: Sequence[Any]) -> list[Any]:
    """What the workers return; what they raise comes out as itself."""
    try:
        return list(ray.get(list(pending)))
    except RayTaskError as problem:
        raise problem.cause from None


def reason(lost: BaseException) -> str:
    """Why a worker was lost, in a line."""
    return str(lost).strip().splitlines()[0].rstrip(".")
