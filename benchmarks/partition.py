"""Dealing 50,000 labelled samples to 100 peers, against shuffling and sorting them once; ratio of
times.

The yardstick is what no partition can do without, in NumPy: shuffle the 50,000 samples, and sort
them twice, by label and by owner. On top of it a partition decides how many of each class a peer
gets, and draws each peer's 100 test samples from 10,000, class by class. The limit of 10 is a
generous one: all of this takes hundredths of a second.
"""

import numpy as np
import torch

from dispfl.core.rng import stream
from dispfl.registry import PARTITIONS
from measure import best_times, report

LIMIT = 10.0
PEERS, CLASSES = 100, 10


def measure(name: str) -> None:
    """One partition with its default settings."""
    rng = torch.Generator().manual_seed(0)
    train, test = (torch.randint(CLASSES, (count,), generator=rng) for count in (50_000, 10_000))
    partition, labels, draws = PARTITIONS[name](), train.numpy(), np.random.default_rng(0)
    owners = draws.integers(PEERS, size=len(labels))

    def yardstick() -> None:
        draws.permutation(len(labels))
        np.argsort(labels, kind="stable")
        np.argsort(owners, kind="stable")

    taken, least = best_times(
        lambda: partition.split(train, test, PEERS, rng=stream(0, "partition")),
        yardstick,
        repeats=15,
    )
    report("partition", taken / least, LIMIT, partition=name, milliseconds=round(1e3 * taken, 1))


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in PARTITIONS:
        measure(name)
