"""FedProx: FedAvg whose peers are pulled towards the global model while they train."""

from dataclasses import replace
from typing import Literal

from pydantic import Field

from dispfl.core.packed import PackedModel
from dispfl.core.train import Trainer
from dispfl.methods.base import PeerState
from dispfl.methods.fedavg import FedAvg


class FedProx(FedAvg):
    """FedProx (Li et al., MLSys 2020), Algorithm 2.

    A peer of the cohort minimizes

        h_k(w; w^t) = F_k(w) + mu / 2 * |w - w^t|^2

    from the global model w^t that it received; mu = 0 is FedAvg. Slow peers train for fewer
    epochs (a list in `train.epochs`), where FedAvg would drop them.
    """

    name: Literal["fedprox"] = "fedprox"  # type: ignore[assignment]
    prox_mu: float = Field(default=0.01, ge=0)
    """mu, the weight of the proximal term; the paper tunes it between 0.001 and 1."""

    def step(self, trainer: Trainer, state: PeerState, received: PackedModel) -> PeerState:
        w_t, mask = received.unpack()
        learned = trainer.learn(w_t, mask, prox=(self.prox_mu, w_t))
        upload = PackedModel.pack(learned, mask)
        return replace(state, upload=upload, buffers=trainer.buffers)
