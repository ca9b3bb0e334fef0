"""Partitions of labelled data over peers.

A partition first decides how many samples of each class a peer gets (`counts`), then which ones
(`split`). By default every peer gets the same number of training samples; no training sample goes
to two peers. The counts are computed as whole matrices, so no choice of settings can loop forever:
an impossible one is a `PartitionError`.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, ValidationInfo, field_validator, model_validator
from torch import Tensor

from dispfl.core.names import names_from, peer_names
from dispfl.core.rng import stream
from dispfl.data.batches import ResidentSamples
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
from dispfl.data.datasets import CustomData, Data
from dispfl.data.shift import FeatureShift, ShiftName, check_shift
from dispfl.data.split import (
    Split,
    assign_samples,
    by_class,
    draw_samples,
    hold_out,
    pool_sizes,
    strata,
)
from dispfl.errors import ConfigError, PartitionError
from dispfl.settings import Component

if TYPE_CHECKING:
    from dispfl.core.samples import Samples
    from dispfl.data.labelled import LabelledDataset


class Partition(Component):
    """Base class of partitions; a subclass decides the counts of the classes."""

    table: ClassVar[str] = "partition"
    draws_from_one_pool: ClassVar[bool] = True
    """Whether a training sample that no peer has could have been any peer's."""
    needs_classes: ClassVar[bool] = True
    """Whether it divides samples by their class."""

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

    shift: ShiftName = "none"
    """Feature shift beside that of labels: each peer's images are turned by a multiple of 90
    degrees (rotate), have their colours exchanged or inverted (colour), or are blurred."""

    @field_validator("samples_per_peer", mode="before")
    @classmethod
    def _positive(cls, samples: object) -> object:
        if samples != "all" and (not isinstance(samples, int) or samples < 1):
            raise ValueError(f'must be a whole number of at least 1, or "all", got {samples!r}.')
        return samples

    @model_validator(mode="after")
    def _sizes_have_their_own_settings(self) -> Self:
        used_by = {"size_alpha": "dirichlet", "size_sigma": "lognormal"}
        for key, sizes in used_by.items():
            if self.sizes != sizes and self._is_set(key):
                raise ConfigError(
                    f"partition.{key} needs partition.sizes={sizes}, which is {self.sizes};"
                    " omit it.",
                    key=f"partition.{key}",
                )
        if self.sizes == "equal" and self._is_set("min_samples"):
            raise ConfigError(
                "partition.min_samples needs unequal partition.sizes: dirichlet or lognormal;"
                " omit it.",
                key="partition.min_samples",
            )
        return self

    def _is_set(self, key: str) -> bool:
        return bool(getattr(self, key) != type(self).model_fields[key].default)

    def data_settings(self, data: Data) -> Data:
        """Return the settings to load data with, so that this partition can divide them."""
        return data

    def split_data(self, data: "LabelledDataset", peers: int, *, rng: torch.Generator) -> Split:
        """Give each of `peers` peers its samples of a data set."""
        if self.needs_classes and data.task != "classification":
            raise PartitionError(
                f"partition={self.name} divides samples by their class, which a {data.task} does"
                " not have; use partition=iid, with partition.sizes for different numbers of"
                " samples, or partition=by_column."
            )
        return self.split(data.train_labels, data.test_labels, peers, rng=rng)

    def split(
        self, train_labels: Tensor, test_labels: Tensor, peers: int, *, rng: torch.Generator
    ) -> Split:
        """Give each of `peers` peers its training and test samples.

        Training samples are disjoint between peers; test samples may be shared. If a peer needs
        more test samples of a class than there are, they are repeated as evenly as possible, which
        keeps the proportions.
        """
        draws = _numpy_generator(rng)
        if not self.needs_classes:
            train_labels = strata(train_labels)
            test_labels = strata(test_labels)
        train_pools = by_class(train_labels, "training")
        test_pools = by_class(test_labels, "test")
        counts = self.counts(pool_sizes(train_pools), peers, rng=draws)
        for label in np.flatnonzero(counts.any(axis=0)):
            if label >= len(test_pools) or not len(test_pools[label]):
                raise PartitionError(
                    f"Class {label} is assigned to peers but the test labels have none of it; "
                    f"add test samples of class {label} or remove it from the training data."
                )

        train = assign_samples(train_pools, counts, draws)
        test_counts = proportional(counts, self.test_samples_per_peer)
        test = tuple(draw_samples(test_pools, row, draws) for row in test_counts)
        return self.completed(train, test, train_labels, test_labels, draws)

    def completed(
        self,
        train: tuple[Tensor, ...],
        test: tuple[Tensor, ...],
        train_labels: Tensor,
        test_labels: Tensor,
        rng: np.random.Generator,
    ) -> Split:
        """Return a split of these samples, with validation data and global test data if set."""
        validation: tuple[Tensor, ...] = ()
        if self.validation:
            divided = [hold_out(rows, train_labels, self.validation, rng) for rows in train]
            train, validation = zip(*divided, strict=True)
        return Split(train, test, validation, self._global_test(test_labels, rng))

    def _global_test(self, test_labels: Tensor, rng: np.random.Generator) -> Tensor | None:
        if not self.global_test_samples:
            return None
        pools = by_class(strata(test_labels), "test")
        supply = pool_sizes(pools)
        total = supply.sum()
        if self.global_test_samples > total:
            raise PartitionError(
                f"partition.global_test_samples is {self.global_test_samples} but there are"
                f" {total} test samples; use at most {total}."
            )
        return draw_samples(pools, proportional(supply[None], self.global_test_samples)[0], rng)

    def peers(
        self, data: "LabelledDataset", peers: int, *, seed: int = 0, augment: bool = False
    ) -> "list[tuple[Samples, ...]]":
        """Divide a data set between peers: (training data, test data) of each.

        This is what `Federation` takes; with `validation` it is (training data, validation data,
        test data). The same seed gives the split of an experiment with this seed. `augment` crops
        and flips training images.
        """
        split = self.split_data(data, peers, rng=stream(seed, "partition"))
        return self._divided(data, split, augment, seed)

    def _divided(
        self, data: "LabelledDataset", split: Split, augment: bool, seed: int
    ) -> "list[tuple[Samples, ...]]":
        train, test = data.samples(augment=augment)
        check_shift(self.shift, getattr(train, "inputs", None), data.task)
        divided = []
        for index, peer in enumerate(split.names or peer_names(len(split.train))):
            parts: list[Samples] = [train.take(split.train[index])]
            if split.validation:
                parts.append(train.take(split.validation[index]))
            parts.append(test.take(split.test[index]))
            divided.append(tuple(self.as_seen(part, seed, peer) for part in parts))
        return divided

    def as_seen(self, samples: "Samples", seed: int, peer: str) -> "Samples":
        """Return a peer's images with its shift of features, if there is one."""
        if self.shift == "none":
            return samples
        assert isinstance(samples, ResidentSamples), "images are in memory"
        return samples.shifted(FeatureShift.of(self.shift, seed, peer))

    def counts(self, supply: Counts, peers: int, *, rng: np.random.Generator) -> Counts:
        """Training samples of each class for each peer, as (peers, classes).

        `supply` has the class sizes.
        """
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
        sizes = self._draw_sizes(total, peers, rng)
        present_counts = np.asarray(self.class_counts(supply[present], sizes, rng))
        self._check_counts(present_counts, supply[present], peers)
        counts = np.zeros((peers, len(supply)), np.int64)
        counts[:, present] = present_counts
        return counts

    def _check_counts(self, counts: Counts, supply: Counts, peers: int) -> None:
        """Refuse impossible counts of a user's own partition."""
        expected_shape = counts.shape == (peers, len(supply))
        if not expected_shape or (counts < 0).any() or (counts.sum(axis=0) > supply).any():
            raise PartitionError(
                f"class_counts of partition {self.name} must return {peers} x {len(supply)}"
                f" numbers of at least 0 whose column sums are at most {supply.tolist()},"
                f" got {counts.tolist()}."
            )

    def _draw_sizes(self, total: int, peers: int, rng: np.random.Generator) -> Counts:
        """Return the number of training samples of each peer, of `total` at most."""
        mean = total // peers if self.samples_per_peer == "all" else self.samples_per_peer
        if self.sizes == "equal":
            return np.full(peers, mean)
        if mean < self.min_samples:
            raise PartitionError(
                f"partition.min_samples is {self.min_samples} but the {peers} peers have {mean}"
                " training samples on average; lower partition.min_samples or peers."
            )
        if self.sizes == "dirichlet":
            logarithms = log_priors(self.size_alpha, 1, peers, rng)[0]
        else:
            logarithms = rng.normal(0, self.size_sigma, peers)
        used = total if self.samples_per_peer == "all" else mean * peers
        return unequal_sizes(np.exp(logarithms - logarithms.max()), used, self.min_samples)

    @abstractmethod
    def class_counts(self, supply: Counts, sizes: Counts, rng: np.random.Generator) -> Counts:
        """The counts, as (peers, classes); each row sums to the peer's entry of `sizes`.

        `supply` has the class sizes, all above 0. There are enough samples for all sizes.
        """


