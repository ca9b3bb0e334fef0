"""Who gets which samples: partitions of labelled data over peers.

A partition first decides how many samples of each class a peer gets (`counts`), then which ones (`split`). Every peer
gets the same number of training samples and no training sample goes to two peers. Counting comes first and is done
in whole matrices, so no choice of settings can stall: what the labels cannot give is a `PartitionError`.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from pydantic import Field, ValidationInfo, field_validator
from torch import Tensor

from dispfl.data.apportion import Counts, deal_classes, fill_evenly, fit_to_supply, log_priors, proportional, share
from dispfl.errors import PartitionError
from dispfl.settings import Settings


@dataclass(frozen=True, eq=False)
class Split:
    """The samples of every peer, in roster order: ascending int64 indices into the training and the test data."""

    train: tuple[Tensor, ...]
    test: tuple[Tensor, ...]

    def label_counts(self, labels: Tensor, classes: int) -> Tensor:
        """How many training samples of each class a peer has, as (peers, classes)."""
        return torch.stack([torch.bincount(labels[mine], minlength=classes) for mine in self.train])


class Partition(Settings):
    """The base of all partitions; a subclass says how the classes are dealt."""

    table: ClassVar[str] = "partition"

    samples: int | Literal["all"] = "all"
    """Training samples a peer; "all" shares out as many as can be had when every peer gets the same number."""
    test_samples: int = Field(default=100, ge=1)
    """Test samples a peer, in the label proportions of its training samples."""

    @field_validator("samples", mode="before")
    @classmethod
    def _positive(cls, samples: object) -> object:
        if samples != "all" and (not isinstance(samples, int) or samples < 1):
            raise ValueError(f'must be a whole number of at least 1, or "all", got {samples!r}.')
        return samples

    def split(self, train_labels: Tensor, test_labels: Tensor, peers: int, *, rng: torch.Generator) -> Split:
        """Give each of `peers` peers its training and test samples.

        Training samples are disjoint between peers; test samples may be shared. Where a peer needs more test samples
        of a class than there are, all of them are repeated, as evenly as possible, so that the proportions stay right.
        """
        # NumPy draws gamma variates and permutations much faster; its generator is seeded from ours.
        draws = np.random.default_rng(int(torch.randint(2**63 - 1, (), generator=rng)))
        train_pools, test_pools = _by_class(train_labels, "training"), _by_class(test_labels, "test")
        counts = self.counts(np.array([len(pool) for pool in train_pools]), peers, rng=draws)
        for label in np.flatnonzero(counts.any(axis=0)):
            if label >= len(test_pools) or not len(test_pools[label]):
                raise PartitionError(
                    f"Class {label} is dealt to peers but the test labels have none of it; "
                    f"add test samples of class {label} or leave it out of the training data."
                )
        train = _deal_samples(train_pools, counts, draws)
        test = [_draw_samples(test_pools, mine, draws) for mine in proportional(counts, self.test_samples)]
        return Split(train, tuple(test))

    def counts(self, supply: Counts, peers: int, *, rng: np.random.Generator) -> Counts:
        """How many training samples of each class a peer gets, as (peers, classes); `supply` has the class sizes."""
        total = int(supply.sum())
        if peers < 1:
            raise PartitionError(f"peers must be at least 1, got {peers}.")
        if peers > total:
            raise PartitionError(f"peers is {peers} but there are {total} training samples; use at most {total}.")
        largest = total // peers
        if self.samples != "all" and self.samples > largest:
            raise PartitionError(
                f"partition.samples is {self.samples} but {total} training samples give each of {peers} peers "
                f"at most {largest}; lower partition.samples or peers."
            )
        present = np.flatnonzero(supply)
        counts = np.zeros((peers, len(supply)), np.int64)
        counts[:, present] = self._deal(supply[present], peers, largest if self.samples == "all" else self.samples, rng)
        return counts

    @abstractmethod
    def _deal(self, supply: Counts, peers: int, n: int, rng: np.random.Generator) -> Counts:
        """The counts, given that each class has samples and that there are enough for n a peer."""


class Dirichlet(Partition):
    """Every peer draws its own label distribution from Dirichlet(alpha); the paper's "Dir" partition."""

    name: Literal["dirichlet"] = "dirichlet"
    alpha: float = Field(default=0.3, ge=0.001, le=10_000)
    """Concentration: 0.01 is nearly one class a peer, 100 nearly the same distribution for all."""

    def _deal(self, supply: Counts, peers: int, n: int, rng: np.random.Generator) -> Counts:
        return fit_to_supply(log_priors(self.alpha, peers, len(supply), rng), np.full(peers, n), supply)


