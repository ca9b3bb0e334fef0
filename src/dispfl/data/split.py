"""Which samples each peer has: row numbers, drawn by the counts of each class."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dispfl.data.class_counts import Counts, proportional
from dispfl.errors import PartitionError


@dataclass(frozen=True, eq=False)
class Split:
    """The samples of every peer, in roster order: ascending row numbers (int64)."""

    train: tuple[Tensor, ...]
    test: tuple[Tensor, ...]
    validation: tuple[Tensor, ...] = ()
    """Of the training data, with `partition.validation`: empty otherwise."""
    global_test: Tensor | None = None
    """Of the test data, with `partition.global_test_samples`: the same for all peers."""
    unseen: "Split | None" = None
    """The samples of peers that do not take part."""
    names: tuple[str, ...] = ()
    """The names of the peers, in order, where the data name them."""

    @property
    def parts(self) -> dict[str, tuple[Tensor, ...]]:
        """The rows of every peer, by the name of the part."""
        return {"train": self.train, "test": self.test, "validation": self.validation}

    def without_last(self, count: int) -> "Split":
        """Return the split with its last peers as unseen ones."""
        if not count:
            return self
        first = slice(-count)
        last = slice(-count, None)
        unseen = Split(self.train[last], self.test[last], self.validation[last])
        return Split(
            self.train[first],
            self.test[first],
            self.validation[first],
            self.global_test,
            unseen,
            self.names[first],
        )

    def fits(self, train: int, test: int) -> bool:
        """Whether data with so many training and test samples have all rows."""
        test_rows = list(self.test)
        if self.global_test is not None:
            test_rows.append(self.global_test)
        if not _all_below([*self.train, *self.validation], train) or not _all_below(
            test_rows, test
        ):
            return False
        return self.unseen is None or self.unseen.fits(train, test)

    def label_counts(self, labels: Tensor, classes: int) -> Tensor:
        """The number of training labels of each class that a peer has, as (peers, classes).

        Of a segmentation those of pixels; of a regression that of all samples.
        """
        return torch.stack([count_labels(labels[rows], classes) for rows in self.train])


def count_labels(labels: Tensor, classes: int) -> Tensor:
    """Return how often each class is a label; of numbers, how many there are."""
    if labels.is_floating_point():
        return torch.tensor([len(labels)])
    if labels.ndim == 2:  # one column for each label, 0 or 1
        return labels.sum(0, dtype=torch.int64)
    flat = labels.flatten().long()
    return torch.bincount(flat[flat >= 0], minlength=classes)


def are_classes(labels: Tensor) -> bool:
    """Whether each label is one class, by which samples can be divided."""
    return labels.ndim == 1 and not labels.is_floating_point() and not labels.is_complex()


def strata(labels: Tensor) -> Tensor:
    """Return the labels if they are classes; otherwise one class for all samples."""
    if are_classes(labels):
        return labels
    return torch.zeros(len(labels), dtype=torch.int64)


def _all_below(rows_of_peers: Iterable[Tensor], limit: int) -> bool:
    return all(bool((rows < limit).all()) for rows in rows_of_peers)


def validation_samples(samples: int, share: float) -> int:
    """Return how many samples are held out: the share, rounded; at least one, and not all."""
    if not share:
        return 0
    return min(max(1, round(share * samples)), samples - 1)


def hold_out(
    rows: Tensor,
    labels: Tensor,
    share: float,
    rng: np.random.Generator,
    key: str = "partition.validation",
) -> tuple[Tensor, Tensor]:
    """Divide a peer's samples for training and validation, in equal label proportions.

    `key` is the setting of the share, for errors.
    """
    if len(rows) < 2:
        raise PartitionError(
            f"{key} is {share:g}, but a peer has a single training sample; give each at least two,"
            f" or set {key}=0."
        )
    pools = by_class(strata(labels[rows]), "training")
    counts = proportional(pool_sizes(pools)[None], validation_samples(len(rows), share))[0]
    held_out = draw_samples(pools, counts, rng)
    is_train = torch.ones(len(rows), dtype=torch.bool)
    is_train[held_out] = False
    return rows[is_train], rows[held_out]


def by_class(labels: Tensor, which: str) -> list[Counts]:
    """The rows of the samples of each class; `which` names the labels in errors."""
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


def pool_sizes(pools: list[Counts]) -> Counts:
    """The number of samples of each class."""
    return np.array([len(pool) for pool in pools])


def assign_samples(
    pools: list[Counts], counts: Counts, rng: np.random.Generator
) -> tuple[Tensor, ...]:
    """Shuffle each class and assign its samples by the counts."""
    peers, classes = counts.shape
    drawn = []
    for pool, used in zip(pools, counts.sum(axis=0), strict=True):
        drawn.append(rng.permutation(pool)[:used])
    samples = np.concatenate(drawn)
    owners = np.repeat(np.tile(np.arange(peers), classes), counts.T.ravel())

    by_owner = samples[np.lexsort((samples, owners))]
    rows = np.split(by_owner, np.cumsum(counts.sum(axis=1))[:-1])
    return tuple(map(torch.from_numpy, rows))


def draw_samples(pools: list[Counts], counts: Counts, rng: np.random.Generator) -> Tensor:
    """Draw one peer's test samples by the counts.

    Each class is shuffled and its first samples are taken, repeatedly if there are too few.
    """
    drawn = []
    for label in np.flatnonzero(counts):
        drawn.append(np.resize(rng.permutation(pools[label]), counts[label]))
    return torch.from_numpy(np.sort(np.concatenate(drawn)))
