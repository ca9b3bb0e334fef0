"""A researcher's package: a method, an aggregation, a topology, a partition, a model and a data
set."""

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor, nn

from dispfl import (
    DisPFL,
    GossipMethod,
    Mask,
    PackedModel,
    Partition,
    PeerState,
    Topology,
    Trainer,
    gossip_average,
)

Counts = NDArray[np.int64]


class Halfway(GossipMethod):
    """Each peer trains from a point between its own model and the average."""

    name: Literal["half"] = "half"  # its own name, which is not that of the entry point
    share: float = Field(default=0.5, ge=0, le=1)

    def step(
        self, trainer: Trainer, state: PeerState, received: Mapping[str, PackedModel]
    ) -> PeerState:
        own, mask = state.model.unpack()
        models = {**received, trainer.peer: state.model}
        weights, masks = zip(*(models[name].unpack() for name in sorted(models)), strict=True)
        average = gossip_average(weights, masks, mask)
        model = PackedModel.pack(
            trainer.learn(self.share * own + (1 - self.share) * average, mask), mask
        )
        return PeerState(model, model.mask, trainer.buffers)


class MedianDisPFL(DisPFL):
    """Dis-PFL with another aggregation: the median of the models that hold a weight."""

    def mix(self, trainer: Trainer, models: Mapping[str, PackedModel], m_k: Mask) -> Tensor:
        held = []
        for name in sorted(models):
            weights, mask = models[name].unpack()
            held.append(torch.where(mask, weights, torch.nan))
        median = torch.stack(held).nanmedian(0).values.nan_to_num(0.0)
        kept = torch.where(m_k.unpack(), median, 0.0)
        if len(models) > 1:
            trainer.log("largest", kept.max())
        return kept


class Star(Topology):
    """The first peer receives from all others, and they receive from it."""

    def neighbours(self, seed: int, t: int, roster: Sequence[str]) -> dict[str, list[str]]:
        hub, *others = roster
        return {hub: list(others), **{peer: [hub] for peer in others}}


class SortedLabels(Partition):
    """Each peer gets the next samples in the order of their labels."""

    def class_counts(self, supply: Counts, sizes: Counts, rng: np.random.Generator) -> Counts:
        ends = np.cumsum(supply)
        edges = np.clip(np.cumsum([0, *sizes])[:, None], ends - supply, ends)
        counts: Counts = np.diff(edges, axis=0)
        return counts


def linear(shape: Sequence[int], classes: int) -> nn.Module:
    """Return a linear classifier."""
    return nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(shape)), classes))


def points() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return points in four dimensions, labelled by the largest of their first three
    coordinates."""
    x = torch.randn(400, 4, generator=torch.Generator().manual_seed(0))
    y = x[:, :3].argmax(1)
    return (x[:300], y[:300]), (x[300:], y[300:])
