"""DFedPGP: personal heads, and one shared body that peers average on directed graphs (push-sum)."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from dispfl.core.layout import Layout
from dispfl.core.packed import PackedModel
from dispfl.core.report import Passes
from dispfl.core.tensors import TensorSpec
from dispfl.core.train import Train, Trainer
from dispfl.methods.base import GossipMethod, Patterns, PeerState, counts_where

PUSH_SUM = "push_sum"
"""The key of a peer's push-sum weight, in its memory and beside its model."""
SMALLEST_WEIGHT = 1e-6
"""Below this push-sum weight a peer begins again with 1: messages were lost for long."""


class DFedPGP(GossipMethod):
    """DFedPGP (Liu et al., CVPR 2024), Algorithm 1: partial models and gradient push.

    A peer has a body u_k, a head v_k that it never sends (`method.private`), and a push-sum weight
    o_k, at first 1. Each sender divides what it has among its receivers and itself, so that the
    columns of P add up to 1, and z_k = u_k / o_k approaches the mean of all peers on any strongly
    connected graph, where plain averages give peers with many receivers more weight:

        u_k <- sum_j p_kj u_j,   o_k <- sum_j p_kj o_j,   z_k = u_k / o_k

    Then the head learns with the body frozen, and the body with the head frozen; the body's steps
    are steps of u_k with the gradient at z_k:

        v_k <- v_k - eta_v g_v(z_k, v_k),   u_k <- u_k - eta g_u(z_k, v_k)

    With `push_sum=false` it is DFedAlt (Shi et al., 2023): the body is a plain average. The
    personal models (z_k, v_k) are evaluated.
    """

    train_defaults: ClassVar[Mapping[str, Any]] = {"momentum": 0.9, "lr_decay": 0.99}
    name: Literal["dfedpgp"] = "dfedpgp"
    private: Patterns = ("head",)
    """The head: parameters that each peer trains for itself and never sends."""
    push_sum: bool = True
    """Average by push-sum; false: plainly, which is DFedAlt."""
    head_epochs: int = Field(default=1, ge=1)
    """Epochs in which a round trains the head; then `train.epochs` or `train.steps` the body."""
    head_lr: float = Field(default=0.001, gt=0)
    """Learning rate of the head in round 0; it follows the schedule of `train`."""

    @property
    def pushes(self) -> bool:
        return self.push_sum

    @property
    def uses_mixing_weights(self) -> bool:
        return True

    def private_steps(self, train: Train, samples: int) -> int:
        return train.local_steps(samples) + train.local_steps(samples, self.head_epochs)

    def training_passes(
        self, train: Train, samples: int, layout: Layout, kept: Sequence[int]
    ) -> list[Passes]:
        is_head = self.private_parameters(layout)
        is_body = [not flag for flag in is_head]
        head = counts_where(is_head, kept)
        body = counts_where(is_body, kept)
        return [
            Passes(train.samples_trained(samples, self.head_epochs), list(kept), head),
            Passes(train.samples_trained(samples), list(kept), body),
        ]

    def tensors(self, layout: Layout) -> Mapping[str, TensorSpec]:
        return {PUSH_SUM: TensorSpec()} if self.push_sum else {}

    def publish(self, state: PeerState) -> PackedModel:
        """Return z_k and o_k, from which receivers compute u_k."""
        if not self.push_sum:
            return state.model
        return state.model.with_tensors(push_sum=push_sum_weight(state))

    def step(
        self, trainer: Trainer, state: PeerState, received: Mapping[str, PackedModel]
    ) -> PeerState:
        """Mix, learn the head, learn the body."""
        o_k, z_k = self.mix(trainer, state, received)
        trainer.observe_mixed(z_k)

        mask = state.model.mask
        eta = trainer.settings.rate(trainer.t, trainer.T)
        eta_v = self.head_lr * eta / trainer.settings.lr
        layout = trainer.network.layout
        is_head = layout.flags(self.private_parameters(layout))
        learned = trainer.learn(z_k, mask, self.head_epochs, lr=eta_v, only=is_head, name="head")
        # A step of eta on u_k is one of eta / o_k on z_k.
        learned = trainer.learn(learned, mask, lr=eta / o_k, only=~is_head, name="body")

        after = PeerState(PackedModel.under(learned, mask), mask, trainer.buffers)
        if self.push_sum:
            after = replace(after, memory={PUSH_SUM: torch.tensor(o_k)})
        return after

    def mix(
        self, trainer: Trainer, state: PeerState, received: Mapping[str, PackedModel]
    ) -> tuple[float, Tensor]:
        """Return o_k, and z_k = sum_j p_kj o_j z_j / o_k; without push-sum all o are 1.

        Received models do not hold the head, whose only holder is the peer itself.
        """
        models = {**received, trainer.peer: state.model}
        names = sorted(models)
        shares = trainer.mixing_weights_of(names) or [1.0] * len(names)
        first_weights = trainer.first_weights
        in_order = [models[name] for name in names]
        if not self.push_sum:
            return 1.0, state.model.mask.average(in_order, first_weights, shares)

        pushed = []
        for name, share in zip(names, shares, strict=True):
            o_j = push_sum_weight(state)
            if name != trainer.peer:
                o_j = max(0.0, float(models[name].tensors[PUSH_SUM]))
            pushed.append(share * o_j)
        o_k = sum(pushed)
        z_k = state.model.mask.average(in_order, first_weights, pushed)
        if o_k < SMALLEST_WEIGHT:
            o_k = 1.0
        return o_k, z_k


def push_sum_weight(state: PeerState) -> float:
    """Return a peer's push-sum weight: 1 before its first round."""
    return float(state.memory.get(PUSH_SUM, 1.0))
