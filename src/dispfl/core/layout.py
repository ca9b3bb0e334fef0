"""The layout of a model as a flat vector: where each parameter is in it.

The order is that of `named_parameters()`, each parameter row-major: the order of digests and
messages too. Tied parameters appear once; frozen ones (`requires_grad=False`) not at all, because
they are neither trained nor sent.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import accumulate, pairwise, starmap
from math import prod
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from dispfl.core.masks import layer_counts, random_mask
from dispfl.core.packed import Flags, Mask, WeightMask
from dispfl.core.sparsity import erk_densities, uniform_densities
from dispfl.errors import ConfigError

LayerDensities = Literal["erk", "uniform"]
"""How a density is distributed over the layers."""


@dataclass(frozen=True)
class Layout:
    """Name, shape and slice of every trainable parameter, in order; and the masks of such a model.

    Masks leave out single weights; those of a `channels/channel_mask.py: ChannelLayout` leave out
    whole channels.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    has_small_networks: ClassVar[bool] = False
    """Whether peers train small networks, with a part of this network's channels, instead of it."""

    @classmethod
    def from_shapes(cls, shapes: Mapping[str, Sequence[int]]) -> "Layout":
        """The layout of parameters with these shapes, in the mapping's order."""
        return cls(tuple(shapes), tuple(map(tuple, shapes.values())))

    @classmethod
    def of(cls, module: nn.Module) -> "Layout":
        """The layout of a module's trainable parameters."""
        shapes = {}
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                shapes[name] = parameter.shape
        return cls.from_shapes(shapes)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The number of weights of each parameter."""
        return tuple(map(prod, self.shapes))

    @cached_property
    def slices(self) -> tuple[slice, ...]:
        """The slice of each parameter in the flat vector."""
        bounds = accumulate(self.sizes, initial=0)
        return tuple(starmap(slice, pairwise(bounds)))

    @cached_property
    def size(self) -> int:
        """The length of the flat vector."""
        return sum(self.sizes)

    @cached_property
    def by_name(self) -> dict[str, tuple[int, ...]]:
        """The shape of each parameter."""
        return dict(zip(self.names, self.shapes, strict=True))

    @cached_property
    def head(self) -> slice:
        """The slice of the last layer, with all its parameters, in the flat vector."""
        is_head = self.matching("head", "head")
        return slice(self.slices[is_head.index(True)].start, self.size)

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return the flat vector as one shaped view per parameter, without copying."""
        parameters = zip(self.slices, self.shapes, strict=True)
        return [flat[where].view(shape) for where, shape in parameters]

    def matching(self, patterns: str | Sequence[str], key: str) -> list[bool]:
        """Return for each parameter whether a pattern names it.

        A pattern is a name, a glob (`"blocks.*.bias"`), `"head"` for the last layer, or `"norm"`
        for the normalization layers, whose weights are vectors. `key` is the setting or argument
        that has the patterns.
        """
        if isinstance(patterns, str):
            patterns = [patterns]
        matches = [False] * len(self.names)
        for pattern in patterns:
            names = self._names_matching(pattern)
            if not names:
                raise ConfigError(
                    f"{key} is {pattern!r}, which matches no parameter of the network; it has"
                    f" {', '.join(self.names)}, and `head` and `norm` name layers.",
                    key=key,
                )
            for index, name in enumerate(self.names):
                matches[index] |= name in names
        return matches

    def _names_matching(self, pattern: str) -> set[str]:
        if pattern == "head":
            head = _layer_of(self.names[-1])
            return {name for name in self.names if _layer_of(name) == head}
        if pattern == "norm":
            return {name for name in self.names if self._normalizes(_layer_of(name))}
        return {name for name in self.names if fnmatchcase(name, pattern)}

    def _normalizes(self, layer: str) -> bool:
        return len(self.by_name.get(f"{layer}.weight", ())) == 1

    def flags(self, parameters: Sequence[bool]) -> Tensor:
        """Return a flag for each weight: that of its parameter."""
        return torch.tensor(parameters).repeat_interleave(torch.tensor(self.sizes))

    def spec(self) -> str:
        """Return the layout as text; equal texts are equal layouts."""
        return json.dumps([self.names, self.shapes])

    # masks

    @property
    def dense_layers(self) -> list[str]:
        """The layers that every peer keeps whole, because nothing of them can be left out."""
        return []

    @property
    def entries(self) -> int:
        """The number of entries of a mask: it has a bit for each."""
        return self.size

    def mask(self, entries: Flags) -> Mask:
        """Return the mask that keeps these entries, given a flag for each."""
        return WeightMask.pack(torch.from_numpy(entries))

    def random_mask(self, density: float, layers: LayerDensities, *, rng: torch.Generator) -> Mask:
        """Return a first mask that keeps random entries of each layer."""
        return WeightMask.pack(random_mask(self, self._densities(density, layers), rng=rng))

    def kept_counts(self, density: float, layers: LayerDensities) -> tuple[int, ...]:
        """Return the number of weights that `random_mask` keeps of each layer."""
        return layer_counts(self, self._densities(density, layers))

    def _densities(self, density: float, layers: LayerDensities) -> dict[str, float]:
        distribute = erk_densities if layers == "erk" else uniform_densities
        return distribute(self.by_name, density)

    def sparse_slices(self, dense: Sequence[bool]) -> list[slice]:
        """Return the slices of a mask's entries, as few as possible, that peers keep or leave out.

        `dense` says which layers all peers keep whole.
        """
        slices: list[slice] = []
        for where, is_dense in zip(self.slices, dense, strict=True):
            if is_dense:
                continue
            if slices and slices[-1].stop == where.start:
                slices[-1] = slice(slices[-1].start, where.stop)
            else:
                slices.append(where)
        return slices


def _layer_of(parameter: str) -> str:
    """Return the module that has this parameter: `fc` for `fc.bias`."""
    return parameter.rpartition(".")[0]
