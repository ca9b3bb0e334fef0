"""How the benchmarks measure: both sides in turn, several times, the best of each, and one JSON
line."""

import json
import time
from collections.abc import Callable


def best_times(
    *sides: Callable[[], object],
    repeats: int = 7,
    clock: Callable[[], float] = time.perf_counter,
    warm_up: bool = True,
) -> list[float]:
    """The best time of each side in seconds. Taking turns lets a noisy machine disturb all sides
    alike.

    `time.process_time` as the clock counts the processor's time alone: better where all is done on
    one thread and other programs are about.
    """
    times: list[list[float]] = [[] for _ in sides]
    if warm_up:
        for side in sides:
            side()
    for _ in range(repeats):
        for side, taken in zip(sides, times, strict=True):
            began = clock()
            side()
            taken.append(clock() - began)
    return [min(taken) for taken in times]


def report(benchmark: str, ratio: float, limit: float | None, **more: object) -> bool | None:
    """Print a result: a ratio against a limit that was measured in the same run, where there is
    one. Return whether the limit was held.
    """
    held = None if limit is None else ratio <= limit
    print(
        json.dumps(
            {"benchmark": benchmark, "ratio": round(ratio, 3), "limit": limit, "held": held} | more
        )
    )
    return held
