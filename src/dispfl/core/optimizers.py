"""Optimizers on flat vectors: the settings' own, users' own, and what they remember of a model between rounds."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from dispfl.core.layout import Layout
from dispfl.core.packed import PackedMask, PackedModel
from dispfl.errors import ConfigError

OptimizerName = Literal["sgd", "adam", "adamw"]
OptimizerFactory = Callable[[Tensor, Layout], Optimizer]
"""Returns an optimizer of the flat weights of a network with this layout."""


def named_optimizer(
    name: OptimizerName,
    flat: Tensor,
    *,
    lr: float,
    weight_decay: float,
    momentum: float,
    nesterov: bool,
    betas: tuple[float, float],
    eps: float,
) -> Optimizer:
    """Return one of torch's optimizers. The fused kernels update a flat vector in one pass."""
    fused = flat.device.type in ("cpu", "cuda")
    if name == "sgd":
        return SGD([flat], lr, momentum, weight_decay=weight_decay, nesterov=nesterov, fused=fused)
    kind = Adam if name == "adam" else AdamW
    return kind([flat], lr, betas, eps, weight_decay, fused=fused)


def own_optimizer(make: OptimizerFactory, flat: Tensor, layout: Layout, scale: float) -> Optimizer:
    """Return a user's optimizer, with its learning rates multiplied by what the schedule gives for this round."""
    optimizer = make(flat, layout)
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(f"`optimizer` must return a torch.optim.Optimizer, got {type(optimizer).__name__}.")
    if [id(parameter) for group in optimizer.param_groups for parameter in group["params"]] != [id(flat)]:
        raise ConfigError(
            "The optimizer has other parameters than the flat weights; build it like torch.optim.Adam([weights])."
        )
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * scale
    return optimizer


def as_parameter(weights: Tensor, grad: Tensor) -> Tensor:
    """Return the flat weights as a parameter in the same memory, with this gradient."""
    flat = nn.Parameter(weights)
    flat.grad = grad
    return flat


@dataclass(frozen=True, eq=False)
class Moments:
    """What an optimizer remembers of a model: numbers for each kept weight, and counters.

    A weight that is masked out loses its numbers, so a regrown one begins with zeros.
    """

    mask: PackedMask
    """The mask that the model was trained under."""
    values: Mapping[str, Tensor]
    """By name: one number for each kept weight, or a single number."""

    @classmethod
    def of(cls, optimizer: Optimizer, flat: Tensor, mask: PackedMask) -> "Moments":
        """Return an optimizer's state after training under a mask."""
        values = {}
        for name, value in optimizer.state[flat].items():
            host = torch.as_tensor(value).cpu()
            if host.shape not in (flat.shape, ()):
                raise ConfigError(
                    f"The optimizer's state {name!r} has the shape {tuple(host.shape)}; only numbers for each weight "
                    "and single numbers can be kept between rounds. Use train.keep_moments=false."
                )
            values[name] = mask.select(host) if host.dim() else host.clone()
        return cls(mask, values)

    def restore(self, optimizer: Optimizer, flat: Tensor, mask: PackedMask) -> None:
        """Give an optimizer this state, to train under another mask."""
        optimizer.state[flat] = {
            name: self._under(mask, value).to(flat.device) if value.dim() else value.clone()
            for name, value in self.values.items()
        }

    def _under(self, mask: PackedMask, values: Tensor) -> Tensor:
        """Return numbers for each weight under another mask; zero where the old one does not keep it."""
        whole, _ = PackedModel(values, self.mask).unpack()
        return PackedModel.pack(whole, mask.unpack(), mask).flat().clone()
