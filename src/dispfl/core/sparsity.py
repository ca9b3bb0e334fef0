"""Sparsity: the density of each layer (ERK), and Algorithm 2, which prunes and regrows weights."""

from collections.abc import Mapping, Sequence
from math import ceil, cos, pi, prod
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from dispfl.core.masks import true_indices

if TYPE_CHECKING:
    from dispfl.core.layout import Layout


def erk_densities(shapes: Mapping[str, Sequence[int]], density: float) -> dict[str, float]:
    """Return the Erdos-Renyi-Kernel densities: large layers sparser, small layers denser.

    The network as a whole has `density`. The paper, section "Algorithm": masks are initialized by
    ERK. A layer's density is proportional to its

        raw = sum(shape) / prod(shape)

    with one factor eps for all layers, so that the kept weights add up: sum(eps * raw * size) =
    density * total. A layer that would exceed 1 becomes dense, leaves the sum, and eps is solved
    again for the rest. Deviation 1: all parameters take part, biases and norms included
    (docs/deviations.md).
    """
    budget = density * sum(map(prod, shapes.values()))
    sparse = dict(shapes)
    dense_size = 0
    while True:
        raw_size = sum(_raw_density(shape) * prod(shape) for shape in sparse.values())
        eps = (budget - dense_size) / raw_size if raw_size else 0.0

        densities = dict.fromkeys(shapes, 1.0)
        too_dense = []
        for name, shape in sparse.items():
            densities[name] = eps * _raw_density(shape)
            if densities[name] > 1.0:
                too_dense.append(name)
        if not too_dense:
            return densities
        for name in too_dense:
            dense_size += prod(sparse.pop(name))


def _raw_density(shape: Sequence[int]) -> float:
    size = prod(shape)
    if not shape or not size:
        return 1.0
    return sum(shape) / size


def uniform_densities(shapes: Mapping[str, Sequence[int]], density: float) -> dict[str, float]:
    """Return the same density for every layer."""
    return dict.fromkeys(shapes, density)


def prune_rate(t: float, T: int, alpha_0: float) -> float:
    """Return the share of kept weights replaced in round t, cosine-annealed from alpha_0 to 0.

    Algorithm 2, line 1:  alpha_t = alpha_0 / 2 * (1 + cos(pi t / T))

    Deviation 4: the paper does not give alpha_0 (docs/deviations.md).
    """
    return alpha_0 / 2 * (1 + cos(pi * t / T))


def prune_and_regrow(
    weights: Tensor, mask: Tensor, grad: Tensor, rate: float, layout: "Layout"
) -> Tensor:
    """Return the next mask: in each layer, prune the smallest kept weights and regrow as many.

    Algorithm 2, lines 3-6. `grad` is the dense gradient, whose magnitude is the score (RigL);
    random numbers in its place give random regrowth (SET). ceil(rate * kept) weights are replaced,
    so a layer's kept count never changes. Deviation 3: every position that is empty after pruning
    may regrow, just-pruned ones included. Ties go to the lower index. The inputs are not modified.
    """
    next_mask = mask.clone()
    for where in layout.slices:
        m = next_mask[where]
        kept_count = int(m.sum())
        count = min(kept_count, ceil(rate * kept_count))
        if count == 0 or kept_count == m.numel():  # a dense layer would only regrow what it pruned
            continue
        held_positions = true_indices(m)
        magnitudes = weights[where][held_positions].abs()
        m[held_positions[smallest(magnitudes, count)]] = False

        empty = true_indices(~m)
        growth_scores = grad[where][empty].abs()
        m[empty[smallest(-growth_scores, count)]] = True
    return next_mask


def smallest(scores: Tensor, count: int) -> Tensor:
    """Return the indices of the `count` smallest scores, ties to the lower index."""
    threshold = float(np.partition(scores.numpy(), count - 1)[count - 1])  # faster than a sort
    below = true_indices(scores < threshold)
    ties = true_indices(scores == threshold)
    return torch.cat([below, ties[: count - below.numel()]])
