"""Models under masks of units: their average and scores, on the dense blocks that masks have in common.

The values of such a model are the parameters of its small network, one after another. What two models hold in common
of a parameter is a block of each: some rows and some columns.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dispfl.core.packed import PackedModel
from dispfl.core.units import Axis, Flags, Positions, UnitMask

Floats = NDArray[np.float32]
Block = tuple[Positions | None, ...]
"""The positions of a block in each dimension of a parameter; None: all."""

LONG_RUN = 64
"""Values that lie side by side in both blocks, on average, from which adding slice by slice is fastest."""


def block_average(models: Sequence[PackedModel], mask: UnitMask, first_weights: Tensor) -> Tensor:
    """Average each weight of our units over the models that hold it; return our small network's values.

    Algorithm 1, line 7, as `gossip_average` computes it, and equal to the bit. A unit that no model holds starts with
    the first weights of all peers as its inputs and with zeros as its outputs: it changes nothing at first, and learns.
    """
    layout, small = mask.layout, mask.small
    models = [model for model in models if model.mask.kept]  # a peer that joins later has no model yet
    if not models:
        return PackedModel.pack(first_weights, mask.unpack(), mask).values
    average = torch.zeros(small.size)
    parts = [view.numpy() for view in small.views(average)]
    of_models = [(_unit_mask(model), [view.numpy() for view in _small_views(model)]) for model in models]
    common = [_common_positions(theirs, mask) for theirs, _ in of_models]
    for i, (part, axes) in enumerate(zip(parts, layout.axes, strict=True)):
        holders = np.zeros([1 if axis is None else size for axis, size in zip(axes, part.shape, strict=True)], np.int32)
        for (_, theirs), shared in zip(of_models, common, strict=True):
            here = tuple(None if axis is None else shared[axis][1] for axis in axes)
            there = tuple(None if axis is None else shared[axis][0] for axis in axes)
            _add(part, here, theirs[i], there)
            holders[_index(here, holders.shape)] += 1
        np.divide(part, np.maximum(holders, 1), out=part, dtype=np.float32)
    _start_units(parts, mask, mask.units & ~np.logical_or.reduce([m.units for m, _ in of_models]), first_weights)
    return average


def mean_squares(values: Tensor, mask: UnitMask) -> NDArray[np.float64]:
    """Return the mean square of the weights of each unit, incoming and outgoing; 0 for units that are not held."""
    layout = mask.layout
    totals, counts = np.zeros(layout.units + 1), np.zeros(layout.units + 1)
    units = {axis: np.array(axis)[found] for axis, found in mask.positions.items()}
    for view, axes in zip(mask.small.views(values), layout.axes, strict=True):
        squares = view.numpy() ** 2
        for dim, axis in enumerate(axes):
            if axis is None:
                continue
            others = tuple(i for i in range(squares.ndim) if i != dim)
            np.add.at(totals, units[axis], squares.sum(others, dtype=np.float64))
            np.add.at(counts, units[axis], squares.size / max(1, squares.shape[dim]))
    return np.divide(totals, counts, out=totals, where=counts > 0)[:-1]


def _unit_mask(model: PackedModel) -> UnitMask:
    assert isinstance(model.mask, UnitMask)
    return model.mask


def _small_views(model: PackedModel) -> list[Tensor]:
    return _unit_mask(model).small.views(model.values)


def _common_positions(theirs: UnitMask, ours: UnitMask) -> dict[Axis, tuple[Positions, Positions]]:
    """Return for every axis where what both hold is among their positions, and among ours."""
    found = {}
    for axis, mine in ours.positions.items():
        _, there, here = np.intersect1d(theirs.positions[axis], mine, assume_unique=True, return_indices=True)
        found[axis] = there, here
    return found


def _add(total: Floats, here: Block, source: Floats, there: Block) -> None:
    """Add a block of one parameter to a block of another: slice by slice where slices are long."""
    if any(positions is not None and not len(positions) for positions in here):
        return  # nothing in common
    if all(positions is None for positions in here):
        total += source
        return
    if any(positions is not None for positions in here[2:]):
        total[_index(here, total.shape)] += source[_index(there, source.shape)]
        return
    # As (rows, columns, values): a vector has one column, a convolution's values are its kernels.
    total, source = (part.reshape(len(part), part.shape[1] if part.ndim > 1 else 1, -1) for part in (total, source))
    here, there = (*here, None)[:2], (*there, None)[:2]
    rows, columns = (_runs(h, t, size) for h, t, size in zip(here, there, total.shape, strict=False))
    values = total.shape[2] * sum(length for _, _, length in columns)
    if values < LONG_RUN * len(columns):
        _add_rows(total, here, source, there)
        return
    for r, from_r, height in rows:
        for c, from_c, width in columns:
            total[r : r + height, c : c + width] += source[from_r : from_r + height, from_c : from_c + width]


def _add_rows(total: Floats, here: Block, source: Floats, there: Block) -> None:
    """Bring each row into our order of columns, with zeros where it has none, and add whole rows."""
    part = torch.from_numpy(source)
    if there[0] is not None:
        part = part.index_select(0, torch.from_numpy(there[0]))
    if here[1] is not None and there[1] is not None:
        columns = np.full(total.shape[1], source.shape[1])
        columns[here[1]] = there[1]
        nothing = torch.zeros(len(part), 1, part.shape[2])
        part = torch.cat([part, nothing], 1).index_select(1, torch.from_numpy(columns))
    rows = np.arange(len(total)) if here[0] is None else here[0]
    torch.from_numpy(total).index_add_(0, torch.from_numpy(rows), part)


def _runs(here: Positions | None, there: Positions | None, size: int) -> list[tuple[int, int, int]]:
    """Return runs (start here, start there, length) of positions that are neighbours in both."""
    if here is None or there is None:
        return [(0, 0, size)]
    if not len(here):
        return []
    cuts = np.flatnonzero((np.diff(here) != 1) | (np.diff(there) != 1)) + 1
    edges = [0, *cuts.tolist(), len(here)]
    return [(int(here[start]), int(there[start]), end - start) for start, end in pairwise(edges)]


def _index(block: Block, shape: Sequence[int]) -> tuple[Positions, ...]:
    return np.ix_(*(np.arange(size) if where is None else where for where, size in zip(block, shape, strict=True)))


def _start_units(parts: Sequence[Floats], mask: UnitMask, fresh: Flags, first_weights: Tensor) -> None:
    """Set the incoming weights of fresh units, in place, to the first weights; their outgoing ones stay 0."""
    if not fresh.any():
        return
    layout = mask.layout
    is_fresh = layout.held(fresh)
    first = [view.numpy() for view in layout.views(first_weights)]
    for part, start, axes, output in zip(parts, first, layout.axes, layout.output_dims, strict=True):
        axis = axes[output] if axes else None
        if axis is None:
            continue
        here, there = [], []
        for dim, other in enumerate(axes):
            if other is None:
                positions = where = np.arange(part.shape[dim])
            else:
                positions = mask.positions[other]
                units = np.array(other)[positions]
                new = is_fresh[other][positions] & (units >= 0)
                where = np.flatnonzero(new if dim == output else ~new)
                positions = positions[where]
            here.append(where)
            there.append(positions)
        part[np.ix_(*here)] = start[np.ix_(*there)]
