"""Partitions of labelled data over peers.

A partition first decides how many samples of each class a peer gets (`counts`), then which ones (`split`). Every peer
gets the same number of training samples and no training sample goes to two peers. The counts are computed as whole
matrices, so no choice of settings can loop forever: an impossible one is a `PartitionError`.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field, ValidationInfo, field_validator
from torch import Tensor

from dispfl.core.rng import stream
from dispfl.data.apportion import (
    Counts,
    assign_classes,
    fill_evenly,
    fit_to_supply,
    log_priors,
    proportional,
    split_evenly,
)
from dispfl.errors import PartitionError
from dispfl.settings import Component

if TYPE_CHECKING:
    from dispfl.core.train import Samples
    from dispfl.data.custom import CustomDataset
    from dispfl.data.datasets import ImageDataset


@dataclass(frozen=True, eq=False)
class Split:
    """The samples of every peer, in roster order: ascending int64 indices into the training and the test data."""

    train: tuple[Tensor, ...]
    test: tuple[Tensor, ...]

    def label_counts(self, labels: Tensor, classes: int) -> Tensor:
        """The number of training samples of each class that a peer has, as (peers, classes)."""
        return torch.stack([torch.bincount(labels[mine], minlength=classes) for mine in self.train])


class Partition(Component):
    """Base class of partitions; a subclass decides the counts of the classes."""

    table: ClassVar[str] = "partition"

    samples_per_peer: int | Literal["all"] = "all"
    """Training samples per peer; "all" uses as many as possible while every peer gets the same number."""
    test_samples_per_peer: int = Field(default=100, ge=1)
    """Test samples per peer, in the label proportions of its training samples."""

    @field_validator("samples_per_peer", mode="before")
    @classmethod
    def _positive(cls, samples: object) -> object:
        if samples != "all" and (not isinstance(samples, int) or samples < 1):
            raise ValueError(f'must be a whole number of at least 1, or "all", got {samples!r}.')
        return samples

    def split(self, train_labels: Tensor, test_labels: Tensor, peers: int, *, rng: torch.Generator) -> Split:
        """Give each of `peers` peers its training and test samples.

        Training samples are disjoint between peers; test samples may be shared. If a peer needs more test samples of a
        class than there are, they are repeated as evenly as possible, which keeps the proportions.
        """
        # NumPy draws gamma variates and permutations much faster; its generator is seeded from ours.
        draws = np.random.default_rng(int(torch.randint(2**63 - 1, (), generator=rng)))
        train_pools, test_pools = _by_class(train_labels, "training"), _by_class(test_labels, "test")
        counts = self.counts(np.array([len(pool) for pool in train_pools]), peers, rng=draws)
        for label in np.flatnonzero(counts.any(axis=0)):
            if label >= len(test_pools) or not len(test_pools[label]):
                raise PartitionError(
                    f"Class {label} is assigned to peers but the test labels have none of it; "
                    f"add test samples of class {label} or remove it from the training data."
                )
        train = _assign_samples(train_pools, counts, draws)
        test = [_draw_samples(test_pools, mine, draws) for mine in proportional(counts, self.test_samples_per_peer)]
        return Split(train, tuple(test))

    def peers(
        self, data: "ImageDataset | CustomDataset", peers: int, *, seed: int = 0, augment: bool = False
    ) -> "list[tuple[Samples, Samples]]":
        """Divide a data set between peers: (training data, test data) of each, as `Federation` takes them.

        The same seed gives the split of an experiment with this seed. `augment` crops and flips training images.
        """
        train, test = data.samples(augment=augment)
        split = self.split(data.train_labels, data.test_labels, peers, rng=stream(seed, "partition"))
        return [(train.take(a), test.take(b)) for a, b in zip(split.train, split.test, strict=True)]

    def counts(self, supply: Counts, peers: int, *, rng: np.random.Generator) -> Counts:
        """Training samples of each class for each peer, as (peers, classes); `supply` has the class sizes."""
        total = int(supply.sum())
        if peers < 1:
            raise PartitionError(f"peers must be at least 1, got {peers}.")
        if peers > total:
            raise PartitionError(f"peers is {peers} but there are {total} training samples; use at most {total}.")
        largest = total // peers
        if self.samples_per_peer != "all" and self.samples_per_peer > largest:
            raise PartitionError(
                f"partition.samples_per_peer is {self.samples_per_peer} but {total} training samples give each of "
                f"{peers} peers at most {largest}; lower partition.samples_per_peer or peers."
            )
        present = np.flatnonzero(supply)
        counts = np.zeros((peers, len(supply)), np.int64)
        n = largest if self.samples_per_peer == "all" else self.samples_per_peer
        found = np.asarray(self.class_counts(supply[present], peers, n, rng))
        if found.shape != (peers, len(present)) or (found < 0).any() or (found.sum(axis=0) > supply[present]).any():
            raise PartitionError(
                f"class_counts of partition {self.name} must return {peers} x {len(present)} numbers of at least 0 "
                f"whose column sums are at most {supply[present].tolist()}, got {found.tolist()}."
            )
        counts[:, present] = found
        return counts

    @abstractmethod
    def class_counts(self, supply: Counts, peers: int, n: int, rng: np.random.Generator) -> Counts:
        """The counts, as (peers, classes); each class has samples, and there are enough for n per peer."""


class Dirichlet(Partition):
    """Every peer draws a label distribution from Dirichlet(alpha); the paper's "Dir" partition."""

    name: Literal["dirichlet"] = "dirichlet"
    alpha: float = Field(default=0.3, ge=0.001, le=10_000)
    """Concentration: with 0.01 a peer has nearly one class, with 100 all have nearly the same distribution."""

    def class_counts(self, supply: Counts, peers: int, n: int, rng: np.random.Generator) -> Counts:
        return fit_to_supply(log_priors(self.alpha, peers, len(supply), rng), np.full(peers, n), supply)


