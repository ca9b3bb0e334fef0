"""The layout of a model as a flat vector: where each parameter is in it.

The order is that of `named_parameters()`, each parameter row-major: the order of digests and
messages too. Tied parameters appear once; frozen ones (`requires_grad=False`) not at all, because
they are neither trained nor sent.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod

from torch import Tensor, nn


@dataclass(frozen=True)
class Layout:
    """Name, shape and slice of every trainable parameter, in order."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def from_shapes(cls, shapes: Mapping[str, Sequence[int]]) -> "Layout":
        """The layout of parameters with these shapes, in the mapping's order."""
        return cls(tuple(shapes), tuple(tuple(shape) for shape in shapes.values()))

    @classmethod
    def of(cls, module: nn.Module) -> "Layout":
        """The layout of a module's trainable parameters."""
        return cls.from_shapes(
            {n: p.shape for n, p in module.named_parameters() if p.requires_grad}
        )

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The number of weights of each parameter."""
        return tuple(prod(shape) for shape in self.shapes)

    @cached_property
    def slices(self) -> tuple[slice, ...]:
        """The slice of each parameter in the flat vector."""
        ends = tuple(accumulate(self.sizes))
        return tuple(slice(end - size, end) for end, size in zip(ends, self.sizes, strict=True))

    @cached_property
    def size(self) -> int:
        """The length of the flat vector."""
        return sum(self.sizes)

    @cached_property
    def by_name(self) -> dict[str, tuple[int, ...]]:
        """The shape of each parameter."""
        return dict(zip(self.names, self.shapes, strict=True))

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return the flat vector as one shaped view per parameter, without copying."""
        return [
            flat[where].view(shape) for where, shape in zip(self.slices, self.shapes, strict=True)
        ]
