"""Algorithm 2, local mask searching: forget the smallest weights, regrow where the gradient is largest."""

from math import ceil, cos, pi

import numpy as np
import torch
from torch import Tensor

from dispfl.core.layout import Layout
from dispfl.core.masks import places


def prune_rate(t: int, T: int, alpha_0: float) -> float:
    """The share of kept weights replaced at round t, cosine-annealed from alpha_0 to nothing.

    Algorithm 2, line 1:  alpha_t = alpha_0 / 2 * (1 + cos(pi t / T))
    """
    return alpha_0 / 2 * (1 + cos(pi * t / T))


def prune_and_regrow(weights: Tensor, mask: Tensor, grad: Tensor, rate: float, layout: Layout) -> Tensor:
    """The next mask: in each layer, prune the smallest kept weights and regrow as many by growth score.

    Algorithm 2, lines 3-6. `grad` is the dense gradient, whose magnitude is the score (RigL); random numbers in its
    place give random regrowth (SET). ceil(rate * kept) weights are replaced, so a layer's kept count never changes.
    Deviation 3: every position that is empty after pruning may regrow, just-pruned ones included. Ties go to the
    lower index. The inputs are not modified.
    """
    next_mask = mask.clone()
    for where in layout.slices:
        m = next_mask[where]
        kept = int(m.sum())
        count = min(kept, ceil(rate * kept))
        if count == 0 or kept == m.numel():  # a dense layer would only regrow what it pruned
            continue
        held = places(m)
        m[held[smallest(weights[where][held].abs(), count)]] = False
        empty = places(~m)
        m[empty[smallest(-grad[where][empty].abs(), count)]] = True
    return next_mask


def smallest(scores: Tensor, count: int) -> Tensor:
    """The indices of the `count` smallest scores, ties to the lower index: a selection, not a sort."""
    threshold = float(np.partition(scores.numpy(), count - 1)[count - 1])
    below, ties = places(scores < threshold), places(scores == threshold)
    return torch.cat([below, ties[: count - below.numel()]])
