"""Evaluation as a share of a Dis-PFL round that is scored after mixing and after training.

On one thread. Counted in forward passes, with a backward pass as two of them, the share is

    2 n_test / (2 n_test + 3 (epochs n + batch))

and so small that the round's other costs do not matter. The limit is 1.5 times that: evaluation
also loads the model and normalizes its images, and a small model's forward pass is somewhat more
than a third of its training.
"""

import torch

from dispfl import Train
from dispfl.core.train import Trainer
from dispfl.round.round import peer_step
from measure import best_times, report
from synthetic import PAPER_BATCH, PAPER_DEGREE, federation, first_step


def measure(setting: str, samples: int, tests: int, train: Train, degree: int) -> None:
    """The small CNN on grey images."""
    torch.set_num_threads(1)
    context = federation("cnn", 1, 28, samples, tests, train, peers=degree + 1, degree=degree)
    network = context.network()
    task, state, received = first_step(context, evaluate=True)
    data = context.data.peers[task.peer]

    def evaluate() -> None:
        for _ in range(2):
            trainer = Trainer(network, data, context.training, task.peer, task.t)
            weights, _mask = state.model.unpack()
            trainer.score(weights)

    def whole_round() -> None:
        peer_step(context, network, task, state, received)

    round_time, evaluation_time = best_times(whole_round, evaluate, repeats=15)
    evaluation_passes = 2 * tests
    training_passes = 3 * (train.epochs * samples + train.batch_size)
    share = evaluation_passes / (evaluation_passes + training_passes)
    report(
        "evaluation",
        evaluation_time / round_time,
        round(1.5 * share, 3),
        context=setting,
        seconds_a_round=round(round_time, 3),
    )


if __name__ == "__main__":
    demo = Train(batch_size=32)
    paper = Train(batch_size=PAPER_BATCH)
    measure("demo", samples=96, tests=100, train=demo, degree=4)
    measure("paper", samples=500, tests=100, train=paper, degree=PAPER_DEGREE)
