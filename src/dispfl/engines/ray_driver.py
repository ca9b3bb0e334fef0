"""The Ray engine: the same rounds, with peers in several processes of a machine or a cluster.

Peers' data and states stay with their worker; only models and reports travel. A lost worker is
replaced: the new one restores its peers from the last checkpoint and repeats their steps, with the
same bits.
"""

import os
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dispfl.clock.schedule import ModelMessage
from dispfl.engines.checkpoint import Checkpoints
from dispfl.engines.ray_pool import WorkerPool, connect, disconnect, wait_any
from dispfl.engines.ray_steps import StepRunner
from dispfl.engines.ray_worker import CONCURRENT_STEPS, WORKER_LOST, RemoteResult, get
from dispfl.methods.base import PeerState
from dispfl.round.context import LazyStates, PeerTask, RunContext, StepResult
from dispfl.round.late_models import AskedModels

MIN_SPEEDUP = 1.05
"""Peers move only if that makes the slowest worker at least this many times faster."""


class RayEngine:
    """Runs the peers in `workers` processes, each with one thread."""

    def __init__(
        self,
        context: RunContext,
        workers: int | None,
        checkpoints: Checkpoints,
        address: str | None = None,
    ) -> None:
        self.context = context
        count = min(workers or os.cpu_count() or 1, len(context.roster))
        connect(address, count)
        folder = checkpoints.folder.absolute()
        folder.mkdir(parents=True, exist_ok=True)
        self._codec = context.codec
        samples = {peer: len(context.data.peers[peer].train) for peer in context.roster}
        self._loads = MeasuredLoads(samples)
        self.pool = WorkerPool(context, count, folder)

    @property
    def states(self) -> Mapping[str, PeerState]:
        """Every peer's state, fetched from its worker when it is accessed."""
        return LazyStates(self.context.roster, lambda peer: self._get_state(peer, evaluated=False))

    @property
    def evaluated(self) -> Mapping[str, PeerState]:
        """The state that each peer was last evaluated with, where that was a global model."""
        evaluated: set[str] = set()
        for peers in self.pool.call_all("evaluated_peers"):
            evaluated.update(peers)
        return LazyStates(sorted(evaluated), lambda peer: self._get_state(peer, evaluated=True))

    def restore(self, rounds: int) -> None:
        """Restore every peer's state after this many rounds."""
        self.pool.restore(rounds)

    def partial_round(self, t: int) -> dict[str, StepResult]:
        """Restore the steps of round t that were finished before an interruption."""
        results: dict[str, StepResult] = {}
        for results_of_worker in self.pool.call_all("partial_round", t):
            results |= results_of_worker
        return results

    def choices(self, t: int, graph: Mapping[str, Sequence[str]]) -> dict[str, Sequence[str]]:
        """Return whom each online peer requests models from in round t."""
        choices: dict[str, Sequence[str]] = {}
        for choices_of_worker in self.pool.call_all("choices", t, graph):
            choices |= choices_of_worker
        return choices

    def message_sizes(self, senders: Mapping[str, Sequence[str]]) -> list[ModelMessage]:
        """Return the messages of the next round with their sizes, by whom each peer asks."""
        asked: dict[str, AskedModels] = {}
        for asked_of_worker in self.pool.call_all("asked_models", senders):
            asked |= asked_of_worker
        messages: list[ModelMessage] = []
        for messages_of_worker in self.pool.call_all("message_sizes", asked):
            messages += messages_of_worker
        return messages

    def run_tasks(self, tasks: Iterable[PeerTask]) -> Iterator[tuple[str, StepResult]]:
        """Yield each task's result when it is done; after the last, all states are on the disk."""
        try:
            yield from _TaskRunner(self.pool, list(tasks), self._receive).results()
        except BaseException:
            self.pool.submit_all("stop")
            raise

    def run_steps(self, tasks: Sequence[PeerTask]) -> Iterator[tuple[PeerTask, StepResult]]:
        """Yield each asynchronous step when it is done."""
        try:
            yield from StepRunner(self.pool, tasks, self._receive).results()
        except BaseException:
            self.pool.submit_all("stop")
            raise

    def end_steps(self, t: int, needed: Mapping[str, Collection[int]]) -> None:
        """End asynchronous round t: all states are on the disk before models are dropped."""
        self.pool.call_all("save_steps", t, needed)
        self.end_round()

    def end_round(self) -> None:
        """End the round; move peers between workers if measured times promise faster rounds."""
        self.pool.end_round()
        assignment = rebalance(self._loads.estimate(), self.pool.assignment, len(self.pool))
        if assignment != self.pool.assignment:
            self.pool.move(assignment)

    def flush(self, t: int) -> None:
        """Write the finished steps of round t that are not on the disk yet."""
        self.pool.flush(t)

    def close(self) -> None:
        """Stop the workers, and close the connection to Ray if it was made here."""
        self.pool.close()
        disconnect()

    def _receive(self, task: PeerTask, remote: RemoteResult) -> StepResult:
        """Return a worker's result with the message to the server decoded."""
        self._loads.add(task, remote.seconds)
        upload = None if remote.upload is None else self._codec.decode_model(remote.upload)
        return replace(remote.result, upload=upload)

    def _get_state(self, peer: str, evaluated: bool) -> PeerState:
        state: PeerState = self.pool.call(self.pool.assignment[peer], "get_state", peer, evaluated)
        return state


