"""What a step trains: the weights that a mask keeps, or a part of them while the rest is frozen."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from dispfl.core.layout import Layout
from dispfl.core.masks import keep_, kept_per_layer, mask_bits
from dispfl.core.packed import Mask
from dispfl.core.report import Passes
from dispfl.errors import ConfigError

Part = str | Sequence[str] | Tensor
"""Patterns of parameters' names (`Layout.matching`), or a flag for each weight of the network."""


@dataclass(frozen=True, eq=False)
class TrainedPart:
    """Which weights of the computing network are trained.

    A weight that the mask leaves out is zero; one that it keeps and that is not trained is frozen
    at its value.
    """

    layout: Layout
    """Of the computing network."""
    kept: Tensor | None
    """A flag for each of its weights: whether the mask keeps it; None: it keeps all of them."""
    only: Tensor | None = None
    """Which of the kept weights are trained; None: all of them."""

    @classmethod
    def of(cls, mask: Tensor | Mask, only: Part | None, layout: Layout) -> "TrainedPart":
        """Return the part that `only` names of the weights that a mask keeps."""
        kept = mask if isinstance(mask, Tensor) else mask.network_mask()
        if only is None:
            return cls(layout, kept)
        if isinstance(only, Tensor):
            trained = _network_flags(only, mask, layout)
        else:
            trained = layout.flags(layout.matching(only, "only"))

        if kept is not None:
            trained = trained & kept
        kept_count = layout.size if kept is None else int(kept.sum())
        if int(trained.sum()) == kept_count:
            return cls(layout, kept)
        return cls(layout, kept, trained)

    @property
    def flags(self) -> Tensor | None:
        """A flag for each weight of the network: whether it is trained; None: all of them are."""
        return self.kept if self.only is None else self.only

    @cached_property
    def passes(self) -> Passes:
        """The weights kept and trained in each layer, and no samples yet."""
        if self.kept is None:
            kept_counts = list(self.layout.sizes)
        else:
            kept_counts = kept_per_layer(self.kept, self.layout)
        if self.only is None:
            return Passes(0, kept_counts)
        return Passes(0, kept_counts, kept_per_layer(self.only, self.layout))

    @property
    def parameters(self) -> tuple[bool, ...] | None:
        """For each parameter whether some of its weights are trained; None: all parameters are."""
        if self.passes.trained is None:
            return None
        return tuple(count > 0 for count in self.passes.trained)

    def frozen_values(self, weights: Tensor) -> Tensor | None:
        """Return the values of the frozen weights, and zeros elsewhere; None: none is frozen."""
        if self.only is None:
            return None
        is_frozen = ~self.only
        if self.kept is not None:
            is_frozen &= self.kept
        return keep_(weights.clone(), mask_bits(is_frozen.to(weights.device)))

    @property
    def is_empty(self) -> bool:
        """Whether nothing is trained, because `only` names nothing that the mask keeps."""
        return self.parameters is not None and not any(self.parameters)


def _network_flags(flags: Tensor, mask: Tensor | Mask, layout: Layout) -> Tensor:
    """Return the flags of the computing network's weights, from those of the whole network."""
    size = layout.size if isinstance(mask, Tensor) else mask.size
    if flags.dtype != torch.bool or flags.shape != (size,):
        raise ConfigError(
            f"`only` must be patterns of parameters' names or a flag for each of the network's"
            f" {size} weights, got a tensor of {flags.dtype} and shape {tuple(flags.shape)}.",
            key="only",
        )
    if isinstance(mask, Mask) and mask.small is not None:
        return flags[mask.unpack()]
    return flags
