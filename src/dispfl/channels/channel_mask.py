"""Masks of whole channels and hidden units, and the layout that knows them.

A unit is an output channel (or hidden unit) with all that belongs to it: its bias and normalization
entries, and the input slices of every layer that follows. A weight is held when all of its units
are. So the weights that a peer holds form a smaller dense network, whose flat vector has the same
values in the same order as the large one's under the mask.
"""

import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from functools import cached_property, lru_cache
from math import prod
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from dispfl.channels.block_average import aligned_blocks, block_average, start_units_
from dispfl.channels.kept_units import (
    kept_weights,
    random_units,
    replace_units,
    unit_counts,
    unit_strengths,
)
from dispfl.channels.units import (
    Axis,
    AxisIndex,
    Flags,
    Positions,
    UnitGroup,
    from_runs,
    is_cut_by_norm_group,
    to_runs,
)
from dispfl.core.averaging import AlignedWeights
from dispfl.core.chunks import allocate
from dispfl.core.layout import LayerDensities, Layout
from dispfl.core.packed import Mask, PackedModel


@dataclass(frozen=True)
class ChannelLayout(Layout):
    """A layout that knows the units of every dimension of every parameter."""

    has_small_networks: ClassVar[bool] = True
    groups: tuple[UnitGroup, ...] = ()
    axis_units: tuple[Axis, ...] = ()
    """The distinct axes."""
    axes: tuple[tuple[AxisIndex | None, ...], ...] = ()
    """For each parameter and dimension its axis; None: the dimension belongs to no unit."""
    output_dims: tuple[int, ...] = ()
    """For each parameter the dimension of the units that it computes; another has their inputs."""
    buffer_axes: Mapping[str, AxisIndex] = field(default_factory=dict, hash=False)
    """The axis of the first dimension of buffers."""

    @cached_property
    def units(self) -> int:
        """The number of units."""
        return sum(group.units for group in self.groups)

    @cached_property
    def dense_layers(self) -> list[str]:
        """The layers that every peer keeps whole, because none of their units can be left out."""
        is_dense: dict[str, bool] = {}
        for name, axes in zip(self.names, self.axes, strict=True):
            layer = name.rpartition(".")[0] or name
            has_units = any(axis is not None for axis in axes)
            is_dense[layer] = is_dense.get(layer, True) and not has_units
        return [layer for layer, dense in is_dense.items() if dense]

    @cached_property
    def group_slices(self) -> tuple[slice, ...]:
        """The units of each group."""
        slices = []
        begin = 0
        for group in self.groups:
            slices.append(slice(begin, begin + group.units))
            begin += group.units
        return tuple(slices)

    @cached_property
    def axis_arrays(self) -> list[Positions]:
        """The distinct axes as arrays."""
        return [np.array(axis, np.int64) for axis in self.axis_units]

    def channel_axis(self, layer: str) -> AxisIndex | None:
        """Return the axis of the first dimension of a layer's weight; None if it has no units."""
        axes = self._axes_by_name.get(f"{layer}.weight")
        if not axes:
            return None
        return axes[0]

    def channel_units(self, layer: str) -> Axis | None:
        """Return the unit of each channel of a layer; None if it has no units."""
        axis = self.channel_axis(layer)
        if axis is None:
            return None
        return self.axis_units[axis]

    @cached_property
    def _axes_by_name(self) -> dict[str, tuple[AxisIndex | None, ...]]:
        return dict(zip(self.names, self.axes, strict=True))

    def held(self, units: Flags) -> list[Flags]:
        """Return for every axis which of its positions are held, given a flag for each unit."""
        padded = np.append(units, True)  # FIXED is the last
        return [padded[array] for array in self.axis_arrays]

    def weights_per_layer(self, units: Flags) -> list[int]:
        """Return the number of weights of each parameter that are held, given a flag per unit."""
        return list(map(prod, self.small_shapes(units)))

    def small_shapes(self, units: Flags) -> list[tuple[int, ...]]:
        """Return the shape of each parameter of the small network, given a flag for each unit."""
        counts = [int(np.count_nonzero(flags)) for flags in self.held(units)]
        small_shapes = []
        for shape, axes in zip(self.shapes, self.axes, strict=True):
            small_shape = list(shape)
            for dim, axis in enumerate(axes):
                if axis is not None:
                    small_shape[dim] = counts[axis]
            small_shapes.append(tuple(small_shape))
        return small_shapes

    def weight_flags(self, units: Flags) -> Flags:
        """Return the flat mask of single weights, given a flag for each unit."""
        axis_flags = self.held(units)
        flags = np.empty(self.size, np.bool_)
        for where, shape, axes in zip(self.slices, self.shapes, self.axes, strict=True):
            view = flags[where].reshape(shape)
            view[...] = True
            for dim, axis in enumerate(axes):
                if axis is not None:
                    along_dim = [1] * len(shape)
                    along_dim[dim] = -1
                    view &= axis_flags[axis].reshape(along_dim)
        return flags

    # masks

    @property
    def entries(self) -> int:
        return self.units

    def mask(self, entries: Flags) -> "ChannelMask":
        bits = torch.from_numpy(np.packbits(entries, bitorder="little"))
        return ChannelMask(bits, self.size, self)

    def random_mask(
        self, density: float, layers: LayerDensities, *, rng: torch.Generator
    ) -> "ChannelMask":
        return random_units(self, unit_counts(self, density, layers), rng=rng)

    def kept_counts(self, density: float, layers: LayerDensities) -> tuple[int, ...]:
        return kept_weights(self, unit_counts(self, density, layers))

    def sparse_slices(self, dense: Sequence[bool]) -> list[slice]:
        return [slice(0, self.units)]

    def spec(self) -> str:
        """Return the layout as JSON, from which `channel_layout` makes it again."""
        groups = list(map(astuple, self.groups))
        return json.dumps(
            {
                "parameters": list(zip(self.names, self.shapes, strict=True)),
                "groups": groups,
                "units": list(map(to_runs, self.axis_units)),
                "axes": self.axes,
                "outputs": self.output_dims,
                "buffers": dict(self.buffer_axes),
            }
        )

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return channel_layout, (self.spec(),)


