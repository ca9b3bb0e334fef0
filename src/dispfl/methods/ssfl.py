"""SSFL: one sparse network for all, chosen before training by what matters to all data."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import Tensor

from dispfl.core.layout import Layout
from dispfl.core.masks import kept_count, true_indices
from dispfl.core.packed import PackedModel
from dispfl.core.sparsity import smallest
from dispfl.core.tensors import TensorSpec
from dispfl.core.train import Trainer
from dispfl.methods.base import Method, PeerState
from dispfl.methods.dpsgd import DPSGD
from dispfl.topology import Topology

SCORES = "scores"
"""The key of a peer's present scores, until it has a mask."""


class SSFL(DPSGD):
    """SSFL (Ohib et al., TMLR 2025), Algorithm 1, without a server.

    At the shared first weights w_0 every peer scores each weight by SNIP's saliency, and the mean
    over all peers decides, once, which weights everybody keeps from then on:

        s_k = |g_k(w_0) * w_0|,   s = mean_k s_k,   m = the top density of s

    Peers score in round 0, and average their scores with those of their neighbours in the next
    `score_rounds` rounds. They then train w_0 * m as D-PSGD does, and are evaluated with their own
    models.
    """

    evaluates_global: ClassVar[bool] = False
    name: Literal["ssfl"] = "ssfl"  # type: ignore[assignment]
    density: float = Field(default=0.5, gt=0, le=1)
    """Share of weights that all peers keep."""
    score_rounds: int | None = Field(default=None, ge=0)
    """Rounds in which scores are exchanged: by default 1 if all peers are neighbours, else 4.

    With more rounds the peers' masks differ less. With 0 each peer has a mask of its own.
    """

    @property
    def needs_rounds(self) -> str:
        return "its peers find their common mask in the first rounds"

    def resolved(self, topology: Topology, peers: int) -> Self:
        if self.score_rounds is not None:
            return self
        all_connected = min(topology.degrees(peers)) == peers - 1
        return self.model_copy(update={"score_rounds": 1 if all_connected else 4})

    # dense until the mask is found, and nobody knows how many weights of a layer it will keep

    start = Method.start

    def kept_counts(self, layout: Layout, density: float) -> tuple[int, ...]:
        return layout.sizes

    def always_dense(self, layout: Layout, densities: Collection[float]) -> list[bool]:
        return [False] * len(layout.sizes)

    def has_mask(self, state: PeerState) -> bool:
        """Whether a peer has found its mask."""
        return self.density == 1 or state.model.mask.kept < state.model.mask.size

    def tensors(self, layout: Layout) -> Mapping[str, TensorSpec]:
        """Return what tells models from scores."""
        return {"is_model": TensorSpec(dtype="uint8")}

    def publish(self, state: PeerState) -> PackedModel:
        """Return the model; the scores of a peer that has no mask yet; nothing if it has none."""
        if self.has_mask(state):
            return state.model.with_tensors(is_model=torch.tensor(1, dtype=torch.uint8))
        flags = torch.zeros(state.model.mask.size, dtype=torch.bool)
        scores = state.memory.get(SCORES)
        if scores is None:
            scores = torch.zeros(len(flags))
        else:
            flags = ~flags
        return PackedModel.pack(scores, flags).with_tensors(
            is_model=torch.tensor(0, dtype=torch.uint8)
        )

    def step(
        self, trainer: Trainer, state: PeerState, received: Mapping[str, PackedModel]
    ) -> PeerState:
        """Find the common mask, then average and learn."""
        models = {}
        received_scores = {}
        for sender, model in received.items():
            if model.tensors["is_model"]:
                models[sender] = model
            elif model.mask.kept:
                received_scores[sender] = model
        if self.has_mask(state):
            return super().step(trainer, state, models)

        if models:  # the others have begun to train without us
            mask = held_by_most(models)
            pruned = PackedModel.pack(state.model.flat(), mask)
            return super().step(trainer, replace(state, model=pruned), models)

        scores = self.mean_scores(trainer, state, received_scores)
        assert self.score_rounds is not None, "a run's context has fitted it"
        if trainer.t < self.score_rounds:
            return replace(state, memory={SCORES: scores}, buffers=trainer.buffers)
        mask = top_scores(scores, self.density, trainer.network.layout)
        pruned = PackedModel.pack(trainer.first_weights(), mask)
        return super().step(trainer, replace(state, model=pruned), {})

    def mean_scores(
        self, trainer: Trainer, state: PeerState, received: Mapping[str, PackedModel]
    ) -> Tensor:
        """Return the average of our own and the received scores."""
        scores = state.memory.get(SCORES)
        if scores is None:
            scores = saliency(trainer, trainer.first_weights())
        full = state.model.mask
        return self.average(
            trainer, {**received, trainer.peer: PackedModel.pack(scores, full)}, full
        )


def saliency(trainer: Trainer, w_0: Tensor) -> Tensor:
    """Return SNIP's score of each weight, |g(w_0) * w_0|, on one batch of training data."""
    trainer.begin(w_0, torch.ones(len(w_0), dtype=torch.bool))
    (batch,) = trainer.batches(steps=1)
    loss = trainer.backward(*batch)
    gradient = trainer.network.grad.to("cpu", copy=True)
    trainer.end(loss)
    return (gradient * w_0).abs()


def top_scores(scores: Tensor, density: float, layout: Layout) -> Tensor:
    """Return the mask that keeps the highest scores of all layers together.

    Biases and normalization layers are kept whole, and count as kept weights.
    """
    is_scored = layout.flags([len(shape) > 1 for shape in layout.shapes])
    mask = ~is_scored
    count = max(1, kept_count(layout.size, density) - int(mask.sum()))
    positions = true_indices(is_scored)
    mask[positions[smallest(-scores[positions], count)]] = True
    return mask


def held_by_most(models: Mapping[str, PackedModel]) -> Tensor:
    """Return the mask of the weights that more than half of the models hold."""
    masks = torch.stack([models[name].mask.unpack() for name in sorted(models)])
    return masks.float().mean(0) > 0.5
