"""Ray's workers as one crew, in which every place stays filled.

A worker may be lost at any moment: killed, out of memory, gone with its machine. It is missed when it is next asked for
something, whatever that is; then a new one takes its place, is brought to where the lost one was, and is asked
instead. Two rules make this enough:

new worker        takes its peers up from the seed or the last checkpoint, gets to know the others, and does again what
                  the lost one had done of the parts under way and not written down
every question    may be asked again, of a worker that has answered it or of one that was put in its place since
"""

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from dispfl.core.train import Samples
from dispfl.data.batches import ResidentSamples
from dispfl.engines.balance import dealt
from dispfl.engines.ray_worker import LOST, Worker
from dispfl.errors import DispflError
from dispfl.work import PeerData, Setting

log = logging.getLogger("dispfl")
LOSSES_BORNE = 3
"""So many workers for each place may be lost before another round is finished; then the run is given up."""

FAREWELL = 60.0
"""Seconds that the workers have to write down what they have finished when a run is interrupted."""


class WorkersLostError(DispflError):
    """Ray's workers are lost again and again, or do not even start."""


class Crew:
    """The workers, each a process with some of the peers."""

    def __init__(self, setting: Setting, count: int, folder: Path) -> None:
        self.setting = setting
        self.rounds = 0
        """How many are finished; the peers' states are those after them."""
        self.places = dealt({peer: float(len(setting.peers[peer].train)) for peer in setting.roster}, count)
        """Each peer's place."""
        self.again: Callable[[int], None] = _nothing
        """Does again what was lost of the parts under way with the worker that was in a place before."""
        self._folder = folder
        self._bare = ray.put(replace(setting, peers={}, elsewhere=setting.roster))
        self._born = self._losses = 0
        self._workers = {place: self._new_worker() for place in range(count)}
        self._say_if_cores_lack()

    # what they are asked

    def ask_each(self, places: Iterable[int], what: str, given: Callable[[int], Sequence[Any]]) -> dict[int, Any]:
        """What the workers in some places answer, all asked at once."""
        asked = {place: self.call(place, what, *given(place)) for place in places}
        answers = {}
        for place, (worker, pending) in asked.items():
            while place not in answers:
                try:
                    answers[place] = get(pending)
                except LOST as lost:
                    self.replace(place, worker, lost)
                    worker, pending = self.call(place, what, *given(place))
        return answers

    def ask_all(self, what: str, *given: Any) -> list[Any]:
        """What all workers answer."""
        return list(self.ask_each(self._workers, what, lambda place: given).values())

    def ask(self, place: int, what: str, *given: Any) -> Any:
        """What the worker in a place answers."""
        return self.ask_each([place], what, lambda place: given)[place]

    def call(self, place: int, what: str, *given: Any) -> tuple[Any, Any]:
        """The worker in a place, and what it will answer: for those who wait for it themselves."""
        worker = self._workers[place]
        return worker, getattr(worker, what).remote(*given)

    def call_all(self, what: str, *given: Any) -> list[Any]:
        """What all workers will answer, if they do: none is replaced."""
        return [self.call(place, what, *given)[1] for place in self._workers]

    # what becomes of them

    def recall(self, rounds: int) -> None:
        """Give each its peers, as they are after so many rounds."""
        self.rounds = rounds
        self.ask_each(self._workers, "adopt", lambda place: (self._data(self.peers(place)), self.rounds))
        self.introduce()

    def introduce(self) -> None:
        """Tell everyone who the others are, and where the peers are."""
        self.ask_all("meet", self._workers, self.places)

    def turn(self) -> None:
        """The round is over, and the parts of it are forgotten."""
        self.again = _nothing
        self.rounds += 1
        self.ask_all("turn", self.rounds)
        self._losses = 0

    def move(self, places: dict[str, int]) -> None:
        """Other places for some peers, which are taken up there from the disk."""
        before, self.places = self.places, places
        moved = [peer for peer in places if places[peer] != before[peer]]
        come = {place: [peer for peer in moved if places[peer] == place] for place in self._workers}
        gone = {place: [peer for peer in moved if before[peer] == place] for place in self._workers}
        self.ask_each(self._workers, "adopt", lambda place: (self._data(come[place]), self.rounds))
        self.ask_each(self._workers, "give_away", lambda place: (gone[place],))
        self.introduce()

    def replace(self, place: int, worker: Any, lost: Exception) -> None:
        """Fill the place of a worker that is lost, unless that has been done since it was asked."""
        if self._workers[place] is not worker:
            return
        self._bear(lost)
        peers = self.peers(place)
        log.warning("A Ray worker was lost (%s). Its %d peers go on in a new one.", _reason(lost), len(peers))
        with contextlib.suppress(RayActorError):
            ray.kill(worker)
        self._workers[place] = self._new_worker()
        self._say_if_cores_lack()
        self.ask(place, "adopt", self._data(peers), self.rounds)
        self.introduce()
        self.again(place)

    def farewell(self, t: int) -> None:
        """Let them write down what they have finished of round t; whoever is lost or slow now is not waited for."""
        pending = self.call_all("flush", t)
        ray.wait(pending, num_returns=len(pending), timeout=FAREWELL)

    def end(self) -> None:
        """End them all."""
        for worker in self._workers.values():
            ray.kill(worker)

    # who they are

    def peers(self, place: int) -> list[str]:
        """The peers in a place, in the order of the roster."""
        return [peer for peer in self.setting.roster if self.places[peer] == place]

    def __iter__(self) -> Iterator[int]:
        """The places."""
        return iter(self._workers)

    def __len__(self) -> int:
        """How many places there are."""
        return len(self._workers)

    def _new_worker(self) -> Any:
        self._born += 1  # so that a new worker does not overwrite what a lost one wrote
        gpus = 1 if self.setting.device.startswith("cuda") else 0
        place = Worker.options(num_cpus=1, num_gpus=gpus)  # type: ignore[attr-defined]
        return place.remote(f"w{self._born}", self._bare, self._folder)

    def _bear(self, lost: Exception) -> None:
        """Count a loss; too many end the run."""
        if isinstance(lost, RayActorError) and lost.actor_init_failed:
            raise WorkersLostError(
                f"A Ray worker could not start: {str(lost).strip().splitlines()[-1]}. Has every machine of the cluster "
                "the same dispfl, torch and Python, and the modules that the model comes from?"
            ) from None
        self._losses += 1
        if self._losses > LOSSES_BORNE * len(self):
            raise WorkersLostError(
                f"{self._losses} Ray workers were lost without a round being finished, the last because of this: "
                f"{_reason(lost)}. Is there enough memory for {len(self)} threads? What is finished is in "
                f"{self._folder.parent}; go on there with --resume."
            ) from None

    def _say_if_cores_lack(self) -> None:
        """A worker that there is no core for waits until a machine joins: for ever, where none is expected."""
        cores = int(ray.cluster_resources().get("CPU", 0))  # type: ignore[no-untyped-call]
        if cores < len(self):
            log.warning("threads is %d, but Ray has %d cores: waiting for more machines to join.", len(self), cores)

    def _data(self, peers: Iterable[str]) -> Mapping[str, PeerData]:
        return {peer: _compact(self.setting.peers[peer]) for peer in peers}


def get(pending: Any) -> Any:
    """What a worker answers; what it raises comes out as itself."""
    try:
        return ray.get(pending)
    except RayTaskError as problem:
        raise problem.cause from None


def _nothing(place: int) -> None:
    """No parts are under way."""


def _reason(lost: Exception) -> str:
    """Why a worker was lost, in a line."""
    return str(lost).strip().splitlines()[0].rstrip(".")


def _compact(data: PeerData) -> PeerData:
    """A peer's data without those of others that lie in the same tensors."""
    return PeerData(_alone(data.train), _alone(data.test))


def _alone(samples: Samples) -> Samples:
    if not isinstance(samples, ResidentSamples) or samples.index is None:
        return samples
    rows = samples.index
    return ResidentSamples(samples.inputs.index_select(0, rows), samples.labels[rows], None, samples.transform)
