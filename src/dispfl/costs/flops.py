"""Floating-point operations as the paper counts them.

With masks of single weights they are counted, not saved: dense kernels do the work. With masks of channels they are
saved: they are the operations of the small network that the peer trains.

A convolution or linear layer needs, for one sample, 2 operations for each weight and output position, and 1 for each
bias and output position; everything else counts 0. So each parameter has a cost per kept weight, and a sparse model
costs in proportion to what it keeps. A training step counts as 3 forward passes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from dispfl.core.layout import Layout

TRAINING = 3
"""Forward passes that forward and backward together count for."""


@dataclass(frozen=True)
class ForwardCost:
    """Operations of one forward pass on one sample, for each kept weight of each parameter of a layout."""

    per_weight: tuple[int, ...]
    sizes: tuple[int, ...]

    def dense(self) -> int:
        """Return the operations with every weight kept."""
        return self.sparse(self.sizes)

    def sparse(self, kept: Sequence[int]) -> int:
        """Return the operations with this many weights kept in each parameter."""
        return sum(cost * count for cost, count in zip(self.per_weight, kept, strict=True))

    def training(self, kept: Sequence[int], samples: int) -> int:
        """Return the operations of training on some samples, with this many weights kept in each parameter."""
        return TRAINING * samples * self.sparse(kept)

    def local_training(self, kept: Sequence[int], samples: int, search_batch: int = 0) -> int:
        """Return the operations of a peer's round: the samples it trains on, plus one dense batch for a mask search."""
        return self.training(kept, samples) + self.training(self.sizes, search_batch)


@torch.no_grad()
def forward_cost(module: nn.Module, layout: Layout, sample: Tensor) -> ForwardCost:
    """Run one sample (a batch of one) through the module and count how often each weight is used."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    uses = dict.fromkeys(layout.names, 0)

    def count(layer: nn.Module, inputs: tuple[Tensor, ...], named: dict[str, Tensor], output: Tensor) -> None:
        positions = _positions(layer, inputs[0] if inputs else named["input"], output)
        for parameter, operations in ((layer.weight, 2 * positions), (layer.bias, _positions(layer, output, output))):
            name = names.get(parameter) if isinstance(parameter, nn.Parameter) else None
            if name in uses:
                uses[name] += operations

    counted = [layer for layer in module.modules() if isinstance(layer, (nn.Linear, _ConvNd))]
    hooks = [layer.register_forward_hook(count, with_kwargs=True) for layer in counted]
    training = module.training
    module.eval()
    try:
        module(sample)
    finally:
        module.train(training)
        for hook in hooks:
            hook.remove()
    return ForwardCost(tuple(uses[name] for name in layout.names), layout.sizes)


def _positions(layer: nn.Module, source: Tensor, output: Tensor) -> int:
    """Return how often a layer's weight is used for one sample: at each position of its output (transposed: input)."""
    if isinstance(layer, nn.Linear):
        return output.numel() // (output.shape[0] * output.shape[-1])
    where: Any = source if isinstance(layer, _ConvTransposeNd) else output
    dims = len(layer.kernel_size) if isinstance(layer, _ConvNd) else 0
    return int(torch.tensor(where.shape[-dims:]).prod())
