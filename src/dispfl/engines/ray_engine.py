"""The Ray engine: the same rounds, with the peers spread over processes on this machine or on a cluster.

Peers' data and states stay with their worker; what travels is messages of the codec, and reports. A worker that is
lost (killed, or with its machine) is replaced: the new one takes its peers up from the last checkpoint and does their
parts of the round again, which gives the same bits.
"""

import contextlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayActorError

from dispfl.core.layout import Layout
from dispfl.core.train import Samples
from dispfl.data.batches import ResidentSamples
from dispfl.engines.balance import dealt, rebalanced
from dispfl.engines.ray_connection import connect, disconnect
from dispfl.engines.ray_round import RayRound, get, reason
from dispfl.engines.ray_worker import Told, Worker
from dispfl.methods.base import PeerState
from dispfl.round import Outcome, Part, PeerData, Setting
from dispfl.runs.checkpoint import Checkpoints

log = logging.getLogger("dispfl")
FAREWELL = 60.0
"""Seconds that the workers have to write down what they have finished when a run is interrupted."""


class RayEngine:
    """Keeps the peers in `threads` workers, each a process with one thread."""

    def __init__(
        self, setting: Setting, threads: int | None, checkpoints: Checkpoints, address: str | None = None
    ) -> None:
        self.setting = setting
        count = min(threads or os.cpu_count() or 1, len(setting.roster))
        connect(address, count)
        self._folder = checkpoints.folder.absolute()
        self._folder.mkdir(parents=True, exist_ok=True)
        module = setting.module()
        self._codec = setting.codec(Layout.of(module))
        self._bare = ray.put(replace(setting, peers={}, elsewhere=setting.roster))
        self._rounds = 0
        self._places = dealt({peer: float(len(setting.peers[peer].train)) for peer in setting.roster}, count)
        self._measured: dict[str, float] = {}
        self._born = 0
        self._workers = {place: self._new_worker() for place in range(count)}
        self._adopted = False

    # what the rounds need

    @property
    def states(self) -> Mapping[str, PeerState]:
        """Everyone's state, fetched one by one when it is looked at."""
        return _Fetched(self.setting.roster, lambda peer: self._fetch(peer, judged=False))

    @property
    def judged(self) -> Mapping[str, PeerState]:
        """What each peer was judged on last, where that was a model that all share."""
        known = {peer for names in self._all("has_judged") for peer in names}
        roster = [peer for peer in self.setting.roster if peer in known]
        return _Fetched(roster, lambda peer: self._fetch(peer, judged=True))

    def recall(self, rounds: int) -> None:
        """Take up everyone's state after so many rounds."""
        self._rounds = rounds
        if self._adopted:
            self._all("recall", rounds)
            return
        get([worker.adopt.remote(self._data(place), rounds) for place, worker in self._workers.items()])
        self._adopted = True
        self._introduce()

    def under_way(self, t: int) -> dict[str, Outcome]:
        """Take up the steps of round t that were finished before a stop."""
        return {peer: outcome for found in self._all("under_way", t) for peer, outcome in found.items()}

    def steps(self, parts: Iterable[Part]) -> Iterator[tuple[str, Outcome]]:
        """Each part's outcome, as it is done; when all are, the states are on the disk."""
        work = RayRound(self, list(parts))
        try:
            yield from work.done()
        except BaseException:
            self._stop_steps()
            raise

    def turn(self) -> None:
        """The round is over. A worker that is lost now is taken up from what it wrote."""
        self._rounds += 1
        for place, worker in list(self._workers.items()):
            try:
                get([worker.turn.remote()])
            except RayActorError as lost:
                self.replace_worker(place, lost)
        self._move_peers()

    def flush(self, t: int) -> None:
        """Write down the finished steps of round t that are not on the disk yet."""
        pending = [worker.flush.remote(t) for worker in self._workers.values()]
        ray.wait(pending, num_returns=len(pending), timeout=FAREWELL)

    def close(self) -> None:
        """End the workers, and the connection to Ray if it was made here."""
        for worker in self._workers.values():
            ray.kill(worker)
        disconnect()

    # the workers

    def replace_worker(self, place: int, lost: BaseException) -> dict[str, Outcome]:
        """A new worker for a place, with the lost one's peers; what those had on the disk of the round under way."""
        peers = [peer for peer, where in self._places.items() if where == place]
        log.warning("A Ray worker was lost (%s). Its %d peers go on in a new one.", reason(lost), len(peers))
        with contextlib.suppress(RayActorError):
            ray.kill(self._workers[place])
        self._workers[place] = self._new_worker()
        get([self._workers[place].adopt.remote(self._data(place), self._rounds)])
        self._introduce()
        found: list[dict[str, Outcome]] = get([self._workers[place].under_way.remote(self._rounds)])
        return found[0]

    def worker(self, place: int) -> Any:
        """The worker in a place."""
        return self._workers[place]

    def places(self) -> dict[int, list[str]]:
        """The peers of each place."""
        peers: dict[int, list[str]] = {place: [] for place in self._workers}
        for peer in self.setting.roster:
            peers[self._places[peer]].append(peer)
        return peers

    def take(self, peer: str, told: Told) -> Outcome:
        """What is told of a step, with the message to the server opened."""
        self._measured[peer] = told.seconds
        sent = None if told.message is None else self._codec.decode_model(told.message)
        return replace(told.outcome, sent=sent)

    def _new_worker(self) -> Any:
        self._born += 1  # so that a new worker does not overwrite what a lost one wrote
        gpus = 1 if self.setting.device.startswith("cuda") else 0
        place = Worker.options(num_cpus=1, num_gpus=gpus)  # type: ignore[attr-defined]
        return place.remote(f"w{self._born}", self._bare, self._folder)

    def _introduce(self) -> None:
        self._all("meet", self._workers, self._places)

    def _data(self, place: int) -> dict[str, PeerData]:
        return {peer: _compact(self.setting.peers[peer]) for peer, where in self._places.items() if where == place}

    def _move_peers(self) -> None:
        """Even out the workers' load by what the peers' steps took."""
        if len(self._measured) < len(self._places):
            return
        places = rebalanced(self._measured, self._places, len(self._workers))
        moved = [peer for peer in places if places[peer] != self._places[peer]]
        if not moved:
            return
        self._places, before = places, self._places
        for place, worker in self._workers.items():
            coming = {p: _compact(self.setting.peers[p]) for p in moved if places[p] == place}
            get([worker.adopt.remote(coming, self._rounds)])
            get([worker.give_away.remote([peer for peer in moved if before[peer] == place])])
        self._introduce()

    def _fetch(self, peer: str, judged: bool) -> PeerState:
        state: PeerState = get([self._workers[self._places[peer]].fetch.remote(peer, judged)])[0]
        return state

    def _all(self, what: str, *given: Any) -> list[Any]:
        return get([getattr(worker, what).remote(*given) for worker in self._workers.values()])

    def _stop_steps(self) -> None:
        with contextlib.suppress(RayActorError):
            for worker in self._workers.values():
                worker.stop.remote()


class _Fetched(Mapping[str, PeerState]):
    """Peers' states that are elsewhere."""

    def __init__(self, roster: Sequence[str], fetch: Callable[[str], PeerState]) -> None:
        self._roster, self._fetch = roster, fetch

    def __getitem__(self, peer: str) -> PeerState:
        return self._fetch(peer)

    def __iter__(self) -> Iterator[str]:
        return iter(self._roster)

    def __len__(self) -> int:
        return len(self._roster)


def _compact(data: PeerData) -> PeerData:
    """A peer's data without those of others that lie in the same tensors."""
    return PeerData(_alone(data.train), _alone(data.test))


def _alone(samples: Samples) -> Samples:
    if not isinstance(samples, ResidentSamples) or samples.index is None:
        return samples
    rows = samples.index
    return ResidentSamples(samples.inputs.index_select(0, rows), samples.labels[rows], None, samples.transform)
