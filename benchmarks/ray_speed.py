"""Rounds with two single-thread Ray workers against one: ratio of times; two cores could give 0.5.

The demo's peers, model and training. `inprocess` is the time of the in-process engine with two
threads over that of the two workers. Starting Ray and the workers, once a run, is not counted;
checkpoints are.
"""

import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import torch

from dispfl import Experiment
from dispfl.data.datasets import load_dataset
from dispfl.engines.checkpoint import Checkpoints
from dispfl.engines.inprocess import InProcess
from dispfl.engines.ray_driver import RayEngine
from dispfl.round.context import Engine, RunContext
from dispfl.runs.prepare import experiment_context, split_dataset
from dispfl.testing.rounds import run_round
from measure import report

LIMIT = 1 / 1.5
ROUNDS = 5


def best_round(context: RunContext, start: Callable[[Checkpoints], Engine]) -> float:
    """Return the time of the shortest round; the first round only warms up."""
    times = []
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(start(Checkpoints(Path(folder)))) as engine,
    ):
        engine.restore(0)
        for t in range(ROUNDS):
            began = time.perf_counter()
            run_round(context, None, t, engine)
            engine.flush(t)
            times.append(time.perf_counter() - began)
    return min(times[1:])


def main() -> None:
    """All three ways, one after another."""
    experiment = Experiment(rounds=ROUNDS)
    images = load_dataset(experiment.data)
    context = experiment_context(experiment, images, split_dataset(experiment, images))
    one_worker = best_round(context, lambda checkpoints: RayEngine(context, 1, checkpoints))
    two_workers = best_round(context, lambda checkpoints: RayEngine(context, 2, checkpoints))
    two_threads = best_round(context, lambda checkpoints: InProcess(context, 2, checkpoints))
    report(
        "ray_speed",
        two_workers / one_worker,
        LIMIT,
        speedup=round(one_worker / two_workers, 2),
        inprocess=round(two_threads / two_workers, 2),
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
