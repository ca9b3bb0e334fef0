"""How benchmarks measure: all sides in turn, the best of several times, and one JSON line."""

import cProfile
import json
import math
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import CodeType


def best_times(
    *sides: Callable[[], object],
    repeats: int = 7,
    clock: Callable[[], float] = time.perf_counter,
    warm_up: bool = True,
) -> list[float]:
    """Return the best time of each side in seconds.

    The sides take turns, so that a noisy machine disturbs all of them alike. `time.process_time` as
    the clock counts processor time alone: better where all the work is done on one thread while
    other programs run.
    """
    if warm_up:
        for side in sides:
            side()
    best = [math.inf] * len(sides)
    for _ in range(repeats):
        for index, side in enumerate(sides):
            began = clock()
            side()
            best[index] = min(best[index], clock() - began)
    return best


def seconds_by_function(
    run: Callable[[], object], clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Return the seconds that each Python function takes in a run, with all that it calls.

    Functions are named `module.function`, and those of the same name in a module are summed up.
    """
    profile = cProfile.Profile(clock)
    profile.runcall(run)
    seconds: dict[str, float] = defaultdict(float)
    for entry in profile.getstats():
        if isinstance(entry.code, CodeType):
            module = Path(entry.code.co_filename).stem
            seconds[f"{module}.{entry.code.co_name}"] += entry.totaltime
    return dict(seconds)


def report(benchmark: str, ratio: float, limit: float | None, **details: object) -> bool | None:
    """Print a ratio of two sides of the same run; return whether it is within the limit, if any."""
    held = None if limit is None else ratio <= limit
    result = {"benchmark": benchmark, "ratio": round(ratio, 3), "limit": limit, "held": held}
    print(json.dumps(result | details))
    return held
