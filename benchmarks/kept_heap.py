"""Rounds with the memory settings that an engine makes (`core/heap.py`) against rounds without;
ratio of processor times, user and system, each in a process of its own. Page faults are counted
beside.

Eight peers with the small CNN, two rounds of two epochs over 500 images, on one thread and on two.
"""

import json
import resource
import subprocess
import sys

from measure import report

LIMIT = 1.0


def spent(how: str, threads: int) -> tuple[float, float, int]:
    """User and system seconds and page faults of two rounds, after one to warm up."""
    from dispfl import Train
    from dispfl.engines import inprocess
    from dispfl.testing.rounds import run_round
    from synthetic import federation

    if how == "let go":
        inprocess.keep_heap = lambda: None  # type: ignore[attr-defined]
    context = federation(
        "cnn", 3, 32, samples=500, tests=100, train=Train(epochs=2), peers=8, degree=4
    )
    engine = inprocess.InProcess(context, threads)
    engine.restore(0)
    run_round(context, None, 0, engine)
    before = resource.getrusage(resource.RUSAGE_SELF)
    for t in (1, 2):
        run_round(context, None, t, engine)
    after = resource.getrusage(resource.RUSAGE_SELF)
    engine.close()
    return (
        after.ru_utime - before.ru_utime,
        after.ru_stime - before.ru_stime,
        after.ru_minflt - before.ru_minflt,
    )


def main() -> None:
    """The best of three of each, in turn."""
    for threads in (1, 2):
        found: dict[str, list[list[float]]] = {"keep": [], "let go": []}
        for _ in range(3):
            for how, runs in found.items():
                words = [sys.executable, __file__, how, str(threads)]
                runs.append(
                    json.loads(subprocess.run(words, check=True, capture_output=True).stdout)
                )
        kept, let_go = (min(runs, key=lambda run: run[0] + run[1]) for runs in found.values())
        report(
            "kept_heap",
            (kept[0] + kept[1]) / (let_go[0] + let_go[1]),
            LIMIT,
            threads=threads,
            system_seconds=[round(kept[1], 2), round(let_go[1], 2)],
            page_faults=[kept[2], let_go[2]],
        )


if __name__ == "__main__":
    if len(sys.argv) == 3:
        print(json.dumps(spent(sys.argv[1], int(sys.argv[2]))))
    else:
        main()
