"""A model at rest: its kept values and one bit a parameter. Models in messages and peers between rounds look so."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class PackedMask:
    """A mask as bits, least significant first."""

    bits: Tensor
    """uint8, ceil(size / 8) bytes; the unused bits of the last byte are zero."""
    size: int

    @classmethod
    def pack(cls, mask: Tensor) -> "PackedMask":
        """Pack a flat bool mask."""
        return cls(torch.from_numpy(np.packbits(mask.cpu().numpy(), bitorder="little")), mask.numel())

    def unpack(self) -> Tensor:
        """The flat bool mask."""
        flags = np.unpackbits(self.bits.numpy(), count=self.size, bitorder="little")
        return torch.from_numpy(flags.view(np.bool_))

    @cached_property
    def kept(self) -> int:
        """The number of weights that the mask keeps."""
        return int(np.bitwise_count(self.bits.numpy()).sum(dtype=np.int64))


@dataclass(frozen=True)
class PackedModel:
    """The kept weights of a model, in order, and the mask that says which they are."""

    values: Tensor
    mask: PackedMask

    @classmethod
    def pack(cls, weights: Tensor, mask: Tensor) -> "PackedModel":
        """Pack flat weights under a flat mask. Adding +0.0 turns -0.0 into 0.0, so equal models have equal bytes."""
        return cls(weights[mask].add_(0.0), PackedMask.pack(mask))

    def unpack(self) -> tuple[Tensor, Tensor]:
        """The flat weights, exactly zero outside the mask, and the mask."""
        mask = self.mask.unpack()
        weights = torch.zeros(self.mask.size)
        weights[mask] = self.values
        return weights, mask
