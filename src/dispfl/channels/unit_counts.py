"""How many units of each group a peer keeps, and which ones at first."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import lcm
from typing import TYPE_CHECKING

import numpy as np
import torch

from dispfl.channels.units import Flags, UnitGroup
from dispfl.errors import ConfigError

if TYPE_CHECKING:
    from dispfl.channels.channel_mask import ChannelLayout, ChannelMask

KERNEL = 8
"""Convolution kernels work on this many channels at once."""
LARGE = 2
"""Counts are rounded to multiples of `KERNEL` channels in groups with at least this many such
multiples."""
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

    low, high = 0.0, 1.0 / min(ideal)
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
    fewest_weights = _weights(layout, [_least(group) for group in layout.groups])
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
    return 1 if group.strata == 1 else min(group.units, 2 * group.strata)


def _step(group: UnitGroup) -> int:
    """Return the number of units by which a group grows.

    A multiple of its strata, and of 8 channels if it is large.
    """
    step = group.strata
    kernel = lcm(step * group.channels, KERNEL) // group.channels
    return kernel if group.units >= LARGE * kernel else step


def _rounded(layout: "ChannelLayout", ideal: Sequence[float], factor: float) -> list[int]:
    counts = []
    for group, share in zip(layout.groups, ideal, strict=True):
        step = _step(group)
        count = step * round(min(1.0, factor * share) * group.units / step)
        counts.append(max(_least(group), min(group.units, count)))
    return counts


def _weights(layout: "ChannelLayout", counts: Sequence[int]) -> int:
    return sum(layout.weights_per_layer(_first_units(layout, counts)))


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
