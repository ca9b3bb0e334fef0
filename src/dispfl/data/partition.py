"""Partitions of labelled data over peers.

A partition first decides how many samples of each class a peer gets (`counts`), then which ones
(`split`). By default every peer gets the same number of training samples; no training sample goes
to two peers. The counts are computed as whole matrices, so no choice of settings can loop forever:
an impossible one is a `PartitionError`.
"""

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar, Literal, Self

import numpy as np
import torch
from pydantic import Field, ValidationInfo, field_validator, model_validator
from torch import Tensor

from dispfl.core.rng import stream
from dispfl.data.class_counts import (
    Counts,
    assign_classes,
    fill_evenly,
    fill_unevenly,
    fit_to_supply,
    log_priors,
    proportional,
    split_totals,
    unequal_sizes,
)
from dispfl.data.split import Split, assign_samples, by_class, draw_samples, hold_out
from dispfl.errors import ConfigError, PartitionError
from dispfl.settings import Component

if TYPE_CHECKING:
    from dispfl.core.samples import Samples
    from dispfl.data.custom import CustomDataset
    from dispfl.data.datasets import ImageDataset


class Partition(Component):
    """Base class of partitions; a subclass decides the counts of the classes."""

    table: ClassVar[str] = "partition"

    samples_per_peer: int | Literal["all"] = "all"
    """Training samples per peer, or their mean where `sizes` differ; "all": as many as there are
    for all peers. The default of `dispfl run` is 96 with `dirichlet`, and all with the other
    partitions."""
    sizes: Literal["equal", "dirichlet", "lognormal"] = "equal"
    """Numbers of training samples: equal; shares drawn from Dirichlet(`size_alpha`); log-normal
    (`size_sigma`)."""
    size_alpha: float = Field(default=1.0, ge=0.001, le=10_000)
    """Concentration of `sizes=dirichlet`: with 0.1 a few peers have most samples, with 100 all have
    nearly as many."""
    size_sigma: float = Field(default=1.0, gt=0, le=10)
    """Standard deviation of the logarithm of `sizes=lognormal`: with 1 a sixth of the peers have
    over 2.7 medians."""
    min_samples: int = Field(default=10, ge=1)
    """The smallest number of training samples of a peer, where `sizes` differ."""
    test_samples_per_peer: int = Field(default=100, ge=1)
    """Test samples per peer, in the label proportions of its training samples."""
    validation: float = Field(default=0.0, ge=0, lt=1)
    """Share of each peer's training samples that is held out for choices such as when to stop; 0:
    none."""
    global_test_samples: int = Field(default=0, ge=0)
    """Test samples on which every peer's model is evaluated too, in the label proportions of all
    test data; 0: none."""

    @field_validator("samples_per_peer", mode="before")
    @classmethod
    def _positive(cls, samples: object) -> object:
        if samples != "all" and (not isinstance(samples, int) or samples < 1):
            raise ValueError(f'must be a whole number of at least 1, or "all", got {samples!r}.')
        return samples

    @model_validator(mode="after")
    def _sizes_have_their_own_settings(self) -> Self:
        uses = {"size_alpha": "dirichlet", "size_sigma": "lognormal"}
        for key, sizes in uses.items():
            if self.sizes != sizes and getattr(self, key) != type(self).model_fields[key].default:
                raise ConfigError(
                    f"partition.{key} needs partition.sizes={sizes}, which is {self.sizes};"
                    " omit it.",
                    key=f"partition.{key}",
                )
        if (
            self.sizes == "equal"
            and self.min_samples != type(self).model_fields["min_samples"].default
        ):
            raise ConfigError(
                "partition.min_samples needs unequal partition.sizes: dirichlet or lognormal;"
                " omit it.",
                key="partition.min_samples",
            )
        return self

    def split(
        self, train_labels: Tensor, test_labels: Tensor, peers: int, *, rng: torch.Generator
    ) -> Split:
        """Give each of `peers` peers its training and test samples.

        Training samples are disjoint between peers; test samples may be shared. If a peer needs
        more test samples of a class than there are, they are repeated as evenly as possible, which
        keeps the proportions.
        """
        # NumPy draws gamma variates and permutations much faster; its generator is seeded from
        # ours.
        draws = np.random.default_rng(int(torch.randint(2**63 - 1, (), generator=rng)))
        train_pools, test_pools = by_class(train_labels, "training"), by_class(test_labels, "test")
        counts = self.counts(np.array([len(pool) for pool in train_pools]), peers, rng=draws)
        for label in np.flatnonzero(counts.any(axis=0)):
            if label >= len(test_pools) or not len(test_pools[label]):
                raise PartitionError(
                    f"Class {label} is assigned to peers but the test labels have none of it; "
                    f"add test samples of class {label} or remove it from the training data."
                )
        train = assign_samples(train_pools, counts, draws)
        test = [
            draw_samples(test_pools, mine, draws)
            for mine in proportional(counts, self.test_samples_per_peer)
        ]
        return self.completed(train, tuple(test), train_labels, test_labels, draws)

    def completed(
        self,
        train: tuple[Tensor, ...],
        test: tuple[Tensor, ...],
        train_labels: Tensor,
        test_labels: Tensor,
        rng: np.random.Generator,
    ) -> Split:
        """Return a split of these samples, with the validation data and the global test data that
        are set."""
        held_out: tuple[Tensor, ...] = ()
        if self.validation:
            train, held_out = zip(
                *(hold_out(mine, train_labels, self.validation, rng) for mine in train), strict=True
            )
        return Split(train, test, held_out, self._global_test(test_labels, rng))

    def split_data(
        self, data: "ImageDataset | CustomDataset", peers: int, *, rng: torch.Generator
    ) -> Split:
        """Give each of `peers` peers its samples of a data set."""
        return self.split(data.train_labels, data.test_labels, peers, rng=rng)

    def _global_test(self, test_labels: Tensor, rng: np.random.Generator) -> Tensor | None:
        if not self.global_test_samples:
            return None
        pools = by_class(test_labels, "test")
        supply = np.array([[len(pool) for pool in pools]])
        if self.global_test_samples > supply.sum():
            raise PartitionError(
                f"partition.global_test_samples is {self.global_test_samples} but there are"
                f" {supply.sum()} test samples; use at most {supply.sum()}."
            )
        return draw_samples(pools, proportional(supply, self.global_test_samples)[0], rng)

    def peers(
        self,
        data: "ImageDataset | CustomDataset",
        peers: int,
        *,
        seed: int = 0,
        augment: bool = False,
    ) -> "list[tuple[Samples, ...]]":
        """Divide a data set between peers: (training data, test data) of each, as `Federation`
        takes them, or with `validation` (training data, validation data, test data).

        The same seed gives the split of an experiment with this seed. `augment` crops and flips
        training images.
        """
        train, test = data.samples(augment=augment)
        split = self.split_data(data, peers, rng=stream(seed, "partition"))
        parts = [
            (train, split.train),
            *([(train, split.validation)] if split.validation else []),
            (test, split.test),
        ]
        return [tuple(samples.take(rows[k]) for samples, rows in parts) for k in range(peers)]

    def counts(self, supply: Counts, peers: int, *, rng: np.random.Generator) -> Counts:
        """Training samples of each class for each peer, as (peers, classes); `supply` has the class
        sizes."""
        total = int(supply.sum())
        if peers < 1:
            raise PartitionError(f"peers must be at least 1, got {peers}.")
        if peers > total:
            raise PartitionError(
                f"peers is {peers} but there are {total} training samples; use at most {total}."
            )
        largest = total // peers
        if self.samples_per_peer != "all" and self.samples_per_peer > largest:
            raise PartitionError(
                f"partition.samples_per_peer is {self.samples_per_peer} but {total} training"
                f" samples give each of {peers} peers at most {largest}; lower"
                " partition.samples_per_peer or peers."
            )
        present = np.flatnonzero(supply)
        counts = np.zeros((peers, len(supply)), np.int64)
        found = np.asarray(
            self.class_counts(supply[present], self._draw_sizes(total, peers, rng), rng)
        )
        if (
            found.shape != (peers, len(present))
            or (found < 0).any()
            or (found.sum(axis=0) > supply[present]).any()
        ):
            raise PartitionError(
                f"class_counts of partition {self.name} must return {peers} x {len(present)}"
                f" numbers of at least 0 whose column sums are at most {supply[present].tolist()},"
                f" got {found.tolist()}."
            )
        counts[:, present] = found
        return counts

    def _draw_sizes(self, total: int, peers: int, rng: np.random.Generator) -> Counts:
        """Return the number of training samples of each peer, of `total` at most."""
        n = total // peers if self.samples_per_peer == "all" else self.samples_per_peer
        if self.sizes == "equal":
            return np.full(peers, n)
        if n < self.min_samples:
            raise PartitionError(
                f"partition.min_samples is {self.min_samples} but the {peers} peers have {n}"
                " training samples on average; lower partition.min_samples or peers."
            )
        if self.sizes == "dirichlet":
            logarithms = log_priors(self.size_alpha, 1, peers, rng)[0]
        else:
            logarithms = rng.normal(0, self.size_sigma, peers)
        used = total if self.samples_per_peer == "all" else n * peers
        return unequal_sizes(np.exp(logarithms - logarithms.max()), used, self.min_samples)

    @abstractmethod
    def class_counts(self, supply: Counts, sizes: Counts, rng: np.random.Generator) -> Counts:
        """The counts, as (peers, classes), with the rows' sums `sizes`; `supply` has the class
        sizes, all above 0.

        There are enough samples for all sizes.
        """


