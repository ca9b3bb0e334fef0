"""Evaluation as a share of a Dis-PFL round that is scored: after mixing and after training; on one thread.

Counted in forward passes, with a backward pass as two of them, the share is

    2 n_test / (2 n_test + 3 (epochs n + batch))

and so small that the round's other costs do not matter. The limit is 1.5 times that: evaluation also loads the model
and normalizes its pictures, and a small model's forward pass is somewhat more than a third of its training.
"""

import torch

from dispfl import Train
from dispfl.core.live import LiveModel
from dispfl.core.train import Trainer
from dispfl.round import peer_step
from made_up import federation, first_step
from measure import best_times, report


def measure(what: str, samples: int, tests: int, train: Train, degree: int) -> None:
    """The small CNN on grey pictures."""
    torch.set_num_threads(1)
    setting = federation("cnn", 1, 28, samples, tests, train, peers=degree + 1, degree=degree)
    live, work = LiveModel(setting.module()), first_step(setting, scoring=True)
    data, model = setting.peers["000"], work.state.model

    def evaluate() -> None:
        for _ in range(2):
            trainer = Trainer(live, data.train, data.test, train, setting.task, 0, "000", 0, setting.rounds)
            trainer.score(model.unpack()[0])

    whole, evaluating = best_times(lambda: peer_step(setting, live, work), evaluate, repeats=15)
    passes, learned = 2 * tests, 3 * (train.epochs * samples + train.batch)
    limit = round(1.5 * passes / (passes + learned), 3)
    report("evaluation", evaluating / whole, limit, setting=what, seconds_a_round=round(whole, 3))


if __name__ == "__main__":
    measure("demo", samples=96, tests=100, train=Train(batch=32), degree=4)
    measure("paper", samples=500, tests=100, train=Train(), degree=10)
