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
from numpy.typing import NDArray
from pydantic import Field, ValidationInfo, field_validator
from torch import Tensor

from dispfl.errors import PartitionError
from dispfl.settings import Settings

Counts = NDArray[np.int64]

_FITTING_STEPS = 1000
"""Enough for alpha = 0.01 with every sample in use; what little is over its supply after that, rounding repairs."""


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

    samples: int | None = Field(default=None, ge=1)
    """Training samples a peer. Left out: as many as can be had when every peer gets the same number."""
    test_samples: int = Field(default=100, ge=1)
    """Test samples a peer, in the label proportions of its training samples."""

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
        test = [_draw_samples(test_pools, mine, draws) for mine in _proportional(counts, self.test_samples)]
        return Split(train, tuple(test))

    def counts(self, supply: Counts, peers: int, *, rng: np.random.Generator) -> Counts:
        """How many training samples of each class a peer gets, as (peers, classes); `supply` has the class sizes."""
        total = int(supply.sum())
        if peers < 1:
            raise PartitionError(f"peers must be at least 1, got {peers}.")
        if peers > total:
            raise PartitionError(f"peers is {peers} but there are {total} training samples; use at most {total}.")
        largest = total // peers
        if self.samples is not None and self.samples > largest:
            raise PartitionError(
                f"partition.samples is {self.samples} but {total} training samples give each of {peers} peers "
                f"at most {largest}; lower partition.samples or peers."
            )
        present = np.flatnonzero(supply)
        counts = np.zeros((peers, len(supply)), np.int64)
        counts[:, present] = self._deal(supply[present], peers, self.samples or largest, rng)
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
        return fit_to_supply(_log_priors(self.alpha, peers, len(supply), rng), np.full(peers, n), supply)


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
        totals = fit_to_supply(_log_priors(self.alpha, self.groups, len(supply), rng), members * n, supply)
        return np.concatenate([_share(total, size) for total, size in zip(totals, members, strict=True)])


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
        samples = others.data.get("samples")
        if samples is not None and samples < classes:
            raise ValueError(f"is {classes} but partition.samples is {samples}; a peer needs a sample of each class.")
        return classes

    def _deal(self, supply: Counts, peers: int, n: int, rng: np.random.Generator) -> Counts:
        if self.classes > len(supply):
            raise PartitionError(
                f"partition.classes is {self.classes} but the training labels have {len(supply)} classes; "
                f"use at most {len(supply)}."
            )
        counts = _fill_evenly(_deal_classes(supply, peers, self.classes, rng), supply, n)
        largest = int(counts[0].sum())
        if largest < self.classes:
            raise PartitionError(
                f"partition.classes is {self.classes} but for {peers} peers some class has fewer training samples "
                "than holders; lower partition.classes or peers."
            )
        if self.samples is not None and largest < self.samples:
            raise PartitionError(
                f"partition.samples is {self.samples} but {self.classes} classes for each of {peers} peers leave "
                f"at most {largest} training samples a peer; lower partition.samples or peers."
            )
        return counts


class IID(Partition):
    """Every peer has the label distribution of the whole, up to one sample a class."""

    name: Literal["iid"] = "iid"

    def _deal(self, supply: Counts, peers: int, n: int, rng: np.random.Generator) -> Counts:
        return _share(_proportional(supply[None], peers * n)[0], peers)


PARTITIONS: dict[str, type[Partition]] = {
    str(kind.model_fields["name"].default): kind for kind in (Dirichlet, Grouped, Pathological, IID)
}


