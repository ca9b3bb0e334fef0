"""SCAFFOLD: FedAvg whose peers correct their drift with control variates."""

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from dispfl.core.layout import Layout
from dispfl.core.packed import PackedModel
from dispfl.core.tensors import TensorSpec
from dispfl.core.train import Trainer
from dispfl.errors import ConfigError
from dispfl.methods.base import PeerState, ServerMethod, empty_state, initial_state

CONTROL = "control"
"""The name of control variates, beside models and in what a peer remembers."""


class SCAFFOLD(ServerMethod):
    """SCAFFOLD (Karimireddy et al., ICML 2020), Algorithm 1 with option II.

    The server sends the global model x and its control variate c, an estimate of the gradient of
    all peers. A peer of the cohort has its own, c_i. It takes K steps from y_i = x, and updates
    c_i:

        y_i <- y_i - eta * (g_i(y_i) + c - c_i)
        c_i <- c_i - c + (x - y_i) / (K * eta)

    It uploads y_i and the change of c_i. With S the cohort and N the number of all peers,

        x <- x + eta_g / |S| * sum_i (y_i - x)
        c <- c + 1 / N * sum_i (change of c_i)

    A peer is evaluated with the global model.
    """

    plain_sgd: ClassVar[bool] = True
    name: Literal["scaffold"] = "scaffold"
    server_lr: float = Field(default=1.0, gt=0)
    """eta_g, the server's step towards the mean of the uploads; 1 takes the mean."""

    @model_validator(mode="after")
    def _shares_everything(self) -> Self:
        if self.private:
            raise ConfigError(
                f"method.private is {','.join(self.private)}, but SCAFFOLD's control variates are"
                " those of one global model; omit it, or use fedper.",
                key="method.private",
            )
        return self

    def tensors(self, layout: Layout) -> Mapping[str, TensorSpec]:
        return {CONTROL: TensorSpec((layout.size,))}

    def start(
        self, weights: Tensor, layout: Layout, density: float, *, seed: int, peer: str
    ) -> PeerState:
        return empty_state(layout)

    def start_server(self, weights: Tensor, layout: Layout) -> PeerState:
        server = super().start_server(weights, layout)
        return with_control(server, torch.zeros(layout.size))

    def step(self, trainer: Trainer, state: PeerState, received: PackedModel) -> PeerState:
        K = trainer.settings.local_steps(len(trainer.train))
        eta = trainer.settings.rate(trainer.t, trainer.T)
        x, mask = received.unpack()
        c = received.tensors[CONTROL]
        c_i = state.memory.get(CONTROL, torch.zeros_like(c))

        y_i = trainer.learn(x, mask, correction=c - c_i)
        next_c_i = c_i - c + (x - y_i) / (K * eta)

        upload = PackedModel.pack(y_i, mask).with_tensors(control=next_c_i - c_i)
        memory = {**state.memory, CONTROL: next_c_i}
        return replace(state, upload=upload, memory=memory, buffers=trainer.buffers)

    def aggregate(
        self, server: PeerState, uploads: Mapping[str, PackedModel], samples: Mapping[str, int]
    ) -> PeerState:
        x, mask = server.model.unpack()
        next_x = x.clone()
        next_c = server.model.tensors[CONTROL].clone()
        for peer in sorted(uploads):
            y_i, _ = uploads[peer].unpack()
            next_x.add_(y_i - x, alpha=self.server_lr / len(uploads))
            next_c.add_(uploads[peer].tensors[CONTROL], alpha=1 / len(samples))
        return with_control(initial_state(next_x, mask), next_c)


def with_control(server: PeerState, control: Tensor) -> PeerState:
    """Return the server's state with a control variate beside its model."""
    return replace(server, model=server.model.with_tensors(control=control))
