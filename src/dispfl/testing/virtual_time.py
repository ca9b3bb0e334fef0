"""An event loop with virtual time, whose clock jumps to the next timer.

Hours of simulation take a second.
It has no sockets, no threads and never sleeps, so the order of events is deterministic.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")
_MAX_ITERATIONS = 1_000_000
"""Iterations of the loop at the same virtual time after which it is considered an infinite loop."""


class OutOfTimeError(RuntimeError):
    """The virtual clock would pass its limit, or a task runs without ever advancing it."""


class DeadlockError(RuntimeError):
    """All tasks wait and no timer is left."""


def run(coroutine: Coroutine[Any, Any, T], limit_seconds: float) -> T:
    """Run a coroutine on a virtual clock, which starts at 0 and must not pass the limit.

    Returns its result. An unhandled exception in another task or in a timer is raised at the end
    instead of logged.
    """
    loop = VirtualTimeLoop(limit_seconds)
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        result = runner.run(coroutine)
    if loop.unhandled:
        raise loop.unhandled[0]
    return result


class VirtualTimeLoop(asyncio.BaseEventLoop):
    """Event loop that advances its clock to the next timer when nothing is ready."""

    def __init__(self, limit_seconds: float) -> None:
        super().__init__()
        self._selector = _Clock(limit_seconds)  # replaces the selector that asyncio waits on
        self.unhandled: list[BaseException] = []
        """Exceptions that no task awaits."""
        self._task_count = 0
        self.set_task_factory(self._numbered_task)

    def time(self) -> float:
        """Virtual seconds since the start."""
        return self._selector.now

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> NoReturn:  # type: ignore[override]
        """Not supported: threads take real time and finish in an arbitrary order."""
        raise RuntimeError(
            "Threads are not supported in virtual time; run this work in the event loop."
        )

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Store an exception that asyncio would only log."""
        self.unhandled.append(context.get("exception") or RuntimeError(context["message"]))

    def _numbered_task(
        self, loop: asyncio.AbstractEventLoop, coro: Any, **kwargs: Any
    ) -> "asyncio.Task[Any]":
        self._task_count += 1
        return _NumberedTask(self._task_count, coro, loop=loop, **kwargs)

    # required by asyncio.BaseEventLoop

    def _process_events(self, event_list: list[Any]) -> None:
        """Nothing to do: there are no sockets."""

    def _write_to_self(self) -> None:
        """Nothing to do: the loop never sleeps."""


class _Clock:
    """Selector that advances the virtual clock instead of waiting."""

    def __init__(self, limit: float) -> None:
        self.now = 0.0
        self._limit = limit
        self._iterations = 0

    def select(self, timeout: float | None) -> list[Any]:
        if timeout is None:
            raise DeadlockError(
                f"At {self.now:g} s of virtual time all tasks wait and no timer is left."
            )
        self._iterations += 1
        if timeout > 0:
            self._iterations = 0
        if self._iterations > _MAX_ITERATIONS:
            raise OutOfTimeError(
                f"{_MAX_ITERATIONS} iterations of the loop without advancing from {self.now:g} s of"
                " virtual time."
            )
        if self.now + timeout > self._limit:
            raise OutOfTimeError(
                f"The next event would pass the limit of {self._limit:g} s of virtual time."
            )
        self.now += timeout
        return []


class _NumberedTask(asyncio.Task[T]):
    """A task whose hash is its number: asyncio iterates over sets, and the default hash varies."""

    def __init__(self, number: int, coro: Coroutine[Any, Any, T], **kwargs: Any) -> None:
        self._number = number
        super().__init__(coro, **kwargs)

    def __hash__(self) -> int:
        return self._number
