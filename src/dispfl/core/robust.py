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
and `nnm` the nearest-neighbour mixing of Allouah et al. (2023) before it; these two are our reading, not compared with
the papers' text, while `clip` was compared with its authors' code. With masks that keep everything they are
these rules. What masks add is ours:

    regrown weights    we have no value of our own: the mean over near senders that hold the weight, 0 without any. A
                       sender's regrown weights are scaled down as a whole, to the (2b+1)-th largest root mean square
    few holders        trim, nnm: a weight that at most 2b models hold is averaged over ourselves and near senders

So a stranger never decides a weight alone. Where the centre is a server's model, it is not averaged itself. A peer that
has no model yet has no centre: it trims.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Rule = Literal["clip", "trim", "nnm"]

MISSING = 3e38
"""Stands for a weight that a model does not hold where a number is needed: larger than any weight that is averaged."""
BLOCK = 1 << 14
"""Weights that are averaged at once: few enough that those of all models stay in the processor's cache."""


class Columns(NamedTuple):
    """The same weights of all models, a model a row: either weights that we hold, or weights that we do not hold."""

    values: Tensor
    """0 where a model does not hold the weight."""
    held: Tensor
    """1 where a model holds the weight, and 0 elsewhere."""
    ours: bool
    """Whether we hold them."""
    store: Callable[[Tensor], object]
    """Takes the average of these weights."""


@dataclass(frozen=True)
class Trust:
    """How far the models are from ours, and what follows for each, by row."""

    distances: list[float]
    """Root mean square difference to our weights; infinite without common weights."""
    broken: list[int]
    """Models with a number that is not finite, or whose square is not; they are ignored."""
    scale: Tensor
    """Factor on the difference to our weights, at most 1; 0 in our own row."""
    near: Tensor
    """1 for near senders, 0 for others and for ourselves."""
    regrown: Tensor
    """Factor on regrown weights: 0 unless the sender is near."""
    nearest: Tensor
    """Row j: 1 for each of the n - b averaged models that are nearest to model j; 0 if j is not averaged."""


def robust_average(
    columns: Callable[[], Iterable[Columns]], models: int, own: int, rule: Rule, b: int, *, averages_own: bool = True
) -> Trust:
    """Average the models by a rule that withstands b lies; `own` is the row of our own model, or of the server's.

    Two passes over the models: the first measures distances, the second averages.
    """
    counted = torch.ones(models)
    counted[own] = float(averages_own)
    trust = measure_trust(columns(), counted, own, b, pairs=rule == "nnm")
    for part in columns():
        for row in trust.broken:  # nan and overflow would pass through a factor of 0
            part.values[row], part.held[row] = 0.0, 0.0
        if rule == "clip" and trust.distances[own] == 0:
            part.store(_clipped(part, trust, own, counted))
        else:
            part.store(_trimmed(part, trust, own, counted, b, mix=rule == "nnm"))
    return trust


def measure_trust(columns: Iterable[Columns], counted: Tensor, own: int, b: int, *, pairs: bool = False) -> Trust:
    """Measure each model's distance to ours, and with `pairs` the distances between the models that are averaged."""
    models = len(counted)
    squares, common = torch.zeros(2, 2, models, dtype=torch.float64)  # of weights that are not ours, that are ours
    pair_squares, pair_common = torch.zeros(2, models, models, dtype=torch.float64)
    for part in columns:
        difference = (part.values - part.values[own]).mul_(part.held) if part.ours else part.values
        squares[int(part.ours)] += torch.linalg.vecdot(difference, difference)
        common[int(part.ours)] += part.held.sum(1)
        if pairs:
            square = difference.square()
            once = square @ part.held.T
            pair_squares += once + once.T - 2 * (difference @ difference.T)
            pair_common += part.held @ part.held.T
    others = torch.arange(models) != own
    magnitude, distance = _root_mean(squares, common)
    distance[own] = 0.0 if common[1, own] else inf  # a peer that has just joined has no model
    tau = _threshold(distance[others], b)
    near = others & distance.isfinite() & (distance <= tau) & bool(others.sum() > 2 * b)
    scale = torch.where(distance <= tau, 1.0, tau / distance).where(others & distance.isfinite(), 0.0)
    holders = others & (common[0] > 0)
    largest = _threshold(magnitude[holders], b)
    regrown = torch.where(magnitude <= largest, 1.0, largest / magnitude).where(near & holders, 0.0)
    broken = (~squares.isfinite()).any(0)
    averaged = counted.bool() & ~broken & (common.sum(0) > 0)
    pair_distance = _root_mean(pair_squares.clamp(min=0), pair_common).fill_diagonal_(0.0)
    pair_distance[:, ~averaged] = inf
    order = pair_distance.argsort(dim=1, stable=True)[:, : max(1, int(averaged.sum()) - b)]
    nearest = torch.zeros(models, models).scatter_(1, order, 1.0) * averaged[:, None]
    unusable = broken.nonzero().flatten().tolist()
    return Trust(distance.tolist(), unusable, scale.float(), near.float(), regrown.float(), nearest)


