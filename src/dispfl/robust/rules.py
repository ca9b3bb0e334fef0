"""Robust averages: what our weights become when up to b of the averaged models are Byzantine.

All rules compare what is comparable: weights that both models hold, among those that we keep from
now on. Let x_i be our weights, x_j a neighbour's, and d_j the root mean square of x_j - x_i over
the weights that both hold, so that masks of different overlap compare. Senders are *near* if d_j is
at most tau, the (2b+1)-th largest distance; there is none if at most 2b were received that hold any
of our weights.

    clip    w = x_i + sum_j m_j min(1, tau / d_j) (x_j - x_i) / sum_j m_j
    trim    each weight: the mean of its holders' values without the b largest and the b smallest
    nnm     the same, after each model is replaced by the average of the n - b models nearest to it,
            itself included

With affinities, `clip` takes only a share a_j of each clipped difference, and divides by the same
number of holders: so a Byzantine peer that seems similar has no more influence than without them.

`clip` is ClippedGossip (He, Karimireddy, Jaggi 2022) with the threshold of CS+ (Gaucher,
Dieuleveut, Hendrikx 2025): a difference that is among the 2b largest is scaled down to the next
one. `trim` is the trimmed mean of Yin et al. (2018), and `nnm` the nearest-neighbour mixing of
Allouah et al. (2023) before it. With masks that keep everything they are these rules: `clip` was
compared with its authors' code, `trim` and `nnm` with that of the authors of `nnm` (TrMean and NNM
of the library ByzFL). What masks add is ours:

    regrown weights    we have no value of our own: the mean over near senders that hold the weight,
                       0 without any. A sender's regrown weights are scaled down as a whole, to the
                       (2b+1)-th largest root mean square
    few holders        trim, nnm: a weight that at most 2b models hold is averaged over ourselves
                       and near senders

So a stranger never decides a weight alone. Where the centre is a server's model, it is not averaged
itself. A peer that has no model yet has no centre: it trims.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import inf, nan
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dispfl.core.averaging import AlignedWeights
from dispfl.core.chunks import Chunk
from dispfl.core.masks import keep_, mask_bits, true_indices
from dispfl.core.packed import Mask, PackedModel

Rule = Literal["clip", "trim", "nnm"]
Floats = NDArray[np.float32]

BLOCK = 1 << 14
"""Weights that are compared between all models at once, so that they stay in the cache."""


class Part(AlignedWeights):
    """Some weights of all models, compared with ours."""

    @cached_property
    def retained(self) -> Tensor:
        """The positions of weights that we keep and held before."""
        assert self.keeps is not None
        return true_indices(self.keeps * self.own_chunk[0])

    @cached_property
    def regrown(self) -> Tensor:
        """The positions of weights that we keep and did not hold."""
        if self.keeps is None:
            return torch.empty(0, dtype=torch.int64)
        return true_indices(self.keeps > self.own_chunk[0])

    @cached_property
    def own_weights(self) -> Tensor:
        """Our weights; 0 where we hold none or keep none."""
        _, positions, w_i = self.own_chunk
        if positions is None:
            return w_i
        return self.keep_(torch.zeros(len(self.average)).scatter_(0, positions, w_i))

    @cached_property
    def bits(self) -> Tensor:
        assert self.keeps is not None
        return mask_bits(self.keeps)

    def keep_(self, dense: Tensor) -> Tensor:
        """Set to 0, in place, what we do not keep."""
        if self.keeps is None:
            return dense
        return keep_(dense, self.bits)

    def row(self, chunk: Chunk, fill: Tensor) -> Tensor:
        """Return a model's weights, with `fill`'s where it holds none.

        The next call may overwrite them.
        """
        _, positions, w_j = chunk
        if positions is None:
            return w_j
        return self._row.copy_(fill).scatter_(0, positions, w_j)

    def difference(self, chunk: Chunk) -> Tensor:
        """Return a model's difference to our weights.

        It is 0 where the model holds none, and its own weight where we held none. What we do not
        keep means nothing. Overwritten by the next call.
        """
        row = self.row(chunk, self.own_weights)
        return torch.sub(row, self.own_weights, out=self._difference)

    @cached_property
    def _row(self) -> Tensor:
        return torch.empty_like(self.own_weights)

    @cached_property
    def _difference(self) -> Tensor:
        return torch.empty_like(self.own_weights)


class Block(NamedTuple):
    """Some of the weights that we keep, of several models: all retained, or all regrown."""

    values: Tensor
    """A model a row; nan where it does not hold the weight."""
    own_weights: Tensor
    retained: bool
    """Whether we held them before."""
    complete: bool
    """Whether every model holds them all."""
    store: Callable[[Tensor], object]
    """Takes the average."""


@dataclass(frozen=True)
class Trust:
    """How far the models are from ours, and what follows for each, by row."""

    distances: list[float]
    """Root mean square difference to our weights; infinite without common weights."""
    averaged: list[int]
    """Models that are averaged.

    Not those that hold nothing or have a number whose square is not finite, and not a server's.
    """
    scale: Tensor
    """Factor on the difference to our weights, at most 1; 0 in our own row."""
    near: Tensor
    """1 for near senders, 0 for others and for ourselves."""
    regrown: Tensor
    """Factor on regrown weights: 0 unless the sender is near."""
    nearest: Tensor
    """For averaged models: 1 for each of the n - b that are nearest to the model of a row."""


def robust_average_of(
    models: Sequence[PackedModel],
    own: int,
    mask: Mask,
    rule: Rule,
    b: int,
    *,
    averages_own: bool = True,
    shares: Sequence[float] | None = None,
) -> tuple[Tensor, Trust]:
    """Average models under our mask by a rule that withstands b Byzantine peers.

    `own` is the index of our model, or of the server's, which is then not averaged
    (`averages_own=False`). `shares` says which share of each model's difference `clip` takes, by
    default all of it. Return flat weights of our network, and what was measured about each model.
    """
    network_size = mask.size
    if mask.small is not None:
        network_size = mask.small.size
    average = torch.zeros(network_size)
    masks = [model.mask & mask for model in models]

    def parts() -> Iterator[Part]:
        for weights in mask.align(models, own, average):
            yield Part(*weights)

    trust = robust_average(parts, masks, own, rule, b, averages_own=averages_own, shares=shares)
    return average, trust


def robust_average(
    parts: Callable[[], Iterable[Part]],
    masks: Sequence[Mask],
    own: int,
    rule: Rule,
    b: int,
    *,
    averages_own: bool = True,
    shares: Sequence[float] | None = None,
) -> Trust:
    """Average the models by a rule that withstands b Byzantine peers.

    `own` is the row of our own model, or of the server's. The masks say which of the weights that
    we keep each model holds. Two passes over the models: the first measures distances, the second
    averages.
    """
    counted = [row != own or averages_own for row in range(len(masks))]
    trust = measure_trust(parts(), masks, counted, own, b, pairs=rule == "nnm")
    if rule == "clip" and trust.distances[own] == 0:
        _clip(parts(), trust, shares)
    else:
        _trim(parts(), trust, own, b, mix=rule == "nnm")
    return trust


def measure_trust(
    parts: Iterable[Part],
    masks: Sequence[Mask],
    counted: Sequence[bool],
    own: int,
    b: int,
    *,
    pairs: bool,
) -> Trust:
    """Measure each model's distance to ours.

    With `pairs` also the distances between all models that are averaged.
    """
    counts = torch.zeros(2, len(masks), dtype=torch.float64)  # of regrown and of common weights
    for row, mask in enumerate(masks):
        common = mask.overlap(masks[own])
        counts[0, row] = mask.kept - common
        counts[1, row] = common
    pair_squares = None
    if pairs:
        squares, pair_squares = _pair_squares(parts, len(masks))
    else:
        squares = _squares(parts, len(masks), own)

    is_sender = torch.arange(len(masks)) != own
    magnitude, distance = _root_mean(squares, counts)
    distance[own] = 0.0 if counts[1, own] else inf  # a peer that has just joined has no model
    compared = is_sender & distance.isfinite()
    tau = _threshold(distance[compared], b)
    near = compared & (distance <= tau) & bool(compared.sum() > 2 * b)
    scale = torch.where(distance <= tau, 1.0, tau / distance).where(compared, 0.0)

    holders = is_sender & (counts[0] > 0)
    largest = _threshold(magnitude[holders], b)
    regrown = torch.where(magnitude <= largest, 1.0, largest / magnitude).where(near & holders, 0.0)

    usable = torch.tensor(counted) & squares.isfinite().all(0) & (counts.sum(0) > 0)
    averaged = usable.nonzero().flatten().tolist()
    nearest = torch.eye(len(averaged))
    if pair_squares is not None:
        averaged_masks = [masks[row] for row in averaged]
        nearest = _nearest(averaged_masks, pair_squares[averaged][:, averaged], b)
    return Trust(distance.tolist(), averaged, scale.float(), near.float(), regrown.float(), nearest)


def _nearest(masks: Sequence[Mask], pair_squares: Tensor, b: int) -> Tensor:
    """Return, in each row, 1 for each of the n - b models that are nearest to the row's."""
    n = len(masks)
    counts = torch.zeros(n, n, dtype=torch.int64)
    for i in range(n):
        for j in range(n):
            counts[i, j] = masks[i].overlap(masks[j])
    distances = _root_mean(pair_squares.clamp(min=0), counts).fill_diagonal_(0.0)
    order = distances.argsort(dim=1, stable=True)[:, : max(1, n - b)]
    return torch.zeros(n, n).scatter_(1, order, 1.0)