def _log_priors(alpha: float, rows: int, classes: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Logarithms of Dirichlet(alpha) draws, each row up to a constant.

    A Dirichlet draw is a row of Gamma(alpha) draws, normalised. Most of them underflow when alpha is small, so they
    are drawn as logarithms: Gamma(alpha) is distributed as Gamma(alpha + 1) * U^(1/alpha).
    """
    shape = (rows, classes)
    return np.log(rng.standard_gamma(alpha + 1, shape)) + np.log1p(-rng.random(shape)) / alpha


def fit_to_supply(log_x: NDArray[np.float64], row_sums: Counts, supply: Counts) -> Counts:
    """Fit the priors to the supply and round: rows sum to `row_sums`, columns to at most `supply`.

    Sinkhorn's iteration with columns that are capped instead of matched: scale each row to its sum, scale down each
    column that is over its supply, repeat. The limit is the nearest such matrix to the priors (in Kullback-Leibler
    divergence); priors that never meet a shortage stay as drawn. Rows are kept as logarithms, because a small
    alpha sets entries apart by a thousand orders of magnitude.
    """
    for _ in range(_FITTING_STEPS):
        log_x = log_x - log_x.max(axis=1, keepdims=True)
        x = np.exp(log_x)
        x *= (row_sums / x.sum(axis=1))[:, None]
        columns = x.sum(axis=0)
        excess = np.maximum(columns / supply, 1.0)
        if (columns - supply).max() < 0.5:
            break
        log_x -= np.log(excess)
    return _round(x / excess, log_x, row_sums, supply)


def _round(x: NDArray[np.float64], preference: NDArray[np.float64], row_sums: Counts, supply: Counts) -> Counts:
    """Whole numbers near x with rows that sum to `row_sums` and columns to at most `supply`.

    No row or column of x may be over its sum. Each cell is rounded down; the largest remainders are rounded up while
    their row needs it and their column has room. What a row still lacks then, it takes from the columns that have
    room, in the order of its preference.
    """
    counts = np.floor(x).astype(np.int64)
    need, room = row_sums - counts.sum(axis=1), supply - counts.sum(axis=0)
    by_remainder = np.argsort(counts - x, axis=None, kind="stable")
    for row, column in zip(*np.unravel_index(by_remainder, x.shape), strict=True):
        if need[row] and room[column]:
            counts[row, column] += 1
            need[row] -= 1
            room[column] -= 1
    for row in np.flatnonzero(need):
        order = np.argsort(-preference[row], kind="stable")
        taken = np.diff(np.minimum(np.cumsum(room[order]), need[row]), prepend=0)
        counts[row, order] += taken
        room[order] -= taken
    return counts


def _share(totals: Counts, members: int) -> Counts:
    """Share class totals among members, each count equal up to one, each row sum too.

    As one deals cards: the samples lie in a row, sorted by class, and member m takes every members-th from the m-th.
    """
    edges = np.cumsum([0, *totals])
    taken_before: Counts = -((np.arange(members)[:, None] - edges) // members)
    return np.diff(taken_before, axis=1)


def _proportional(counts: Counts, total: int) -> Counts:
    """Scale each row of counts to sum to `total`, in proportion, by the method of largest remainders."""
    scaled, remainders = np.divmod(counts * total, counts.sum(axis=1, keepdims=True))
    rank = np.argsort(np.argsort(-remainders, axis=1, kind="stable"), axis=1)
    rounded_up: NDArray[np.bool_] = rank < total - scaled.sum(axis=1, keepdims=True)
    return scaled + rounded_up


def _deal_classes(supply: Counts, peers: int, each: int, rng: np.random.Generator) -> NDArray[np.bool_]:
    """Deal `each` distinct classes to every peer, each class equally often up to one: True where a peer holds a class.

    A peer takes the classes with most free places, ties at random. So free places never differ by more than one
    between classes, and never run out early.
    """
    classes = len(supply)
    places, left_over = divmod(peers * each, classes)
    free = np.full(classes, places)
    free[np.lexsort((rng.random(classes), -supply))[:left_over]] += 1
    held = np.zeros((peers, classes), np.bool_)
    for mine in held:
        taken = np.lexsort((rng.random(classes), -free))[:each]
        mine[taken] = True
        free[taken] -= 1
    return held


def _fill_evenly(held: NDArray[np.bool_], supply: Counts, n: int) -> Counts:
    """Give each peer n samples of its classes, equally many of each up to one.

    Where the supply does not reach, the largest number that it does; 0 if not even one of each class.
    """
    each, holders = int(held[0].sum()), held.sum(axis=0)
    even, more = divmod(n, each)
    limit = int((supply[holders > 0] // holders[holders > 0]).min())
    if even > limit:
        even, more = limit, each - 1
    if even == 0:
        return np.zeros(held.shape, np.int64)
    extra = np.zeros_like(held)
    for _ in range(more):
        grown = _one_more_each(held, extra, supply - even * holders)
        if grown is None:
            break
        extra = grown
    return held * np.int64(even) + extra


def _one_more_each(held: NDArray[np.bool_], extra: NDArray[np.bool_], room: Counts) -> NDArray[np.bool_] | None:
    """Give every peer one more extra sample, of a class it holds and has no extra of; None if there is no way.

    Where a peer's classes have no room left, others make room: we search chains of "whoever has an extra of this
    class could have one of that class instead" for one that ends at a class with room. These are the augmenting
    paths of bipartite matching, so a way is found whenever there is one.
    """
    extra, room = extra.copy(), room - extra.sum(axis=0)
    for peer in range(len(held)):
        mine = np.flatnonzero(held[peer] & ~extra[peer])
        queue: list[int] = mine[np.argsort(-room[mine], kind="stable")].tolist()
        takers: dict[int, tuple[int, int | None]] = dict.fromkeys(queue, (peer, None))
        for label in queue:  # grows as we go
            if room[label]:
                break
            others = np.flatnonzero(extra[:, label])
            could_take = held[others] & ~extra[others]
            for instead in np.flatnonzero(could_take.any(axis=0)).tolist():
                if instead not in takers:
                    takers[instead] = (int(others[could_take[:, instead].argmax()]), label)
                    queue.append(instead)
        else:
            return None
        room[label] -= 1
        taker, given_up = takers[label]
        while given_up is not None:
            extra[taker, label], extra[taker, given_up] = True, False
            label = given_up
            taker, given_up = takers[label]
        extra[peer, label] = True
    return extra


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
