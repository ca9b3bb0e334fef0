"""The average of models under masks of channels, on the dense blocks that masks have in common.

The values of such a model are the parameters of its small network, one after another. What two
models hold in common of a parameter is a block of each: some rows and some columns.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dispfl.channels.units import AxisIndex, Flags, Positions
from dispfl.core.averaging import AlignedWeights
from dispfl.core.layout import Layout
from dispfl.core.masks import true_indices
from dispfl.core.packed import PackedModel

if TYPE_CHECKING:
    from dispfl.channels.channel_mask import ChannelMask

Floats = NDArray[np.float32]
_T = TypeVar("_T")
Axes = tuple[AxisIndex | None, ...]

LONG_RUN = 64
"""Values that lie side by side in both blocks, on average, from which adding slice by slice is
fastest."""


@dataclass(frozen=True, eq=False)
class Common:
    """What our mask and a sender's hold in common of an axis."""

    ours: Positions
    """Where it is among our positions."""
    theirs: Positions
    """Where it is among the sender's."""

    @cached_property
    def runs(self) -> list[tuple[int, int, int]]:
        """Runs (our start, their start, length) of positions that are neighbours in both."""
        if not len(self.ours):
            return []
        starts_run = (np.diff(self.ours) != 1) | (np.diff(self.theirs) != 1)
        starts = np.concatenate([[0], np.flatnonzero(starts_run) + 1])
        lengths = np.diff(starts, append=len(self.ours))
        our_starts = self.ours[starts].tolist()
        their_starts = self.theirs[starts].tolist()
        return list(zip(our_starts, their_starts, lengths.tolist(), strict=True))


def block_average(models: Sequence[PackedModel], mask: "ChannelMask") -> Tensor:
    """Average each weight of our units over the models that hold it, else 0.

    Algorithm 1, line 7, as `gossip_average` computes it, and equal to the bit. Return our small
    network's values.
    """
    average = torch.zeros(mask.small.size)
    averages = parameter_arrays(mask.small, average)
    masks = [_channel_mask(model) for model in models]
    sources = _sources(models, masks)
    common = _in_common(masks, mask)
    held_by_axis = _held_by_axis(common, mask)

    holders: dict[Axes, Tensor] = {}
    for i, (total, axes) in enumerate(zip(averages, mask.layout.axes, strict=True)):
        for source, common_axes in zip(sources, common, strict=True):
            _add(total, source[i], _of_dimensions(common_axes, axes))
        if axes not in holders:
            holders[axes] = _count(_of_dimensions(held_by_axis, axes), len(models))
        torch.from_numpy(total).div_(holders[axes])
    return average


def aligned_blocks(
    models: Sequence[PackedModel], own: int, mask: "ChannelMask", average: Tensor
) -> Iterator[AlignedWeights]:
    """Yield the weights of all models that belong to our units, parameter by parameter."""
    masks = [_channel_mask(model) for model in models]
    sources = _sources(models, masks)
    common = _in_common(masks, mask)
    held_by_axis = _held_by_axis(common, mask)
    parameters = zip(mask.small.slices, mask.small.shapes, mask.layout.axes, strict=True)
    for i, (where, shape, axes) in enumerate(parameters):
        is_held = torch.ones(len(models), *shape, dtype=torch.uint8)
        for dim, flags in enumerate(_of_dimensions(held_by_axis, axes)):
            if flags is not None:
                along_dim = [1] * len(shape)
                along_dim[dim] = shape[dim]
                is_held *= flags.view(-1, *along_dim).byte()

        rows = []
        for flags, source, common_axes in zip(is_held.flatten(1), sources, common, strict=True):
            weights = torch.zeros(shape)
            _add(weights.numpy(), source[i], _of_dimensions(common_axes, axes))
            positions = true_indices(flags.view(torch.bool))
            rows.append((flags, positions, weights.flatten()[positions]))
        keeps = torch.ones(where.stop - where.start, dtype=torch.bool)
        yield AlignedWeights(rows[own], keeps, rows, average[where])


def start_units_(average: Tensor, mask: "ChannelMask", fresh: Flags, first_weights: Tensor) -> None:
    """Set the incoming weights of fresh units, in place, to the first weights.

    Their outgoing weights stay 0.
    """
    layout = mask.layout
    is_fresh = layout.held(fresh)
    averages = parameter_arrays(mask.small, average)
    first = parameter_arrays(layout, first_weights)
    parameters = zip(averages, first, layout.axes, layout.output_dims, strict=True)
    for small, large, axes, output in parameters:
        if not axes or axes[output] is None:
            continue
        in_small = []
        in_large = []
        for dim, axis in enumerate(axes):
            if axis is None:
                in_small.append(np.arange(small.shape[dim]))
                in_large.append(np.arange(small.shape[dim]))
                continue
            positions = mask.positions[axis]
            new = is_fresh[axis][positions] & (layout.axis_arrays[axis][positions] >= 0)
            where = np.flatnonzero(new if dim == output else ~new)
            in_small.append(where)
            in_large.append(positions[where])
        small[np.ix_(*in_small)] = large[np.ix_(*in_large)]


def parameter_arrays(layout: Layout, values: Tensor) -> list[Floats]:
    """Return the parameters in a flat vector.

    As `Layout.views` does, but several times faster for many small ones.
    """
    flat = values.numpy()
    parameters = zip(layout.slices, layout.shapes, strict=True)
    return [flat[where].reshape(shape) for where, shape in parameters]


