"""Which samples each peer has: row numbers, drawn by the counts of each class."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dispfl.data.class_counts import Counts, proportional
from dispfl.errors import PartitionError


@dataclass(frozen=True, eq=False)
class Split:
    """The samples of every peer, in roster order: ascending int64 indices into the training and the
    test data."""

    train: tuple[Tensor, ...]
    test: tuple[Tensor, ...]
    validation: tuple[Tensor, ...] = ()
    """Of the training data, with `partition.validation`: empty otherwise."""
    global_test: Tensor | None = None
    """Of the test data, with `partition.global_test_samples`: the same for all peers."""
    unseen: "Split | None" = None
    """The samples of peers that do not take part."""

    @property
    def parts(self) -> dict[str, tuple[Tensor, ...]]:
        """The rows of every peer, by the name of the part."""
        return {"train": self.train, "test": self.test, "validation": self.validation}

    def without_last(self, count: int) -> "Split":
        """Return the split with its last peers as unseen ones."""
        if not count:
            return self
        first, last = slice(-count), slice(-count, None)
        unseen = Split(self.train[last], self.test[last], self.validation[last])
        return Split(
            self.train[first], self.test[first], self.validation[first], self.global_test, unseen
        )

    def fits(self, train: int, test: int) -> bool:
        """Whether data with so many training and test samples have all rows."""
        tested = self.test if self.global_test is None else (*self.test, self.global_test)
        limits = [(rows, train) for rows in (*self.train, *self.validation)] + [
            (rows, test) for rows in tested
        ]
        inside = all(bool((rows < limit).all()) for rows, limit in limits)
        return inside and (self.unseen is None or self.unseen.fits(train, test))

    def label_counts(self, labels: Tensor, classes: int) -> Tensor:
        """The number of training samples of each class that a peer has, as (peers, classes)."""
        return torch.stack([torch.bincount(labels[mine], minlength=classes) for mine in self.train])


def validation_samples(samples: int, share: float) -> int:
    """Return how many of a peer's samples are held out: the share, rounded, but at least one, and
    not all."""
    return min(max(1, round(share * samples)), samples - 1) if share else 0


def hold_out(
    mine: Tensor,
    labels: Tensor,
    share: float,
    rng: np.random.Generator,
    key: str = "partition.validation",
) -> tuple[Tensor, Tensor]:
    """Divide a peer's samples into those to train on and those to validate with, in equal label
    proportions.

    `key` is the setting of the share, for errors.
    """
    if len(mine) < 2:
        raise PartitionError(
            f"{key} is {share:g}, but a peer has a single training sample; give each at least two,"
            f" or set {key}=0."
        )
    pools = by_class(labels[mine], "training")
    supply = np.array([[len(pool) for pool in pools]])
    drawn = draw_samples(pools, proportional(supply, validation_samples(len(mine), share))[0], rng)
    kept = torch.ones(len(mine), dtype=torch.bool)
    kept[drawn] = False
    return mine[kept], mine[drawn]


def by_class(labels: Tensor, which: str) -> list[Counts]:
    """The indices of the samples of each class."""
    if labels.ndim != 1 or labels.is_floating_point() or labels.is_complex():
        raise PartitionError(
            f"The {which} labels must be one integer per sample, got {labels.dtype} of shape"
            f" {tuple(labels.shape)}."
        )
    if not len(labels):
        raise PartitionError(f"The {which} labels are empty; give at least one sample.")
    values = labels.numpy(force=True).astype(np.int64)
    if values.min() < 0:
        raise PartitionError(f"The {which} labels must count from 0, got {values.min()}.")
    return np.split(np.argsort(values, kind="stable"), np.cumsum(np.bincount(values))[:-1])


def assign_samples(
    pools: list[Counts], counts: Counts, rng: np.random.Generator
) -> tuple[Tensor, ...]:
    """Shuffle each class and assign its samples by the counts."""
    peers, classes = counts.shape
    samples = np.concatenate(
        [rng.permutation(p)[:used] for p, used in zip(pools, counts.sum(axis=0), strict=True)]
    )
    owners = np.repeat(np.tile(np.arange(peers), classes), counts.T.ravel())
    rows = np.split(samples[np.lexsort((samples, owners))], np.cumsum(counts.sum(axis=1))[:-1])
    return tuple(torch.from_numpy(row) for row in rows)


def draw_samples(pools: list[Counts], counts: Counts, rng: np.random.Generator) -> Tensor:
    """Draw one peer's test samples: shuffle each class and take the first ones, repeatedly if there
    are too few."""
    drawn = [
        np.resize(rng.permutation(pools[label]), counts[label]) for label in np.flatnonzero(counts)
    ]
    return torch.from_numpy(np.sort(np.concatenate(drawn)))
