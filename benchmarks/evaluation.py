"""Evaluation as a share of a Dis-PFL round that is scored: after mixing and after training; on one
thread.

Counted in forward passes, with a backward pass as two of them, the share is

    2 n_test / (2 n_test + 3 (epochs n + batch))

and so small that the round's other costs do not matter. The limit is 1.5 times that: evaluation
also loads the model and normalizes its images, and a small model's forward pass is somewhat more
than a third of its training.
"""

import torch

from dispfl import Train
from dispfl.core.flat_module import FlatModule
from dispfl.core.train import Trainer
from dispfl.round.round import peer_step
from measure import best_times, report
from synthetic import federation, first_step


def measure(what: str, samples: int, tests: int, train: Train, degree: int) -> None:
    """The small CNN on grey images."""
    torch.set_num_threads(1)
    context = federation("cnn", 1, 28, samples, tests, train, peers=degree + 1, degree=degree)
    network, (task, state, received) = (
        FlatModule(context.module()),
        first_step(context, evaluate=True),
    )
    data, model = context.data.peers["000"], state.model

    def evaluate() -> None:
        for _ in range(2):
            trainer = Trainer(
                network,
                data.train,
                data.test,
                train,
                context.task,
                0,
                "000",
                0,
                context.settings.rounds,
            )
            trainer.score(model.unpack()[0])

    whole, evaluating = best_times(
        lambda: peer_step(context, network, task, state, received), evaluate, repeats=15
    )
    passes, learned = 2 * tests, 3 * (train.epochs * samples + train.batch_size)
    limit = round(1.5 * passes / (passes + learned), 3)
    report("evaluation", evaluating / whole, limit, context=what, seconds_a_round=round(whole, 3))


if __name__ == "__main__":
    measure("demo", samples=96, tests=100, train=Train(batch_size=32), degree=4)
    measure("paper", samples=500, tests=100, train=Train(), degree=10)