class Dirichlet(Partition):
    """Every peer draws a label distribution from Dirichlet(alpha); the paper's "Dir" partition."""

    name: Literal["dirichlet"] = "dirichlet"
    alpha: float = Field(default=0.3, ge=0.001, le=10_000)
    """Concentration: with 0.01 a peer has nearly one class, with 100 all have nearly the same
    distribution."""

    def class_counts(self, supply: Counts, sizes: Counts, rng: np.random.Generator) -> Counts:
        return fit_to_supply(log_priors(self.alpha, len(sizes), len(supply), rng), sizes, supply)


class Grouped(Partition):
    """Groups of peers that share a label distribution drawn from Dirichlet(alpha).

    Groups are blocks of consecutive peers whose sizes differ by at most one. Within a group the
    counts of a class differ by at most one.
    """

    name: Literal["grouped"] = "grouped"
    groups: int = Field(default=4, ge=1)
    """Groups of peers, of equal size up to one."""
    alpha: float = Field(default=0.3, ge=0.001, le=10_000)
    """Concentration of the groups' label distributions, as in `Dirichlet`."""

    def class_counts(self, supply: Counts, sizes: Counts, rng: np.random.Generator) -> Counts:
        peers = len(sizes)
        if self.groups > peers:
            raise PartitionError(
                f"partition.groups is {self.groups} but peers is {peers}; use at most {peers}"
                " groups."
            )
        members = peers // self.groups + (np.arange(self.groups) < peers % self.groups)
        groups = np.split(sizes, np.cumsum(members)[:-1])
        group_sizes = np.array([group.sum() for group in groups])
        totals = fit_to_supply(
            log_priors(self.alpha, self.groups, len(supply), rng), group_sizes, supply
        )
        return np.concatenate(
            [split_totals(total, group) for total, group in zip(totals, groups, strict=True)]
        )


