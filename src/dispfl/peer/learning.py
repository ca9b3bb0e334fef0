"""Learning on a thread of its own, so that a peer that learns goes on answering others."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from dispfl.core.heap import keep_heap
from dispfl.core.live import LiveModel
from dispfl.round import peer_step
from dispfl.work import Setting, Step, Work

T = TypeVar("T")


class ThreadLearner:
    """Takes steps on one thread; `threads` are what torch may use in them. One makes results independent of it."""

    def __init__(self, setting: Setting, threads: int = 1) -> None:
        keep_heap()
        self._setting = setting
        self._live = LiveModel(setting.module(), setting.device, setting.precision)
        self._pool = ThreadPoolExecutor(1, "learning", initializer=torch.set_num_threads, initargs=(threads,))
        self._stopped = threading.Event()

    async def step(self, work: Work) -> Step:
        """One step; other tasks go on meanwhile."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, peer_step, self._setting, self._live, work, self._pulse)

    def close(self) -> None:
        """End the thread, between two batches."""
        self._stopped.set()
        self._pool.shutdown()

    def _pulse(self) -> None:
        if self._stopped.is_set():
            raise InterruptedError("stopped between two batches")


class Aside:
    """Computes messages on a thread of its own."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "messages", initializer=torch.set_num_threads, initargs=(1,))

    async def __call__(self, work: Callable[[], T]) -> Any:
        """What the work returns."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def close(self) -> None:
        """End the thread."""
        self._pool.shutdown()
