"""The steps of an asynchronous round on the workers of a pool."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from dispfl.engines.ray_pool import WorkerPool, wait_any
from dispfl.engines.ray_worker import CONCURRENT_STEPS, WORKER_LOST, RemoteResult, get
from dispfl.engines.ready_steps import ReadySteps, Step
from dispfl.round.context import PeerTask, StepResult


class StepRunner:
    """Runs the steps of an asynchronous round, and repeats those of lost workers.

    All models of a round stay with their workers until its end, so that steps can be repeated.
    """

    def __init__(
        self,
        pool: WorkerPool,
        tasks: Sequence[PeerTask],
        receive: Callable[[PeerTask, RemoteResult], StepResult],
    ) -> None:
        self.pool = pool
        self.receive = receive
        self.tasks = tasks
        self.running: dict[Any, tuple[int, Any, PeerTask]] = {}
        """Pending results, with slot, worker and task."""
        self.done: set[Step] = set()
        """The steps whose results the workers have."""
        self.received: set[Step] = set()
        self.finished = False
        self._ready = ReadySteps(tasks)
        self._waiting: dict[int, deque[PeerTask]] = {}
        """The steps of each slot that may begin."""

    def results(self) -> Iterator[tuple[PeerTask, StepResult]]:
        """Yield results until all are received."""
        self.pool.redo = self.redo
        self.pool.call_all("begin_steps")
        yield from self._run()

    def redo(self, slot: int) -> None:
        """Repeat the steps of a slot's lost worker: the new one has the states of the last round"""
        for pending, (running_slot, _, _) in list(self.running.items()):
            if running_slot == slot:
                del self.running[pending]
        peers = set(self.pool.peers(slot))
        self.done = {step for step in self.done if step[0] not in peers}
        self._restart()
        if self.finished:  # lost before its states were saved
            deque(self._run(), maxlen=0)

    def _restart(self) -> None:
        """Find out anew which steps may begin."""
        left = [task for task in self.tasks if (task.peer, task.t) not in self.done]
        running = {(task.peer, task.t) for _, _, task in self.running.values()}
        self._ready = ReadySteps(left, running)
        self._waiting = {}

    def _run(self) -> Iterator[tuple[PeerTask, StepResult]]:
        self.finished = False
        while self._submit():
            yield from self._collect()
        self.finished = True

    def _submit(self) -> bool:
        """Keep every worker busy; return whether any step is running."""
        while (task := self._ready.take()) is not None:
            slot = self.pool.assignment[task.peer]
            self._waiting.setdefault(slot, deque()).append(task)
        busy = dict.fromkeys(self.pool, 0)
        for slot, _, _ in self.running.values():
            busy[slot] += 1
        for slot, tasks in self._waiting.items():
            while tasks and busy[slot] < CONCURRENT_STEPS:
                task = tasks.popleft()
                worker, pending = self.pool.submit(slot, "async_step", task)
                self.running[pending] = slot, worker, task
                busy[slot] += 1
        return bool(self.running)

    def _collect(self) -> Iterator[tuple[PeerTask, StepResult]]:
        for pending in wait_any(list(self.running)):
            if pending not in self.running:  # of a worker that was replaced meanwhile
                continue
            slot, worker, task = self.running.pop(pending)
            try:
                remote = get(pending)
            except WORKER_LOST as lost:
                self.pool.replace(slot, worker, lost)
                continue
            if remote is None:  # a lost worker had a model that it needs; this call finds it
                self.pool.announce_workers()
                self._restart()
                continue
            self.done.add((task.peer, task.t))
            self._ready.finish(task)
            if (task.peer, task.t) not in self.received:
                self.received.add((task.peer, task.t))
                yield task, self.receive(task, remote)
