"""Masks and models as peers keep and exchange them: bits, and the values that they keep.

A mask answers everything that depends on what it leaves out. `WeightMask` leaves out single
weights, as in the paper; `channels/channel_mask.py: ChannelMask` leaves out whole channels.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dispfl.core.averaging import AlignedWeights, aligned_chunks, average_of
from dispfl.core.chunks import Chunk, allocate, chunk_slices, select, spread
from dispfl.core.sparsity import prune_and_regrow

if TYPE_CHECKING:
    from dispfl.core.layout import Layout

Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Mask(ABC):
    """Which weights of a network a peer keeps.

    A mask has one bit for each entry: for each weight, or for each unit (a channel with all that
    belongs to it). `size` and `kept` always count weights. A model under the mask is computed by a
    network, whose flat weights `select` and `spread` translate from and to the kept values: the
    network itself, or a smaller one (`small`).
    """

    bits: Tensor
    """uint8, least significant bit first; the unused bits of the last byte are zero."""
    size: int
    """Weights of the network, kept or not."""
    structure: ClassVar[Literal["weights", "channels"]]
    """What the mask leaves out."""
    averages_without_own: ClassVar[bool]
    """Whether a robust rule can average received models for a peer that has no model yet."""

    # which weights are kept

    @abstractmethod
    def entries(self) -> Flags:
        """Return a flag for each entry: whether it is kept."""

    @abstractmethod
    def flags(self) -> Flags:
        """Return a flag for each weight: whether it is kept."""

    def unpack(self) -> Tensor:
        """Return the flat bool mask of all weights."""
        return torch.from_numpy(self.flags())

    @property
    @abstractmethod
    def kept(self) -> int:
        """The number of weights that the mask keeps."""

    @cached_property
    def kept_entries(self) -> int:
        """The number of entries that the mask keeps."""
        return _ones(self.bits.numpy())

    @abstractmethod
    def kept_per_layer(self, layout: "Layout") -> list[int]:
        """Return the number of kept weights of each layer."""

    @abstractmethod
    def overlap(self, other: "Mask") -> int:
        """Return the number of weights that both masks keep."""

    def __and__(self, other: "Mask") -> Self:
        """Return what both masks keep."""
        return replace(self, bits=self.bits & other.bits)

    @abstractmethod
    def full(self) -> "Mask":
        """Return the mask of this structure that keeps everything."""

    @abstractmethod
    def fits(self, layout: "Layout") -> bool:
        """Whether this is a mask of a network with this layout."""

    @property
    def layout_spec(self) -> str | None:
        """The layout that is needed to read the bits, as text; None if they are single weights."""
        return None

    # the network that computes a model under the mask

    @property
    def small(self) -> "Layout | None":
        """The layout of the small network; None if the network itself computes the model."""
        return None

    def small_network(self, module: nn.Module) -> nn.Module:
        """Return the small network, made from the whole one; its weights are not set."""
        raise NotImplementedError

    @abstractmethod
    def network_mask(self) -> Tensor | None:
        """Return the flat mask of the computing network's weights; None: it has kept ones only."""

    def buffer_positions(self, buffer: str) -> Tensor | None:
        """Return which entries of a peer's buffer the small network has; None: all."""
        return None

    @abstractmethod
    def select(self, weights: Tensor) -> Tensor:
        """Return the kept ones of the computing network's flat weights, and 0.0 for -0.0."""

    @abstractmethod
    def spread(self, values: Tensor) -> Tensor:
        """Return the computing network's flat weights with these kept values, else zeros."""

    @abstractmethod
    def restrict(self, values: Tensor, other: "Mask") -> "tuple[Tensor, Mask]":
        """Return those of the kept values that another mask keeps too, and what both masks keep."""

    # Algorithms 1 and 2

    @abstractmethod
    def average(
        self,
        models: Sequence["PackedModel"],
        first_weights: Callable[[], Tensor],
        mixing_weights: Sequence[float] | None = None,
    ) -> Tensor:
        """Average each kept weight over the models that hold it (Algorithm 1, line 7).

        Return flat weights of the computing network. `first_weights` returns those that all peers
        started from; `mixing_weights` says how much each model counts, by default the same.
        """

    @abstractmethod
    def align(
        self, models: Sequence["PackedModel"], own: int, average: Tensor
    ) -> Iterator[AlignedWeights]:
        """Yield the models' weights side by side, to average them into the network's weights."""

    @abstractmethod
    def start_unheld_(
        self, average: Tensor, holders: Sequence["Mask"], first_weights: Callable[[], Tensor]
    ) -> None:
        """Set the kept entries that no holder has, in place, to what they start from."""

    @abstractmethod
    def evolve(
        self,
        weights: Tensor,
        rate: float,
        layout: "Layout",
        *,
        gradient: Tensor | None,
        rng: torch.Generator,
    ) -> "Mask":
        """Prune a share of the entries, and regrow as many (Algorithm 2, lines 3-6).

        `weights`, `layout` and `gradient` are those of the computing network. Entries regrow where
        the gradient is largest, and at random without one.
        """


