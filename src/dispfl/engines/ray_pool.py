"""The pool of Ray workers, which replaces lost ones, and the connection of this process to Ray.

A worker may be lost at any moment: killed, out of memory, or with its machine. The loss is noticed
at the next call of any kind; a new worker then takes its slot, is brought to the same state, and
the call is repeated. Two rules make this sufficient:

- A new worker restores its peers from the seed or the last checkpoint, receives the list of
  workers, and repeats the steps of the lost worker that were not on the disk.
- Every call may be repeated, on a worker that has executed it or on one that has replaced it.
"""

import contextlib
import logging
import os
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

WORKER_DIED = "^A worker died or was killed while executing a task by an unexpected system error"
"""How Ray's own paragraph about a lost worker begins; we log one line about it instead."""
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", WORKER_DIED)

import ray  # noqa: E402  it reads the environment when it is imported
from ray.exceptions import RayActorError  # noqa: E402

from dispfl.core.inputs import take_rows  # noqa: E402
from dispfl.core.samples import PeerData, Samples  # noqa: E402
from dispfl.data.batches import ResidentSamples  # noqa: E402
from dispfl.engines.ray_worker import WORKER_LOST, Worker, get  # noqa: E402
from dispfl.errors import ConfigError, DispflError  # noqa: E402
from dispfl.round.context import RunContext  # noqa: E402

log = logging.getLogger("dispfl")
MAX_LOSSES = 3
"""Workers per slot that may be lost before a round is finished; with more, the run stops."""
FLUSH_SECONDS = 60.0
"""Time for the workers to write what they have finished when a run is interrupted."""

_connected_here = False
"""Whether this module made the connection. Ray allows one per process, which may have existed
before."""


class WorkersLostError(DispflError):
    """Ray workers are lost repeatedly, or do not start."""


# The connection


def cluster_address(address: str | None) -> str | None:
    """Return the address of the Ray cluster to use, if one is configured."""
    return address or os.environ.get("RAY_ADDRESS")