class _TaskRunner:
    """Runs the tasks of one round on the workers of a pool, and repeats those of lost workers."""

    def __init__(
        self,
        pool: WorkerPool,
        tasks: Sequence[PeerTask],
        receive: Callable[[PeerTask, RemoteResult], StepResult],
    ) -> None:
        self.pool = pool
        self.receive = receive
        self.tasks = {task.peer: task for task in tasks}
        self.waiting: dict[int, deque[str]] = {}
        """The peers of each slot that are not running yet."""
        self.running: dict[Any, tuple[int, Any, str]] = {}
        """Pending results, with slot, worker and peer."""
        self.received: set[str] = set()
        self.finished = False

    def results(self) -> Iterator[tuple[str, StepResult]]:
        """Yield results until all are received and on the disk."""
        self.pool.redo = self.redo
        self._set_tasks(self.pool)
        yield from self._run()

    def redo(self, slot: int) -> None:
        """Repeat the steps of a slot's lost worker, except those on the disk."""
        for pending, (running_slot, _, _) in list(self.running.items()):
            if running_slot == slot:
                del self.running[pending]
        self._set_tasks([slot])
        if self.finished:  # lost afterwards, with the states that it had evaluated
            deque(self._run(), maxlen=0)

    def _set_tasks(self, slots: Iterable[int]) -> None:
        tasks = {slot: self._tasks_of(slot) for slot in slots}
        on_disk = self.pool.call_each(tasks, "set_tasks", lambda slot: (tasks[slot],))
        for slot in tasks:
            done = self.received.intersection(on_disk[slot])
            self.waiting[slot] = deque(task.peer for task in tasks[slot] if task.peer not in done)

    def _tasks_of(self, slot: int) -> list[PeerTask]:
        return [self.tasks[peer] for peer in self.pool.peers(slot) if peer in self.tasks]

    def _run(self) -> Iterator[tuple[str, StepResult]]:
        self.finished = False
        while not self.finished:
            while self._submit():
                yield from self._collect()
            self.finished = not self.tasks or self._flushed()

    def _submit(self) -> bool:
        """Keep every worker busy; return whether any step is running."""
        busy = dict.fromkeys(self.waiting, 0)
        for slot, _, _ in self.running.values():
            busy[slot] += 1
        for slot, peers in self.waiting.items():
            while peers and busy[slot] < CONCURRENT_STEPS:
                peer = peers.popleft()
                worker, pending = self.pool.submit(slot, "step", peer)
                self.running[pending] = slot, worker, peer
                busy[slot] += 1
        return bool(self.running)

    def _collect(self) -> Iterator[tuple[str, StepResult]]:
        finished = wait_any(list(self.running))
        for pending in finished:
            if pending not in self.running:  # of a worker that was replaced meanwhile
                continue
            slot, worker, peer = self.running.pop(pending)
            try:
                remote = get(pending)
            except WORKER_LOST as lost:
                self.pool.replace(slot, worker, lost)
                continue
            if (
                remote is None
            ):  # it could not reach a lost worker, which this call to all of them finds
                self.waiting[slot].appendleft(peer)
                self.pool.announce_workers()
            elif peer not in self.received:
                self.received.add(peer)
                yield peer, self.receive(self.tasks[peer], remote)

    def _flushed(self) -> bool:
        """Write all next states to the disk; return whether no worker was lost meanwhile."""
        self.pool.call_all("flush", next(iter(self.tasks.values())).t)
        return not any(self.waiting.values())


class MeasuredLoads:
    """Estimates how long each peer's step takes: the mean over the rounds that it takes part in.

    Other rounds do not count: a server selects some peers in each, so that the idle ones of this
    round may train next.
    """

    def __init__(self, samples: Mapping[str, int]) -> None:
        self._samples = samples
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._steps: Counter[str] = Counter()

    def add(self, task: PeerTask, seconds: float) -> None:
        """Add the measured time of a task, unless the peer is idle in it."""
        if not task.idle:
            self._seconds[task.peer] += seconds
            self._steps[task.peer] += 1

    def estimate(self) -> dict[str, float]:
        """Return the load of every peer.

        Until a peer's first step, it is that of its samples at the mean speed of the others.
        """
        means = {peer: self._seconds[peer] / steps for peer, steps in self._steps.items()}
        samples = sum(self._samples[peer] for peer in means)
        seconds_per_sample = sum(means.values()) / max(1, samples)
        loads = {}
        for peer, count in self._samples.items():
            loads[peer] = means.get(peer, seconds_per_sample * count)
        return loads


def rebalance(
    loads: Mapping[str, float], assignment: Mapping[str, int], slots: int
) -> dict[str, int]:
    """Move a few peers from the busiest slots to the idlest ones, if that gains enough."""
    balanced = dict(assignment)
    totals = [0.0] * slots
    for peer, slot in assignment.items():
        totals[slot] += loads[peer]
    before = max(totals)
    for _ in loads:
        by_load = sorted(range(slots), key=lambda slot: (totals[slot], slot))
        idlest = by_load[0]
        busiest = by_load[-1]
        gap = totals[busiest] - totals[idlest]
        busiest_peers = [peer for peer, slot in balanced.items() if slot == busiest]
        movable = [peer for peer in busiest_peers if 0 < loads[peer] < gap]
        if not movable:
            break
        peer = min(movable, key=lambda peer: (abs(gap / 2 - loads[peer]), peer))
        balanced[peer] = idlest
        totals[busiest] -= loads[peer]
        totals[idlest] += loads[peer]
    return balanced if before > MIN_SPEEDUP * max(totals) else dict(assignment)
