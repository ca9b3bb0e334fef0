"""Virtual time jumps to the next timer, events are deterministic, and deadlocks and infinite loops
are detected."""

import asyncio
import time

import pytest
from messages import refused

from dispfl.testing.virtual_time import DeadlockError, OutOfTimeError, run


def now() -> float:
    return asyncio.get_running_loop().time()


def test_a_day_of_sleep_passes_without_sleeping() -> None:
    async def sleep_for_a_day() -> float:
        for _ in range(24):
            await asyncio.sleep(3600)
        return now()

    assert run(sleep_for_a_day(), 100_000) == 86_400


def test_timers_fire_in_the_order_of_their_due_time_not_of_their_creation() -> None:
    async def three_timers() -> list[tuple[str, float]]:
        seen: list[tuple[str, float]] = []

        async def note(name: str, after: float) -> None:
            await asyncio.sleep(after)
            seen.append((name, now()))

        await asyncio.gather(note("late", 3), note("early", 1), note("between", 2))
        return seen

    assert run(three_timers(), 10) == [("early", 1), ("between", 2), ("late", 3)]


def test_a_timeout_cancels_at_its_virtual_time() -> None:
    async def wait_too_long() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(7):
                await asyncio.sleep(100)
        return now()

    assert run(wait_too_long(), 50) == 7


def test_a_timer_after_the_limit_raises_and_one_at_the_limit_does_not() -> None:
    run(asyncio.sleep(10), 10)
    with refused(OutOfTimeError):
        run(asyncio.sleep(10.5), 10)


def test_waiting_without_a_timer_is_a_deadlock() -> None:
    async def wait_forever() -> None:
        await asyncio.sleep(2)
        await asyncio.Event().wait()

    with refused(DeadlockError):
        run(wait_forever(), 10)


def test_an_infinite_loop_without_advancing_time_is_detected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dispfl.testing.virtual_time._MAX_ITERATIONS", 1000)

    async def spin() -> None:
        while True:
            await asyncio.sleep(0)

    with refused(OutOfTimeError):
        run(spin(), 10)


def test_threads_are_not_supported() -> None:
    async def use_a_thread() -> None:
        await asyncio.to_thread(time.time)

    with pytest.raises(RuntimeError, match="Threads are not supported in virtual time"):
        run(use_a_thread(), 10)


def test_an_error_in_a_task_that_is_not_awaited_is_raised_at_the_end() -> None:
    async def fail() -> None:
        raise ZeroDivisionError("in the background")

    async def start_and_forget() -> None:
        task = asyncio.create_task(fail())
        await asyncio.sleep(1)
        del task

    with pytest.raises(ZeroDivisionError, match="in the background"):
        run(start_and_forget(), 10)


def test_sets_of_tasks_are_ordered_by_creation() -> None:
    async def names_in_a_set() -> list[str]:
        tasks = {asyncio.create_task(asyncio.sleep(1), name=f"{number}") for number in range(7)}
        done, _ = await asyncio.wait(tasks)
        return [task.get_name() for task in done]

    first = run(names_in_a_set(), 10)
    ballast = [bytearray(1000) for _ in range(1000)]  # other addresses for the second run
    assert run(names_in_a_set(), 10) == first
    assert len(ballast) == 1000


def test_remaining_tasks_are_cancelled() -> None:
    seen: list[str] = []

    async def linger() -> None:
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    async def leave_one_behind() -> str:
        asyncio.create_task(linger())  # noqa: RUF006
        await asyncio.sleep(1)
        return "done"

    assert run(leave_one_behind(), 10) == "done"
    assert seen == ["cancelled"]
