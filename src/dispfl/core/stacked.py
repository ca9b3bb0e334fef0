"""Training of several peers' small models at once with `vmap`, as one stack.

A step of a tiny network mostly consists of the overhead of calling torch, which a stack pays once
for all its peers. Networks with more computation, convolutions above all, gain nothing. Sums are
computed in another order than for single peers, so results are equal up to rounding, not to the
bit.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.func import functional_call, vmap

from dispfl.core.flat_module import FlatModule
from dispfl.core.layout import Layout
from dispfl.core.masks import keep_, mask_bits
from dispfl.core.packed import Mask
from dispfl.core.samples import Samples
from dispfl.core.task import Task
from dispfl.core.train import Train, Trainer, step_clock, trained_per_layer, weight_flags
from dispfl.errors import NonFiniteError


def can_stack(trainers: Sequence[Trainer]) -> bool:
    """Whether these peers train in equal steps of plain SGD, on a model without buffers."""
    kinds_of_steps = set()
    for trainer in trainers:
        if trainer.run.optimizer is not None or not trainer.settings.is_plain:
            return False
        if trainer.network.buffer_names:
            return False
        kinds_of_steps.add(
            (trainer.t, trainer.settings, trainer.task, len(trainer.train), trainer.network.layout)
        )
    return len(kinds_of_steps) == 1


def can_be_stacked(network: FlatModule, task: Task, samples: Samples) -> bool:
    """Whether a stack of this model can be trained: `vmap` does not support all operations.

    It is tested on one batch.
    """
    if network.buffer_names or network.precision != "float32":
        return False
    inputs, labels = next(samples.batches(2))
    x = network.to_device(inputs.unsqueeze(0))
    y = network.to_device(labels.unsqueeze(0))
    stack_of_one = {}
    for name, parameter in network.module.named_parameters():
        if parameter.requires_grad:
            stack_of_one[name] = parameter.detach().clone().unsqueeze(0).requires_grad_()
    try:
        losses = vmap(_loss(network, task))(stack_of_one, x, y)
        torch.autograd.grad(losses.sum(), list(stack_of_one.values()))
    except Exception:  # an error of the user's own code is raised again when a peer trains alone
        return False
    return True


def _loss(
    network: FlatModule, task: Task
) -> Callable[[Mapping[str, Tensor], Tensor, Tensor], Tensor]:
    """Return the loss function of one model with its own weights on its own batch."""

    def loss(parameters: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return task.loss(functional_call(network.module, dict(parameters), (x,)), y)

    return loss


def learn_stacked(
    trainers: Sequence[Trainer],
    weights: Sequence[Tensor],
    masks: Sequence[Tensor | Mask],
    steps: int | None = None,
    lr: float | None = None,
) -> list[Tensor | NonFiniteError]:
    """Return the result of `Trainer.learn` for each peer, or the error that ended it."""
    first = trainers[0]
    settings = first.settings
    network = first.network
    steps = steps or settings.local_steps(len(first.train))
    lr = lr or settings.rate(first.t, first.T)
    began = step_clock(network)
    network.module.train()
    flat = network.to_device(torch.stack(list(weights)))
    flags = [weight_flags(mask) for mask in masks]
    bits = _stacked_bits(flags, network)
    parameters = _stacked_parameters(flat, network.layout)

    loss_of_each = vmap(_loss(network, first.task))
    losses = []
    samples = 0
    for batches in zip(*(trainer.batches(steps) for trainer in trainers), strict=True):
        inputs, labels = zip(*batches, strict=True)
        x = network.to_device(torch.stack(inputs))
        y = network.to_device(torch.stack(labels))
        batch_losses = loss_of_each(parameters, x, y)
        gradients = torch.autograd.grad(batch_losses.sum(), list(parameters.values()))
        flat_gradients = torch.cat([gradient.flatten(1) for gradient in gradients], 1)
        _sgd_steps(flat, flat_gradients, bits, lr, settings, _noise(trainers, flat))
        losses.append(batch_losses.detach())
        samples += y.shape[1]

    mean_losses = torch.stack(losses).mean(0).cpu()
    for trainer in trainers:
        trainer.report.seconds += (step_clock(network) - began) / len(trainers)
    results = zip(trainers, flat.cpu().unbind(), flags, mean_losses, strict=True)
    return [
        _finish(trainer, learned, mask, loss, samples) for trainer, learned, mask, loss in results
    ]


def _stacked_bits(flags: Sequence[Tensor | None], network: FlatModule) -> Tensor | None:
    """Return the bits of all peers' masks; None if their networks have kept weights only."""
    masks = [mask for mask in flags if mask is not None]
    return mask_bits(network.to_device(torch.stack(masks))) if masks else None


def _stacked_parameters(flat: Tensor, layout: Layout) -> dict[str, Tensor]:
    """Return views of all peers' flat weights, one for each parameter.

    Through .data: autograd must not record the steps on `flat` as a part of the next forward pass.
    """
    parameters = {}
    for name, where, shape in zip(layout.names, layout.slices, layout.shapes, strict=True):
        view = flat[:, where].view(len(flat), *shape)
        parameters[name] = view.data.requires_grad_()
    return parameters


def _noise(trainers: Sequence[Trainer], flat: Tensor) -> Tensor | None:
    """Draw each peer's noise from its own stream."""
    drawn = [trainer.draw_noise(flat.shape[1]) for trainer in trainers]
    noise = [values for values in drawn if values is not None]
    return trainers[0].network.to_device(torch.stack(noise)) if noise else None


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