@lru_cache(maxsize=16)
def channel_layout(spec: str) -> ChannelLayout:
    """Return the layout that a spec describes; the same object for the same spec."""
    content = json.loads(spec)
    names, shapes = zip(*content["parameters"], strict=True)
    return ChannelLayout(
        tuple(names),
        tuple(map(tuple, shapes)),
        tuple(UnitGroup(*group) for group in content["groups"]),
        tuple(map(from_runs, content["units"])),
        tuple(map(tuple, content["axes"])),
        tuple(content["outputs"]),
        content["buffers"],
    )


@dataclass(frozen=True)
class ChannelMask(Mask):
    """A mask with one bit for each unit.

    The values of a model under it are the flat weights of its small network, in order.
    """

    structure = "channels"
    averages_without_own = False
    layout: ChannelLayout

    @cached_property
    def units(self) -> Flags:
        """A flag for each unit."""
        flags = np.unpackbits(self.bits.numpy(), count=self.layout.units, bitorder="little")
        return flags.view(np.bool_)

    def entries(self) -> Flags:
        return self.units

    def flags(self) -> Flags:
        return self.layout.weight_flags(self.units)

    @cached_property
    def kept(self) -> int:
        """The number of weights that the mask keeps."""
        return sum(self.layout.weights_per_layer(self.units))

    def kept_per_layer(self, layout: Layout) -> list[int]:
        return self.layout.weights_per_layer(self.units)

    def overlap(self, other: Mask) -> int:
        return sum(self.layout.weights_per_layer(self.units & other.entries()))

    def full(self) -> "ChannelMask":
        return self.layout.mask(np.ones(self.layout.units, np.bool_))

    def fits(self, layout: Layout) -> bool:
        return self.layout.by_name == layout.by_name

    @property
    def layout_spec(self) -> str:
        """The layout that is needed to read the bits, as text."""
        return self.layout.spec()

    # the small network

    @cached_property
    def positions(self) -> list[Positions]:
        """For every axis of the layout the held positions."""
        return [np.flatnonzero(flags) for flags in self.layout.held(self.units)]

    @cached_property
    def small(self) -> Layout:
        """The layout of the small network."""
        return Layout(self.layout.names, tuple(self.layout.small_shapes(self.units)))

    def small_network(self, module: nn.Module) -> nn.Module:
        """Return a copy of a network with the channels of the mask only.

        Its weights and sliced buffers are not set. Large tensors are never copied: the copy gets
        small ones in their place. Frozen parameters stay as they are.
        """
        replacements: dict[int, Any] = {}
        for name, shape in self.small.by_name.items():
            parameter = module.get_parameter(name)
            replacements[id(parameter)] = nn.Parameter(parameter.new_zeros(shape))
        for name, axis in self.layout.buffer_axes.items():
            buffer = module.get_buffer(name)
            held_channels = len(self.positions[axis])
            replacements[id(buffer)] = buffer.new_zeros(held_channels, *buffer.shape[1:])
        small = copy.deepcopy(module, replacements)

        for (name, layer), small_layer in zip(module.named_modules(), small.modules(), strict=True):
            _set_sizes(layer, small_layer, self.layout.channel_units(name))
        return small

    def network_mask(self) -> None:
        return None

    def buffer_positions(self, buffer: str) -> Tensor | None:
        axis = self.layout.buffer_axes.get(buffer)
        if axis is None:
            return None
        return torch.from_numpy(self.positions[axis])

    def select(self, weights: Tensor) -> Tensor:
        values = allocate(weights.numel(), np.dtype(np.float32))
        np.add(weights.numpy(), np.float32(0.0), out=values)
        return torch.from_numpy(values)

    def spread(self, values: Tensor) -> Tensor:
        return values

    def restrict(self, values: Tensor, other: Mask) -> tuple[Tensor, Mask]:
        common = self & other
        common_positions = []
        for flags, positions in zip(self.layout.held(common.units), self.positions, strict=True):
            common_positions.append(np.flatnonzero(flags[positions]))

        result = torch.empty(common.kept)
        targets = common.small.views(result)
        sources = self.small.views(values)
        for target, source, axes in zip(targets, sources, self.layout.axes, strict=True):
            block = source.numpy()
            for dim, axis in enumerate(axes):
                if axis is not None and len(common_positions[axis]) < block.shape[dim]:
                    block = block.take(common_positions[axis], dim)
            target.numpy()[...] = block
        return result, common

    # Algorithms 1 and 2

    def average(
        self,
        models: Sequence[PackedModel],
        first_weights: Callable[[], Tensor],
        mixing_weights: Sequence[float] | None = None,
    ) -> Tensor:
        trained = []
        holders = []
        weights_of_trained = []
        for j, model in enumerate(models):
            if model.mask.kept:  # a joining peer has no model yet
                trained.append(model)
                holders.append(model.mask)
                weights_of_trained.append(1.0 if mixing_weights is None else mixing_weights[j])
        if not trained:
            return PackedModel.pack(first_weights(), self).values
        average = block_average(
            trained, self, None if mixing_weights is None else weights_of_trained
        )
        self.start_unheld_(average, holders, first_weights)
        return average

    def align(
        self, models: Sequence[PackedModel], own: int, average: Tensor
    ) -> Iterator[AlignedWeights]:
        return aligned_blocks(models, own, self, average)

    def start_unheld_(
        self, average: Tensor, holders: Sequence[Mask], first_weights: Callable[[], Tensor]
    ) -> None:
        """Set the incoming weights of units that no holder has to the first weights, in place.

        Their outgoing weights stay 0: such a unit changes nothing at first, and learns.
        """
        fresh = self.units.copy()
        for mask in holders:
            fresh &= ~mask.entries()
        if fresh.any():
            start_units_(average, self, fresh, first_weights())

    def evolve(
        self,
        weights: Tensor,
        rate: float,
        layout: Layout,
        *,
        gradient: Tensor | None,
        rng: torch.Generator,
    ) -> "ChannelMask":
        """Units regrow at random: the small network has no gradient of those that it lacks."""
        growth = torch.rand(self.layout.units, generator=rng, dtype=torch.float64).numpy()
        return replace_units(self, unit_strengths(weights, self), growth, rate, rng=rng)


def _set_sizes(large: nn.Module, small: nn.Module, units: Axis | None) -> None:
    """Set the sizes that a layer keeps beside its parameters, given the unit of each channel."""
    weight = getattr(small, "weight", None)
    if not isinstance(weight, Tensor):
        return
    rows = len(weight) if weight.ndim else 1
    match small:
        case _ConvTransposeNd():
            small.in_channels, small.out_channels = weight.shape[:2]
        case _ConvNd():
            small.out_channels, small.in_channels = weight.shape[:2]
            if small.groups > 1 and small.groups == getattr(large, "out_channels", 0):  # depthwise
                small.in_channels = small.groups = rows
        case nn.Linear():
            small.out_features, small.in_features = weight.shape
        case nn.Embedding():
            small.embedding_dim = weight.shape[1]
        case nn.GroupNorm():
            small.num_channels = rows
            if units is not None and is_cut_by_norm_group(units, small.num_groups):
                small.num_groups = rows * small.num_groups // len(units)
        case nn.LayerNorm() | nn.RMSNorm():
            small.normalized_shape = tuple(weight.shape)
        case _NormBase():
            small.num_features = rows
        case nn.PReLU():
            small.num_parameters = rows
