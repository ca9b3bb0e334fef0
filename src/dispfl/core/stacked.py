"""Training of several peers' small models at once with `vmap`, as one stack.

A step of a tiny network mostly consists of the overhead of calling torch, which a stack pays once
for all its peers. Networks with more computation, convolutions above all, gain nothing. Sums are
computed in another order than for single peers, so results are equal up to rounding, not to the
bit.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.func import functional_call, vmap

from dispfl.core.flat_module import FlatModule
from dispfl.core.masks import keep_, mask_bits
from dispfl.core.packed import Mask
from dispfl.core.samples import Samples
from dispfl.core.task import Task
from dispfl.core.train import Train, Trainer, step_clock, trained_per_layer, weight_flags
from dispfl.errors import NonFiniteError


def can_stack(trainers: Sequence[Trainer]) -> bool:
    """Whether these peers' batches have equal sizes, their model has no buffers, and training is
    plain SGD."""
    if any(trainer.optimizer is not None or not trainer.settings.is_plain for trainer in trainers):
        return False
    alike = {
        (trainer.t, trainer.settings, trainer.task, len(trainer.train), trainer.network.layout)
        for trainer in trainers
    }
    return len(alike) == 1 and not any(trainer.network.buffer_names for trainer in trainers)


def can_be_stacked(network: FlatModule, task: Task, samples: Samples) -> bool:
    """Whether a stack of this model can be trained, tested on one batch: `vmap` does not support
    all operations."""
    if network.buffer_names or network.precision != "float32":
        return False
    x, y = (network.to_device(part.unsqueeze(0)) for part in next(samples.batches(2)))
    own = {
        name: part.detach().clone().unsqueeze(0).requires_grad_()
        for name, part in _trainable(network)
    }
    try:
        torch.autograd.grad(vmap(_loss(network, task))(own, x, y).sum(), list(own.values()))
    except Exception:  # an error of the user's own code is raised again when a peer trains alone
        return False
    return True


def _trainable(network: FlatModule) -> Iterator[tuple[str, Tensor]]:
    return ((name, part) for name, part in network.module.named_parameters() if part.requires_grad)


def _loss(
    network: FlatModule, task: Task
) -> Callable[[Mapping[str, Tensor], Tensor, Tensor], Tensor]:
    """Return the loss function of one model with its own weights on its own batch."""

    def loss(own: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return task.loss(functional_call(network.module, dict(own), (x,)), y)

    return loss


def learn_stacked(
    trainers: Sequence[Trainer],
    weights: Sequence[Tensor],
    masks: Sequence[Tensor | Mask],
    steps: int | None = None,
    lr: float | None = None,
) -> list[Tensor | NonFiniteError]:
    """Return the result of `Trainer.learn` for each peer, or the error that ended it."""
    first, peers = trainers[0], len(trainers)
    s, network = first.settings, first.network
    steps, lr = steps or s.local_steps(len(first.train)), lr or s.rate(first.t, first.T)
    began = step_clock(network)
    network.module.train()
    flat, flags = (
        network.to_device(torch.stack(list(weights))),
        [weight_flags(mask) for mask in masks],
    )
    masked = [each for each in flags if each is not None]
    bits = mask_bits(network.to_device(torch.stack(masked))) if masked else None
    layers = zip(network.layout.names, network.layout.slices, network.layout.shapes, strict=True)
    # Through .data: autograd must not record the steps on `flat` as a part of the next forward
    # pass.
    parameters = {
        name: flat[:, where].view(peers, *shape).data.requires_grad_()
        for name, where, shape in layers
    }

    loss_of_each = vmap(_loss(network, first.task))
    losses = []
    samples = 0
    for batches in zip(*(trainer.batches(steps) for trainer in trainers), strict=True):
        x, y = (network.to_device(torch.stack(part)) for part in zip(*batches, strict=True))
        of_each = loss_of_each(parameters, x, y)
        gradients = torch.autograd.grad(of_each.sum(), list(parameters.values()))
        _sgd_steps(
            flat,
            torch.cat([g.flatten(1) for g in gradients], 1),
            bits,
            lr,
            s,
            _noise(trainers, flat),
        )
        losses.append(of_each.detach())
        samples += y.shape[1]
    means = torch.stack(losses).mean(0).cpu()
    for trainer in trainers:
        trainer.report.seconds += (step_clock(network) - began) / peers
    return [
        _finish(trainer, learned, mask, mean, samples)
        for trainer, learned, mask, mean in zip(
            trainers, flat.cpu().unbind(), flags, means, strict=True
        )
    ]


def _noise(trainers: Sequence[Trainer], flat: Tensor) -> Tensor | None:
    """Draw each peer's noise from its own stream."""
    drawn = [trainer.draw_noise(flat.shape[1]) for trainer in trainers]
    given = [noise for noise in drawn if noise is not None]
    return trainers[0].network.to_device(torch.stack(given)) if given else None


def _sgd_steps(
    flat: Tensor, grad: Tensor, bits: Tensor | None, lr: float, s: Train, noise: Tensor | None
) -> None:
    """`sgd_step` on the rows of a matrix, each with its own norm."""
    if bits is not None:
        keep_(grad, bits)
    if s.clip_norm:
        norms = torch.linalg.vector_norm(grad, dim=1, keepdim=True)
        grad.mul_((s.clip_norm / (norms + 1e-6)).clamp(max=1.0))
    flat.mul_(1 - lr * s.weight_decay).add_(grad, alpha=-lr)
    if noise is not None:
        flat.add_(noise if bits is None else keep_(noise, bits), alpha=-lr)


def _finish(
    trainer: Trainer, learned: Tensor, mask: Tensor | None, loss: Tensor, samples: int
) -> Tensor | NonFiniteError:
    """Complete one peer's report and return its weights."""
    trainer.report.passes.append((samples, trained_per_layer(mask, trainer.network.layout)))
    try:
        trainer.check_finite(loss, "training loss")
        trainer.check_finite(learned, "weights")
    except NonFiniteError as problem:
        return problem
    trainer.report.train_loss = float(loss)
    return learned.clone()
