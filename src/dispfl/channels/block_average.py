"""The average of models under masks of channels, on the dense blocks that masks have in common.

The values of such a model are the parameters of its small network, one after another. What two
models hold in common of a parameter is a block of each: some rows and some columns.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, TypeVar, cast

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
"""Mean number of values in a run from which adding slice by slice is fastest."""


class Run(NamedTuple):
    """Positions of an axis that are adjacent in our model and in the sender's."""

    our_start: int
    sender_start: int
    length: int


@dataclass(frozen=True, eq=False)
class Common:
    """What our mask and a sender's hold in common of an axis."""

    in_ours: Positions
    """Where it is among our positions."""
    in_senders: Positions
    """Where it is among the sender's."""

    @classmethod
    def everything(cls, size: int) -> "Common":
        """All positions of a dimension without units."""
        return cls(np.arange(size), np.arange(size))

    @property
    def is_empty(self) -> bool:
        return len(self.in_ours) == 0

    @cached_property
    def runs(self) -> list[Run]:
        """The runs of adjacent positions, in order."""
        if self.is_empty:
            return []
        starts_run = (np.diff(self.in_ours) != 1) | (np.diff(self.in_senders) != 1)
        starts = np.concatenate([[0], np.flatnonzero(starts_run) + 1])
        lengths = np.diff(starts, append=len(self.in_ours))
        our_starts = self.in_ours[starts].tolist()
        sender_starts = self.in_senders[starts].tolist()
        return list(map(Run, our_starts, sender_starts, lengths.tolist()))


class _Sender(NamedTuple):
    """A model to average, compared with our mask."""

    parameters: list[Floats]
    """The parameters of its small network."""
    common: list[Common]
    """What its mask and ours hold in common, by axis."""


def block_average(
    models: Sequence[PackedModel],
    mask: "ChannelMask",
    mixing_weights: Sequence[float] | None = None,
) -> Tensor:
    """Average each weight of our units over the models that hold it, else 0.

    Algorithm 1, line 7, as `gossip_average` computes it, and equal to the bit; `mixing_weights`
    says how much each model counts. Return our small network's values.
    """
    if mixing_weights is not None:
        models = [_scaled(*pair) for pair in zip(models, mixing_weights, strict=True)]
    average = torch.zeros(mask.small.size)
    averages = parameter_arrays(mask.small, average)
    senders = _compare(models, mask)
    held_by_axis = _held_by_axis(senders, mask)

    holders: dict[Axes, Tensor] = {}
    for i, (total, axes) in enumerate(zip(averages, mask.layout.axes, strict=True)):
        for sender in senders:
            _add(total, sender.parameters[i], _of_dimensions(sender.common, axes))
        if axes not in holders:
            holders[axes] = _count(_of_dimensions(held_by_axis, axes), len(models), mixing_weights)
        torch.from_numpy(total).div_(holders[axes])
    return average


def aligned_blocks(
    models: Sequence[PackedModel], own: int, mask: "ChannelMask", average: Tensor
) -> Iterator[AlignedWeights]:
    """Yield the weights of all models that belong to our units, parameter by parameter."""
    senders = _compare(models, mask)
    held_by_axis = _held_by_axis(senders, mask)
    parameters = zip(mask.small.slices, mask.small.shapes, mask.layout.axes, strict=True)
    for i, (where, shape, axes) in enumerate(parameters):
        is_held = torch.ones(len(models), *shape, dtype=torch.uint8)
        for dim, flags in enumerate(_of_dimensions(held_by_axis, axes)):
            if flags is not None:
                along_dim = [1] * len(shape)
                along_dim[dim] = shape[dim]
                is_held *= flags.view(-1, *along_dim).byte()

        rows = []
        for flags, sender in zip(is_held.flatten(1), senders, strict=True):
            weights = torch.zeros(shape)
            _add(weights.numpy(), sender.parameters[i], _of_dimensions(sender.common, axes))
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


def _of_dimensions(by_axis: Sequence[_T], axes: Axes) -> list[_T | None]:
    """Return what belongs to each dimension of a parameter; None: the dimension has no units."""
    return [None if axis is None else by_axis[axis] for axis in axes]


def _compare(models: Sequence[PackedModel], mask: "ChannelMask") -> list[_Sender]:
    """Find what each model has in common with our mask."""
    our_flags = mask.layout.held(mask.units)
    our_index = [np.cumsum(flags) - 1 for flags in our_flags]  # where positions are among ours
    senders = []
    for model in models:
        sender_mask = cast("ChannelMask", model.mask)
        common = []
        axes = zip(sender_mask.positions, our_flags, our_index, strict=True)
        for positions, flags, index in axes:
            in_senders = np.flatnonzero(flags[positions])
            common.append(Common(index[positions[in_senders]], in_senders))
        senders.append(_Sender(parameter_arrays(sender_mask.small, model.values), common))
    return senders


