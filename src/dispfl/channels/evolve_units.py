"""Algorithm 2 for whole units: how strong each is, and which are replaced."""

from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dispfl.channels.block_average import parameter_arrays

if TYPE_CHECKING:
    from dispfl.channels.channel_mask import ChannelMask

Scores = NDArray[np.float64]


def unit_strengths(values: Tensor, mask: "ChannelMask") -> Scores:
    """Return the mean square of each unit's incoming weights times that of its outgoing weights.

    It is 0 for a unit that is not held. Scaling a ReLU unit's inputs by c and its outputs by 1/c
    changes neither the network nor this number. Biases and norms do not count.
    """
    layout = mask.layout
    totals = np.zeros((2, layout.units + 1))
    counts = np.zeros((2, layout.units + 1))
    axis_units = zip(layout.axis_arrays, mask.positions, strict=True)
    held_units = [units[positions] for units, positions in axis_units]

    arrays = parameter_arrays(mask.small, values)
    for array, axes, output in zip(arrays, layout.axes, layout.output_dims, strict=True):
        if array.ndim < 2:
            continue
        squares = array**2
        for dim, axis in enumerate(axes):
            if axis is None:
                continue
            side = int(dim != output)  # 0: incoming, 1: outgoing
            other_dims = tuple(k for k in range(squares.ndim) if k != dim)
            sums = squares.sum(other_dims, dtype=np.float64)
            np.add.at(totals[side], held_units[axis], sums)
            np.add.at(counts[side], held_units[axis], squares.size / max(1, squares.shape[dim]))

    means = np.divide(totals, counts, out=totals, where=counts > 0)
    return np.asarray((means[0] * means[1])[:-1])


def replace_units(
    mask: "ChannelMask", strength: Scores, growth: Scores, rate: float, *, rng: torch.Generator
) -> "ChannelMask":
    """Return the next mask: in each group, prune the weakest kept units and regrow as many others.

    A group replaces rate * kept units on average: the fraction that is left over is rounded at
    random, because a group may have few units. A unit regrows in the norm group of a pruned one,
    those with the largest growth score first, so kept counts never change. Just-pruned units do not
    regrow.
    """
    layout = mask.layout
    next_units = mask.units.copy()
    for group, where in zip(layout.groups, layout.group_slices, strict=True):
        units = np.arange(where.start, where.stop)
        stratum = (units - where.start) // (group.units // group.strata)
        candidates = []
        for index in range(group.strata):
            empty = units[(stratum == index) & ~mask.units[where]]
            best_last = np.argsort(growth[empty], kind="stable")
            candidates.append(list(empty[best_last]))

        kept = units[mask.units[where]]
        count = int(rate * len(kept) + float(torch.rand((), generator=rng)))
        for unit in kept[np.argsort(strength[kept], kind="stable")]:
            in_same_stratum = candidates[stratum[unit - where.start]]
            if count > 0 and in_same_stratum:
                next_units[unit] = False
                next_units[in_same_stratum.pop()] = True
                count -= 1
    return layout.mask(next_units)
