"""Units: channels and hidden units that a network can do without, and masks of whole units.

A unit is an output channel (or hidden unit) with all that belongs to it: its bias and normalization
entries, and the input slices of every layer that follows. A weight is held when all of its units
are. So the weights that a peer holds form a smaller dense network, whose flat vector has the same
values in the same order as the large one's under the mask.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import pairwise
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dispfl.core.layout import Layout
from dispfl.core.packed import PackedMask, allocate

Flags = NDArray[np.bool_]
Positions = NDArray[np.int64]

FIXED = -1
"""In an axis: the position belongs to no unit and is always held."""


@dataclass(frozen=True)
class UnitGroup:
    """Units that are the outputs of one layer, or of several whose outputs are added.

    Where the channels are normalized together, equally many units of each norm group are kept:
    `strata` of them.
    """

    name: str
    """The first layer of the group."""
    units: int
    channels: int
    """Channels of that layer in a unit: more than one where whole norm groups are left out."""
    strata: int = 1
    """Norm groups; the units of one are neighbours. Of each, equally many units are kept."""


Axis = tuple[int, ...]
"""The unit of every position of a tensor's dimension, or `FIXED`."""
AxisIndex = int
"""The index of an axis in the layout: tensors that share units share it."""


@dataclass(frozen=True)
class UnitLayout(Layout):
    """A layout that knows the units of every dimension of every parameter."""

    groups: tuple[UnitGroup, ...] = ()
    axis_units: tuple[Axis, ...] = ()
    """The distinct axes."""
    axes: tuple[tuple[AxisIndex | None, ...], ...] = ()
    """For each parameter and dimension its axis; None: the dimension belongs to no unit."""
    output_dims: tuple[int, ...] = ()
    """For each parameter the dimension of the units that it computes; its other dimension is that
    of their inputs."""
    buffer_axes: Mapping[str, AxisIndex] = field(default_factory=dict, hash=False)
    """The axis of the first dimension of buffers."""

    @cached_property
    def units(self) -> int:
        """The number of units."""
        return sum(group.units for group in self.groups)

    @cached_property
    def dense_layers(self) -> list[str]:
        """The layers that every peer keeps whole, because none of their units can be left out."""
        layers = [name.rpartition(".")[0] or name for name in self.names]
        cut = {
            layer
            for layer, axes in zip(layers, self.axes, strict=True)
            if any(axis is not None for axis in axes)
        }
        return [layer for layer in dict.fromkeys(layers) if layer not in cut]

    @cached_property
    def group_slices(self) -> tuple[slice, ...]:
        """The units of each group."""
        ends = np.cumsum([group.units for group in self.groups])
        return tuple(
            slice(int(end) - group.units, int(end))
            for end, group in zip(ends, self.groups, strict=True)
        )

    @cached_property
    def axis_arrays(self) -> list[Positions]:
        """The distinct axes as arrays."""
        return [np.array(axis, np.int64) for axis in self.axis_units]

    def held(self, flags: Flags) -> list[Flags]:
        """Return for every axis which of its positions are held, given a flag for each unit."""
        padded = np.append(flags, True)  # FIXED is the last
        return [padded[array] for array in self.axis_arrays]

    def kept_per_layer(self, flags: Flags) -> list[int]:
        """Return the number of weights of each parameter that are held, given a flag for each
        unit."""
        return [prod(shape) for shape in self.small_shapes(flags)]

    def small_shapes(self, flags: Flags) -> list[tuple[int, ...]]:
        """Return the shape of each parameter of the small network, given a flag for each unit."""
        counts = [int(np.count_nonzero(held)) for held in self.held(flags)]
        return [
            tuple(
                size if axis is None else counts[axis]
                for size, axis in zip(shape, axes, strict=True)
            )
            for shape, axes in zip(self.shapes, self.axes, strict=True)
        ]

    def weight_flags(self, flags: Flags) -> Flags:
        """Return the flat mask of single weights, given a flag for each unit."""
        held, found = self.held(flags), np.empty(self.size, np.bool_)
        for where, shape, axes in zip(self.slices, self.shapes, self.axes, strict=True):
            view = found[where].reshape(shape)
            view[...] = True
            for dim, axis in enumerate(axes):
                if axis is not None:
                    view &= held[axis].reshape([-1 if i == dim else 1 for i in range(len(shape))])
        return found

    def spec(self) -> str:
        """Return the layout as JSON, from which `unit_layout` makes it again."""
        return json.dumps(
            {
                "parameters": [
                    [name, list(shape)] for name, shape in zip(self.names, self.shapes, strict=True)
                ],
                "groups": [
                    [group.name, group.units, group.channels, group.strata] for group in self.groups
                ],
                "units": [_to_runs(axis) for axis in self.axis_units],
                "axes": self.axes,
                "outputs": self.output_dims,
                "buffers": dict(self.buffer_axes),
            }
        )

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return unit_layout, (self.spec(),)


