"""Dealing 50,000 labelled samples to 100 peers, against shuffling and sorting them once.

The yardstick is what no partition can do without, in NumPy: shuffle the 50,000 samples, and sort
them twice, by label and by owner. On top of it a partition decides how many of each class a peer
gets, and draws each peer's 100 test samples from 10,000, class by class. The limit of 10 times the
yardstick's time is a generous one: all of this takes hundredths of a second.
"""

import numpy as np
import torch

from dispfl.core.rng import stream
from dispfl.registry import PARTITIONS
from measure import best_times, report

LIMIT = 10.0
PEERS = 100
CLASSES = 10


def measure(name: str) -> None:
    """One partition with its default settings."""
    rng = torch.Generator().manual_seed(0)
    train_labels = torch.randint(CLASSES, (50_000,), generator=rng)
    test_labels = torch.randint(CLASSES, (10_000,), generator=rng)
    partition = PARTITIONS[name]()
    labels = train_labels.numpy()
    draws = np.random.default_rng(0)
    owners = draws.integers(PEERS, size=len(labels))

    def split() -> None:
        partition.split(train_labels, test_labels, PEERS, rng=stream(0, "partition"))

    def yardstick() -> None:
        draws.permutation(len(labels))
        np.argsort(labels, kind="stable")
        np.argsort(owners, kind="stable")

    split_time, yardstick_time = best_times(split, yardstick, repeats=15)
    ratio = split_time / yardstick_time
    report("partition", ratio, LIMIT, partition=name, milliseconds=round(1e3 * split_time, 1))


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in PARTITIONS:
        if name != "by_column":  # it divides data by a column, not by labels
            measure(name)