def trimmed_mean(values: Tensor, holders: Tensor | int, b: int) -> Tensor:
    """Return the mean of each column without the b largest and the b smallest values.

    Yin et al. (2018). Values that are nan are not held. Columns with at most 2b held values have no
    such mean; what is returned for them means nothing. The values are overwritten.
    """
    rows = values.numpy()
    spare = np.empty(values.shape, np.float32)
    # nan counts as the largest, then as the smallest
    for winner, loser in ((np.fmin, np.maximum), (np.fmax, np.minimum)):
        for _ in range(b):
            remaining = _without_first(rows, spare, winner, loser)
            spare = rows
            rows = remaining
    return torch.nansum(torch.from_numpy(rows), 0).div_(holders - 2 * b)


def _without_first(rows: Floats, out: Floats, winner: Any, loser: Any) -> Floats:
    """Drop the first value of each column in some order, in a tournament.

    Those that lose are stored in `out`.
    """
    left = len(rows)
    stored = 0
    while left > 1:
        pairs = left // 2
        upper = rows[:pairs]
        lower = rows[left - pairs : left]
        loser(upper, lower, out=out[stored : stored + pairs])
        left -= pairs
        stored += pairs
        if left > 1:
            winner(upper, lower, out=upper)
    return out[:stored]


def _squares(parts: Iterable[Part], models: int, own: int) -> Tensor:
    """Return the sums of squares of each model's regrown weights, and of its differences."""
    squares = torch.zeros(2, models, dtype=torch.float64)
    for part in parts:
        for j, chunk in enumerate(part.models):
            if j == own:
                continue
            difference = part.keep_(part.difference(chunk))
            new = difference.index_select(0, part.regrown)
            difference.index_fill_(0, part.regrown, 0.0)
            squares[:, j] += torch.stack([torch.dot(new, new), torch.dot(difference, difference)])
    return squares


