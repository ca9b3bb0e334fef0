"""Ditto: a global model as in FedAvg, and personal models that are pulled towards it."""

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

from pydantic import Field

from dispfl.core.layout import Layout
from dispfl.core.packed import PackedModel
from dispfl.core.report import Passes
from dispfl.core.train import Train, Trainer
from dispfl.methods.base import PeerState, ServerMethod
from dispfl.methods.fedavg import averaged_uploads
from dispfl.robust.averages import Robust


class Ditto(Robust, ServerMethod):
    """The paper's baseline "Ditto" (Li et al.): a round trains two models.

    A peer of the cohort first trains the global model w, which it received, and uploads the result.
    Then it trains its personal model v to minimize

        F_k(v) + lambda / 2 * |v - w|^2

    with w as received. It is evaluated on v.
    """

    evaluates_global: ClassVar[bool] = False
    name: Literal["ditto"] = "ditto"
    prox_mu: float = Field(default=0.5, ge=0)
    """lambda, the weight of the proximal term, which pulls the personal model to the global one."""
    global_epochs: int = Field(default=2, ge=1)
    """Epochs of a round that train the global model."""
    personal_epochs: int = Field(default=3, ge=1)
    """Epochs of a round that train the personal model.

    `train.steps` is divided in the same proportion.
    """

    def step(self, trainer: Trainer, state: PeerState, received: PackedModel) -> PeerState:
        """Train the global model, then the personal model against what was received."""
        global_steps, personal_steps = self._steps(trainer.settings, len(trainer.train))
        w, mask = received.unpack()
        v, _ = state.model.unpack()

        trained_w = trainer.learn(w, mask, steps=global_steps, name="global")
        trained_v = trainer.learn(v, mask, steps=personal_steps, prox=(self.prox_mu, w))

        personal = PackedModel.pack(trained_v, mask)
        upload = PackedModel.pack(trained_w, mask)
        return PeerState(personal, personal.mask, trainer.buffers, upload=upload)

    def private_steps(self, train: Train, samples: int) -> int:
        return sum(self._steps(train, samples))

    def training_passes(
        self, train: Train, samples: int, layout: Layout, kept: Sequence[int]
    ) -> list[Passes]:
        passes = []
        for steps in self._steps(train, samples):
            passes.append(Passes(train.samples_of_steps(samples, steps), list(kept)))
        return passes

    def _steps(self, train: Train, samples: int) -> tuple[int, int]:
        """Return the steps of the global and of the personal model."""
        return divided_steps(train, samples, self.global_epochs, self.personal_epochs)

    def aggregate(
        self, server: PeerState, uploads: Mapping[str, PackedModel], samples: Mapping[str, int]
    ) -> PeerState:
        return averaged_uploads(self, server, uploads, samples)


def divided_steps(train: Train, samples: int, first: int, second: int) -> tuple[int, int]:
    """Return the steps of two trainings in a round, from their epochs.

    `train.steps` is divided in the same proportion.
    """
    if train.steps is None:
        return train.local_steps(samples, first), train.local_steps(samples, second)
    first_steps = max(1, round(train.steps * first / (first + second)))
    return first_steps, max(1, train.steps - first_steps)
