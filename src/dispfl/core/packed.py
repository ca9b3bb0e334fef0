"""A model at rest: its kept values and one bit a parameter. Models in messages and peers between rounds look so."""

import mmap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

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
        bits = _room(len(packed), packed.dtype)
        bits[:] = packed
        return cls(torch.from_numpy(bits), mask.numel())

    def flags(self) -> NDArray[np.bool_]:
        """The flat bool mask, as an array."""
        return np.unpackbits(self.bits.numpy(), count=self.size, bitorder="little").view(np.bool_)

    def unpack(self) -> Tensor:
        """The flat bool mask."""
        return torch.from_numpy(self.flags())

    @cached_property
    def kept(self) -> int:
        """The number of weights that the mask keeps."""
        return _ones(self.bits.numpy())

    def overlap(self, other: "PackedMask") -> int:
        """The number of weights that both masks keep."""
        return _ones(self.bits.numpy() & other.bits.numpy())


@dataclass(frozen=True)
class PackedModel:
    """The kept weights of a model, in order, and the mask that says which they are."""

    values: Tensor
    mask: PackedMask

    @classmethod
    def pack(cls, weights: Tensor, mask: Tensor, packed: PackedMask | None = None) -> "PackedModel":
        """Pack flat weights under a flat mask, of which the packed form may be there already.

        Adding +0.0 turns -0.0 into 0.0, so equal models have equal bytes.
        """
        kept = select(weights.numpy(), mask.numpy(), room=_room)
        return cls(torch.from_numpy(kept).add_(0.0), packed or PackedMask.pack(mask))

    def unpack(self) -> tuple[Tensor, Tensor]:
        """The flat weights, exactly zero outside the mask, and the mask."""
        flags = self.mask.flags()
        return torch.from_numpy(spread(self.values.numpy(), flags)), torch.from_numpy(flags)

    def parts(self) -> Iterator["Part"]:
        """The model in pieces, one for each of `stretches(size)`, for whoever need not see it whole."""
        bits, begin = self.mask.bits.numpy(), 0
        for here in stretches(self.mask.size):
            if self.mask.kept == self.mask.size:
                yield 1, None, self.values[here]
                continue
            length = here.stop - here.start
            flags = np.unpackbits(bits[here.start // 8 : -(-here.stop // 8)], count=length, bitorder="little")
            where = np.flatnonzero(flags.view(np.bool_))
            yield torch.from_numpy(flags), torch.from_numpy(where), self.values[begin : (begin := begin + len(where))]


Part = tuple[Tensor | int, Tensor | None, Tensor]
"""Of a stretch: which weights are kept (a 1 says all), at which places they are (None says all), and their values."""

LARGE = 1 << 20
"""Bytes."""
STRETCH = 1 << 18
"""How many weights are looked at at once: so few that their positions stay in the processor's cache."""


def stretches(size: int) -> Iterator[slice]:
    """Where the stretches of a flat vector are."""
    return (slice(start, min(start + STRETCH, size)) for start in range(0, size, STRETCH))


def select(
    array: NDArray[_T], flags: NDArray[np.bool_], room: Callable[[int, np.dtype[_T]], NDArray[_T]] = np.empty
) -> NDArray[_T]:
    """What stands where the flags are set, in order: `array[flags]`; `room` makes the memory for it.

    Through the positions, stretch by stretch: several times faster than NumPy or torch index by a random mask.
    """
    selected = room(int(np.count_nonzero(flags)), array.dtype)
    begin = 0
    for start in range(0, len(flags), STRETCH):
        where = np.flatnonzero(flags[start : start + STRETCH])
        end = begin + len(where)
        array[start : start + STRETCH].take(where, out=selected[begin:end], mode="clip")
        begin = end
    return selected


def spread(values: NDArray[_T], flags: NDArray[np.bool_]) -> NDArray[_T]:
    """The opposite of `select`: the values where the flags are set, zeros elsewhere."""
    array = np.zeros(len(flags), values.dtype)
    begin = 0
    for start in range(0, len(flags), STRETCH):
        where = np.flatnonzero(flags[start : start + STRETCH])
        end = begin + len(where)
        array[start : start + STRETCH][where] = values[begin:end]
        begin = end
    return array


def _room(count: int, dtype: np.dtype[_T]) -> NDArray[_T]:
    """Memory for what stays long. Large pieces are mapped by themselves: they go back when they are let go, while the
    heap would keep them for the sake of some small thing that lies behind them. New pages take longer to fill.
    """
    size = count * dtype.itemsize
    return np.empty(count, dtype) if size < LARGE else np.frombuffer(mmap.mmap(-1, size), dtype)


def _ones(bits: NDArray[np.uint8]) -> int:
    return int(np.bitwise_count(bits).sum(dtype=np.int64))
