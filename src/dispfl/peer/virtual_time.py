"""An event loop whose clock jumps to the next timer: hours of simulated network in a second, the same every time.

There are no sockets, no threads and no sleeping in it, so nothing from outside can change the order of events.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")
_SPINS = 1_000_000
"""So many turns of the loop at one and the same time are taken for a loop without end."""


class OutOfTimeError(RuntimeError):
    """The virtual clock passed its limit, or something keeps busy without ever letting it move."""


class DeadlockError(RuntimeError):
    """Everyone waits, and nothing is left that could wake anyone."""


def run(coroutine: Coroutine[Any, Any, T], limit_seconds: float) -> T:
    """What the coroutine returns, on a clock that begins at 0 and must not pass the limit.

    An exception that nobody awaits, in a task of its own or in a timer, is raised here at the end instead of logged.
    """
    loop = VirtualTimeLoop(limit_seconds)
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        result = runner.run(coroutine)
    if loop.unnoticed:
        raise loop.unnoticed[0]
    return result


class VirtualTimeLoop(asyncio.BaseEventLoop):
    """Runs what is ready; when nothing is, the next timer is due at once."""

    def __init__(self, limit_seconds: float) -> None:
        super().__init__()
        self._selector = _Clock(limit_seconds)  # what asyncio waits with when nothing is ready
        self.unnoticed: list[BaseException] = []
        """What was raised where nobody waits for it."""
        self._tasks_made = 0
        self.set_task_factory(self._numbered_task)

    def time(self) -> float:
        """Virtual seconds since the loop began."""
        return self._selector.now

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> NoReturn:  # type: ignore[override]
        """Refused: a thread takes real time, and ends in an order of its own."""
        raise RuntimeError("A thread has no place on a virtual clock; do this work in the event loop.")

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Keep what asyncio would only log."""
        self.unnoticed.append(context.get("exception") or RuntimeError(context["message"]))

    def _numbered_task(self, loop: asyncio.AbstractEventLoop, coro: Any, **more: Any) -> "asyncio.Task[Any]":
        self._tasks_made += 1
        return _NumberedTask(self._tasks_made, coro, loop=loop, **more)

    # What asyncio asks of a loop of one's own.

    def _process_events(self, event_list: list[Any]) -> None:
        """There are no sockets, so there are no events."""

    def _write_to_self(self) -> None:
        """The loop never sleeps, so nobody has to wake it."""


class _Clock:
    """Stands where a selector would: instead of waiting for a timer, it moves the clock there."""

    def __init__(self, limit: float) -> None:
        self.now = 0.0
        self._limit = limit
        self._spins = 0

    def select(self, timeout: float | None) -> list[Any]:
        if timeout is None:
            raise DeadlockError(f"At {self.now:g} s of virtual time everyone waits, and nothing is left to happen.")
        self._spins = 0 if timeout > 0 else self._spins + 1
        if self._spins > _SPINS:
            raise OutOfTimeError(f"{_SPINS} turns of the loop, and it is still {self.now:g} s of virtual time.")
        if self.now + timeout > self._limit:
            raise OutOfTimeError(f"The next event would pass the limit of {self._limit:g} s of virtual time.")
        self.now += timeout
        return []


class _NumberedTask(asyncio.Task[T]):
    """A task that sets order by when it was made: asyncio keeps tasks in sets, and an address differs in every run."""

    def __init__(self, number: int, coro: Coroutine[Any, Any, T], **more: Any) -> None:
        self._number = number
        super().__init__(coro, **more)

    def __hash__(self) -> int:
        return self._number
