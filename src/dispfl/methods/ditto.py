"""Ditto: a global model as in FedAvg, and for each peer a personal model that is pulled towards
it."""

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field

from dispfl.core.packed import PackedModel
from dispfl.core.train import Train, Trainer
from dispfl.methods.base import PeerState, ServerMethod
from dispfl.methods.fedavg import averaged_uploads
from dispfl.robust.averages import Robust


class Ditto(Robust, ServerMethod):
    """The paper's baseline "Ditto" (Li et al.): the epochs of a round are divided between the two
    models.

    A peer of the cohort trains the global model w and sends it back, then its personal model v
    against

        F_k(v) + lambda / 2 * |v - w|^2

    where w is what it received. It is evaluated on v.
    """

    evaluates_global: ClassVar[bool] = False
    name: Literal["ditto"] = "ditto"
    prox_mu: float = Field(default=0.5, ge=0)
    """lambda, the weight of the proximal term: how strongly the personal model is pulled towards
    the global one."""
    global_epochs: int = Field(default=2, ge=1)
    """Epochs of a round that train the global model."""
    personal_epochs: int = Field(default=3, ge=1)
    """Epochs of a round that train the personal model. `train.steps` is divided in the same
    proportion."""

    def step(self, trainer: Trainer, state: PeerState, received: PackedModel) -> PeerState:
        w, mask = received.unpack()
        of_global, of_personal = self._steps(trainer.settings, len(trainer.train))
        uploaded = PackedModel.pack(trainer.learn(w, mask, steps=of_global, name="global"), mask)
        v = trainer.learn(state.model.unpack()[0], mask, steps=of_personal, prox=(self.prox_mu, w))
        personal = PackedModel.pack(v, mask)
        return PeerState(personal, personal.mask, trainer.buffers, upload=uploaded)

    def private_steps(self, train: Train, samples: int) -> int:
        return sum(self._steps(train, samples))

    def _steps(self, train: Train, samples: int) -> tuple[int, int]:
        """Return the steps for both models: their epochs, or `train.steps` divided in the same
        proportion."""
        if train.steps is None:
            return train.local_steps(samples, self.global_epochs), train.local_steps(
                samples, self.personal_epochs
            )
        of_global = max(
            1, round(train.steps * self.global_epochs / (self.global_epochs + self.personal_epochs))
        )
        return of_global, max(1, train.steps - of_global)

    def aggregate(
        self, server: PeerState, uploads: Mapping[str, PackedModel], samples: Mapping[str, int]
    ) -> PeerState:
        return averaged_uploads(self, server, uploads, samples)
