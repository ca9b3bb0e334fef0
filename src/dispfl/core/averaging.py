"""The modified gossip average of Algorithm 1."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dispfl.core.chunks import CHUNK, Chunk, chunk_slices

if TYPE_CHECKING:
    from dispfl.core.packed import PackedModel

Floats = NDArray[np.float32]
Counts = NDArray[np.uint8] | NDArray[np.int32] | Floats


def gossip_average(weights: Sequence[Tensor], masks: Sequence[Tensor], m_k: Tensor) -> Tensor:
    """Average each weight over the peers that hold it, then apply our own mask.

    Algorithm 1, line 7, with j over ourselves and our neighbours, in roster order:

        w_k <- (sum_j w_j / sum_j m_j) * m_k

    Weights are zero outside their mask. A weight that no peer holds would be 0/0; it becomes 0. The
    inputs are not modified. Where models count differently (`average_of`), by a_j:

        w_k <- (sum_j a_j w_j / sum_j a_j m_j) * m_k
    """
    total = torch.zeros(m_k.numel())
    holders = torch.zeros(m_k.numel(), dtype=torch.int32)
    for w_j, m_j in zip(weights, masks, strict=True):
        total += torch.where(m_j, w_j, 0.0)
        holders += m_j
    return torch.where(m_k, total / holders.clamp(min=1), 0.0)


def average_of(
    models: Iterable["PackedModel"], m_k: Tensor, mixing_weights: Sequence[float] | None = None
) -> Tensor:
    """Compute `gossip_average` of packed models in chunks; no model is unpacked whole.

    `mixing_weights` says how much each model counts; by default all count the same.
    """
    average = np.empty(m_k.numel(), np.float32)
    kept_bits = -m_k.numpy().view(np.int8)  # all ones where we keep a weight
    for where, total, holders in _sums(models, m_k.numel(), mixing_weights):
        divisor = np.maximum(holders, 1)
        if mixing_weights is not None:
            divisor = np.where(holders > 0, holders, 1)
        np.divide(total, divisor, out=average[where], dtype=np.float32)
        bits = average[where].view(np.int32)
        np.bitwise_and(bits, kept_bits[where], out=bits)  # as `keep_`: +0.0 where we keep nothing
    return torch.from_numpy(average)


def masked_mean(models: Iterable["PackedModel"], fallback: Tensor) -> Tensor:
    """Average each weight over the models that hold it; where none does, take the fallback's."""
    average = fallback.clone()
    for where, total, holders in _sums(models, fallback.numel()):
        np.divide(total, holders, out=average[where].numpy(), where=holders > 0, dtype=np.float32)
    return average


class AlignedWeights(NamedTuple):
    """The same weights of several models, for averages that compare models with each other."""

    own_chunk: Chunk
    """Our model."""
    keeps: Tensor | None
    """Which of the weights we keep from now on; the others are ignored.

    None: we keep all, and every model holds them all.
    """
    models: Iterable[Chunk]
    """All models, our own among them; each is read once."""
    average: Tensor
    """Takes the average."""


def aligned_chunks(
    models: Sequence["PackedModel"], own: int, m_k: Tensor, average: Tensor
) -> Iterator[AlignedWeights]:
    """Yield the weights of all models in chunks; `own` is the index of our model."""
    chunks = [model.chunks() for model in models]
    all_dense = all(model.mask.kept == m_k.numel() for model in models)
    complete = all_dense and bool(m_k.numpy().all())
    for where in chunk_slices(m_k.numel()):
        own_chunk = next(chunks[own])
        rows = chain(map(next, chunks[:own]), [own_chunk], map(next, chunks[own + 1 :]))
        keeps = None if complete else m_k[where]
        yield AlignedWeights(own_chunk, keeps, rows, average[where])


def _sums(
    models: Iterable["PackedModel"], size: int, mixing_weights: Sequence[float] | None = None
) -> Iterator[tuple[slice, Floats, Counts]]:
    """Yield the sum of the weights and the number of holders of each chunk.

    With mixing weights a_j it is sum_j a_j w_j and sum_j a_j m_j. They are summed in the given
    order. All chunks share the same memory: use one before advancing to the next.
    """
    chunks = [model.chunks() for model in models]
    longest = min(CHUNK, size)
    sums = torch.empty(longest)
    count_type = torch.uint8 if len(chunks) < 256 else torch.int32
    if mixing_weights is not None:
        count_type = torch.float32
    counts = torch.empty(longest, dtype=count_type)
    for where in chunk_slices(size):
        length = where.stop - where.start
        total = sums[:length].zero_()
        holders = counts[:length].zero_()
        for j, (m_j, positions, w_j) in enumerate(map(next, chunks)):
            held: Tensor | float = m_j
            if mixing_weights is not None:
                held = m_j * mixing_weights[j]
                w_j = w_j * mixing_weights[j]
            if positions is None:
                total += w_j
            else:
                total.scatter_add_(0, positions, w_j)
            holders += held
        yield where, total.numpy(), holders.numpy()
