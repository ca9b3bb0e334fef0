"""Several peers' tiny models trained at once: one call computes for all of them what would be a call for each.

A step of a tiny network is mostly the price of calling torch. Stacked, as many peers pay it once; where a network has
enough to compute, convolutions above all, stacking gains nothing. The sums are done in another order than one by one,
so results are equal up to rounding, not to the bit.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.func import functional_call, vmap

from dispfl.core.live import LiveModel
from dispfl.core.masks import keep_, kept_per_layer, mask_bits
from dispfl.core.train import Samples, Task, Train, Trainer
from dispfl.errors import NonFiniteError


def can_learn_together(trainers: Sequence[Trainer]) -> bool:
    """Whether these peers' batches are of equal sizes and their model keeps nothing but weights."""
    alike = {(trainer.t, trainer.settings, trainer.task, len(trainer.train)) for trainer in trainers}
    return len(alike) == 1 and not any(trainer.live.buffer_names for trainer in trainers)


def can_be_stacked(live: LiveModel, task: Task, samples: Samples) -> bool:
    """Whether a stack of this model can be trained, found out on one batch: not all that modules do can be mapped."""
    if live.buffer_names or live.precision != "float32":
        return False
    x, y = (live.bring(part.unsqueeze(0)) for part in next(samples.batches(2)))
    own = {name: part.detach().clone().unsqueeze(0).requires_grad_() for name, part in _trainable(live)}
    try:
        torch.autograd.grad(vmap(_loss(live, task))(own, x, y).sum(), list(own.values()))
    except Exception:  # whatever of the user's own it is, it will come out where a peer trains by itself
        return False
    return True


def _trainable(live: LiveModel) -> Iterator[tuple[str, Tensor]]:
    return ((name, part) for name, part in live.module.named_parameters() if part.requires_grad)


def _loss(live: LiveModel, task: Task) -> Callable[[Mapping[str, Tensor], Tensor, Tensor], Tensor]:
    """The loss of one model's own weights on its own batch."""

    def loss(own: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return task.loss(functional_call(live.module, dict(own), (x,)), y)

    return loss


def learn_together(
    trainers: Sequence[Trainer], weights: Sequence[Tensor], masks: Sequence[Tensor], epochs: int | None = None
) -> list[Tensor | NonFiniteError]:
    """What `Trainer.learn` gives each peer, or why it was given up; one peer's failure is not another's."""
    first, peers = trainers[0], len(trainers)
    s, live = first.settings, first.live
    epochs, lr = epochs or s.epochs, s.rate(first.t)
    live.module.train()
    flat, bits = live.bring(torch.stack(list(weights))), mask_bits(live.bring(torch.stack(list(masks))))
    layers = zip(live.layout.names, live.layout.slices, live.layout.shapes, strict=True)
    # By way of .data: autograd must not take the steps on `flat` for a part of the next forward pass.
    parameters = {name: flat[:, where].view(peers, *shape).data.requires_grad_() for name, where, shape in layers}

    loss_of_each = vmap(_loss(live, first.task))
    losses = []
    for _ in range(epochs):
        own_batches = (trainer.train.batches(s.batch, rng=trainer.order) for trainer in trainers)
        for batches in zip(*own_batches, strict=True):
            for trainer in trainers:
                trainer.pulse()
            x, y = (live.bring(torch.stack(part)) for part in zip(*batches, strict=True))
            of_each = loss_of_each(parameters, x, y)
            gradients = torch.autograd.grad(of_each.sum(), list(parameters.values()))
            _sgd_steps(flat, torch.cat([g.flatten(1) for g in gradients], 1), bits, lr, s, _noise(trainers, flat))
            losses.append(of_each.detach())
    means = torch.stack(losses).mean(0).cpu()
    return [
        _outcome(trainer, learned, mask, mean, epochs)
        for trainer, learned, mask, mean in zip(trainers, flat.cpu().unbind(), masks, means, strict=True)
    ]


def _noise(trainers: Sequence[Trainer], flat: Tensor) -> Tensor | None:
    """Each peer's noise from its own stream."""
    drawn = [trainer.draw_noise(flat.shape[1]) for trainer in trainers]
    there = [noise for noise in drawn if noise is not None]
    return trainers[0].live.bring(torch.stack(there)) if there else None


def _sgd_steps(flat: Tensor, grad: Tensor, bits: Tensor, lr: float, s: Train, noise: Tensor | None) -> None:
    """`sgd_step` on the rows of a matrix, each with its own norm."""
    keep_(grad, bits)
    if s.clip_norm:
        norms = torch.linalg.vector_norm(grad, dim=1, keepdim=True)
        grad.mul_((s.clip_norm / (norms + 1e-6)).clamp(max=1.0))
    flat.mul_(1 - lr * s.weight_decay).add_(grad, alpha=-lr)
    if noise is not None:
        flat.add_(keep_(noise, bits), alpha=-lr)


def _outcome(trainer: Trainer, learned: Tensor, mask: Tensor, loss: Tensor, epochs: int) -> Tensor | NonFiniteError:
    """One peer's weights, and its report filled in."""
    trainer.report.passes.append((epochs * len(trainer.train), kept_per_layer(mask, trainer.live.layout)))
    try:
        trainer.demand_finite(loss, "training loss")
        trainer.demand_finite(learned, "weights")
    except NonFiniteError as problem:
        return problem
    trainer.report.loss = float(loss)
    return learned.clone()
