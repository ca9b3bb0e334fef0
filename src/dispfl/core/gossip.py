"""The modified gossip average: what a peer makes of the models that it hears."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from dispfl.core.masks import keep_, mask_bits
from dispfl.core.packed import STRETCH, PackedModel, stretches


def gossip_average(weights: Sequence[Tensor], masks: Sequence[Tensor], m_k: Tensor) -> Tensor:
    """Average each weight over the peers that hold it, then keep ours.

    Algorithm 1, line 7, with j over ourselves and our neighbours, in roster order:

        w_k <- (sum_j w_j / sum_j m_j) * m_k

    Weights are zero outside their mask. A weight that nobody holds would be 0/0; it becomes 0. The inputs are not
    modified.
    """
    return average_of((PackedModel.pack(w_j, m_j) for w_j, m_j in zip(weights, masks, strict=True)), m_k)


def average_of(models: Iterable[PackedModel], m_k: Tensor) -> Tensor:
    """`gossip_average` of packed models, stretch by stretch: no model is unpacked whole, and sums stay in the cache."""
    average = _vector(m_k.numel())
    for here, total, holders in _sums(models, m_k.numel()):
        torch.div(total, holders.clamp_(min=1), out=average[here])
        keep_(average[here], mask_bits(m_k[here]))
    return average


def average_of_holders(models: Iterable[PackedModel], fallback: Tensor) -> Tensor:
    """Average each weight over the models that hold it, and take the fallback's where none does."""
    average = _vector(fallback.numel())
    for here, total, holders in _sums(models, fallback.numel()):
        average[here] = torch.where(holders > 0, total.div_(holders.clamp(min=1)), fallback[here])
    return average


def _sums(models: Iterable[PackedModel], size: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """The sum of the weights and the number of holders, in the order given: floating point notices.

    The same memory holds the sums of every stretch: use them before asking for the next.
    """
    parts = [model.parts() for model in models]
    some = min(STRETCH, size)
    sums, counts = torch.empty(some), torch.empty(some, dtype=torch.uint8 if len(parts) < 256 else torch.int32)
    for here in stretches(size):
        length = here.stop - here.start
        total, holders = sums[:length].zero_(), counts[:length].zero_()
        for m_j, where, w_j in map(next, parts):
            if where is None:
                total += w_j
            else:
                total.scatter_add_(0, where, w_j)
            holders += m_j
        yield here, total, holders.float()


def _vector(size: int) -> Tensor:
    """A vector to be filled in, from NumPy, which asks for large pages: first writing to it is several times faster."""
    return torch.from_numpy(np.empty(size, np.float32))