class Pathological(Partition):
    """Every peer has a few classes, with counts that differ by at most one.

    The numbers of peers with a class differ by at most one; the larger classes go to more peers.
    The smallest class in proportion to its number of peers limits the samples per peer.
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
                f"is {classes} but partition.samples_per_peer is {samples}; a peer needs a sample"
                " of each class."
            )
        least = others.data.get("min_samples", classes)
        if others.data.get("sizes", "equal") != "equal" and least < classes:
            raise ValueError(
                f"is {classes} but partition.min_samples is {least}; a peer needs a sample of each"
                " class."
            )
        return classes

    def class_counts(self, supply: Counts, sizes: Counts, rng: np.random.Generator) -> Counts:
        if self.classes > len(supply):
            raise PartitionError(
                f"partition.classes is {self.classes} but the training labels have {len(supply)}"
                f" classes; use at most {len(supply)}."
            )
        peers, equal = len(sizes), self.sizes == "equal"
        held = assign_classes(supply, peers, self.classes, rng)
        counts = (
            fill_evenly(held, supply, int(sizes[0]))
            if equal
            else fill_unevenly(held, supply, sizes)
        )
        found = counts.sum(axis=1)
        if (found < self.classes).any():
            raise PartitionError(
                f"partition.classes is {self.classes} but for {peers} peers some class has fewer"
                " training samples than peers that hold it; lower partition.classes or peers."
            )
        if self.samples_per_peer != "all" and (found < sizes).any():
            raise PartitionError(
                f"partition.samples_per_peer is {self.samples_per_peer} but {self.classes} classes"
                f" for each of {peers} peers leave at most {found[(found < sizes).argmax()]}"
                " training samples per peer; lower partition.samples_per_peer or peers."
            )
        if not equal and found.min() < self.min_samples:
            raise PartitionError(
                f"partition.min_samples is {self.min_samples} but {self.classes} classes for each"
                f" of {peers} peers leave one with {found.min()} training samples; lower"
                " partition.min_samples or peers."
            )
        return counts


class IID(Partition):
    """Every peer has the label distribution of the whole data set, up to one sample per class."""

    name: Literal["iid"] = "iid"

    def class_counts(self, supply: Counts, sizes: Counts, rng: np.random.Generator) -> Counts:
        return split_totals(proportional(supply[None], int(sizes.sum()))[0], sizes)