def _held_by_axis(senders: Sequence[_Sender], mask: "ChannelMask") -> list[Tensor]:
    """Return by axis which of our positions each model holds, as ones and zeros."""
    held_by_axis = []
    for axis, positions in enumerate(mask.positions):
        is_held = torch.zeros(len(senders), len(positions))
        for row, sender in zip(is_held, senders, strict=True):
            row.numpy()[sender.common[axis].in_ours] = 1
        held_by_axis.append(is_held)
    return held_by_axis


def _add(total: Floats, source: Floats, common: Sequence[Common | None]) -> None:
    """Add what a parameter of a sender's model has in common with ours."""
    if not any(common):  # no dimension has units
        total += source
        return
    if any(shared is not None and shared.is_empty for shared in common):
        return
    if len(common) == 1 and common[0] is not None:
        total[common[0].in_ours] += source[common[0].in_senders]
        return
    if any(common[2:]):
        our_positions = []
        sender_positions = []
        for size, units_in_common in zip(total.shape, common, strict=True):
            shared = units_in_common or Common.everything(size)
            our_positions.append(shared.in_ours)
            sender_positions.append(shared.in_senders)
        total[np.ix_(*our_positions)] += source[np.ix_(*sender_positions)]
        return
    # As (rows, columns, values): a convolution's values are its kernels.
    total = total.reshape(*total.shape[:2], -1)
    source = source.reshape(*source.shape[:2], -1)
    _add_block(total, source, common[0], common[1])


def _add_block(total: Floats, source: Floats, rows: Common | None, columns: Common | None) -> None:
    """Add some rows and columns: slice by slice where slices are long, else row by row."""
    row_runs = _runs(rows, total.shape[0])
    column_runs = _runs(columns, total.shape[1])
    values_per_row = total.shape[2] * sum(run.length for run in column_runs)
    if values_per_row < LONG_RUN * len(column_runs):
        _add_rows(total, source, rows, columns)
        return

    if len(column_runs) == 1:
        ((column, sender_column, width),) = column_runs
        for row, sender_row, height in row_runs:
            block = total[row : row + height, column : column + width]
            sender_rows = source[sender_row : sender_row + height]
            np.add(block, sender_rows[:, sender_column : sender_column + width], out=block)
        return

    # Copying slices into rows like ours and adding whole rows takes less time than adding slices.
    most_rows = max((run.length for run in row_runs), default=0)
    buffer = np.zeros((most_rows, *total.shape[1:]), np.float32)
    for row, sender_row, height in row_runs:
        block = total[row : row + height]
        sender_rows = source[sender_row : sender_row + height]
        like_ours = buffer[:height]
        for column, sender_column, width in column_runs:
            sender_slice = sender_rows[:, sender_column : sender_column + width]
            like_ours[:, column : column + width] = sender_slice
        np.add(block, like_ours, out=block)


def _runs(common: Common | None, size: int) -> list[Run]:
    """Return the runs of a dimension: a single one if it has no units."""
    if common is None:
        return [Run(0, 0, size)]
    return common.runs


def _add_rows(total: Floats, source: Floats, rows: Common | None, columns: Common | None) -> None:
    """Bring each row into our order of columns, zeros where it has none, and add whole rows."""
    block = torch.from_numpy(source)
    our_rows = np.arange(len(total))
    if rows is not None:
        block = block.index_select(0, torch.from_numpy(rows.in_senders))
        our_rows = rows.in_ours
    if columns is not None:
        order = np.full(total.shape[1], source.shape[1])
        order[columns.in_ours] = columns.in_senders
        zeros = torch.zeros(len(block), 1, block.shape[2])
        block = torch.cat([block, zeros], 1).index_select(1, torch.from_numpy(order))
    torch.from_numpy(total).index_add_(0, torch.from_numpy(our_rows), block)


def _scaled(model: PackedModel, mixing_weight: float) -> PackedModel:
    return replace(model, values=model.values * mixing_weight)


def _count(
    held: Sequence[Tensor | None], models: int, mixing_weights: Sequence[float] | None
) -> Tensor:
    """Return how many models hold each weight of a parameter, or how much they count; never 0.

    Dimensions without units have size 1.
    """
    held_by_all = torch.ones(models, 1)
    by_dimension = [held_by_all if flags is None else flags for flags in held]
    shape = [flags.shape[1] for flags in by_dimension]
    rows = by_dimension[0] if by_dimension else held_by_all

    columns = held_by_all
    for flags in by_dimension[1:]:
        columns = (columns[:, :, None] * flags[:, None, :]).flatten(1)
    if mixing_weights is None:
        return (rows.T @ columns).clamp_(min=1).view(shape)
    weighted_rows = rows * torch.tensor(mixing_weights)[:, None]
    sums = weighted_rows.T @ columns
    return sums.masked_fill_(sums == 0, 1).view(shape)