@lru_cache(maxsize=16)
def unit_layout(spec: str) -> UnitLayout:
    """Return the layout that a spec describes; the same object for the same spec."""
    content = json.loads(spec)
    names, shapes = zip(*content["parameters"], strict=True)
    return UnitLayout(
        tuple(names),
        tuple(tuple(shape) for shape in shapes),
        tuple(UnitGroup(*group) for group in content["groups"]),
        tuple(map(_from_runs, content["units"])),
        tuple(map(tuple, content["axes"])),
        tuple(content["outputs"]),
        content["buffers"],
    )


def _to_runs(axis: Axis) -> list[list[int]]:
    """Return an axis as runs [first unit, number of units, positions of each]."""
    runs: list[list[int]] = []
    edges = [0, *(np.flatnonzero(np.diff(axis)) + 1).tolist(), len(axis)]
    for start, end in pairwise(edges):
        unit, width = int(axis[start]), end - start
        if runs and width == runs[-1][2] and FIXED != unit == runs[-1][0] + runs[-1][1]:
            runs[-1][1] += 1
        else:
            runs.append([unit, 1, width])
    return runs


def _from_runs(runs: Sequence[Sequence[int]]) -> Axis:
    return tuple(
        first + i for first, count, width in runs for i in range(count) for _ in range(width)
    )


def is_cut_by_norm_group(axis: Axis, num_groups: int) -> bool:
    """Whether a GroupNorm's channels are left out as whole norm groups; otherwise equally many of
    each are."""
    return bool(
        (np.diff(np.reshape(axis, (num_groups, -1)), axis=1) == 0).all()
    ) and num_groups < len(axis)


@dataclass(frozen=True)
class UnitMask(PackedMask):
    """A mask with one bit for each unit. `size` and `kept` count weights, as those of a mask of
    single weights."""

    layout: UnitLayout

    @classmethod
    def of(cls, units: Flags, layout: UnitLayout) -> "UnitMask":
        """Return the mask that holds these units, a flag for each."""
        return cls(torch.from_numpy(np.packbits(units, bitorder="little")), layout.size, layout)

    @cached_property
    def units(self) -> Flags:
        """A flag for each unit."""
        return np.unpackbits(self.bits.numpy(), count=self.layout.units, bitorder="little").view(
            np.bool_
        )

    def flags(self) -> Flags:
        """Return the flat mask of single weights."""
        return self.layout.weight_flags(self.units)

    def select(self, weights: Tensor) -> Tensor:
        """Return the values of the small network's flat weights: all of them."""
        values = allocate(weights.numel(), np.dtype(np.float32))
        np.add(weights.numpy(), np.float32(0.0), out=values)
        return torch.from_numpy(values)

    def spread(self, values: Tensor) -> Tensor:
        """Return the small network's flat weights."""
        return values

    @cached_property
    def kept(self) -> int:
        """The number of weights that the mask keeps."""
        return sum(self.layout.kept_per_layer(self.units))

    def kept_per_layer(self, layout: Layout) -> list[int]:
        """Return the number of kept weights of each layer."""
        return self.layout.kept_per_layer(self.units)

    def restrict(self, values: Tensor, other: PackedMask) -> tuple[Tensor, PackedMask]:
        """Return those of the values that another mask keeps too, and what both masks keep."""
        assert isinstance(other, UnitMask)
        common = UnitMask.of(self.units & other.units, self.layout)
        theirs = common.layout.held(common.units)
        kept = [
            np.flatnonzero(held[mine]) for held, mine in zip(theirs, self.positions, strict=True)
        ]
        result = torch.empty(common.kept)
        for to, source, axes in zip(
            common.small.views(result), self.small.views(values), self.layout.axes, strict=True
        ):
            part = source.numpy()
            for dim, axis in enumerate(axes):
                if axis is not None and len(kept[axis]) < part.shape[dim]:
                    part = part.take(kept[axis], dim)
            to.numpy()[...] = part
        return result, common

    def overlap(self, other: PackedMask) -> int:
        """Return the number of weights that both masks keep."""
        assert isinstance(other, UnitMask)
        return sum(self.layout.kept_per_layer(self.units & other.units))

    @cached_property
    def positions(self) -> list[Positions]:
        """For every axis of the layout the held positions."""
        return [np.flatnonzero(held) for held in self.layout.held(self.units)]

    @cached_property
    def small(self) -> Layout:
        """The layout of the small network."""
        return Layout(self.layout.names, tuple(self.layout.small_shapes(self.units)))
