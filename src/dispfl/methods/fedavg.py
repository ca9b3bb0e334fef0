"""FedAvg: a server averages what a random cohort of peers makes of the global model."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from dispfl.core.layout import Layout
from dispfl.core.packed import PackedModel
from dispfl.core.train import Trainer
from dispfl.methods.base import PeerState, ServerMethod, empty_state, fresh_state


class FedAvg(ServerMethod):
    """The paper's baseline "FedAvg". A peer keeps nothing between rounds; it is judged on the global model."""

    name: Literal["fedavg"] = "fedavg"

    def start(self, weights: Tensor, layout: Layout, density: float, *, seed: int, peer: str) -> PeerState:
        return empty_state(layout)

    def step(self, peer: Trainer, state: PeerState, received: PackedModel) -> PeerState:
        weights, mask = received.unpack()
        return replace(state, sent=PackedModel.pack(peer.learn(weights, mask), mask), buffers=peer.buffers)

    def aggregate(self, server: PeerState, sent: Mapping[str, PackedModel], samples: Mapping[str, int]) -> PeerState:
        return fresh_state(*weighted_mean(sent, samples))


def weighted_mean(sent: Mapping[str, PackedModel], samples: Mapping[str, int]) -> tuple[Tensor, Tensor]:
    """The mean of dense models, weighted by their peers' samples (McMahan et al.), and the mask that keeps all of it.

    w <- sum_k n_k w_k / sum_k n_k, in roster order
    """
    total = sum(samples[peer] for peer in sent)
    mean: Tensor | None = None
    for peer in sorted(sent):
        weights, mask = sent[peer].unpack()
        mean = torch.zeros_like(weights) if mean is None else mean
        mean.add_(weights, alpha=samples[peer] / total)
    assert mean is not None  # the server aggregates only what somebody sent
    return mean, mask
