"""Robust averages: what our weights become when up to b of the models that we average are lies.

All rules compare what is comparable: weights that both models hold, among those that we keep from now on. Let x_i be
our weights, x_j a neighbour's, and d_j the root mean square of x_j - x_i over the weights that both hold, so that masks
of different overlap compare. Senders are *near* if d_j is at most tau, the (2b+1)-th largest distance; there is none if
at most 2b were heard.

    clip    w = x_i + sum_j m_j min(1, tau / d_j) (x_j - x_i) / sum_j m_j
    trim    each weight: the mean of its holders' values without the b largest and the b smallest
    nnm     the same, after each model is replaced by the average of the n - b models nearest to it (itself included)

`clip` is ClippedGossip (He, Karimireddy, Jaggi 2022) with the threshold of CS+ (Gaucher, Dieuleveut, Hendrikx 2025): a
difference that is among the 2b largest is scaled down to the next one. `trim` is the trimmed mean of Yin et al. (2018),
and `nnm` the nearest-neighbour mixing of Allouah et al. (2023) before it. With masks that keep everything they are
these rules: `clip` was compared with its authors' code, `trim` and `nnm` with that of the authors of `nnm` (TrMean and
NNM of the library ByzFL). What masks add is ours:

    regrown weights    we have no value of our own: the mean over near senders that hold the weight, 0 without any. A
                       sender's regrown weights are scaled down as a whole, to the (2b+1)-th largest root mean square
    few holders        trim, nnm: a weight that at most 2b models hold is averaged over ourselves and near senders

So a stranger never decides a weight alone. Where the centre is a server's model, it is not averaged itself. A peer that
has no model yet has no centre: it trims.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import repeat
from math import inf, nan
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dispfl.core.masks import true_indices
from dispfl.core.packed import Chunk, PackedMask

Rule = Literal["clip", "trim", "nnm"]
Floats = NDArray[np.float32]

BLOCK = 1 << 14
"""Weights that are compared between all models at once: few enough that they stay in the processor's cache."""


@dataclass(frozen=True)
class Part:
    """Some weights of all models."""

    ours: Chunk
    """Our model."""
    keeps: Tensor | None
    """Which of the weights we keep from now on; others are ignored. None: all, and every model holds them all."""
    models: Iterable[Chunk]
    """All models, ours among them; each is looked at once."""
    average: Tensor
    """Takes the average."""

    @cached_property
    def mine(self) -> Tensor:
        """The positions of weights that we keep and held."""
        assert self.keeps is not None
        return true_indices(self.keeps * self.ours[0])

    @cached_property
    def kept(self) -> Tensor:
        """The positions of all that we keep: of those that we held, then of the regrown ones."""
        assert self.keeps is not None
        return torch.cat([self.mine, true_indices(self.keeps > self.ours[0])])

    @cached_property
    def dense(self) -> Tensor:
        """Our weights; 0 where we hold none."""
        _, where, w_i = self.ours
        return w_i if where is None else torch.zeros(len(self.average)).scatter_(0, where, w_i)

    @cached_property
    def own(self) -> Tensor:
        """Our weights among those that we keep, in their order; 0 for regrown ones."""
        return self.of_kept(self.dense)

    @cached_property
    def held(self) -> int:
        """How many of those we held."""
        return len(self.average) if self.keeps is None else len(self.mine)

    def of_kept(self, dense: Tensor) -> Tensor:
        """Return the entries of the weights that we keep, in their order."""
        return dense if self.keeps is None else dense.index_select(0, self.kept)

    def rows(self, fill: Tensor, out: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor | int]]:
        """Yield each model's values of the weights that we keep, in their order, and all that it holds (1: everything).

        They are stored in `out`, with `fill`'s where the model does not hold a weight; but if every model holds all,
        they are the models' own.
        """
        if self.keeps is None:
            yield from ((w_j, 1) for _, _, w_j in self.models)
            return
        dense = torch.empty_like(fill)
        for to, (m_j, where, w_j) in zip(out, self.models, strict=False):
            whole = w_j if where is None else dense.copy_(fill).scatter_(0, where, w_j)
            yield torch.index_select(whole, 0, self.kept, out=to), m_j

    def store(self, here: slice, average: Tensor) -> None:
        """Store the average of some of the weights that we keep."""
        if self.keeps is None:
            self.average[here] = average
        else:
            self.average.scatter_(0, self.kept[here], average)


class Block(NamedTuple):
    """Some of the weights that we keep, of some models: either weights that we held, or regrown ones."""

    values: Tensor
    """A model a row; nan where it does not hold the weight."""
    own: Tensor
    mine: bool
    """Whether we held them."""
    complete: bool
    """Whether every model holds them all."""
    store: Callable[[Tensor], None]
    """Takes the average."""