def connect(address: str | None, workers: int) -> None:
    """Connect to the configured cluster, or to a new Ray on this machine with this many cores.

    An existing connection of this process is used.
    """
    global _connected_here
    if ray.is_initialized():
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray passes our path to the workers, which import a user's modules.
    current_folder = str(Path.cwd())
    if current_folder not in sys.path:
        sys.path.append(current_folder)
    address = cluster_address(address)
    options: dict[str, Any] = {"num_cpus": workers, "include_dashboard": False}
    if address:
        options = {"address": address}
    try:
        _check_listening(address)
        ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)
    except (OSError, ValueError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else None
        raise ConfigError(
            f"Cannot connect to the Ray cluster at {address}:"
            f" {reason or str(problem).splitlines()[0]}. Is it running, and are RAY_AUTH_MODE and"
            " the token the same here and there?"
        ) from None
    _connected_here = True


def disconnect() -> None:
    """Close the connection, if this module made it."""
    global _connected_here
    if _connected_here:
        ray.shutdown()
    _connected_here = False


def _check_listening(address: str | None) -> None:
    """Fail at once if nothing listens at the address; Ray would retry for minutes."""
    host, _, port = (address or "").rpartition(":")
    if host and port.isdecimal() and "/" not in host:
        socket.create_connection((host, int(port)), timeout=10).close()


# The pool


class WorkerPool:
    """Ray workers by slot; each is a process with some of the peers."""

    def __init__(self, context: RunContext, count: int, folder: Path) -> None:
        self.context = context
        self.rounds = 0
        """The number of finished rounds; the peers' states are those after them."""
        samples = {peer: len(context.data.peers[peer].train) for peer in context.roster}
        self.assignment = assign(samples, count)
        """Each peer's slot."""
        self.redo: Callable[[int], None] = _nothing
        """Repeats the lost steps of the current tasks after the worker in a slot was replaced."""
        self._folder = folder
        data = replace(context.data, peers={}, unseen={}, remote_peers=context.roster)
        self._shared_context = ray.put(replace(context, data=data, known_layout=context.layout))
        self._started = self._losses = 0
        self._workers = {slot: self._new_worker() for slot in range(count)}
        self._warn_if_cores_are_missing()

    # Calls

    def call_each(
        self, slots: Iterable[int], method: str, args: Callable[[int], Sequence[Any]]
    ) -> dict[int, Any]:
        """Call a method of the workers in some slots, all at once, and return their results."""
        calls = {slot: self.submit(slot, method, *args(slot)) for slot in slots}
        results = {}
        for slot, (worker, pending) in calls.items():
            while slot not in results:
                try:
                    results[slot] = get(pending)
                except WORKER_LOST as lost:
                    self.replace(slot, worker, lost)
                    worker, pending = self.submit(slot, method, *args(slot))
        return results

    def call_all(self, method: str, *args: Any) -> list[Any]:
        """Call a method of all workers and return their results."""
        return list(self.call_each(self._workers, method, lambda slot: args).values())

    def call(self, slot: int, method: str, *args: Any) -> Any:
        """Call a method of the worker in a slot and return its result."""
        return self.call_each([slot], method, lambda slot: args)[slot]

    def submit(self, slot: int, method: str, *args: Any) -> tuple[Any, Any]:
        """Start a call; return the worker and its pending result, for the caller to wait for."""
        worker = self._workers[slot]
        return worker, getattr(worker, method).remote(*args)

    def submit_all(self, method: str, *args: Any) -> list[Any]:
        """Start a call of all workers and return the pending results.

        Lost workers are not replaced.
        """
        return [self.submit(slot, method, *args)[1] for slot in self._workers]

    # Peers and rounds

    def restore(self, rounds: int) -> None:
        """Give each worker its peers, with their states after this many rounds."""
        self.rounds = rounds
        self.call_each(
            self._workers, "add_peers", lambda slot: (self._data(self.peers(slot)), self.rounds)
        )
        self.announce_workers()

    def announce_workers(self) -> None:
        """Send all workers the list of workers and the assignment of peers."""
        self.call_all("set_workers", self._workers, self.assignment)

    def end_round(self) -> None:
        """End the round; its tasks are dropped."""
        self.redo = _nothing
        self.rounds += 1
        self.call_all("end_round", self.rounds)
        self._losses = 0

    def move(self, assignment: dict[str, int]) -> None:
        """Move peers to other slots, where they are restored from the disk."""
        added: dict[int, list[str]] = {slot: [] for slot in self._workers}
        removed: dict[int, list[str]] = {slot: [] for slot in self._workers}
        for peer, slot in assignment.items():
            slot_before = self.assignment[peer]
            if slot != slot_before:
                added[slot].append(peer)
                removed[slot_before].append(peer)
        self.assignment = assignment
        self.call_each(
            self._workers, "add_peers", lambda slot: (self._data(added[slot]), self.rounds)
        )
        self.call_each(self._workers, "remove_peers", lambda slot: (removed[slot],))
        self.announce_workers()

    def replace(self, slot: int, worker: Any, lost: Exception) -> None:
        """Replace a lost worker, unless that has been done since it was called."""
        if self._workers[slot] is not worker:
            return
        self._count_loss(lost)
        peers = self.peers(slot)
        log.warning(
            "A Ray worker was lost (%s). Its %d peers continue in a new one.",
            _reason(lost),
            len(peers),
        )
        with contextlib.suppress(RayActorError):
            ray.kill(worker)
        self._workers[slot] = self._new_worker()
        self._warn_if_cores_are_missing()
        self.call(slot, "add_peers", self._data(peers), self.rounds)
        self.announce_workers()
        self.redo(slot)

    def flush(self, t: int) -> None:
        """Let the workers write the finished steps of round t, without lost or slow ones."""
        pending = self.submit_all("flush", t)
        ray.wait(pending, num_returns=len(pending), timeout=FLUSH_SECONDS)

    def close(self) -> None:
        """Stop all workers."""
        for worker in self._workers.values():
            ray.kill(worker)

    def peers(self, slot: int) -> list[str]:
        """Return the peers of a slot, in the order of the roster."""
        return [peer for peer in self.context.roster if self.assignment[peer] == slot]

    def __iter__(self) -> Iterator[int]:
        """Iterate over the slots."""
        return iter(self._workers)

    def __len__(self) -> int:
        """Return the number of slots."""
        return len(self._workers)

    def _new_worker(self) -> Any:
        # Names are unique, so a new worker does not overwrite the files of a lost one.
        self._started += 1
        gpus = 1 if self.context.settings.device.startswith("cuda") else 0
        worker = Worker.options(num_cpus=1, num_gpus=gpus)  # type: ignore[attr-defined]
        return worker.remote(f"w{self._started}", self._shared_context, self._folder)

    def _count_loss(self, lost: Exception) -> None:
        """Count a lost worker; too many stop the run."""
        if isinstance(lost, RayActorError) and lost.actor_init_failed:
            reason = str(lost).strip().splitlines()[-1].rstrip(".")
            raise WorkersLostError(
                f"A Ray worker could not start: {reason}. Does every machine of the cluster have"
                " the same dispfl, torch and Python, and the modules that the model comes from?"
            ) from None
        self._losses += 1
        if self._losses > MAX_LOSSES * len(self):
            raise WorkersLostError(
                f"{self._losses} Ray workers were lost without finishing a round, the last one"
                f" because of: {_reason(lost)}. Is there enough memory for {len(self)} workers?"
                f" Finished rounds are in {self._folder.parent}; resume there with --resume."
            ) from None

    def _warn_if_cores_are_missing(self) -> None:
        """Warn that a worker without a core waits until a machine joins, which may never happen."""
        cores = int(ray.cluster_resources().get("CPU", 0))  # type: ignore[no-untyped-call]
        if cores < len(self):
            log.warning(
                "workers is %d, but Ray has %d cores: waiting for more machines to join.",
                len(self),
                cores,
            )

    def _data(self, peers: Iterable[str]) -> Mapping[str, PeerData]:
        return {peer: _compact(self.context.data.peers[peer]) for peer in peers}


def wait_any(pending: list[Any]) -> list[Any]:
    """Wait until a call is done; return those that are."""
    finished, _ = ray.wait(pending)
    return finished


def assign(loads: Mapping[str, float], slots: int) -> dict[str, int]:
    """Assign each peer, the heaviest first, to the slot with the smallest load so far."""
    totals = [0.0] * slots
    assignment = {}
    for peer in sorted(loads, key=lambda peer: (-loads[peer], peer)):
        assignment[peer] = min(range(slots), key=lambda slot: (totals[slot], slot))
        totals[assignment[peer]] += loads[peer]
    return assignment


def _nothing(slot: int) -> None:
    """There are no tasks to repeat."""


def _reason(lost: Exception) -> str:
    """Return why a worker was lost, on one line."""
    return str(lost).strip().splitlines()[0].rstrip(".")


def _compact(data: PeerData) -> PeerData:
    """Copy a peer's data out of tensors that hold those of other peers too."""
    validation = None if data.validation is None else _own_rows(data.validation)
    return PeerData(_own_rows(data.train), _own_rows(data.test), validation)


def _own_rows(samples: Samples) -> Samples:
    if not isinstance(samples, ResidentSamples) or samples.index is None:
        return samples
    rows = samples.index
    inputs = take_rows(samples.inputs, rows)
    return ResidentSamples(inputs, samples.labels[rows], None, samples.transform)
