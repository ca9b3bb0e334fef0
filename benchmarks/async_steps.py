"""Time of a step without rounds, over that of a step with them: nobody waits, at what cost?

python benchmarks/async_steps.py

Both sides train the same peers on one thread, with the same evaluations for each step. Unequal
devices take another number of steps in the same rounds; the ratio is that of a single step.
"""

import statistics
import sys
import time

from dispfl.config import compose
from dispfl.runs.run import Run
from measure import report

LIMIT = 1.1
REPEATS = 5
SETTINGS = [
    "rounds=6",
    "eval_every=6",
    "workers=1",
    "train.epochs=2",
    "partition.test_samples_per_peer=20",
]
EQUAL = ["schedule=async", "classes.board={share=1, speed=1e9}"]
UNEQUAL = ["schedule=async", "classes.a={share=0.5, speed=1e9, up=5}", "classes.b={speed=3e8}"]


def seconds_per_step(*settings: str) -> float:
    """Return the processor time of a step: mean over the run, without its beginning and end."""
    began = time.process_time()
    run = compose({}, [*SETTINGS, *settings]).run(progress=False)
    whole = time.process_time() - began
    began = time.process_time()
    compose({}, [*SETTINGS, *settings, "rounds=1", "eval_every=9"]).run(progress=False)
    shortest = time.process_time() - began
    return (whole - shortest) / (steps(run) - steps(run, rounds=1))


def steps(run: Run, rounds: int | None = None) -> int:
    """Return the steps of all peers in the first rounds of a run."""
    count = 0
    for record in run.metrics[:rounds]:
        if record["steps"] is None:
            count += len(record["peer_seconds"]["per_peer"])
        else:
            count += sum(value or 0 for value in record["steps"]["per_peer"])
    return count


def main() -> bool:
    held = True
    for name, settings in (("equal devices", EQUAL), ("unequal devices", UNEQUAL)):
        ratios = []
        for _ in range(REPEATS):
            synchronous = seconds_per_step()
            ratios.append(seconds_per_step(*settings) / synchronous)
        ratio = statistics.median(ratios)
        held &= bool(
            report(
                "async_steps",
                ratio,
                LIMIT,
                devices=name,
                milliseconds=round(1000 * synchronous, 1),
                ratios=[round(each, 2) for each in ratios],
            )
        )
    return held


if __name__ == "__main__":
    sys.exit(not main())