def trimmed_mean(values: Tensor, held: Tensor, b: int) -> Tensor:
    """Return the mean of each column's held values without the b largest and the b smallest (Yin et al. 2018).

    Columns with at most 2b held values have no such mean; what is returned for them means nothing.

    With `low` and `high` the smallest and the largest value that stay, and all c values cut to [low, high]:

        (sum_j cut(x_j) - b low - b high) / (c - 2b)

    which a value of any size leaves exact, while subtracting the largest from a sum would not.
    """
    missing = 1 - held
    upper = torch.add(values, missing, alpha=MISSING)
    low = _kth_smallest(upper, b + 1)
    high = -_kth_smallest(torch.sub(missing.mul_(MISSING), values), b + 1)
    count, total, cut = held.sum(0), torch.zeros_like(low), torch.empty_like(low)
    for row in upper:
        torch.minimum(row, high, out=cut)  # a missing value becomes `high`
        total += torch.maximum(cut, low, out=cut)
    total -= (len(values) - count + b) * high + b * low
    return total.div_(count - 2 * b)


def _clipped(part: Columns, trust: Trust, own: int, counted: Tensor) -> Tensor:
    if not part.ours:
        return _near_mean(part, trust, own, 0.0)
    ours, holders = part.values[own], counted @ part.held
    moved = trust.scale @ part.values - (trust.scale @ part.held) * ours
    return ours + moved / holders.clamp_(min=1)


def _trimmed(part: Columns, trust: Trust, own: int, counted: Tensor, b: int, *, mix: bool) -> Tensor:
    values, held, holders = part.values, part.held, counted @ part.held
    fallback = _near_mean(part, trust, own, float(counted[own]))
    if mix:
        mixed = trust.nearest @ held
        values, held = (trust.nearest @ values) / mixed.clamp(min=1), (mixed > 0).float()
    elif not counted[own]:
        values, held = (torch.cat([rows[:own], rows[own + 1 :]]) for rows in (values, held))
    few = (holders <= 2 * b).nonzero().squeeze(1)
    return trimmed_mean(values, held, b).index_copy_(0, few, fallback[few])


def _near_mean(part: Columns, trust: Trust, own: int, own_share: float) -> Tensor:
    """Return the mean over ourselves and near senders that hold a weight; our own value without any, which is 0 where
    we do not hold it.
    """
    senders = trust.near @ part.held
    if not part.ours:
        return (trust.regrown @ part.values) / senders.clamp_(min=1)
    ours = part.values[own]
    mean = (own_share * ours + trust.near @ part.values) / (own_share + senders)
    return torch.where(own_share + senders > 0, mean, ours)


def _kth_smallest(rows: Tensor, k: int) -> Tensor:
    """Return the k-th smallest value of each column: each row is sorted into the k smallest so far."""
    *kept, spare, rest = torch.full((k + 2, rows.shape[1]), inf).unbind()
    for row in rows:
        for i in range(k - 1):
            torch.minimum(kept[i], row, out=spare)
            row = torch.maximum(kept[i], row, out=rest)
            kept[i], spare = spare, kept[i]
        torch.minimum(kept[-1], row, out=kept[-1])
    return kept[-1]


def _threshold(distances: Tensor, b: int) -> float:
    """Return the (2b+1)-th largest distance; 0 if there are at most 2b."""
    return float(distances.sort(descending=True).values[2 * b]) if len(distances) > 2 * b else 0.0


def _root_mean(squares: Tensor, counts: Tensor) -> Tensor:
    """Return the root of the mean square; infinite where nothing was counted or a number is not finite."""
    found = (squares / counts).sqrt()
    return torch.where((counts > 0) & found.isfinite(), found, inf)
