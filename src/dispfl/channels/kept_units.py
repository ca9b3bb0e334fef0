"""Which units a peer keeps: how many of each group, which at first, and which are replaced."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import lcm
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dispfl.channels.block_average import parameter_arrays
from dispfl.channels.units import Flags, UnitGroup
from dispfl.errors import ConfigError

if TYPE_CHECKING:
    from dispfl.channels.channel_mask import ChannelLayout, ChannelMask

Scores = NDArray[np.float64]

KERNEL = 8
"""Convolution kernels work on this many channels at once."""
LARGE = 2
"""Groups of at least this many kernels keep a multiple of `KERNEL` channels."""
SLACK = 1 / 8
"""The share of a group's units that rounding may add to it."""
LITTLE = 0.03
"""The share of the weights that may stay unused."""


@lru_cache(maxsize=64)
def unit_counts(layout: "ChannelLayout", density: float, layers: str) -> tuple[int, ...]:
    """Return how many units of each group are kept, to hold at most `density` of all weights.

    Every group keeps the same share w of its units ("uniform"), so a layer between two groups keeps
    w^2 of its weights and of its operations; or a share in proportion to n^-1/2 for n channels, at
    most 1 ("erk"). With the latter, a layer with n_in inputs and n_out outputs has a density in
    proportion to (n_in n_out)^-1/2, as ERK's is to 1/n_in + 1/n_out: large layers are sparser,
    small ones denser. The largest factor is found by bisection, then single groups are filled up.
    """
    budget = density * layout.size * (1 + 1e-9)
    ideal = [1.0] * len(layout.groups)
    if layers == "erk":
        ideal = [(group.units * group.channels) ** -0.5 for group in layout.groups]
    _check_density(layout, density, budget)

    low = 0.0
    high = 1.0 / min(ideal)
    for _ in range(50):
        middle = (low + high) / 2
        if _weights(layout, _rounded(layout, ideal, middle)) <= budget:
            low = middle
        else:
            high = middle
    most = []
    for group, share in zip(layout.groups, ideal, strict=True):
        most.append((min(1.0, low * share) + SLACK) * group.units)
    counts = _filled(layout, _rounded(layout, ideal, low), most, budget, _step)
    all_units = [group.units for group in layout.groups]
    return tuple(_filled(layout, counts, all_units, budget, lambda group: group.strata))


def _check_density(layout: "ChannelLayout", density: float, budget: float) -> None:
    """Refuse a density that is too small for the fewest units of each group."""
    fewest_weights = _weights(layout, list(map(_least, layout.groups)))
    if fewest_weights <= budget:
        return
    reason = ""
    if layout.dense_layers:
        reason = f", because {', '.join(layout.dense_layers)} cannot be cut"
    raise ConfigError(
        f"method.density {density:g} leaves the layer {layout.groups[0].name} without channels:"
        f" with the fewest of each group this network keeps {fewest_weights / layout.size:.3g} of"
        f" its weights{reason}. Use a larger density, or structure=weights.",
        key="method.density",
    )


def _filled(
    layout: "ChannelLayout",
    counts: list[int],
    most: Sequence[float],
    budget: float,
    step: Callable[[UnitGroup], int],
) -> list[int]:
    """Add units to groups, at most to `most` of each, until only little of the budget is left."""
    while _weights(layout, counts) < (1 - LITTLE) * budget:
        more = _with_one_more(layout, counts, most, budget, step)
        if more is None:
            break
        counts = more
    return counts


def _with_one_more(
    layout: "ChannelLayout",
    counts: list[int],
    most: Sequence[float],
    budget: float,
    step: Callable[[UnitGroup], int],
) -> list[int] | None:
    """Return the counts with a step more in one group; None if the budget allows none."""

    def priority(i: int) -> tuple[int, float]:
        """Groups with many units come first: they can be filled most exactly."""
        return -layout.groups[i].units, counts[i] - most[i]

    for i in sorted(range(len(counts)), key=priority):
        group = layout.groups[i]
        more = counts.copy()
        more[i] += step(group)
        if more[i] <= min(most[i], group.units) and _weights(layout, more) <= budget:
            return more
    return None


def _least(group: UnitGroup) -> int:
    """Return the fewest units of a group.

    Two of each norm group, because the normalization of one may be constant.
    """
    if group.strata == 1:
        return 1
    return min(group.units, 2 * group.strata)


def _step(group: UnitGroup) -> int:
    """Return the number of units by which a group grows.

    A multiple of its strata, and of 8 channels if it is large.
    """
    kernel_step = lcm(group.strata * group.channels, KERNEL) // group.channels
    if group.units >= LARGE * kernel_step:
        return kernel_step
    return group.strata


def _rounded(layout: "ChannelLayout", ideal: Sequence[float], factor: float) -> list[int]:
    counts = []
    for group, share in zip(layout.groups, ideal, strict=True):
        step = _step(group)
        count = step * round(min(1.0, factor * share) * group.units / step)
        counts.append(max(_least(group), min(group.units, count)))
    return counts


def _weights(layout: "ChannelLayout", counts: Sequence[int]) -> int:
    return sum(kept_weights(layout, counts))


def _first_units(layout: "ChannelLayout", counts: Sequence[int]) -> Flags:
    """Return flags with the first units of every norm group set.

    All masks with these counts hold as many weights.
    """
    flags = np.zeros(layout.units, np.bool_)
    for group, where, count in zip(layout.groups, layout.group_slices, counts, strict=True):
        flags[where].reshape(group.strata, -1)[:, : count // group.strata] = True
    return flags


def kept_weights(layout: "ChannelLayout", counts: Sequence[int]) -> tuple[int, ...]:
    """Return the weights of each parameter that a mask with these counts holds."""
    return tuple(layout.weights_per_layer(_first_units(layout, counts)))


def random_units(
    layout: "ChannelLayout", counts: Sequence[int], *, rng: torch.Generator
) -> "ChannelMask":
    """Keep random units: as many of each group as its count says, equally many per norm group."""
    flags = np.zeros(layout.units, np.bool_)
    for group, where, count in zip(layout.groups, layout.group_slices, counts, strict=True):
        for stratum in flags[where].reshape(group.strata, -1):
            order = torch.randperm(len(stratum), generator=rng).numpy()
            stratum[order[: count // group.strata]] = True
    return layout.mask(flags)


def unit_strengths(values: Tensor, mask: "ChannelMask") -> Scores:
    """Return the mean square of each unit's incoming weights times that of its outgoing weights.

    It is 0 for a unit that is not held. Scaling a ReLU unit's inputs by c and its outputs by 1/c
    changes neither the network nor this number. Biases and norms do not count.
    """
    layout = mask.layout
    totals = np.zeros((2, layout.units + 1))
    counts = np.zeros((2, layout.units + 1))
    held_units = []
    for units, positions in zip(layout.axis_arrays, mask.positions, strict=True):
        held_units.append(units[positions])

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

    Algorithm 2 for whole units. A group replaces rate * kept units on average: the fraction that
    is left over is rounded at random, because a group may have few units. A unit regrows in the
    norm group of a pruned one, those with the largest growth score first, so kept counts never
    change. Just-pruned units do not regrow.
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

        kept_units = units[mask.units[where]]
        weakest_first = kept_units[np.argsort(strength[kept_units], kind="stable")]
        count = int(rate * len(kept_units) + float(torch.rand((), generator=rng)))
        for unit in weakest_first:
            in_same_stratum = candidates[stratum[unit - where.start]]
            if count > 0 and in_same_stratum:
                next_units[unit] = False
                next_units[in_same_stratum.pop()] = True
                count -= 1
    return layout.mask(next_units)
