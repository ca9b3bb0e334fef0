"""The in-process engine: trains several peers at once, each on one thread of this process."""

import heapq
import os
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from math import inf
from queue import SimpleQueue

import torch

from dispfl.clock.schedule import ModelMessage
from dispfl.core.allocator import keep_heap, trim_heap
from dispfl.core.flat_module import FlatModule
from dispfl.core.rng import forked_generators
from dispfl.core.train import Trainer
from dispfl.engines.base import PeerStates, deliver_upload, fetch_here, simulated_step
from dispfl.engines.checkpoint import Checkpoints
from dispfl.engines.ready_steps import ReadySteps
from dispfl.engines.vmap_peers import MakeTrainer, PeerGroups, run_stacked, vmap_supports
from dispfl.methods.base import PeerState
from dispfl.round.context import PeerTask, RunContext, StepResult
from dispfl.round.exchange import task_senders
from dispfl.round.round import rests, task_state

TRIMMED_WEIGHTS = 3_000_000
"""After steps of models with this many weights together, free memory is returned to the system."""

GIGABYTE = 1e9
POLL_INTERVAL = 0.5
"""Seconds of a wait: a Ctrl-C just before it is noticed at its end only."""


class InProcess:
    """Trains peers in parallel, one thread each: results do not depend on the number of threads.

    This is faster than giving all threads to one peer, because small operations do not parallelize
    well. A peer gets several threads only if there are more threads than peers. A model that draws
    from torch's global generator (dropout) cannot share it between threads reproducibly: its peers
    train one after another.

    With `vmap_peers` > 1, up to that many peers with equally many samples of one shape train as one
    stack of models on one thread; the results are equal up to rounding. The stacks follow from the
    round and the roster, not from the number of threads, so the same `vmap_peers` gives the same
    bits; but a round resumed in its middle stacks the remaining peers differently, and its last
    bits differ. Models that cannot be stacked train peer by peer: those with buffers, in bf16, in
    channels_last, on a GPU, drawing from the global generator, or with control flow that depends on
    their inputs.

    A state that no remaining task reads is released at once, so memory never holds two states of
    every peer.
    """

    def __init__(
        self,
        context: RunContext,
        workers: int | None = None,
        checkpoints: Checkpoints | None = None,
    ) -> None:
        keep_heap()
        self.context = context
        limit = context.simulation.memory_limit
        self._states = PeerStates(
            context,
            checkpoints,
            memory_limit=inf if limit is None else limit * GIGABYTE,
            shares_parts=True,
        )
        threads = workers or os.cpu_count() or 1
        first = context.network()
        self._codec = context.codec
        if context.layout.has_small_networks or context.attack:
            # Computed here, because threads may not share torch's global generator.
            _ = context.first_weights
        self._steps_between_trims = max(1, TRIMMED_WEIGHTS // first.layout.size)
        self._steps_since_trim = 0
        one_by_one = context.settings.device != "cpu" or uses_global_rng(context, first)
        self._workers = 1 if one_by_one else min(threads, len(context.data.peers))
        self.threads_each = max(1, threads // len(context.data.peers))
        self._pool = ThreadPoolExecutor(
            self._workers, initializer=torch.set_num_threads, initargs=(self.threads_each,)
        )
        samples = context.data.peers[context.roster[0]].train
        stack_size = context.simulation.vmap_peers
        if stack_size > 1 and (one_by_one or not vmap_supports(first, context.task, samples)):
            stack_size = 1
        self._groups = PeerGroups(context, stack_size)
        self._stop = threading.Event()
        self._idle: SimpleQueue[FlatModule] = SimpleQueue()
        for worker in range(self._workers):
            network = first if worker == 0 else context.network()
            if context.layout.has_small_networks:
                network.discard_weights()  # only small networks are trained
            self._idle.put(network)

    @property
    def states(self) -> Mapping[str, PeerState]:
        """Every peer's state after the last finished round."""
        return self._states.current

    @property
    def evaluated(self) -> Mapping[str, PeerState]:
        """The state that each peer was last evaluated with, where that was a global model."""
        return dict(sorted(self._states.evaluated.items()))

    def restore(self, rounds: int) -> None:
        """Restore every peer's state after this many rounds."""
        one_by_one = self.context.method.independent_init
        self._states.restore(rounds, self.context.roster, map if one_by_one else self._pool.map)
        trim_heap()

    def choices(self, t: int, graph: Mapping[str, Sequence[str]]) -> dict[str, Sequence[str]]:
        """Return whom each online peer requests models from in round t."""
        return self._states.choices(t, graph)

    def message_sizes(self, senders: Mapping[str, Sequence[str]]) -> list[ModelMessage]:
        """Return the messages of the next round with their sizes, by whom each peer asks."""
        return self._states.message_sizes(self._states.asked_models(senders))

    def partial_round(self, t: int) -> dict[str, StepResult]:
        """Restore the steps of round t that were finished before an interruption."""
        return self._states.partial_round(t, self.context.roster)

    def end_steps(self, t: int, needed: Mapping[str, Collection[int]]) -> None:
        """End asynchronous round t."""
        self._states.save_steps(t, needed)
        self._states.end_steps(needed)

    def end_round(self) -> None:
        """End the round."""
        self._states.end_round()

    def flush(self, t: int) -> None:
        """Write the finished steps of round t that are not on the disk yet."""
        self._states.flush(t)

    def run_tasks(self, tasks: Iterable[PeerTask]) -> Iterator[tuple[str, StepResult]]:
        """Yield each task's result when it is done; at most one task per worker runs at a time."""
        working = []
        for task in tasks:
            if rests(self.context, task):
                yield task.peer, self._states.rest(task)
                self._states.current.drop(task.peer)
            else:
                working.append(task)
        tracker = ReadTracker(working)
        running: dict[Future[list[StepResult]], Sequence[PeerTask]] = {}
        try:
            for group in self._groups.of(tracker.ordered()):
                running[self._pool.submit(self._run_group, group)] = group
                if len(running) == self._workers:
                    yield from self._collect(running, tracker)
            while running:
                yield from self._collect(running, tracker)
        finally:  # interrupted: stop the running tasks, so that nothing trains after this call
            self._stop.set()
            wait(running)
            self._stop.clear()

    def run_steps(self, tasks: Sequence[PeerTask]) -> Iterator[tuple[PeerTask, StepResult]]:
        """Yield each asynchronous step when it is done; at most one per worker runs at a time."""
        ready = ReadySteps(tasks)
        running: dict[Future[StepResult], PeerTask] = {}
        try:
            while self._submit_steps(ready, running):
                done, _ = wait(running, POLL_INTERVAL, FIRST_COMPLETED)
                for future in done:
                    task = running.pop(future)
                    result = self._states.finish_step(task, future.result())
                    ready.finish(task)
                    self._trim(1)
                    yield task, result
        finally:
            self._stop.set()
            wait(running)
            self._stop.clear()

    def _submit_steps(self, ready: ReadySteps, running: dict[Future[StepResult], PeerTask]) -> bool:
        """Keep the workers busy; return whether any step is running."""
        while len(running) < self._workers:
            task = ready.take()
            if task is None:
                break
            running[self._pool.submit(self._run_step, task, self._states.sources(task))] = task
        return bool(running)

    def _run_step(self, task: PeerTask, sources: Mapping[str, PeerState]) -> StepResult:
        """Take an asynchronous step; `sources` has the states that it reads."""
        network = self._idle.get()
        try:
            return self._step(network, task, sources)
        finally:
            self._idle.put(network)

    def _collect(
        self, running: dict[Future[list[StepResult]], Sequence[PeerTask]], tracker: "ReadTracker"
    ) -> Iterator[tuple[str, StepResult]]:
        done: set[Future[list[StepResult]]] = set()
        while not done:
            done, _ = wait(running, POLL_INTERVAL, FIRST_COMPLETED)
        for future in done:
            group = running.pop(future)
            results = {}
            for task, result in zip(group, future.result(), strict=True):
                results[task.peer] = self._states.finish(task, result)
                for name in tracker.released_by(task):
                    self._states.current.drop(name)
            self._trim(len(group))
            yield from results.items()

    def _trim(self, steps: int) -> None:
        """Return free memory after some steps: it lies in pieces between what the steps keep."""
        self._steps_since_trim += steps
        if self._steps_since_trim >= self._steps_between_trims:
            self._steps_since_trim = 0
            trim_heap()

    def _run_group(self, group: Sequence[PeerTask]) -> list[StepResult]:
        network = self._idle.get()
        try:
            if len(group) == 1:
                return [self._step(network, group[0], self._states.current)]
            states = self._states.current
            return run_stacked(partial(self._step, network, task, states) for task in group)
        finally:
            self._idle.put(network)

    def _step(
        self,
        network: FlatModule,
        task: PeerTask,
        states: Mapping[str, PeerState],
        make_trainer: MakeTrainer = Trainer,
    ) -> StepResult:
        context = self.context
        codec = self._codec
        state = task_state(context, task, states)
        fetch = fetch_here(context, codec, task, states)
        result = simulated_step(
            context, codec, network, task, state, fetch, self._check_stop, make_trainer
        )
        return deliver_upload(context, codec, task, result)[0]

    def _check_stop(self) -> None:
        if self._stop.is_set():
            raise InterruptedError("stopped between two batches")

    def close(self) -> None:
        """Stop the threads."""
        self._pool.shutdown()


class ReadTracker:
    """Tracks which tasks of a round still read which peers' states.

    A task reads the state of its peer and those of its senders.
    """

    def __init__(self, tasks: Sequence[PeerTask]) -> None:
        self._tasks = {task.peer: task for task in tasks}
        self._reads: dict[str, set[str]] = {}
        for task in tasks:
            self._reads[task.peer] = {task.peer, *task_senders(task)}
        self._readers: dict[str, set[str]] = {}
        for peer, reads in self._reads.items():
            for name in reads:
                self._readers.setdefault(name, set()).add(peer)

    def ordered(self) -> list[PeerTask]:
        """Return the tasks in an order that releases states early.

        The readers of the least-read state are always next.
        """
        left = {name: len(readers) for name, readers in self._readers.items()}
        queue = sorted((count, name) for name, count in left.items())
        order: dict[str, PeerTask] = {}
        while queue:
            count, name = heapq.heappop(queue)
            if count != left[name]:  # there is a newer entry
                continue
            for peer in sorted(self._readers[name] - order.keys()):
                order[peer] = self._tasks[peer]
                for read in self._reads[peer]:
                    left[read] -= 1
                    heapq.heappush(queue, (left[read], read))
        return list(order.values())

    def released_by(self, task: PeerTask) -> list[str]:
        """Return the peers whose states no task reads once this one is done.

        There are none while evaluating.
        """
        if task.global_model is not None:
            return []
        released = []
        for name in self._reads[task.peer]:
            self._readers[name].discard(task.peer)
            if not self._readers[name]:
                released.append(name)
        return released


def uses_global_rng(context: RunContext, network: FlatModule) -> bool:
    """Whether training draws from torch's global generator, as one batch shows."""
    samples = context.data.peers[context.roster[0]].train
    with forked_generators(context.settings.device), torch.no_grad():
        before = torch.get_rng_state()
        x, _ = next(samples.batches(2, rng=torch.Generator()))
        buffers = network.read_buffers()
        network.module.train()
        network(x)
        network.load(network.weights, buffers)
        return not torch.equal(before, torch.get_rng_state())
