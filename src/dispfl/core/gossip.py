"""The modified gossip average: what a peer makes of the models that it hears."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from dispfl.core.masks import keep_, mask_bits


def gossip_average(weights: Sequence[Tensor], masks: Sequence[Tensor], m_k: Tensor) -> Tensor:
    """Average each weight over the peers that hold it, then keep ours.

    Algorithm 1, line 7, with j over ourselves and our neighbours, in roster order:

        w_k <- (sum_j w_j / sum_j m_j) * m_k

    Weights are zero outside their mask. A weight that nobody holds would be 0/0; it becomes 0. The inputs are not
    modified.
    """
    return average_of(zip(weights, masks, strict=True), m_k)


def average_of(models: Iterable[tuple[Tensor, Tensor]], m_k: Tensor) -> Tensor:
    """`gossip_average` over (weights, mask) pairs that come one at a time, so only one is unpacked at once."""
    total, holders = _sums(models, m_k.shape)
    return keep_(total.div_(holders.clamp_(min=1)), mask_bits(m_k))


def average_of_holders(models: Iterable[tuple[Tensor, Tensor]], fallback: Tensor) -> Tensor:
    """Average each weight over the models that hold it, and take the fallback's where none does."""
    total, holders = _sums(models, fallback.shape)
    return torch.where(holders > 0, total.div_(holders.clamp(min=1)), fallback)


def _sums(models: Iterable[tuple[Tensor, Tensor]], shape: torch.Size) -> tuple[Tensor, Tensor]:
    """The sum of the weights and the number of holders, in the order given: floating point notices."""
    total, holders = torch.zeros(shape), torch.zeros(shape)
    for w_j, m_j in models:
        total += w_j
        holders += m_j
    return total, holders