class Grouped(Partition):
    """Groups of peers that share a label distribution drawn from Dirichlet(alpha).

    Groups are blocks of consecutive peers whose sizes differ by at most one. Within a group the counts of a class
    differ by at most one.
    """

    name: Literal["grouped"] = "grouped"
    groups: int = Field(default=4, ge=1)
    alpha: float = Field(default=0.3, ge=0.001, le=10_000)
    """Concentration of the groups' label distributions, as in `Dirichlet`."""

    def _deal(self, supply: Counts, peers: int, n: int, rng: np.random.Generator) -> Counts:
        if self.groups > peers:
            raise PartitionError(f"partition.groups is {self.groups} but peers is {peers}; use at most {peers} groups.")
        members = peers // self.groups + (np.arange(self.groups) < peers % self.groups)
        totals = fit_to_supply(log_priors(self.alpha, self.groups, len(supply), rng), members * n, supply)
        return np.concatenate([share(total, size) for total, size in zip(totals, members, strict=True)])


class Pathological(Partition):
    """Every peer holds a few classes, equally frequent up to one sample.

    Each class goes to equally many peers, up to one; where that leaves a choice, the larger classes go to more. The
    smallest class in proportion to its holders limits the number of samples a peer.
    """

    name: Literal["pathological"] = "pathological"
    classes: int = Field(default=2, ge=1)
    """Classes a peer."""

    @field_validator("classes")
    @classmethod
    def _one_sample_of_each(cls, classes: int, others: ValidationInfo) -> int:
        samples = others.data.get("samples", "all")
        if samples != "all" and samples < classes:
            raise ValueError(f"is {classes} but partition.samples is {samples}; a peer needs a sample of each class.")
        return classes

    def _deal(self, supply: Counts, peers: int, n: int, rng: np.random.Generator) -> Counts:
        if self.classes > len(supply):
            raise PartitionError(
                f"partition.classes is {self.classes} but the training labels have {len(supply)} classes; "
                f"use at most {len(supply)}."
            )
        counts = fill_evenly(deal_classes(supply, peers, self.classes, rng), supply, n)
        largest = int(counts[0].sum())
        if largest < self.classes:
            raise PartitionError(
                f"partition.classes is {self.classes} but for {peers} peers some class has fewer training samples "
                "than holders; lower partition.classes or peers."
            )
        if self.samples != "all" and largest < self.samples:
            raise PartitionError(
                f"partition.samples is {self.samples} but {self.classes} classes for each of {peers} peers leave "
                f"at most {largest} training samples a peer; lower partition.samples or peers."
            )
        return counts


class IID(Partition):
    """Every peer has the label distribution of the whole, up to one sample a class."""

    name: Literal["iid"] = "iid"

    def _deal(self, supply: Counts, peers: int, n: int, rng: np.random.Generator) -> Counts:
        return share(proportional(supply[None], peers * n)[0], peers)


PARTITIONS: dict[str, type[Partition]] = {
    str(kind.model_fields["name"].default): kind for kind in (Dirichlet, Grouped, Pathological, IID)
}


def _by_class(labels: Tensor, which: str) -> list[Counts]:
    """The indices of each class's samples."""
    if labels.ndim != 1 or labels.is_floating_point() or labels.is_complex():
        raise PartitionError(
            f"The {which} labels must be one whole number a sample, got {labels.dtype} of shape {tuple(labels.shape)}."
        )
    if not len(labels):
        raise PartitionError(f"The {which} labels are empty; give at least one sample.")
    values = labels.numpy(force=True).astype(np.int64)
    if values.min() < 0:
        raise PartitionError(f"The {which} labels must count from 0, got {values.min()}.")
    return np.split(np.argsort(values, kind="stable"), np.cumsum(np.bincount(values))[:-1])


def _deal_samples(pools: list[Counts], counts: Counts, rng: np.random.Generator) -> tuple[Tensor, ...]:
    """Shuffle each class and hand it out in the given counts; rows of counts must have equal sums."""
    peers, classes = counts.shape
    samples = np.concatenate([rng.permutation(p)[:used] for p, used in zip(pools, counts.sum(axis=0), strict=True)])
    owners = np.repeat(np.tile(np.arange(peers), classes), counts.T.ravel())
    rows = samples[np.lexsort((samples, owners))].reshape(peers, -1)
    return tuple(torch.from_numpy(row) for row in rows)


def _draw_samples(pools: list[Counts], counts: Counts, rng: np.random.Generator) -> Tensor:
    """Draw one peer's test samples: shuffle each class and take from the front, over and over if it is too short."""
    drawn = [np.resize(rng.permutation(pools[label]), counts[label]) for label in np.flatnonzero(counts)]
    return torch.from_numpy(np.sort(np.concatenate(drawn)))