def _numpy_generator(rng: torch.Generator) -> np.random.Generator:
    """Seed NumPy's generator from torch's: it draws gamma variates and permutations much faster."""
    return np.random.default_rng(int(torch.randint(2**63 - 1, (), generator=rng)))


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
    """Groups of peers, whose sizes differ by at most one."""
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
        priors = log_priors(self.alpha, self.groups, len(supply), rng)
        totals = fit_to_supply(priors, group_sizes, supply)
        return np.concatenate(list(map(split_totals, totals, groups)))


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
    def _one_sample_of_each(cls, classes: int, fields: ValidationInfo) -> int:
        samples = fields.data.get("samples_per_peer", "all")
        if samples != "all" and samples < classes:
            raise ValueError(
                f"is {classes} but partition.samples_per_peer is {samples}; a peer needs a sample"
                " of each class."
            )
        least = fields.data.get("min_samples", classes)
        if fields.data.get("sizes", "equal") != "equal" and least < classes:
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
        peers = len(sizes)
        held = assign_classes(supply, peers, self.classes, rng)
        if self.sizes == "equal":
            counts = fill_evenly(held, supply, int(sizes[0]))
        else:
            counts = fill_unevenly(held, supply, sizes)

        totals = counts.sum(axis=1)
        short = totals < sizes
        if (totals < self.classes).any():
            raise PartitionError(
                f"partition.classes is {self.classes} but for {peers} peers some class has fewer"
                " training samples than peers that hold it; lower partition.classes or peers."
            )
        if self.samples_per_peer != "all" and short.any():
            raise PartitionError(
                f"partition.samples_per_peer is {self.samples_per_peer} but {self.classes} classes"
                f" for each of {peers} peers leave at most {totals[short.argmax()]} training"
                " samples per peer; lower partition.samples_per_peer or peers."
            )
        if self.sizes != "equal" and totals.min() < self.min_samples:
            raise PartitionError(
                f"partition.min_samples is {self.min_samples} but {self.classes} classes for each"
                f" of {peers} peers leave one with {totals.min()} training samples; lower"
                " partition.min_samples or peers."
            )
        return counts


