"""The in-process engine: several peers at once, each on one thread of this process."""

import os
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from queue import SimpleQueue

import torch

from dispfl.core.live import LiveModel
from dispfl.round import Setting, Step, Work
from dispfl.simulated import simulated_step


class InProcess:
    """Trains peers side by side, one thread each, so a peer's arithmetic does not depend on the number of threads.

    Side by side beats lending all threads to one peer: small operations do not split well. Only where there are more
    threads than peers does a peer get several. A model that draws from torch's one global generator (dropout) cannot
    share it between threads without losing reproducibility: then the peers take turns.
    """

    def __init__(self, setting: Setting, threads: int | None = None) -> None:
        self.setting = setting
        threads = threads or os.cpu_count() or 1
        first = LiveModel(setting.module(), setting.device)
        self._codec = setting.codec(first.layout)
        alone = setting.device != "cpu" or draws_globally(setting, first)
        workers = 1 if alone else min(threads, len(setting.peers))
        self.threads_each = max(1, threads // len(setting.peers))
        self._pool = ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(self.threads_each,))
        self._workers = workers
        self._stop = threading.Event()
        self._idle: SimpleQueue[LiveModel] = SimpleQueue()
        self._idle.put(first)
        for _ in range(workers - 1):
            self._idle.put(LiveModel(setting.module(), setting.device))

    def steps(self, works: Iterable[Work]) -> Iterator[tuple[str, Step]]:
        """Each piece of work's outcome, as it is done; only as many under way as there are workers."""
        running: dict[Future[Step], str] = {}
        try:
            for work in works:
                running[self._pool.submit(self._do, work)] = work.peer
                if len(running) == self._workers:
                    yield from self._collect(running)
            while running:
                yield from self._collect(running)
        finally:  # interrupted: end what is running, so that nothing trains behind the caller's back
            self._stop.set()
            wait(running)
            self._stop.clear()

    def _collect(self, running: dict[Future[Step], str]) -> Iterator[tuple[str, Step]]:
        done, _ = wait(running, return_when=FIRST_COMPLETED)
        for future in done:
            yield running.pop(future), future.result()

    def _do(self, work: Work) -> Step:
        live = self._idle.get()
        try:
            return simulated_step(self.setting, self._codec, live, work, self._pulse)
        finally:
            self._idle.put(live)

    def _pulse(self) -> None:
        if self._stop.is_set():
            raise InterruptedError("stopped between two batches")

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()


def draws_globally(setting: Setting, live: LiveModel) -> bool:
    """Whether training draws from torch's global generator, found out on one batch of the first peer."""
    samples = setting.peers[setting.roster[0]].train
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        before = torch.get_rng_state()
        x, _ = next(samples.batches(2, rng=torch.Generator()))
        buffers = live.read_buffers()
        live.module.train()
        live(x)
        live.load(live.weights, buffers)
        return not torch.equal(before, torch.get_rng_state())