@dataclass(frozen=True)
class WeightMask(Mask):
    """A mask with one bit for each weight: the paper's."""

    structure = "weights"
    averages_without_own = True

    @classmethod
    def pack(cls, mask: Tensor) -> "WeightMask":
        """Pack a flat bool mask."""
        packed = np.packbits(mask.cpu().numpy(), bitorder="little")
        bits = allocate(len(packed), packed.dtype)
        bits[:] = packed
        return cls(torch.from_numpy(bits), mask.numel())

    def entries(self) -> Flags:
        return self.flags()

    def flags(self) -> Flags:
        return np.unpackbits(self.bits.numpy(), count=self.size, bitorder="little").view(np.bool_)

    @cached_property
    def kept(self) -> int:
        """The number of weights that the mask keeps."""
        return self.kept_entries

    def kept_per_layer(self, layout: "Layout") -> list[int]:
        flags = self.flags()
        return [int(np.count_nonzero(flags[where])) for where in layout.slices]

    def overlap(self, other: Mask) -> int:
        return _ones(self.bits.numpy() & other.bits.numpy())

    def __invert__(self) -> "WeightMask":
        """Return the mask of all other weights."""
        return WeightMask.pack(~self.unpack())

    def full(self) -> "WeightMask":
        return WeightMask.pack(torch.ones(self.size, dtype=torch.bool))

    def fits(self, layout: "Layout") -> bool:
        return self.size == layout.size

    def network_mask(self) -> Tensor:
        return self.unpack()

    def select(self, weights: Tensor) -> Tensor:
        return torch.from_numpy(select(weights.numpy(), self.flags(), allocate=allocate)).add_(0.0)

    def spread(self, values: Tensor) -> Tensor:
        return torch.from_numpy(spread(values.numpy(), self.flags()))

    def restrict(self, values: Tensor, other: Mask) -> tuple[Tensor, Mask]:
        shared = select(other.flags(), self.flags())
        return torch.from_numpy(select(values.numpy(), shared)), self & other

    def average(
        self,
        models: Sequence["PackedModel"],
        first_weights: Callable[[], Tensor],
        mixing_weights: Sequence[float] | None = None,
    ) -> Tensor:
        return average_of(models, self.unpack(), mixing_weights)

    def align(
        self, models: Sequence["PackedModel"], own: int, average: Tensor
    ) -> Iterator[AlignedWeights]:
        return aligned_chunks(models, own, self.unpack(), average)

    def start_unheld_(
        self, average: Tensor, holders: Sequence[Mask], first_weights: Callable[[], Tensor]
    ) -> None:
        """A single weight starts from 0, which is its average without holders."""

    def evolve(
        self,
        weights: Tensor,
        rate: float,
        layout: "Layout",
        *,
        gradient: Tensor | None,
        rng: torch.Generator,
    ) -> "WeightMask":
        growth = gradient
        if growth is None:
            growth = torch.rand(weights.shape, generator=rng)
        return WeightMask.pack(prune_and_regrow(weights, self.unpack(), growth, rate, layout))


@dataclass(frozen=True)
class PackedModel:
    """The kept weights of a model, in order, and the mask that says which they are.

    A model that is sent may have named tensors beside its weights.
    """

    values: Tensor
    mask: Mask
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    """Named tensors beside the weights, which the method declares (`Method.tensors`)."""

    @classmethod
    def pack(cls, weights: Tensor, mask: Tensor | Mask) -> "PackedModel":
        """Pack the flat weights of the whole network under a mask.

        Adding +0.0 turns -0.0 into 0.0, so equal models have equal bytes.
        """
        if isinstance(mask, Tensor):
            flags = mask.numpy()
            mask = WeightMask.pack(mask)
        else:
            flags = mask.flags()
        values = select(weights.numpy(), flags, allocate=allocate)
        return cls(torch.from_numpy(values).add_(0.0), mask)

    @classmethod
    def under(cls, weights: Tensor, mask: Mask) -> "PackedModel":
        """Pack the flat weights of the network that was trained under this mask."""
        return cls(mask.select(weights), mask)

    def unpack(self) -> tuple[Tensor, Tensor]:
        """Return the flat weights, exactly zero outside the mask, and the mask."""
        flags = self.mask.flags()
        return torch.from_numpy(spread(self.values.numpy(), flags)), torch.from_numpy(flags)

    def restrict(self, mask: Mask) -> "PackedModel":
        """Return the part of the model that another mask keeps too."""
        return PackedModel(*self.mask.restrict(self.values, mask), self.tensors)

    def with_tensors(self, **tensors: Tensor | float) -> "PackedModel":
        """Return the model with these tensors, copied, beside it: a number becomes a tensor."""
        copies = {}
        for name, tensor in tensors.items():
            copies[name] = torch.as_tensor(tensor).detach().to("cpu", copy=True).contiguous()
        return replace(self, tensors={**self.tensors, **copies})

    def over(self, weights: Tensor) -> Tensor:
        """Return flat weights of the whole network, those of this model where it holds any."""
        held_weights, mask = self.unpack()
        return torch.where(mask, held_weights, weights)

    def joined(self, other: "PackedModel") -> "PackedModel":
        """Return this model with the weights of another where that one holds any."""
        weights, mask = self.unpack()
        joined = PackedModel.pack(other.over(weights), mask | other.mask.unpack())
        return replace(joined, tensors=self.tensors)

    def flat(self) -> Tensor:
        """Return the flat weights of the network that computes this model: inverse of `under`."""
        return self.mask.spread(self.values)

    def chunks(self) -> Iterator[Chunk]:
        """Yield a model under a `WeightMask` in chunks, one for each of `chunk_slices(size)`."""
        if self.mask.kept == self.mask.size:
            for where in chunk_slices(self.mask.size):
                yield 1, None, self.values[where]
            return
        bits = self.mask.bits.numpy()
        begin = 0
        for where in chunk_slices(self.mask.size):
            in_bytes = bits[where.start // 8 : -(-where.stop // 8)]
            flags = np.unpackbits(in_bytes, count=where.stop - where.start, bitorder="little")
            positions = np.flatnonzero(flags.view(np.bool_))
            end = begin + len(positions)
            yield torch.from_numpy(flags), torch.from_numpy(positions), self.values[begin:end]
            begin = end


def _ones(bits: NDArray[np.uint8]) -> int:
    return int(np.bitwise_count(bits).sum(dtype=np.int64))