def _pair_squares(parts: Iterable[Part], models: int) -> tuple[Tensor, Tensor]:
    """Return the same as `_squares`, and the sums for any two models on what both hold."""
    squares = torch.zeros(2, models, dtype=torch.float64)
    pair_squares = torch.zeros(models, models, dtype=torch.float64)
    for block in _blocks(parts, range(models)):
        difference = block.values - block.own_weights
        if block.complete:
            own_squares = torch.linalg.vecdot(difference, difference)[:, None]
            squares[1] += own_squares[:, 0]
        else:
            is_held = (difference == difference).float()  # not nan
            square = difference.nan_to_num_(0.0, inf, -inf).square()
            squares[int(block.retained)] += square.sum(1)
            own_squares = square @ is_held.T
        # |x_i - x_j|^2 = |x_i|^2 + |x_j|^2 - 2 x_i x_j
        pair_squares += own_squares + own_squares.T - 2 * (difference @ difference.T)
    return squares, pair_squares


def _clip(parts: Iterable[Part], trust: Trust, shares: Sequence[float] | None) -> None:
    """Add the clipped differences of the averaged models, or a share of them, to our weights."""
    scales = trust.scale.tolist()
    if shares is not None:
        scales = [scale * share for scale, share in zip(scales, shares, strict=True)]
    near = trust.near.tolist()
    regrown = trust.regrown.tolist()
    count_type = torch.uint8 if len(scales) < 256 else torch.int32
    for part in parts:
        moved = torch.zeros_like(part.own_weights)
        new = torch.zeros(len(part.regrown))
        holders, senders = torch.zeros(2, len(moved), dtype=count_type)
        for j, chunk in enumerate(part.models):
            if j not in trust.averaged:
                continue
            holders += chunk[0]
            if not scales[j]:
                continue
            difference = part.difference(chunk)
            moved.add_(difference, alpha=scales[j])
            if near[j] and len(new):
                senders += chunk[0]
                new.add_(difference.index_select(0, part.regrown), alpha=regrown[j])

        step = part.keep_(moved).div_(holders.clamp_(min=1))
        average = torch.add(part.own_weights, step, out=part.average)
        near_senders = senders.index_select(0, part.regrown).clamp_(min=1)
        average.scatter_(0, part.regrown, new.div_(near_senders))


