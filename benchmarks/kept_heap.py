"""Rounds with the memory settings of an engine (`core/allocator.py`) against rounds without.

A ratio of processor times, user and system, each in a process of its own. Page faults are counted
beside. Eight peers with the small CNN, two rounds of two epochs over 500 images, on one thread and
on two.
"""

import json
import resource
import subprocess
import sys
from dataclasses import asdict, dataclass

from dispfl import Train
from dispfl.engines import inprocess
from dispfl.testing.rounds import run_round
from measure import report
from synthetic import PAPER_BATCH, federation

LIMIT = 1.0
REPEATS = 3


@dataclass(frozen=True)
class Usage:
    """What two rounds use."""

    user_seconds: float
    system_seconds: float
    page_faults: int

    @property
    def processor_seconds(self) -> float:
        return self.user_seconds + self.system_seconds


def measure(heap: str, threads: int) -> Usage:
    """Return what two rounds use, after one to warm up."""
    if heap == "released":
        inprocess.keep_heap = lambda: None  # type: ignore[attr-defined]
    train = Train(epochs=2, batch_size=PAPER_BATCH)
    context = federation("cnn", 3, 32, samples=500, tests=100, train=train, peers=8, degree=4)
    engine = inprocess.InProcess(context, threads)
    engine.restore(0)
    run_round(context, None, 0, engine)

    before = resource.getrusage(resource.RUSAGE_SELF)
    for t in (1, 2):
        run_round(context, None, t, engine)
    after = resource.getrusage(resource.RUSAGE_SELF)
    engine.close()
    return Usage(
        after.ru_utime - before.ru_utime,
        after.ru_stime - before.ru_stime,
        after.ru_minflt - before.ru_minflt,
    )


def measure_in_process(heap: str, threads: int) -> Usage:
    """Return what two rounds use in a process of their own."""
    command = [sys.executable, __file__, heap, str(threads)]
    process = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    return Usage(**json.loads(process.stdout))


def main() -> None:
    """The best of three of each, in turn."""
    for threads in (1, 2):
        usages: dict[str, list[Usage]] = {"kept": [], "released": []}
        for _ in range(REPEATS):
            for heap, repeats in usages.items():
                repeats.append(measure_in_process(heap, threads))
        with_kept = min(usages["kept"], key=lambda usage: usage.processor_seconds)
        with_released = min(usages["released"], key=lambda usage: usage.processor_seconds)
        system_seconds = [with_kept.system_seconds, with_released.system_seconds]
        report(
            "kept_heap",
            with_kept.processor_seconds / with_released.processor_seconds,
            LIMIT,
            threads=threads,
            system_seconds=[round(seconds, 2) for seconds in system_seconds],
            page_faults=[with_kept.page_faults, with_released.page_faults],
        )


if __name__ == "__main__":
    if len(sys.argv) == 3:
        print(json.dumps(asdict(measure(sys.argv[1], int(sys.argv[2])))))
    else:
        main()
