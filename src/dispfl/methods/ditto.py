"""Ditto: a global model as in FedAvg, and for each peer a personal model that is pulled towards it."""

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field

from dispfl.core.packed import PackedModel
from dispfl.core.train import Trainer
from dispfl.methods.base import PeerState, ServerMethod, fresh_state
from dispfl.methods.fedavg import weighted_mean


class Ditto(ServerMethod):
    """The paper's baseline "Ditto" (Li et al.): the epochs of a round are divided between the two models.

    A peer of the cohort trains the global model w and sends it back, then its personal model v against

        F_k(v) + lambda / 2 * |v - w|^2

    where w is what it received. It is judged on v.
    """

    shares: ClassVar[bool] = False
    name: Literal["ditto"] = "ditto"
    pull: float = Field(default=0.5, ge=0)
    """lambda: how strongly the personal model is pulled towards the global one."""
    global_epochs: int = Field(default=2, ge=1)
    personal_epochs: int = Field(default=3, ge=1)

    def step(self, peer: Trainer, state: PeerState, received: PackedModel) -> PeerState:
        w, mask = received.unpack()
        sent = PackedModel.pack(peer.learn(w, mask, self.global_epochs), mask)
        v = peer.learn(state.model.unpack()[0], mask, self.personal_epochs, pull=(self.pull, w))
        personal = PackedModel.pack(v, mask)
        return PeerState(personal, personal.mask, peer.buffers, sent=sent)

    def aggregate(self, server: PeerState, sent: Mapping[str, PackedModel], samples: Mapping[str, int]) -> PeerState:
        return fresh_state(*weighted_mean(sent, samples))