@dataclass(frozen=True)
class Trust:
    """How far the models are from ours, and what follows for each, by row."""

    distances: list[float]
    """Root mean square difference to our weights; infinite without common weights."""
    averaged: list[int]
    """Models that are averaged: those that hold anything, without those with a number that is not finite, or whose
    square is not, and without a server's.
    """
    scale: Tensor
    """Factor on the difference to our weights, at most 1; 0 in our own row."""
    near: Tensor
    """1 for near senders, 0 for others and for ourselves."""
    regrown: Tensor
    """Factor on regrown weights: 0 unless the sender is near."""
    nearest: Tensor
    """For averaged models: 1 for each of the n - b that are nearest to the model of a row."""


def robust_average(
    parts: Callable[[], Iterable[Part]],
    masks: Sequence[PackedMask],
    own: int,
    rule: Rule,
    b: int,
    *,
    averages_own: bool = True,
) -> Trust:
    """Average the models by a rule that withstands b lies; `own` is the row of our own model, or of the server's.

    The masks say which of the weights that we keep each model holds. Two passes over the models: the first measures
    distances, the second averages.
    """
    counted = [row != own or averages_own for row in range(len(masks))]
    trust = measure_trust(parts(), masks, counted, own, b, pairs=rule == "nnm")
    if rule == "clip" and trust.distances[own] == 0:
        _clip(parts(), trust)
    else:
        _trim(parts(), trust, own, b, mix=rule == "nnm")
    return trust


def measure_trust(
    parts: Iterable[Part], masks: Sequence[PackedMask], counted: Sequence[bool], own: int, b: int, *, pairs: bool
) -> Trust:
    """Measure each model's distance to ours, and with `pairs` the distances between all models that are averaged."""
    overlap = [mask.overlap(masks[own]) for mask in masks]
    common = torch.tensor([[m.kept - n for m, n in zip(masks, overlap, strict=True)], overlap], dtype=torch.float64)
    squares, pair_squares = (_pair_squares if pairs else _squares)(parts, len(masks))
    others = torch.arange(len(masks)) != own
    magnitude, distance = _root_mean(squares, common)
    distance[own] = 0.0 if common[1, own] else inf  # a peer that has just joined has no model
    tau = _threshold(distance[others], b)
    near = others & distance.isfinite() & (distance <= tau) & bool(others.sum() > 2 * b)
    scale = torch.where(distance <= tau, 1.0, tau / distance).where(others & distance.isfinite(), 0.0)
    holders = others & (common[0] > 0)
    largest = _threshold(magnitude[holders], b)
    regrown = torch.where(magnitude <= largest, 1.0, largest / magnitude).where(near & holders, 0.0)
    usable = torch.tensor(counted) & squares.isfinite().all(0) & (common.sum(0) > 0)
    averaged = usable.nonzero().flatten().tolist()
    nearest = torch.eye(len(averaged))
    if pairs:
        counts = torch.tensor([[masks[i].overlap(masks[j]) for j in averaged] for i in averaged]).view(nearest.shape)
        found = _root_mean(pair_squares[averaged][:, averaged].clamp(min=0), counts).fill_diagonal_(0.0)
        order = found.argsort(dim=1, stable=True)[:, : max(1, len(averaged) - b)]
        nearest = torch.zeros(nearest.shape).scatter_(1, order, 1.0)
    return Trust(distance.tolist(), averaged, scale.float(), near.float(), regrown.float(), nearest)


def trimmed_mean(values: Tensor, holders: Tensor | int, b: int) -> Tensor:
    """Return the mean of each column without the b largest and the b smallest values (Yin et al. 2018).

    Values that are nan are not held. Columns with at most 2b held values have no such mean; what is returned for them
    means nothing. The values are overwritten.
    """
    rows, spare = values.numpy(), np.empty(values.shape, np.float32)
    for first, other in ((np.fmin, np.maximum), (np.fmax, np.minimum)):  # nan counts as the largest, then the smallest
        for _ in range(b):
            rows, spare = _without_first(rows, spare, first, other), rows
    return torch.nansum(torch.from_numpy(rows), 0).div_(holders - 2 * b)


def _without_first(rows: Floats, out: Floats, first: Any, other: Any) -> Floats:
    """Drop the first value of each column in some order, in a tournament: those that lose are stored in `out`."""
    left, stored = len(rows), 0
    while left > 1:
        pairs = left // 2
        one, two = rows[:pairs], rows[left - pairs : left]
        other(one, two, out=out[stored : stored + pairs])
        left, stored = left - pairs, stored + pairs
        if left > 1:
            first(one, two, out=one)
    return out[:stored]


def _squares(parts: Iterable[Part], models: int) -> tuple[Tensor, Tensor]:
    """Return the sums of the squares of each model's regrown weights, and of its differences to our weights."""
    squares = torch.zeros(2, models, dtype=torch.float64)
    for part in parts:
        ours, memory = part.own[: part.held], torch.empty(len(part.own))
        difference = torch.empty(part.held)
        for j, (row, _) in enumerate(part.rows(part.dense, repeat(memory))):  # no difference where it holds nothing
            torch.sub(row[: part.held], ours, out=difference)
            new = row[part.held :]
            squares[:, j] += torch.stack([torch.dot(new, new), torch.dot(difference, difference)])
    return squares, torch.empty(0)