def _sources(models: Sequence[PackedModel], masks: Sequence["ChannelMask"]) -> list[list[Floats]]:
    """Return the parameters of each model's small network."""
    pairs = zip(models, masks, strict=True)
    return [parameter_arrays(mask.small, model.values) for model, mask in pairs]


def _channel_mask(model: PackedModel) -> "ChannelMask":
    """Return the mask of a model that peers with masks of channels exchange."""
    return cast("ChannelMask", model.mask)


def _of_dimensions(by_axis: Sequence[_T], axes: Axes) -> list[_T | None]:
    """Return what belongs to each dimension of a parameter; None: the dimension has no units."""
    return [None if axis is None else by_axis[axis] for axis in axes]


def _in_common(masks: Sequence["ChannelMask"], mask: "ChannelMask") -> list[list[Common]]:
    """Return what each mask has in common with ours, of every axis."""
    our_flags = mask.layout.held(mask.units)
    our_index = [np.cumsum(flags) - 1 for flags in our_flags]
    return [_common(their_mask, our_flags, our_index) for their_mask in masks]


def _common(
    their_mask: "ChannelMask", our_flags: Sequence[Flags], our_index: Sequence[Positions]
) -> list[Common]:
    """Return what another mask and ours hold of each axis.

    The flags say which positions we hold, the index where they are among ours.
    """
    common = []
    for positions, flags, index in zip(their_mask.positions, our_flags, our_index, strict=True):
        shared = np.flatnonzero(flags[positions])
        common.append(Common(index[positions[shared]], shared))
    return common


def _held_by_axis(common: Sequence[Sequence[Common]], mask: "ChannelMask") -> list[Tensor]:
    """Return by axis which of our positions each model holds, as ones and zeros."""
    held_by_axis = []
    for of_models, positions in zip(zip(*common, strict=True), mask.positions, strict=True):
        is_held = torch.zeros(len(of_models), len(positions))
        for row, shared in zip(is_held, of_models, strict=True):
            row.numpy()[shared.ours] = 1
        held_by_axis.append(is_held)
    return held_by_axis


def _add(total: Floats, source: Floats, common: Sequence[Common | None]) -> None:
    """Add what a parameter of another model has in common with ours."""
    if not any(common):
        total += source
        return
    if any(shared is not None and not len(shared.ours) for shared in common):
        return
    if len(common) == 1 and common[0] is not None:
        total[common[0].ours] += source[common[0].theirs]
        return
    if any(common[2:]):
        our_positions = []
        their_positions = []
        for size, shared in zip(total.shape, common, strict=True):
            our_positions.append(np.arange(size) if shared is None else shared.ours)
            their_positions.append(np.arange(size) if shared is None else shared.theirs)
        total[np.ix_(*our_positions)] += source[np.ix_(*their_positions)]
        return
    # As (rows, columns, values): a convolution's values are its kernels.
    total = total.reshape(*total.shape[:2], -1)
    source = source.reshape(*source.shape[:2], -1)
    _add_block(total, source, common[0], common[1])


def _add_block(total: Floats, source: Floats, rows: Common | None, columns: Common | None) -> None:
    """Add some rows and columns: slice by slice where slices are long, else row by row."""
    row_runs = [(0, 0, total.shape[0])] if rows is None else rows.runs
    column_runs = [(0, 0, total.shape[1])] if columns is None else columns.runs
    values_per_row = total.shape[2] * sum(width for _, _, width in column_runs)
    if values_per_row < LONG_RUN * len(column_runs):
        _add_rows(total, source, rows, columns)
        return
    if len(column_runs) == 1:
        ((column, from_column, width),) = column_runs
        for row, from_row, height in row_runs:
            block = total[row : row + height, column : column + width]
            their_rows = source[from_row : from_row + height]
            np.add(block, their_rows[:, from_column : from_column + width], out=block)
        return
    # Copying slices into rows like ours and adding whole rows takes less time than adding slices.
    most_rows = max((height for _, _, height in row_runs), default=0)
    buffer = np.zeros((most_rows, *total.shape[1:]), np.float32)
    for row, from_row, height in row_runs:
        block = total[row : row + height]
        their_rows = source[from_row : from_row + height]
        like_ours = buffer[:height]
        for column, from_column, width in column_runs:
            their_slice = their_rows[:, from_column : from_column + width]
            like_ours[:, column : column + width] = their_slice
        np.add(block, like_ours, out=block)


def _add_rows(total: Floats, source: Floats, rows: Common | None, columns: Common | None) -> None:
    """Bring each row into our order of columns, zeros where it has none, and add whole rows."""
    block = torch.from_numpy(source)
    if rows is not None:
        block = block.index_select(0, torch.from_numpy(rows.theirs))
    if columns is not None:
        order = np.full(total.shape[1], source.shape[1])
        order[columns.ours] = columns.theirs
        zeros = torch.zeros(len(block), 1, block.shape[2])
        block = torch.cat([block, zeros], 1).index_select(1, torch.from_numpy(order))
    our_rows = np.arange(len(total)) if rows is None else rows.ours
    torch.from_numpy(total).index_add_(0, torch.from_numpy(our_rows), block)


def _count(held: Sequence[Tensor | None], models: int) -> Tensor:
    """Return how many models hold each weight of a parameter, at least 1.

    Dimensions without units have size 1.
    """
    one = torch.ones(models, 1)
    rows, *columns = [one if flags is None else flags for flags in held] or [one]
    held_columns = one
    for flags in columns:
        held_columns = (held_columns[:, :, None] * flags[:, None, :]).flatten(1)
    shape = [1 if flags is None else flags.shape[1] for flags in held]
    return (rows.T @ held_columns).clamp_(min=1).view(shape)
