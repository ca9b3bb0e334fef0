"""Arrays in chunks that fit the processor's cache: how kept values are gathered and scattered."""

import mmap
from collections.abc import Callable, Iterator
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

_T = TypeVar("_T", bound=np.generic)

Chunk = tuple[Tensor | int, Tensor | None, Tensor]
"""Which weights of a chunk are kept (1: all), at which positions (None: all), and their values."""

CHUNK = 1 << 18
"""Weights per chunk: few enough that their positions stay in the processor's cache."""
MAPPED_BYTES = 1 << 12
"""Arrays of at least this many bytes get their own memory mapping."""


def chunk_slices(size: int) -> Iterator[slice]:
    """Yield the slices of a flat vector's chunks."""
    return (slice(start, min(start + CHUNK, size)) for start in range(0, size, CHUNK))


def select(
    array: NDArray[_T],
    flags: NDArray[np.bool_],
    allocate: Callable[[int, np.dtype[_T]], NDArray[_T]] = np.empty,
) -> NDArray[_T]:
    """Return `array[flags]`; `allocate` provides the memory for it.

    Gathers by position, chunk by chunk: several times faster than indexing by a random mask with
    NumPy or torch.
    """
    selected = allocate(int(np.count_nonzero(flags)), array.dtype)
    begin = 0
    for start in range(0, len(flags), CHUNK):
        positions = np.flatnonzero(flags[start : start + CHUNK])
        end = begin + len(positions)
        array[start : start + CHUNK].take(positions, out=selected[begin:end], mode="clip")
        begin = end
    return selected


def spread(values: NDArray[_T], flags: NDArray[np.bool_]) -> NDArray[_T]:
    """Return the values where the flags are set, and zeros elsewhere: the inverse of `select`."""
    array = np.zeros(len(flags), values.dtype)
    begin = 0
    for start in range(0, len(flags), CHUNK):
        positions = np.flatnonzero(flags[start : start + CHUNK])
        end = begin + len(positions)
        array[start : start + CHUNK][positions] = values[begin:end]
        begin = end
    return array


def allocate(count: int, dtype: np.dtype[_T]) -> NDArray[_T]:
    """Allocate memory for long-lived data: the models of peers between their steps.

    All but small arrays get their own mapping, which is returned to the system when they are freed.
    On the heap they would lie between the temporary vectors of steps, and keep the memory of those
    (benchmarks/memory_of_peers.py). Private mappings that are neighbours count as one towards the
    system's limit; beyond it, arrays are on the heap.
    """
    size = count * dtype.itemsize
    if size < MAPPED_BYTES:
        return np.empty(count, dtype)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    try:
        return np.frombuffer(mmap.mmap(-1, size, flags=flags), dtype)
    except OSError:
        return np.empty(count, dtype)
