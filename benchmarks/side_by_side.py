"""Two peers on two threads, one each, against the two one after the other with both threads; ratio of times."""

from concurrent.futures import ThreadPoolExecutor

import torch

from dispfl import Experiment
from dispfl.core.live import LiveModel
from dispfl.data.datasets import load
from dispfl.round import peer_step, start
from dispfl.work import Work
from measure import best_times, report

LIMIT = 0.85


def main() -> None:
    """A step of the demo's model."""
    experiment = Experiment(peers=2, topology="full")
    pictures = load(experiment.data)
    setting = experiment.setting(pictures, experiment.split(pictures))
    works = [Work(peer, 0, state, {}) for peer, state in start(setting).items()]
    lives = [LiveModel(setting.module()) for _ in works]
    threads = ThreadPoolExecutor(2, initializer=torch.set_num_threads, initargs=(1,))

    def side_by_side() -> None:
        torch.set_num_threads(1)
        list(threads.map(peer_step, [setting] * 2, lives, works))

    def in_turn() -> None:
        torch.set_num_threads(2)
        for live, work in zip(lives, works, strict=True):
            peer_step(setting, live, work)

    ours, other = best_times(side_by_side, in_turn, repeats=15)
    report("side_by_side", ours / other, LIMIT)


if __name__ == "__main__":
    main()
