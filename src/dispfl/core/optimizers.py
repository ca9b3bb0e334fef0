"""Optimizers on flat vectors: plain SGD, torch's and users' own, and what they remember."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from dispfl.core.layout import Layout
from dispfl.core.masks import keep_
from dispfl.core.packed import Mask, PackedModel
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
    adam = Adam if name == "adam" else AdamW
    return adam([flat], lr, betas, eps, weight_decay, fused=fused)


def own_optimizer(make: OptimizerFactory, flat: Tensor, layout: Layout, scale: float) -> Optimizer:
    """Return a user's optimizer, with its learning rates scaled as the schedule says."""
    optimizer = make(flat, layout)
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"`optimizer` must return a torch.optim.Optimizer, got {type(optimizer).__name__}.",
            key="optimizer",
        )
    parameters = []
    for group in optimizer.param_groups:
        parameters += group["params"]
    if len(parameters) != 1 or parameters[0] is not flat:
        raise ConfigError(
            "The optimizer has other parameters than the flat weights; build it like"
            " torch.optim.Adam([weights]).",
            key="optimizer",
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

    mask: Mask
    """The mask that the model was trained under."""
    values: Mapping[str, Tensor]
    """By name: one number for each kept weight, or a single number."""

    @classmethod
    def of(cls, optimizer: Optimizer, flat: Tensor, mask: Mask, keep: bool) -> "Moments | None":
        """Return an optimizer's state after training under a mask.

        A state of another shape is refused if it is to be kept between rounds; otherwise there is
        None.
        """
        values = {}
        for name, value in optimizer.state[flat].items():
            host = torch.as_tensor(value).cpu()
            if host.shape not in (flat.shape, ()):
                if not keep:
                    return None
                raise ConfigError(
                    f"The optimizer's state {name!r} has the shape {tuple(host.shape)}; only"
                    " numbers for each weight and single numbers can be kept between rounds. Use"
                    " train.keep_moments=false.",
                    key="train.keep_moments",
                )
            values[name] = mask.select(host) if host.dim() else host.clone()
        return cls(mask, values)

    def restore(self, optimizer: Optimizer, flat: Tensor, mask: Mask) -> None:
        """Give an optimizer this state, to train under another mask."""
        optimizer.state[flat] = self._state(flat, mask)

    def restore_frozen(self, optimizer: Optimizer, flat: Tensor, mask: Mask, only: Tensor) -> None:
        """Give an optimizer this state of the weights that it did not train; of new ones zeros."""
        before = self._state(flat, mask)
        for name, value in optimizer.state[flat].items():
            if isinstance(value, Tensor) and value.shape == flat.shape:
                old_value = before.get(name, torch.zeros((), device=flat.device))
                value.copy_(torch.where(only, value, old_value))

    def _state(self, flat: Tensor, mask: Mask) -> dict[str, Tensor]:
        state = {}
        for name, value in self.values.items():
            if value.dim():
                state[name] = self._under(mask, value).to(flat.device)
            else:
                state[name] = value.clone()
        return state

    def _under(self, mask: Mask, values: Tensor) -> Tensor:
        """Return numbers for each weight under another mask; 0 where the old one keeps none."""
        flat_values, _ = PackedModel(values, self.mask).unpack()
        return PackedModel.pack(flat_values, mask).flat().clone()


def sgd_step(
    weights: Tensor,
    grad: Tensor,
    bits: Tensor | None,
    lr: float,
    weight_decay: float,
    clip_norm: float,
    prox: tuple[float, Tensor] | None = None,
    shift: Tensor | None = None,
) -> None:
    """Take one step in place on flat vectors.

    Mask, clip, decay, apply the proximal term, descend. `shift` is added to the clipped gradient:
    noise, or a correction. Without `bits` nothing is masked.

    Deviations 7 and 12: the paper does not mention clipping, and the authors clip the dense
    gradient before they mask it (docs/deviations.md).
    """
    if bits is not None:
        keep_(grad, bits)
    scale = clip_scale(grad, clip_norm) if clip_norm else 1.0
    mu, anchor = prox or (0.0, None)
    if weight_decay or mu:
        weights.mul_(1 - lr * (weight_decay + mu))
    if anchor is not None:
        weights.add_(anchor, alpha=lr * mu)
    if isinstance(scale, Tensor):
        weights.addcmul_(grad, scale, value=-lr)
    else:
        weights.add_(grad, alpha=-lr * scale)
    if shift is not None:
        if bits is not None:
            keep_(shift, bits)
        weights.add_(shift, alpha=-lr)


def optimizer_step(
    optimizer: Optimizer,
    flat: Tensor,
    bits: Tensor | None,
    clip_norm: float,
    prox: tuple[float, Tensor] | None = None,
    shift: Tensor | None = None,
) -> None:
    """Take one step of an optimizer on a flat parameter.

    Mask, clip, add the proximal term and the shift, update, mask. Weight decay is the optimizer's.
    """
    grad = flat.grad
    assert grad is not None
    if bits is not None:
        keep_(grad, bits)
    if clip_norm:
        grad.mul_(clip_scale(grad, clip_norm))
    if prox is not None:
        grad.add_(flat.detach() - prox[1], alpha=prox[0])
    if shift is not None:
        grad.add_(shift)
    if bits is not None and (prox is not None or shift is not None):
        keep_(grad, bits)
    optimizer.step()
    if bits is not None:
        keep_(flat.detach(), bits)


def clip_scale(grad: Tensor, clip_norm: float) -> float | Tensor:
    """Return the factor, at most 1, that clips a gradient's norm.

    It is a number on the CPU and a tensor on other devices. Reading a number from a device waits
    until all computations before it are done, while the host could prepare the next batch. On the
    CPU there is nothing to wait for, and a number saves one pass over the weights.
    """
    norm = torch.linalg.vector_norm(grad)
    if grad.device.type == "cpu":
        return min(1.0, clip_norm / (float(norm) + 1e-6))
    scale: Tensor = clip_norm / (norm + 1e-6)
    return scale.clamp(max=1.0)
