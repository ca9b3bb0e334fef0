"""Models under masks of units: their average and scores, on the dense blocks that masks have in common.

The values of such a model are the parameters of its small network, one after another. What two models hold in common
of a parameter is a block of each: some rows and some columns.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dispfl.core.packed import PackedModel
from dispfl.core.units import Flags, Positions, UnitMask

Floats = NDArray[np.float32]

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
    masks = [_unit_mask(model) for model in models]
    average = torch.zeros(small.size)
    parts = [view.numpy() for view in small.views(average)]
    of_models = [[view.numpy() for view in _small_views(model)] for model in models]
    shared = [_shared_blocks(theirs, mask) for theirs in masks]
    held = [np.stack(flags) for flags in zip(*(_held_of_ours(theirs, mask) for theirs in masks), strict=True)]
    for i, (part, axes) in enumerate(zip(parts, layout.axes, strict=True)):
        for theirs, blocks in zip(of_models, shared, strict=True):
            _add(part, theirs[i], tuple(None if axis is None else blocks[axis] for axis in axes))
        holders = _holders([None if axis is None else held[axis] for axis in axes], len(models))
        np.divide(part, np.maximum(holders, 1), out=part, dtype=np.float32)
    _start_units(parts, mask, mask.units & ~np.logical_or.reduce([theirs.units for theirs in masks]), first_weights)
    return average


def unit_strengths(values: Tensor, mask: UnitMask) -> NDArray[np.float64]:
    """Return the mean square of each unit's incoming weights times that of its outgoing weights; 0 if it is not held.

    A unit matters as far as it depends on its inputs and as the outputs depend on it. Biases and norms do not count.
    """
    layout = mask.layout
    totals, counts = np.zeros((2, layout.units + 1)), np.zeros((2, layout.units + 1))
    units = [axis[found] for axis, found in zip(layout.axis_arrays, mask.positions, strict=True)]
    for view, axes, output in zip(mask.small.views(values), layout.axes, layout.output_dims, strict=True):
        if view.ndim < 2:
            continue
        squares = view.numpy() ** 2
        for dim, axis in enumerate(axes):
            if axis is not None:
                side, others = int(dim != output), tuple(i for i in range(squares.ndim) if i != dim)
                np.add.at(totals[side], units[axis], squares.sum(others, dtype=np.float64))
                np.add.at(counts[side], units[axis], squares.size / max(1, squares.shape[dim]))
    means = np.divide(totals, counts, out=totals, where=counts > 0)
    return np.asarray((means[0] * means[1])[:-1])


def _unit_mask(model: PackedModel) -> UnitMask:
    assert isinstance(model.mask, UnitMask)
    return model.mask


def _small_views(model: PackedModel) -> list[Tensor]:
    return _unit_mask(model).small.views(model.values)


def _held_of_ours(theirs: UnitMask, ours: UnitMask) -> list[NDArray[np.float32]]:
    """Return for every axis which of our positions another mask holds, as 1 or 0."""
    held = theirs.layout.held(theirs.units)
    return [flags[mine].astype(np.float32) for flags, mine in zip(held, ours.positions, strict=True)]


def _holders(held: Sequence[Floats | None], models: int) -> Floats:
    """Return how many models hold each weight of a parameter, from the positions that each holds; broadcastable."""
    given = [flags for flags in held if flags is not None]
    shape = [1 if flags is None else flags.shape[1] for flags in held]
    if not given:
        return np.full(shape, models, np.float32)
    count: Floats
    if len(given) == 2:
        count = given[0].T @ given[1]
    else:
        dims = "abcdefgh"[: len(given)]
        count = np.einsum(f"{','.join('z' + dim for dim in dims)}->{dims}", *given)
    return count.reshape(shape)


@dataclass(frozen=True)
class _Shared:
    """What two masks hold in common of an axis: its positions among ours and among theirs."""

    here: Positions
    there: Positions

    @cached_property
    def runs(self) -> list[tuple[int, int, int]]:
        """Runs (start here, start there, length) of positions that are neighbours in both."""
        if not len(self.here):
            return []
        cuts = np.flatnonzero((np.diff(self.here) != 1) | (np.diff(self.there) != 1)) + 1
        edges = [0, *cuts.tolist(), len(self.here)]
        return [(int(self.here[start]), int(self.there[start]), end - start) for start, end in pairwise(edges)]


def _shared_blocks(theirs: UnitMask, ours: UnitMask) -> list[_Shared]:
    """Return for every axis what both masks hold."""
    found = []
    for mine, other, held_here, held_there in zip(
        ours.positions,
        theirs.positions,
        ours.layout.held(ours.units),
        theirs.layout.held(theirs.units),
        strict=True,
    ):
        found.append(_Shared(np.flatnonzero(held_there[mine]), np.flatnonzero(held_here[other])))
    return found


def _add(total: Floats, source: Floats, shared: Sequence[_Shared | None]) -> None:
    """Add the shared block of one parameter to another: slice by slice where slices are long."""
    if any(each is not None and not len(each.here) for each in shared):
        return  # nothing in common
    if all(each is None for each in shared):
        total += source
        return
    if any(each is not None for each in shared[2:]):
        here = [np.arange(size) if each is None else each.here for each, size in zip(shared, total.shape, strict=True)]
        there = [np.arange(size) if e is None else e.there for e, size in zip(shared, source.shape, strict=True)]
        total[np.ix_(*here)] += source[np.ix_(*there)]
        return
    # As (rows, columns, values): a vector has one column, a convolution's values are its kernels.
    total, source = (part.reshape(len(part), part.shape[1] if part.ndim > 1 else 1, -1) for part in (total, source))
    of_rows, of_columns = (*shared, None)[:2]
    columns = [(0, 0, total.shape[1])] if of_columns is None else of_columns.runs
    if total.shape[2] * sum(length for _, _, length in columns) < LONG_RUN * len(columns):
        _add_rows(total, source, of_rows, of_columns)
        return
    for r, from_r, height in [(0, 0, len(total))] if of_rows is None else of_rows.runs:
        for c, from_c, width in columns:
            total[r : r + height, c : c + width] += source[from_r : from_r + height, from_c : from_c + width]


def _add_rows(total: Floats, source: Floats, of_rows: _Shared | None, of_columns: _Shared | None) -> None:
    """Bring each row into our order of columns, with zeros where it has none, and add whole rows."""
    part = torch.from_numpy(source)
    if of_rows is not None:
        part = part.index_select(0, torch.from_numpy(of_rows.there))
    if of_columns is not None:
        columns = np.full(total.shape[1], source.shape[1])
        columns[of_columns.here] = of_columns.there
        nothing = torch.zeros(len(part), 1, part.shape[2])
        part = torch.cat([part, nothing], 1).index_select(1, torch.from_numpy(columns))
    if of_rows is None:
        torch.from_numpy(total).add_(part)
    else:
        torch.from_numpy(total).index_add_(0, torch.from_numpy(of_rows.here), part)


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
                new = is_fresh[other][positions] & (layout.axis_arrays[other][positions] >= 0)
                where = np.flatnonzero(new if dim == output else ~new)
                positions = positions[where]
            here.append(where)
            there.append(positions)
        part[np.ix_(*here)] = start[np.ix_(*there)]