class Grouped(Partition):
    """Groups of peers that share a label distribution drawn from Dirichlet(alpha).

    Groups are blocks of consecutive peers whose sizes differ by at most one. Within a group the counts of a class
    differ by at most one.
    """

    name: Literal["grouped"] = "grouped"
    groups: int = Field(default=4, ge=1)
    """Groups of peers, of equal size up to one."""
    alpha: float = Field(default=0.3, ge=0.001, le=10_000)
    """Concentration of the groups' label distributions, as in `Dirichlet`."""

    def class_counts(self, supply: Counts, peers: int, n: int, rng: np.random.Generator) -> Counts:
        if self.groups > peers:
            raise PartitionError(f"partition.groups is {self.groups} but peers is {peers}; use at most {peers} groups.")
        members = peers // self.groups + (np.arange(self.groups) < peers % self.groups)
        totals = fit_to_supply(log_priors(self.alpha, self.groups, len(supply), rng), members * n, supply)
        return np.concatenate([split_evenly(total, size) for total, size in zip(totals, members, strict=True)])


class Pathological(Partition):
    """Every peer has a few classes, with counts that differ by at most one.

    The numbers of peers with a class differ by at most one; the larger classes go to more peers. The smallest class in
    proportion to its number of peers limits the samples per peer.
    """

    name: Literal["pathological"] = "pathological"
    classes: int = Field(default=2, ge=1)
    """Classes per peer."""

    @field_validator("classes")
    @classmethod
    def _one_sample_of_each(cls, classes: int, others: ValidationInfo) -> int:
        samples = others.data.get("samples_per_peer", "all")
        if samples != "all" and samples < classes:
            raise ValueError(
                f"is {classes} but partition.samples_per_peer is {samples}; a peer needs a sample of each class."
            )
        return classes

    def class_counts(self, supply: Counts, peers: int, n: int, rng: np.random.Generator) -> Counts:
        if self.classes > len(supply):
            raise PartitionError(
                f"partition.classes is {self.classes} but the training labels have {len(supply)} classes; "
                f"use at most {len(supply)}."
            )
        counts = fill_evenly(assign_classes(supply, peers, self.classes, rng), supply, n)
        largest = int(counts[0].sum())
        if largest < self.classes:
            raise PartitionError(
                f"partition.classes is {self.classes} but for {peers} peers some class has fewer training samples "
                "than peers that hold it; lower partition.classes or peers."
            )
        if self.samples_per_peer != "all" and largest < self.samples_per_peer:
            raise PartitionError(
                f"partition.samples_per_peer is {self.samples_per_peer} but {self.classes} classes for each of {peers} "
                f"peers leave at most {largest} training samples per peer; lower partition.samples_per_peer or peers."
            )
        return counts


class IID(Partition):
    """Every peer has the label distribution of the whole data set, up to one sample per class."""

    name: Literal["iid"] = "iid"

    def class_counts(self, supply: Counts, peers: int, n: int, rng: np.random.Generator) -> Counts:
        return split_evenly(proportional(supply[None], peers * n)[0], peers)


def _by_class(labels: Tensor, which: str) -> list[Counts]:
    """The indices of the samples of each class."""
    if labels.ndim != 1 or labels.is_floating_point() or labels.is_complex():
        raise PartitionError(
            f"The {which} labels must be one integer per sample, got {labels.dtype} of shape {tuple(labels.shape)}."
        )
    if not len(labels):
        raise PartitionError(f"The {which} labels are empty; give at least one sample.")
    values = labels.numpy(force=True).astype(np.int64)
    if values.min() < 0:
        raise PartitionError(f"The {which} labels must count from 0, got {values.min()}.")
    return np.split(np.argsort(values, kind="stable"), np.cumsum(np.bincount(values))[:-1])


def _assign_samples(pools: list[Counts], counts: Counts, rng: np.random.Generator) -> tuple[Tensor, ...]:
    """Shuffle each class and assign its samples by the counts; rows of counts must have equal sums."""
    peers, classes = counts.shape
    samples = np.concatenate([rng.permutation(p)[:used] for p, used in zip(pools, counts.sum(axis=0), strict=True)])
    owners = np.repeat(np.tile(np.arange(peers), classes), counts.T.ravel())
    rows = samples[np.lexsort((samples, owners))].reshape(peers, -1)
    return tuple(torch.from_numpy(row) for row in rows)


def _draw_samples(pools: list[Counts], counts: Counts, rng: np.random.Generator) -> Tensor:
    """Draw one peer's test samples: shuffle each class and take the first ones, repeatedly if there are too few."""
    drawn = [np.resize(rng.permutation(pools[label]), counts[label]) for label in np.flatnonzero(counts)]
    return torch.from_numpy(np.sort(np.concatenate(drawn)))