class IID(Partition):
    """Every peer has the label distribution of the whole data set, up to one sample per class."""

    name: Literal["iid"] = "iid"
    needs_classes: ClassVar[bool] = False

    def class_counts(self, supply: Counts, sizes: Counts, rng: np.random.Generator) -> Counts:
        return split_totals(proportional(supply[None], int(sizes.sum()))[0], sizes)


class ByColumn(Partition):
    """Every peer has the samples of one value of a column, which is no input.

    The values name the peers, in this order. With fewer peers than values, those with the most
    training samples are used. `samples_per_peer` and `test_samples_per_peer` are upper limits here:
    a peer has as many samples as there are.
    """

    name: Literal["by_column"] = "by_column"
    column: str | None = None
    """The column of the CSV file or of the data set of `data.hub`; default: `data.group`."""
    draws_from_one_pool: ClassVar[bool] = False
    needs_classes: ClassVar[bool] = False

    def data_settings(self, data: Data) -> Data:
        """Return the settings of the data with the column as their group."""
        if not isinstance(data, CustomData) or data.factory:
            raise ConfigError(
                "partition=by_column needs a table with that column: give data.path=FILE.csv or"
                " data.hub.",
                key="partition",
            )
        if self.sizes != "equal":
            raise ConfigError(
                f"partition.sizes is {self.sizes}, but by_column has the sizes of the data;"
                " omit it.",
                key="partition.sizes",
            )
        column = self.column or data.group
        if column is None:
            raise ConfigError(
                "partition.column is missing: name the column whose values are the peers.",
                key="partition.column",
            )
        return data.model_copy(update={"group": column})

    def split_data(self, data: "LabelledDataset", peers: int, *, rng: torch.Generator) -> Split:
        if data.groups is None:
            raise PartitionError("partition=by_column needs data that were read with data.group.")
        column = f"column {self.column}" if self.column else "column of data.group"
        draws = _numpy_generator(rng)
        train_groups = np.array(data.groups[0])
        test_groups = np.array(data.groups[1])
        limit = None if self.samples_per_peer == "all" else self.samples_per_peer

        train = []
        test = []
        groups = self._largest_groups(train_groups, peers, column)
        for group in groups.values():
            test_rows = np.flatnonzero(test_groups == group)
            if not len(test_rows):
                raise PartitionError(
                    f"The value {group} of the {column} has no test samples; add some."
                )
            train.append(_at_most(np.flatnonzero(train_groups == group), limit, draws))
            test.append(_at_most(test_rows, self.test_samples_per_peer, draws))
        split = self.completed(
            tuple(train), tuple(test), data.train_labels, data.test_labels, draws
        )
        return replace(split, names=tuple(groups))

    def named_peers(
        self, data: "LabelledDataset", peers: int, *, seed: int = 0, augment: bool = False
    ) -> "dict[str, tuple[Samples, ...]]":
        """Divide a data set as `peers` does, by the names of the peers: those of the values."""
        split = self.split_data(data, peers, rng=stream(seed, "partition"))
        return dict(zip(split.names, self._divided(data, split, augment, seed), strict=True))

    def _largest_groups(self, groups: NDArray[np.str_], peers: int, column: str) -> dict[str, str]:
        """The values with the most training samples, one for each peer, by its name, in order."""
        names, sizes = np.unique(groups, return_counts=True)
        if peers > len(names):
            raise PartitionError(
                f"peers is {peers} but the {column} has {len(names)} values in the training data; "
                f"use at most {len(names)}."
            )
        largest: list[str] = names[np.argsort(-sizes, kind="stable")[:peers]].tolist()
        values = sorted(largest, key=_sort_key(names.tolist()))
        return dict(sorted(zip(names_from(values), values, strict=True)))

    def class_counts(self, supply: Counts, sizes: Counts, rng: np.random.Generator) -> Counts:
        raise PartitionError(
            "partition=by_column divides data by a column, not by labels; use `split_data`."
        )


def _at_most(rows: Counts, limit: int | None, rng: np.random.Generator) -> Tensor:
    """Draw rows down to a limit."""
    if limit is not None and limit < len(rows):
        rows = np.sort(rng.permutation(rows)[:limit])
    return torch.from_numpy(rows.astype(np.int64))


def _sort_key(names: Sequence[str]) -> Callable[[str], int | str]:
    """Sort values as numbers where all are whole numbers."""
    return int if all(map(str.isdecimal, names)) else str
