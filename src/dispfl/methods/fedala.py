"""FedALA: peers combine the global model with their own, element by element, before they train."""

from collections.abc import Callable, Mapping, Sequence
from statistics import pstdev
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from dispfl.core.layout import Layout
from dispfl.core.packed import PackedModel
from dispfl.core.report import Passes
from dispfl.core.samples import Samples
from dispfl.core.train import Train, Trainer
from dispfl.methods.base import Patterns, PeerState, ServerMethod, counts_where
from dispfl.methods.fedavg import averaged_uploads
from dispfl.robust.averages import Robust

COMBINATION = "combination"
"""Where a peer remembers its weights W of the combined parameters."""
CONVERGED = 0.1
"""The first W has converged when the last losses have a smaller standard deviation."""
LAST_LOSSES = 10
FIRST_EPOCHS = 100
"""The first W is learnt for at most so many epochs."""


class FedALA(Robust, ServerMethod):
    """Federated learning with adaptive local aggregation (Zhang et al., AAAI 2023), Algorithm 1.

    A peer of the cohort starts from its last model theta_k, moved towards the global model theta:

        theta_k + (theta - theta_k) * W

    with a weight in [0, 1] for each element of the last layers; below them W is 1. It learns W on a
    part of its data by descending along g * (theta - theta_k): until the loss has converged in its
    first round, for one epoch in the following ones. Then it trains, uploads the result, and is
    evaluated with it.
    """

    evaluates_global: ClassVar[bool] = False
    can_be_private: ClassVar[bool] = False
    name: Literal["fedala"] = "fedala"
    combined: Patterns = ("head",)
    """Parameters that are combined by learnt weights; the others are the global model's."""
    share: float = Field(default=0.8, gt=0, le=1)
    """Share of the peer's training data, drawn in each round, that the weights are learnt on."""
    weight_lr: float = Field(default=1.0, gt=0)
    """Learning rate of the weights."""

    def layout(self, module: nn.Module, example: Callable[[], Tensor]) -> Layout:
        layout = super().layout(module, example)
        layout.matching(self.combined, "method.combined")  # refuses unknown names before round 0
        return layout

    def step(self, trainer: Trainer, state: PeerState, received: PackedModel) -> PeerState:
        """Combine, learn."""
        layout = trainer.network.layout
        theta, mask = received.unpack()
        theta_k, _ = state.model.unpack()
        memory = state.memory
        start = theta
        if not theta.equal(theta_k):
            flags = layout.flags(layout.matching(self.combined, "method.combined"))
            start, weights = self._combine(trainer, state, theta_k, theta, flags)
            memory = {COMBINATION: weights}
        trainer.observe_mixed(start)

        model = PackedModel.pack(trainer.learn(start, mask), mask)
        return PeerState(model, model.mask, trainer.buffers, memory, upload=model)

    def _combine(
        self, trainer: Trainer, state: PeerState, theta_k: Tensor, theta: Tensor, flags: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the weights that training starts from, and W."""
        network = trainer.network
        positions = network.to_device(flags.nonzero().squeeze(1))
        own_values = network.to_device(theta_k[flags])
        difference = network.to_device((theta - theta_k)[flags])
        W = torch.ones_like(own_values)
        epochs = FIRST_EPOCHS
        if COMBINATION in state.memory:
            W = network.to_device(state.memory[COMBINATION])
            epochs = 1

        samples = self._samples(trainer)
        steps = trainer.settings.steps_per_epoch(len(samples))
        losses: list[float] = []
        trainer.begin(theta, torch.ones_like(flags), only=flags)
        network.weights[positions] = own_values + difference * W
        while len(losses) < epochs and not has_converged(losses):
            for x, y in trainer.batches(steps=steps, samples=samples):
                loss = trainer.backward(x, y)
                W = (W - self.weight_lr * network.grad[positions] * difference).clamp(0, 1)
                network.weights[positions] = own_values + difference * W
            trainer.check_finite(loss, "loss of the combined model")
            losses.append(float(loss))
        return network.read(), W.cpu()

    def _samples(self, trainer: Trainer) -> Samples:
        """Return the part of the training data that W is learnt on in this round."""
        order = torch.randperm(len(trainer.train), generator=trainer.stream("combination"))
        return trainer.train.take(order[: self._share_of(len(order))].sort().values)

    def _share_of(self, samples: int) -> int:
        return max(1, int(self.share * samples))

    def training_passes(
        self, train: Train, samples: int, layout: Layout, kept: Sequence[int]
    ) -> list[Passes]:
        """One epoch for the weights, as in all rounds of a peer but its first ones."""
        combined = counts_where(layout.matching(self.combined, "method.combined"), kept)
        learnt_on = train.samples_trained(self._share_of(samples), 1)
        return [
            Passes(learnt_on, list(kept), combined),
            Passes(train.samples_trained(samples), list(kept)),
        ]

    def aggregate(
        self, server: PeerState, uploads: Mapping[str, PackedModel], samples: Mapping[str, int]
    ) -> PeerState:
        return averaged_uploads(self, server, uploads, samples)


def has_converged(losses: list[float]) -> bool:
    """Whether the losses of the last epochs hardly differ."""
    return len(losses) > LAST_LOSSES and pstdev(losses[-LAST_LOSSES:]) < CONVERGED
