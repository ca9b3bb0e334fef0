"""APFL: each peer mixes the global model with a local one, in a proportion that it learns."""

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from dispfl.core.layout import Layout
from dispfl.core.optimizers import sgd_step
from dispfl.core.packed import PackedModel
from dispfl.core.report import Passes
from dispfl.core.train import Train, Trainer
from dispfl.methods.base import PeerState, ServerMethod
from dispfl.methods.fedavg import averaged_uploads
from dispfl.robust.averages import Robust

LOCAL = "local"
"""Where a peer remembers its local model v."""
ALPHA = "alpha"
"""Where a peer remembers its mixing weight."""


class APFL(Robust, ServerMethod):
    """Adaptive personalized federated learning (Deng et al., 2020), Algorithm 1.

    A peer of the cohort trains two models on each batch: w, which it received and uploads, and its
    local model v, through the mixture that it is evaluated with:

        v_bar = alpha * v + (1 - alpha) * w
        v <- v - eta * alpha * g(v_bar)
        w <- w - eta * g(w)

    With `adaptive`, alpha takes one step in each round (section "Adaptively updating alpha"):

        alpha <- alpha - eta * <v - w, g(v_bar)>, kept in [0, 1]
    """

    evaluates_global: ClassVar[bool] = False
    can_be_private: ClassVar[bool] = False
    plain_sgd: ClassVar[bool] = True
    name: Literal["apfl"] = "apfl"
    alpha: float = Field(default=0.5, ge=0, le=1)
    """The weight of the local model in a peer's mixture, at first."""
    adaptive: bool = True
    """Whether each peer learns its own mixing weight."""

    def step(self, trainer: Trainer, state: PeerState, received: PackedModel) -> PeerState:
        """Train the mixture's local part and the received model on the same batches."""
        network = trainer.network
        lr = trainer.settings.rate(trainer.t, trainer.T)
        received_weights, mask = received.unpack()
        first_weights, _ = state.model.unpack()
        w = network.to_device(received_weights.clone())
        v = network.to_device(state.memory.get(LOCAL, first_weights).clone())
        alpha = float(state.memory.get(ALPHA, self.alpha))
        w_buffers = trainer.buffers  # the trainer's own are the mixture's

        losses: list[Tensor] = []
        trainer.begin(received_weights, mask)
        for x, y in trainer.batches():
            network.load(mixture(alpha, v, w), trainer.buffers)
            losses.append(trainer.backward(x, y))
            trainer.buffers = network.read_buffers()
            next_alpha = alpha
            if self.adaptive and len(losses) == 1:
                slope = float(torch.dot(v - w, network.grad))
                next_alpha = min(1.0, max(0.0, alpha - lr * slope))
            network.grad.mul_(alpha)
            descend_(v, trainer, lr)
            alpha = next_alpha

            network.load(w, w_buffers)
            trainer.backward(x, y)
            w_buffers = network.read_buffers()
            descend_(w, trainer, lr)

        network.load(mixture(alpha, v, w), trainer.buffers)
        v_bar = trainer.end(torch.stack(losses).mean())
        trainer.check_finite(w, "weights of the global model")
        trainer.log("alpha", alpha)
        model = PackedModel.pack(v_bar, mask)
        memory = {LOCAL: v.cpu(), ALPHA: torch.tensor(alpha)}
        upload = PackedModel.pack(w.cpu(), mask)
        return PeerState(model, model.mask, trainer.buffers, memory, upload=upload)

    def training_passes(
        self, train: Train, samples: int, layout: Layout, kept: Sequence[int]
    ) -> list[Passes]:
        return [Passes(2 * train.samples_trained(samples), list(kept))]

    def aggregate(
        self, server: PeerState, uploads: Mapping[str, PackedModel], samples: Mapping[str, int]
    ) -> PeerState:
        return averaged_uploads(self, server, uploads, samples)


def mixture(alpha: float, v: Tensor, w: Tensor) -> Tensor:
    """Return v_bar = alpha * v + (1 - alpha) * w."""
    return alpha * v + (1 - alpha) * w


def descend_(weights: Tensor, trainer: Trainer, lr: float) -> None:
    """Take a step of plain SGD along the network's gradient, in place, as `Trainer.learn` does."""
    s = trainer.settings
    shift = trainer.draw_shift()
    sgd_step(weights, trainer.network.grad, None, lr, s.weight_decay, s.clip_norm, shift=shift)
