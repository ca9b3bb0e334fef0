"""The modified gossip average of Algorithm 1, and its robust counterparts."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dispfl.core.packed import CHUNK, PackedMask, PackedModel, chunk_slices
from dispfl.robust.rules import Part, Rule, Trust, robust_average

Floats = NDArray[np.float32]
Counts = NDArray[np.uint8] | NDArray[np.int32]


def gossip_average(weights: Sequence[Tensor], masks: Sequence[Tensor], m_k: Tensor) -> Tensor:
    """Average each weight over the peers that hold it, then apply our own mask.

    Algorithm 1, line 7, with j over ourselves and our neighbours, in roster order:

        w_k <- (sum_j w_j / sum_j m_j) * m_k

    Weights are zero outside their mask. A weight that no peer holds would be 0/0; it becomes 0. The
    inputs are not modified.
    """
    return average_of(
        (PackedModel.pack(w_j, m_j) for w_j, m_j in zip(weights, masks, strict=True)), m_k
    )


def average_of(models: Iterable[PackedModel], m_k: Tensor) -> Tensor:
    """Compute `gossip_average` of packed models in chunks that fit the cache; no model is unpacked
    whole."""
    average, ours = (
        np.empty(m_k.numel(), np.float32),
        -m_k.numpy().view(np.int8),
    )  # all ones where we keep a weight
    for here, total, holders in _sums(models, m_k.numel()):
        np.divide(total, np.maximum(holders, 1), out=average[here], dtype=np.float32)
        bits = average[here].view(np.int32)
        np.bitwise_and(bits, ours[here], out=bits)  # as `keep_`: +0.0 elsewhere, whatever was there
    return torch.from_numpy(average)


def masked_mean(models: Iterable[PackedModel], fallback: Tensor) -> Tensor:
    """Average each weight over the models that hold it; where none does, take the fallback's."""
    average = fallback.clone()
    for here, total, holders in _sums(models, fallback.numel()):
        np.divide(total, holders, out=average[here].numpy(), where=holders > 0, dtype=np.float32)
    return average


def robust_average_of(
    models: Sequence[PackedModel],
    own: int,
    m_k: Tensor,
    rule: Rule,
    b: int,
    *,
    averages_own: bool = True,
) -> tuple[Tensor, Trust]:
    """Average packed models by a rule that withstands b lies (robust/rules.py), then apply our own
    mask.

    `own` says which of the models is ours, or the server's, which is then not averaged
    (`averages_own=False`). Return also what was measured about each model.
    """
    average, keeps = torch.zeros(m_k.numel()), PackedMask.pack(m_k)
    masks = [model.mask & keeps for model in models]
    trust = robust_average(
        lambda: _parts(models, own, m_k, average), masks, own, rule, b, averages_own=averages_own
    )
    return average, trust


def _parts(models: Sequence[PackedModel], own: int, m_k: Tensor, average: Tensor) -> Iterator[Part]:
    """Yield the weights of all models in chunks."""
    chunks = [model.chunks() for model in models]
    complete = bool(m_k.numpy().all()) and all(model.mask.kept == m_k.numel() for model in models)
    for here in chunk_slices(m_k.numel()):
        ours = next(chunks[own])
        rows = chain(map(next, chunks[:own]), [ours], map(next, chunks[own + 1 :]))
        yield Part(ours, None if complete else m_k[here], rows, average[here])


def _sums(models: Iterable[PackedModel], size: int) -> Iterator[tuple[slice, Floats, Counts]]:
    """Yield the sum of the weights and the number of holders of each chunk, summed in the given
    order.

    All chunks share the same memory: use one before advancing to the next.
    """
    chunks = [model.chunks() for model in models]
    some = min(CHUNK, size)
    sums, counts = (
        torch.empty(some),
        torch.empty(some, dtype=torch.uint8 if len(chunks) < 256 else torch.int32),
    )
    for here in chunk_slices(size):
        length = here.stop - here.start
        total, holders = sums[:length].zero_(), counts[:length].zero_()
        for m_j, where, w_j in map(next, chunks):
            if where is None:
                total += w_j
            else:
                total.scatter_add_(0, where, w_j)
            holders += m_j
        yield here, total.numpy(), holders.numpy()
