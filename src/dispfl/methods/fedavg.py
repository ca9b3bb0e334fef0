"""FedAvg: a server averages the models that a random cohort of peers trains from the global one."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from dispfl.core.layout import Layout
from dispfl.core.packed import PackedModel
from dispfl.core.train import Trainer
from dispfl.methods.base import PeerState, ServerMethod, empty_state, initial_state
from dispfl.robust.averages import Robust


class FedAvg(Robust, ServerMethod):
    """The paper's baseline "FedAvg" (McMahan et al.).

    A peer keeps nothing between rounds; it is evaluated on the global model.
    """

    name: Literal["fedavg"] = "fedavg"

    def start(
        self, weights: Tensor, layout: Layout, density: float, *, seed: int, peer: str
    ) -> PeerState:
        return empty_state(layout)

    def step(self, trainer: Trainer, state: PeerState, received: PackedModel) -> PeerState:
        weights, mask = received.unpack()
        upload = PackedModel.pack(trainer.learn(weights, mask), mask)
        return replace(state, upload=upload, buffers=trainer.buffers)

    def aggregate(
        self, server: PeerState, uploads: Mapping[str, PackedModel], samples: Mapping[str, int]
    ) -> PeerState:
        return averaged_uploads(self, server, uploads, samples)


def averaged_uploads(
    method: Robust,
    server: PeerState,
    uploads: Mapping[str, PackedModel],
    samples: Mapping[str, int],
) -> PeerState:
    """Return the server's next state: the uploads' weighted mean, or the robust average."""
    average = method.robust_aggregate(server.model, uploads)
    if average is None:
        average = weighted_mean(uploads, samples)
    return initial_state(average, server.model.mask.unpack())


def weighted_mean(uploads: Mapping[str, PackedModel], samples: Mapping[str, int]) -> Tensor:
    """Return the mean of dense models, weighted by their peers' samples (McMahan et al.).

        w <- sum_k n_k w_k / sum_k n_k

    summed in roster order. There is at least one upload.
    """
    total = sum(samples[peer] for peer in uploads)
    size = next(iter(uploads.values())).mask.size
    mean = torch.zeros(size)
    for peer in sorted(uploads):
        w_k, _ = uploads[peer].unpack()
        mean.add_(w_k, alpha=samples[peer] / total)
    return mean