def _pair_squares(parts: Iterable[Part], models: int) -> tuple[Tensor, Tensor]:
    """Return the same, and the sums of the squares of the differences between any two models on what both hold."""
    squares, pair_squares = (torch.zeros(n, models, dtype=torch.float64) for n in (2, models))
    for block in _blocks(parts, range(models)):
        difference = block.values - block.own
        if block.complete:
            once = torch.linalg.vecdot(difference, difference)[:, None]
            squares[1] += once[:, 0]
        else:
            held = (difference == difference).float()  # not nan
            square = difference.nan_to_num_(0.0, inf, -inf).square()
            squares[int(block.mine)] += square.sum(1)
            once = square @ held.T
        pair_squares += once + once.T - 2 * (difference @ difference.T)
    return squares, pair_squares


def _clip(parts: Iterable[Part], trust: Trust) -> None:
    scales, near, regrown = (factors.tolist() for factors in (trust.scale, trust.near, trust.regrown))
    for part in parts:
        ours, memory = part.own[: part.held], torch.empty(len(part.own))
        (moved, difference), new = torch.zeros(2, part.held), torch.zeros(len(part.own) - part.held)
        holders, senders = torch.zeros(2, len(part.dense), dtype=torch.uint8 if len(scales) < 256 else torch.int32)
        for j, (row, m_j) in enumerate(part.rows(part.dense, repeat(memory))):
            if j not in trust.averaged:
                continue
            holders += m_j
            if scales[j]:
                moved.add_(torch.sub(row[: part.held], ours, out=difference), alpha=scales[j])
            if near[j] and len(new):
                senders += m_j
                new.add_(row[part.held :], alpha=regrown[j])
        moved.div_(part.of_kept(holders)[: part.held].clamp_(min=1)).add_(ours)
        new.div_(part.of_kept(senders)[part.held :].clamp_(min=1))
        part.store(slice(None), torch.cat([moved, new]) if len(new) else moved)


def _trim(parts: Iterable[Part], trust: Trust, own: int, b: int, *, mix: bool) -> None:
    rows, enough = trust.averaged, len(trust.averaged) > 2 * b
    for block in _blocks(parts, rows):
        values, holders, few = block.values, torch.tensor(len(rows)), torch.empty(0, dtype=torch.int64)
        if not (block.complete and enough):
            missing = np.isnan(values.numpy()).view(np.uint8)
            holders = len(rows) - torch.from_numpy(np.add.reduce(missing, dtype=np.int16))
            few = true_indices(holders <= 2 * b)
        of_few = values.index_select(1, few)
        if mix and enough:
            values, holders = _mixed(values, trust.nearest, block.complete), torch.tensor(len(rows))
        average = trimmed_mean(values, holders, b) if enough else torch.empty(len(block.own))
        if len(few):
            average[few] = _near_mean(of_few, block.own[few], block.mine, trust, own)
        block.store(average)


def _mixed(values: Tensor, nearest: Tensor, complete: bool) -> Tensor:
    """Return the average of the models that are nearest to each. Of a weight that more than b hold it has a value."""
    if complete:
        return (nearest / nearest.sum(1, keepdim=True)) @ values
    held = (values == values).float()  # not nan
    return (nearest @ values.nan_to_num(0.0)).div_((nearest @ held).clamp_(min=1))


def _near_mean(values: Tensor, ours: Tensor, mine: bool, trust: Trust, own: int) -> Tensor:
    """Return the mean over ourselves and near senders that hold a weight; our own value without any, which is 0 where
    we do not hold it.
    """
    held, near = (values == values).float(), trust.near[trust.averaged]
    values, senders = values.nan_to_num(0.0), near @ held
    if not mine:
        return (trust.regrown[trust.averaged] @ values) / senders.clamp_(min=1)
    share = float(own in trust.averaged)
    return torch.where(share + senders > 0, (share * ours + near @ values) / (share + senders), ours)


def _blocks(parts: Iterable[Part], rows: Sequence[int]) -> Iterator[Block]:
    """Yield the weights that we keep, of some models, in blocks."""
    for part in parts:
        complete = part.keeps is None
        memory = torch.empty(0 if complete else max(rows, default=0) + 1, len(part.own))
        values = [row for row, _ in part.rows(torch.full_like(part.dense, nan), memory)]
        for begin, end in ((0, part.held), (part.held, len(part.own))):
            for start in range(begin, end, BLOCK):
                here = slice(start, min(start + BLOCK, end))
                some = torch.stack([values[row][here] for row in rows]) if rows else torch.empty(0, here.stop - start)
                yield Block(some, part.own[here], begin == 0, complete, partial(part.store, here))


def _threshold(distances: Tensor, b: int) -> float:
    """Return the (2b+1)-th largest distance; 0 if there are at most 2b."""
    return float(distances.sort(descending=True).values[2 * b]) if len(distances) > 2 * b else 0.0


def _root_mean(squares: Tensor, counts: Tensor) -> Tensor:
    """Return the root of the mean square; infinite where nothing was counted or a number is not finite."""
    found = (squares / counts).sqrt()
    return torch.where((counts > 0) & found.isfinite(), found, inf)
