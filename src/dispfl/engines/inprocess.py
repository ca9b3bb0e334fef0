"""The in-process engine: several peers at once, each on one thread of this process."""

import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from queue import SimpleQueue

import torch

from dispfl.core.batched import can_be_stacked
from dispfl.core.heap import keep_heap, trim_heap
from dispfl.core.live import LiveModel
from dispfl.core.rng import forked_generators
from dispfl.core.train import Trainer
from dispfl.engines.listening import Listening
from dispfl.engines.states import States
from dispfl.engines.together import MakeTrainer, Stacks, steps_together
from dispfl.methods.base import PeerState
from dispfl.round import state_for
from dispfl.runs.checkpoint import Checkpoints
from dispfl.simulated import heard_here, simulated_step, upload
from dispfl.work import Outcome, Part, Setting, Step

LARGE_MODEL = 1_000_000
"""Weights from which on a step takes so long, and so much memory, that it pays to give back what is free after it."""


class InProcess:
    """Trains peers side by side, one thread each, so a peer's arithmetic does not depend on the number of threads.

    Side by side beats lending all threads to one peer: small operations do not split well. Only where there are more
    threads than peers does a peer get several. A model that draws from torch's one global generator (dropout) cannot
    share it between threads without losing reproducibility: then the peers take turns.

    With `together` > 1, up to so many peers with as many samples of one shape learn as one stack of models on one
    thread, which gives the same up to rounding. The stacks follow from the round and the roster, not from the number of
    threads, so the same `together` gives the same bits; but a round that is taken up in its middle has other stacks for
    the rest, and so other last bits. A model that cannot be stacked is trained peer by peer: with buffers, in bf16, not
    on the CPU, drawing globally, or deciding by the values of its inputs what to compute.

    A state that nobody will hear any more in a round is forgotten at once: there are never two of each in memory.
    """

    def __init__(self, setting: Setting, threads: int | None = None, checkpoints: Checkpoints | None = None) -> None:
        keep_heap()
        self.setting = setting
        self._states = States(setting, checkpoints)
        threads = threads or os.cpu_count() or 1
        first = LiveModel(setting.module(), setting.device, setting.precision)
        self._codec = setting.codec(first.layout)
        self._large = first.layout.size >= LARGE_MODEL
        alone = setting.device != "cpu" or draws_globally(setting, first)
        workers = 1 if alone else min(threads, len(setting.peers))
        self.threads_each = max(1, threads // len(setting.peers))
        self._pool = ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(self.threads_each,))
        self._workers = workers
        some = setting.peers[setting.roster[0]].train
        stacks = setting.together > 1 and not alone and can_be_stacked(first, setting.task, some)
        self._stacks = Stacks(setting, setting.together if stacks else 1)
        self._stop = threading.Event()
        self._idle: SimpleQueue[LiveModel] = SimpleQueue()
        self._idle.put(first)
        for _ in range(workers - 1):
            self._idle.put(LiveModel(setting.module(), setting.device, setting.precision))

    @property
    def states(self) -> Mapping[str, PeerState]:
        """Everyone's state, as of the last turn."""
        return self._states.now

    @property
    def judged(self) -> Mapping[str, PeerState]:
        """What each peer was judged on last, where that was a model that all share."""
        return dict(sorted(self._states.judged.items()))

    def recall(self, rounds: int) -> None:
        """Take up everyone's state after so many rounds."""
        self._states.recall(rounds, self.setting.roster)
        trim_heap()

    def under_way(self, t: int) -> dict[str, Outcome]:
        """Take up the steps of round t that were finished before a stop."""
        return self._states.under_way(t, self.setting.roster)

    def turn(self) -> None:
        """The round is over."""
        self._states.turn()

    def flush(self, t: int) -> None:
        """Write down the finished steps of round t that are not on the disk yet."""
        self._states.flush(t)

    def steps(self, parts: Iterable[Part]) -> Iterator[tuple[str, Outcome]]:
        """Each part's outcome, as it is done; only as many under way as there are workers."""
        listening = Listening(self.setting, list(parts), self._states.now)
        running: dict[Future[list[Step]], Sequence[Part]] = {}
        try:
            for group in self._stacks.of(listening.in_order()):
                running[self._pool.submit(self._do, group)] = group
                if len(running) == self._workers:
                    yield from self._collect(running, listening)
            while running:
                yield from self._collect(running, listening)
        finally:  # interrupted: end what is running, so that nothing trains behind the caller's back
            self._stop.set()
            wait(running)
            self._stop.clear()

    def _collect(
        self, running: dict[Future[list[Step]], Sequence[Part]], listening: Listening
    ) -> Iterator[tuple[str, Outcome]]:
        done, _ = wait(running, return_when=FIRST_COMPLETED)
        for future in done:
            group, outcomes = running.pop(future), {}
            for part, step in zip(group, future.result(), strict=True):
                outcomes[part.peer] = self._states.finish(part, step)
                for name in listening.unheard_after(part):
                    self._states.now.pop(name, None)
            if self._large:
                trim_heap()
            yield from outcomes.items()

    def _do(self, group: Sequence[Part]) -> list[Step]:
        live = self._idle.get()
        try:
            if len(group) == 1:
                return [self._step(live, group[0])]
            return steps_together(partial(self._step, live, part) for part in group)
        finally:
            self._idle.put(live)

    def _step(self, live: LiveModel, part: Part, make_trainer: MakeTrainer = Trainer) -> Step:
        setting, codec, now = self.setting, self._codec, self._states.now
        hear, state = heard_here(setting, codec, part, now), state_for(setting, part, now)
        step = simulated_step(setting, codec, live, part, state, hear, self._pulse, make_trainer)
        return upload(setting, codec, part, step)[0]

    def _pulse(self) -> None:
        if self._stop.is_set():
            raise InterruptedError("stopped between two batches")

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()


def draws_globally(setting: Setting, live: LiveModel) -> bool:
    """Whether training draws from torch's global generator, found out on one batch of the first peer."""
    samples = setting.peers[setting.roster[0]].train
    with forked_generators(setting.device), torch.no_grad():
        before = torch.get_rng_state()
        x, _ = next(samples.batches(2, rng=torch.Generator()))
        buffers = live.read_buffers()
        live.module.train()
        live(x)
        live.load(live.weights, buffers)
        return not torch.equal(before, torch.get_rng_state())
