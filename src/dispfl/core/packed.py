"""Packed models: the kept values and one bit per parameter. Messages and peers between rounds have
this form."""

import mmap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dispfl.core.layout import Layout

_T = TypeVar("_T", bound=np.generic)


@dataclass(frozen=True)
class PackedMask:
    """A mask as bits, least significant first."""

    bits: Tensor
    """uint8, ceil(size / 8) bytes; the unused bits of the last byte are zero."""
    size: int

    @classmethod
    def pack(cls, mask: Tensor) -> "PackedMask":
        """Pack a flat bool mask."""
        packed = np.packbits(mask.cpu().numpy(), bitorder="little")
        bits = allocate(len(packed), packed.dtype)
        bits[:] = packed
        return cls(torch.from_numpy(bits), mask.numel())

    def flags(self) -> NDArray[np.bool_]:
        """Return the flat bool mask as an array."""
        return np.unpackbits(self.bits.numpy(), count=self.size, bitorder="little").view(np.bool_)

    def unpack(self) -> Tensor:
        """Return the flat bool mask."""
        return torch.from_numpy(self.flags())

    def select(self, weights: Tensor) -> Tensor:
        """Return the kept ones of the flat weights. Adding +0.0 turns -0.0 into 0.0."""
        return torch.from_numpy(select(weights.numpy(), self.flags(), allocate=allocate)).add_(0.0)

    def spread(self, values: Tensor) -> Tensor:
        """Return flat weights with these kept ones, and zeros elsewhere."""
        return torch.from_numpy(spread(values.numpy(), self.flags()))

    @cached_property
    def kept(self) -> int:
        """The number of weights that the mask keeps."""
        return _ones(self.bits.numpy())

    def kept_per_layer(self, layout: Layout) -> list[int]:
        """Return the number of kept weights of each layer."""
        flags = self.flags()
        return [int(np.count_nonzero(flags[where])) for where in layout.slices]

    def restrict(self, values: Tensor, other: "PackedMask") -> tuple[Tensor, "PackedMask"]:
        """Return those of the kept values that another mask keeps too, and what both masks keep."""
        shared = select(other.flags(), self.flags())
        return torch.from_numpy(select(values.numpy(), shared)), self & other

    def __and__(self, other: "PackedMask") -> "PackedMask":
        """Return what both masks keep."""
        return replace(self, bits=self.bits & other.bits)

    def overlap(self, other: "PackedMask") -> int:
        """Return the number of weights that both masks keep."""
        return _ones(self.bits.numpy() & other.bits.numpy())


@dataclass(frozen=True)
class PackedModel:
    """The kept weights of a model, in order, and the mask that says which they are."""

    values: Tensor
    mask: PackedMask

    @classmethod
    def pack(cls, weights: Tensor, mask: Tensor, packed: PackedMask | None = None) -> "PackedModel":
        """Pack flat weights under a flat mask, whose packed form may be given too.

        Adding +0.0 turns -0.0 into 0.0, so equal models have equal bytes.
        """
        kept = select(weights.numpy(), mask.numpy(), allocate=allocate)
        return cls(torch.from_numpy(kept).add_(0.0), packed or PackedMask.pack(mask))

    @classmethod
    def under(cls, weights: Tensor, mask: PackedMask) -> "PackedModel":
        """Pack the flat weights of the network that was trained under this mask."""
        return cls(mask.select(weights), mask)

    def unpack(self) -> tuple[Tensor, Tensor]:
        """Return the flat weights, exactly zero outside the mask, and the mask."""
        flags = self.mask.flags()
        return torch.from_numpy(spread(self.values.numpy(), flags)), torch.from_numpy(flags)

    def restrict(self, mask: PackedMask) -> "PackedModel":
        """Return the part of the model that another mask keeps too."""
        return PackedModel(*self.mask.restrict(self.values, mask))

    def flat(self) -> Tensor:
        """Return the flat weights of the network that computes this model: the inverse of
        `under`."""
        return self.mask.spread(self.values)

    def chunks(self) -> Iterator["Chunk"]:
        """Yield the model in chunks, one for each of `chunk_slices(size)`."""
        bits, begin = self.mask.bits.numpy(), 0
        for here in chunk_slices(self.mask.size):
            if self.mask.kept == self.mask.size:
                yield 1, None, self.values[here]
                continue
            length = here.stop - here.start
            flags = np.unpackbits(
                bits[here.start // 8 : -(-here.stop // 8)], count=length, bitorder="little"
            )
            where = np.flatnonzero(flags.view(np.bool_))
            yield (
                torch.from_numpy(flags),
                torch.from_numpy(where),
                self.values[begin : (begin := begin + len(where))],
            )


Chunk = tuple[Tensor | int, Tensor | None, Tensor]
"""Which weights of a chunk are kept (1: all), at which positions (None: all), and their values."""

LARGE = 1 << 20
"""Arrays of at least this many bytes get their own memory mapping."""
CHUNK = 1 << 18
"""Weights per chunk: few enough that their positions stay in the processor's cache."""


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
        where = np.flatnonzero(flags[start : start + CHUNK])
        end = begin + len(where)
        array[start : start + CHUNK].take(where, out=selected[begin:end], mode="clip")
        begin = end
    return selected


def spread(values: NDArray[_T], flags: NDArray[np.bool_]) -> NDArray[_T]:
    """Return an array with the values where the flags are set and zeros elsewhere: the inverse of
    `select`."""
    array = np.zeros(len(flags), values.dtype)
    begin = 0
    for start in range(0, len(flags), CHUNK):
        where = np.flatnonzero(flags[start : start + CHUNK])
        end = begin + len(where)
        array[start : start + CHUNK][where] = values[begin:end]
        begin = end
    return array


def allocate(count: int, dtype: np.dtype[_T]) -> NDArray[_T]:
    """Allocate memory for long-lived data. Large arrays get their own mapping, which is returned to
    the system when they are freed, while the heap could keep it because of a small block behind it.
    New pages take longer to fill.
    """
    size = count * dtype.itemsize
    return np.empty(count, dtype) if size < LARGE else np.frombuffer(mmap.mmap(-1, size), dtype)


def _ones(bits: NDArray[np.uint8]) -> int:
    return int(np.bitwise_count(bits).sum(dtype=np.int64))
