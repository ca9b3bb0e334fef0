"""Rounds with two single-thread Ray workers against one: ratio of times; two cores could give 0.5.

The demo's peers, model and training. `inprocess` is the time of the in-process engine with two
threads over that of the two workers. Starting Ray and the workers, once a run, is not counted;
checkpoints are.
"""

import contextlib
import tempfile
import time
from collections.abc import Callable
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


def best_round(context: RunContext, start: Callable[[Path], Engine]) -> float:
    """The shortest of some rounds, the first of which only warms up."""
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(start(Path(folder))) as engine:
        engine.restore(0)
        spent = []
        for t in range(ROUNDS):
            began = time.perf_counter()
            run_round(context, None, t, engine)
            engine.flush(t)
            spent.append(time.perf_counter() - began)
    return min(spent[1:])


def main() -> None:
    """All three ways, one after another."""
    experiment = Experiment(rounds=ROUNDS)
    images = load_dataset(experiment.data)
    context = experiment_context(experiment, images, split_dataset(experiment, images))
    one, two = (
        best_round(context, lambda folder, n=n: RayEngine(context, n, Checkpoints(folder)))
        for n in (1, 2)
    )  # type: ignore[misc]
    here = best_round(context, lambda folder: InProcess(context, 2, Checkpoints(folder)))
    report(
        "ray_speed", two / one, LIMIT, speedup=round(one / two, 2), inprocess=round(here / two, 2)
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
