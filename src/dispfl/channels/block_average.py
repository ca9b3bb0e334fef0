"""Models under masks of units: their average and scores, on the dense blocks that masks have in
common.

The values of such a model are the parameters of its small network, one after another. What two
models hold in common of a parameter is a block of each: some rows and some columns.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dispfl.channels.units import AxisIndex, Flags, Positions, UnitMask
from dispfl.core.layout import Layout
from dispfl.core.masks import true_indices
from dispfl.core.packed import PackedModel
from dispfl.robust.rules import Part, Rule, Trust, robust_average

Floats = NDArray[np.float32]

LONG_RUN = 64
"""Values that lie side by side in both blocks, on average, from which adding slice by slice is
fastest."""


@dataclass(frozen=True, eq=False)
class Common:
    """What two masks hold in common of an axis."""

    here: Positions
    """Where it is among our positions."""
    there: Positions
    """Where it is among theirs."""

    @cached_property
    def runs(self) -> list[tuple[int, int, int]]:
        """Runs (start here, start there, length) of positions that are neighbours in both."""
        here, there = self.here, self.there
        if not len(here):
            return []
        starts_run = (here[1:] - here[:-1] != 1) | (there[1:] - there[:-1] != 1)
        starts = np.concatenate([[0], np.flatnonzero(starts_run) + 1])
        lengths = np.diff(starts, append=len(here))
        return list(
            zip(here[starts].tolist(), there[starts].tolist(), lengths.tolist(), strict=True)
        )


def block_average(models: Sequence[PackedModel], mask: UnitMask, first_weights: Tensor) -> Tensor:
    """Average each weight of our units over the models that hold it; return our small network's
    values.

    Algorithm 1, line 7, as `gossip_average` computes it, and equal to the bit. A unit that no model
    holds starts with the first weights of all peers as its inputs and with zeros as its outputs: it
    changes nothing at first, and learns.
    """
    models = [
        model for model in models if model.mask.kept
    ]  # a peer that joins later has no model yet
    if not models:
        return PackedModel.pack(first_weights, mask.unpack(), mask).values
    average = torch.zeros(mask.small.size)
    parts = _arrays(mask.small, average)
    masks = [_unit_mask(model) for model in models]
    sources = [_arrays(m.small, model.values) for m, model in zip(masks, models, strict=True)]
    common, held = _in_common(masks, mask)
    counts: dict[tuple[AxisIndex | None, ...], Tensor] = {}
    for i, (part, axes) in enumerate(zip(parts, mask.layout.axes, strict=True)):
        for source, shared in zip(sources, common, strict=True):
            _add(part, source[i], [None if axis is None else shared[axis] for axis in axes])
        if axes not in counts:
            counts[axes] = _count(
                [None if axis is None else held[axis] for axis in axes], len(models)
            )
        torch.from_numpy(part).div_(counts[axes])
    _start_units(
        parts, mask, mask.units & ~np.logical_or.reduce([m.units for m in masks]), first_weights
    )
    return average


def robust_block_average(
    models: Sequence[PackedModel],
    own: int,
    mask: UnitMask,
    first_weights: Tensor,
    rule: Rule,
    b: int,
) -> tuple[Tensor, Trust | None]:
    """Average our units by a rule that withstands b lies (robust/rules.py); also return what was
    measured.

    A unit that neither we nor a near sender holds starts as one that no model holds in
    `block_average`, and so do all units of a peer that has no model yet.
    """
    if not models[own].mask.kept:
        return PackedModel.pack(first_weights, mask.unpack(), mask).values, None
    average = torch.zeros(mask.small.size)
    masks = [_unit_mask(model) for model in models]
    held = [m & mask for m in masks]
    trust = robust_average(lambda: _parts(models, masks, own, mask, average), held, own, rule, b)
    trusted = [m.units for k, m in enumerate(masks) if k == own or trust.near[k]]
    _start_units(
        _arrays(mask.small, average),
        mask,
        mask.units & ~np.logical_or.reduce(trusted),
        first_weights,
    )
    return average, trust


def _parts(
    models: Sequence[PackedModel],
    masks: Sequence[UnitMask],
    own: int,
    mask: UnitMask,
    average: Tensor,
) -> Iterator[Part]:
    """Yield the weights of all models that belong to our units, parameter by parameter."""
    sources = [_arrays(m.small, model.values) for m, model in zip(masks, models, strict=True)]
    common, held_of = _in_common(masks, mask)
    for i, (where, shape, axes) in enumerate(
        zip(mask.small.slices, mask.small.shapes, mask.layout.axes, strict=True)
    ):
        held = torch.ones(len(models), *shape, dtype=torch.uint8)
        for dim, axis in enumerate(axes):
            if axis is not None:
                held *= (
                    held_of[axis]
                    .view(-1, *(shape[dim] if k == dim else 1 for k in range(len(shape))))
                    .byte()
                )
        rows = []
        for flags, source, shared in zip(held.flatten(1), sources, common, strict=True):
            total = torch.zeros(shape)
            _add(
                total.numpy(), source[i], [None if axis is None else shared[axis] for axis in axes]
            )
            at = true_indices(flags.view(torch.bool))
            rows.append((flags, at, total.flatten()[at]))
        yield Part(
            rows[own], torch.ones(len(average[where]), dtype=torch.bool), rows, average[where]
        )


def unit_strengths(values: Tensor, mask: UnitMask) -> NDArray[np.float64]:
    """Return the mean square of each unit's incoming weights times that of its outgoing weights; 0
    if it is not held.

    Scaling a ReLU unit's inputs by c and its outputs by 1/c changes neither the network nor this
    number. Biases and norms do not count.
    """
    layout = mask.layout
    totals, counts = np.zeros((2, layout.units + 1)), np.zeros((2, layout.units + 1))
    units = [axis[found] for axis, found in zip(layout.axis_arrays, mask.positions, strict=True)]
    for array, axes, output in zip(
        _arrays(mask.small, values), layout.axes, layout.output_dims, strict=True
    ):
        if array.ndim < 2:
            continue
        squares = array**2
        for dim, axis in enumerate(axes):
            if axis is not None:
                side, others = int(dim != output), tuple(i for i in range(squares.ndim) if i != dim)
                np.add.at(totals[side], units[axis], squares.sum(others, dtype=np.float64))
                np.add.at(counts[side], units[axis], squares.size / max(1, squares.shape[dim]))
    means = np.divide(totals, counts, out=totals, where=counts > 0)
    return np.asarray((means[0] * means[1])[:-1])


def _arrays(layout: Layout, values: Tensor) -> list[Floats]:
    """Return the parameters in a flat vector, as `Layout.views` does, but several times faster for
    many small ones."""
    flat = values.numpy()
    return [
        flat[where].reshape(shape)
        for where, shape in zip(layout.slices, layout.shapes, strict=True)
    ]


def _unit_mask(model: PackedModel) -> UnitMask:
    assert isinstance(model.mask, UnitMask)
    return model.mask


def _common(theirs: UnitMask, held: Sequence[Flags], index: Sequence[Positions]) -> list[Common]:
    """Return what another mask and ours hold of each axis, given which positions we hold and their
    index among ours."""
    found = []
    for positions, ours, where in zip(theirs.positions, held, index, strict=True):
        there = np.flatnonzero(ours[positions])
        found.append(Common(where[positions[there]], there))
    return found


def _in_common(
    masks: Sequence[UnitMask], mask: UnitMask
) -> tuple[list[list[Common]], list[Tensor]]:
    """Return what each mask has in common with ours, of every axis; and by axis which of our
    positions each holds."""
    ours = mask.layout.held(mask.units)
    index = [np.cumsum(flags) - 1 for flags in ours]
    common = [_common(theirs, ours, index) for theirs in masks]
    by_axis = zip(zip(*common, strict=True), mask.positions, strict=True)
    return common, [_held(of_models, len(kept)) for of_models, kept in by_axis]


def _held(common: Sequence[Common], size: int) -> Tensor:
    """Return for every model which of our positions of an axis it holds, as ones and zeros."""
    held = torch.zeros(len(common), size)
    for row, shared in zip(held, common, strict=True):
        row.numpy()[shared.here] = 1
    return held


def _add(total: Floats, source: Floats, common: Sequence[Common | None]) -> None:
    """Add what a parameter of another model has in common with ours: slice by slice where slices
    are long."""
    if not any(common):
        total += source
        return
    if any(each is not None and not len(each.here) for each in common):
        return
    if len(common) == 1 and common[0] is not None:
        total[common[0].here] += source[common[0].there]
        return
    if any(common[2:]):
        here = [
            np.arange(n) if c is None else c.here for n, c in zip(total.shape, common, strict=True)
        ]
        there = [
            np.arange(n) if c is None else c.there for n, c in zip(total.shape, common, strict=True)
        ]
        total[np.ix_(*here)] += source[np.ix_(*there)]
        return
    # As (rows, columns, values): a convolution's values are its kernels.
    total, source = (part.reshape(*part.shape[:2], -1) for part in (total, source))
    rows, columns = (
        [(0, 0, n)] if c is None else c.runs
        for n, c in zip(total.shape[:2], common[:2], strict=True)
    )
    values = total.shape[2] * sum(length for _, _, length in columns)
    if values < LONG_RUN * len(columns):
        _add_rows(total, source, *common[:2])
        return
    if len(columns) == 1:
        ((c, from_c, width),) = columns
        for r, from_r, height in rows:
            block = total[r : r + height, c : c + width]
            np.add(block, source[from_r : from_r + height, from_c : from_c + width], out=block)
        return
    # Copying slices into rows like ours and adding whole rows takes less time than adding slices.
    buffer = np.zeros(
        (max((height for _, _, height in rows), default=0), *total.shape[1:]), np.float32
    )
    for r, from_r, height in rows:
        part, to = source[from_r : from_r + height], total[r : r + height]
        like_ours = buffer[:height]
        for c, from_c, width in columns:
            like_ours[:, c : c + width] = part[:, from_c : from_c + width]
        np.add(to, like_ours, out=to)


def _add_rows(total: Floats, source: Floats, rows: Common | None, columns: Common | None) -> None:
    """Bring each row into our order of columns, with zeros where it has none, and add whole
    rows."""
    part = torch.from_numpy(source)
    if rows is not None:
        part = part.index_select(0, torch.from_numpy(rows.there))
    if columns is not None:
        order = np.full(total.shape[1], source.shape[1])
        order[columns.here] = columns.there
        nothing = torch.zeros(len(part), 1, part.shape[2])
        part = torch.cat([part, nothing], 1).index_select(1, torch.from_numpy(order))
    here = np.arange(len(total)) if rows is None else rows.here
    torch.from_numpy(total).index_add_(0, torch.from_numpy(here), part)


def _count(held: Sequence[Tensor | None], models: int) -> Tensor:
    """Return how many models hold each weight of a parameter, at least 1; dimensions without units
    have size 1."""
    one = torch.ones(models, 1)
    rows, *others = [one if flags is None else flags for flags in held] or [one]
    rest = one
    for flags in others:
        rest = (rest[:, :, None] * flags[:, None, :]).flatten(1)
    return (
        (rows.T @ rest)
        .clamp_(min=1)
        .view([1 if flags is None else flags.shape[1] for flags in held])
    )


def _start_units(
    parts: Sequence[Floats], mask: UnitMask, fresh: Flags, first_weights: Tensor
) -> None:
    """Set the incoming weights of fresh units, in place, to the first weights; their outgoing ones
    stay 0."""
    if not fresh.any():
        return
    layout = mask.layout
    is_fresh = layout.held(fresh)
    first = _arrays(layout, first_weights)
    for part, start, axes, output in zip(
        parts, first, layout.axes, layout.output_dims, strict=True
    ):
        axis = axes[output] if axes else None
        if axis is None:
            continue
        here, there = [], []
        for dim, other in enumerate(axes):
            if other is None:
                positions = where = np.arange(part.shape[dim])
            else:
                positions = mask.positions[other]
                new = is_fresh[other][positions] & (layout.axis_arrays[other][positions] >= 0)
                where = np.flatnonzero(new if dim == output else ~new)
                positions = positions[where]
            here.append(where)
            there.append(positions)
        part[np.ix_(*here)] = start[np.ix_(*there)]
