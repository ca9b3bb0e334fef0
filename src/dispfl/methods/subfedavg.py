"""SubFedAvg: peers prune dense models step by step; the server averages what they keep."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from dispfl.core.averaging import masked_mean
from dispfl.core.layout import Layout
from dispfl.core.masks import hamming, kept_count
from dispfl.core.packed import PackedModel
from dispfl.core.sparsity import smallest
from dispfl.core.train import Trainer
from dispfl.methods.base import PeerState, ServerMethod, initial_state
from dispfl.robust.averages import Robust


class SubFedAvg(Robust, ServerMethod):
    """The paper's baseline "SubFedAvg" (Vahidian et al., unstructured): dense to sparse.

    A peer is evaluated on the global model under its own mask.
    """

    can_be_private: ClassVar[bool] = False
    name: Literal["subfedavg"] = "subfedavg"
    density: float = Field(default=0.5, gt=0, le=1)
    """Density at which pruning stops."""
    prune: float = Field(default=0.05, gt=0, lt=1)
    """Share of a layer's kept weights that one pruning removes."""
    min_change: float = Field(default=1e-4, ge=0)
    """Prune only if the pruned masks of first and last epoch differ in more than this share."""
    min_accuracy: float = Field(default=0.5, ge=0, le=1)
    """Prune only if the pruned model's score on the training data stays better than this."""

    def always_dense(self, layout: Layout, densities: Collection[float]) -> list[bool]:
        return [False] * len(layout.sizes)  # dense at first, but pruned later

    def broadcast(self, server: PeerState, state: PeerState) -> PackedModel:
        """The global model, where the peer keeps it."""
        return restricted(server.model, state.model.mask.unpack())

    def evaluated_model(self, state: PeerState, global_model: PackedModel) -> PackedModel:
        return restricted(global_model, state.model.mask.unpack())

    def step(self, trainer: Trainer, state: PeerState, received: PackedModel) -> PeerState:
        """Prune if the masks that pruning gives after the first and the last epoch differ."""
        weights, mask = received.unpack()
        layout = trainer.network.layout
        steps = trainer.settings.local_steps(len(trainer.train))
        epoch = trainer.settings.steps_per_epoch(len(trainer.train))
        first = trainer.learn(weights, mask, steps=min(epoch, steps))
        last = first
        if steps > epoch:
            last = trainer.learn(first, mask, steps=steps - epoch)

        early_mask = pruned(first, mask, self.prune, self.density, layout)
        late_mask = pruned(last, mask, self.prune, self.density, layout)
        if hamming(early_mask, late_mask) > self.min_change * layout.size:
            pruned_weights = torch.where(late_mask, last, 0.0)
            score = trainer.score(pruned_weights, trainer.train)
            if trainer.task.metric.gain(score, self.min_accuracy) > 0:
                last = pruned_weights
                mask = late_mask
        model = PackedModel.pack(last, mask)
        return replace(
            state, model=model, next_mask=model.mask, buffers=trainer.buffers, upload=model
        )

    def aggregate(
        self, server: PeerState, uploads: Mapping[str, PackedModel], samples: Mapping[str, int]
    ) -> PeerState:
        """Average each weight over the uploads that hold it, else keep the server's value."""
        weights, mask = server.model.unpack()
        average = self.robust_aggregate(server.model, uploads)
        if average is None:
            average = masked_mean((uploads[peer] for peer in sorted(uploads)), weights)
        return initial_state(average, mask)


def pruned(weights: Tensor, mask: Tensor, share: float, target: float, layout: Layout) -> Tensor:
    """The mask without the smallest weights of each layer of two or more dimensions.

    It is never below the target density.
    """
    mask = mask.clone()
    spare = int(mask.sum()) - kept_count(layout.size, target)
    for shape, where in zip(layout.shapes, layout.slices, strict=True):
        positions = mask[where].nonzero().squeeze(1)
        count = min(int(share * len(positions)), spare, len(positions) - 1)
        if len(shape) < 2 or count <= 0:
            continue
        magnitudes = weights[where][positions].abs()
        mask[where][positions[smallest(magnitudes, count)]] = False
        spare -= count
    return mask


def restricted(model: PackedModel, mask: Tensor) -> PackedModel:
    """A dense model under a mask."""
    return PackedModel.pack(model.unpack()[0], mask)