def _trim(parts: Iterable[Part], trust: Trust, own: int, b: int, *, mix: bool) -> None:
    """Take the trimmed mean of each weight; with `mix`, after nearest-neighbour mixing."""
    rows = trust.averaged
    enough = len(rows) > 2 * b
    for block in _blocks(parts, rows):
        values = block.values
        holders = torch.tensor(len(rows))
        few = torch.empty(0, dtype=torch.int64)
        if not (block.complete and enough):
            missing = np.isnan(values.numpy()).view(np.uint8)
            holders = len(rows) - torch.from_numpy(np.add.reduce(missing, dtype=np.int16))
            few = true_indices(holders <= 2 * b)
        held_by_few = values.index_select(1, few)
        if mix and enough:
            values = _mixed(values, trust.nearest, block.complete)
            holders = torch.tensor(len(rows))

        if enough:
            average = trimmed_mean(values, holders, b)
        else:
            average = torch.empty(len(block.own_weights))
        if len(few):
            own_weights = block.own_weights[few]
            average[few] = _near_mean(held_by_few, own_weights, block.retained, trust, own)
        block.store(average)


def _mixed(values: Tensor, nearest: Tensor, complete: bool) -> Tensor:
    """Return, for each model, the average of the models that are nearest to it.

    It has a value for each weight that more than b models hold.
    """
    if complete:
        return (nearest / nearest.sum(1, keepdim=True)) @ values
    is_held = (values == values).float()  # not nan
    return (nearest @ values.nan_to_num(0.0)).div_((nearest @ is_held).clamp_(min=1))


def _near_mean(
    values: Tensor, own_weights: Tensor, retained: bool, trust: Trust, own: int
) -> Tensor:
    """Return the mean over ourselves and near senders that hold a weight.

    Without any it is our own value, which is 0 where we do not hold it.
    """
    is_held = (values == values).float()  # not nan
    near = trust.near[trust.averaged]
    senders = near @ is_held
    values = values.nan_to_num(0.0)
    if not retained:
        return (trust.regrown[trust.averaged] @ values) / senders.clamp_(min=1)
    own_share = float(own in trust.averaged)
    holders = own_share + senders
    mean = (own_share * own_weights + near @ values) / holders
    return torch.where(holders > 0, mean, own_weights)


def _blocks(parts: Iterable[Part], rows: Sequence[int]) -> Iterator[Block]:
    """Yield the weights that we keep, of several models, in blocks."""
    for part in parts:
        if part.keeps is None:
            yield from _complete_blocks(part, rows)
            continue
        positions = torch.cat([part.retained, part.regrown])
        retained = len(part.retained)
        own_weights = part.own_weights.index_select(0, positions)
        unheld = torch.full_like(part.own_weights, nan)
        memory = torch.empty(1 + max(rows, default=-1), len(positions))
        for chunk, to in zip(part.models, memory, strict=False):
            torch.index_select(part.row(chunk, unheld), 0, positions, out=to)

        for begin, end in ((0, retained), (retained, len(positions))):
            for where in _block_slices(begin, end):
                store = partial(part.average.scatter_, 0, positions[where])
                values = _stack(memory, rows, where)
                yield Block(values, own_weights[where], begin == 0, False, store)


def _complete_blocks(part: Part, rows: Sequence[int]) -> Iterator[Block]:
    """Yield weights that we and all models hold, in blocks."""
    weights = [w_j for _, _, w_j in part.models]
    for where in _block_slices(0, len(part.own_weights)):
        values = _stack(weights, rows, where)
        yield Block(values, part.own_weights[where], True, True, part.average[where].copy_)


def _stack(weights: Sequence[Tensor] | Tensor, rows: Sequence[int], where: slice) -> Tensor:
    if not rows:
        return torch.empty(0, where.stop - where.start)
    return torch.stack([weights[row][where] for row in rows])


def _block_slices(begin: int, end: int) -> Iterator[slice]:
    return (slice(start, min(start + BLOCK, end)) for start in range(begin, end, BLOCK))


def _threshold(distances: Tensor, b: int) -> float:
    """Return the (2b+1)-th largest distance; 0 if there are at most 2b."""
    if len(distances) <= 2 * b:
        return 0.0
    return float(distances.sort(descending=True).values[2 * b])


def _root_mean(squares: Tensor, counts: Tensor) -> Tensor:
    """Return the root of the mean square.

    It is infinite where nothing was counted or a number is not finite.
    """
    root = (squares / counts).sqrt()
    return torch.where((counts > 0) & root.isfinite(), root, inf)
