"""Units and axes: which positions of a tensor's dimension belong to which channel.

A unit is an output channel (or hidden unit) with all that belongs to it: its bias and normalization
entries, and the input slices of every layer that follows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

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


def to_runs(axis: Axis) -> list[list[int]]:
    """Return an axis as runs [first unit, number of units, positions of each]."""
    runs: list[list[int]] = []
    edges = [0, *(np.flatnonzero(np.diff(axis)) + 1).tolist(), len(axis)]
    for start, end in pairwise(edges):
        unit = int(axis[start])
        width = end - start
        if runs and unit != FIXED:
            first, count, last_width = runs[-1]
            if unit == first + count and width == last_width:
                runs[-1][1] += 1
                continue
        runs.append([unit, 1, width])
    return runs


def from_runs(runs: Sequence[Sequence[int]]) -> Axis:
    """Return the axis that runs describe: the inverse of `to_runs`."""
    axis: list[int] = []
    for first, count, width in runs:
        for unit in range(first, first + count):
            axis += [unit] * width
    return tuple(axis)


def is_cut_by_norm_group(axis: Axis, num_groups: int) -> bool:
    """Whether a GroupNorm's channels are left out as whole norm groups.

    Otherwise equally many of each are left out.
    """
    by_norm_group = np.reshape(axis, (num_groups, -1))
    one_unit_each = bool((np.diff(by_norm_group, axis=1) == 0).all())
    return one_unit_each and num_groups < len(axis)
