"""FedPer and FedRep: a server averages the body of the network; each peer keeps its own head."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from pydantic import Field

from dispfl.core.layout import Layout
from dispfl.core.packed import PackedModel
from dispfl.core.report import Passes
from dispfl.core.train import Train, Trainer
from dispfl.methods.base import Patterns, PeerState, counts_where
from dispfl.methods.ditto import divided_steps
from dispfl.methods.fedavg import FedAvg


class FedPer(FedAvg):
    """FedPer (Arivazhagan et al., 2019): FedAvg with private heads, trained with the body.

    A peer is evaluated with the global body and its own head.
    """

    name: Literal["fedper"] = "fedper"  # type: ignore[assignment]
    private: Patterns = ("head",)
    """The personalization layers, which never leave a peer."""


class FedRep(FedPer):
    """FedRep (Collins et al., ICML 2021), Algorithm 1: first the head, then the body.

    With the body phi that it received, a peer of the cohort trains its head h for some epochs, then
    phi for others, and uploads phi:

        h   <- h - eta * g_h(h, phi)
        phi <- phi - eta * g_phi(h, phi)
    """

    name: Literal["fedrep"] = "fedrep"  # type: ignore[assignment]
    head_epochs: int = Field(default=4, ge=1)
    """Epochs of a round that train the head, with the body frozen."""
    body_epochs: int = Field(default=1, ge=1)
    """Epochs of a round that train the body, with the head frozen.

    `train.steps` is divided in the same proportion.
    """

    def step(self, trainer: Trainer, state: PeerState, received: PackedModel) -> PeerState:
        """Train the head, then the body."""
        layout = trainer.network.layout
        head = layout.flags(self.private_parameters(layout))
        head_steps, body_steps = self._steps(trainer.settings, len(trainer.train))
        weights, mask = received.unpack()

        weights = trainer.learn(weights, mask, steps=head_steps, only=head)
        weights = trainer.learn(weights, mask, steps=body_steps, only=~head)

        upload = PackedModel.pack(weights, mask)
        return replace(state, upload=upload, buffers=trainer.buffers)

    def private_steps(self, train: Train, samples: int) -> int:
        return sum(self._steps(train, samples))

    def training_passes(
        self, train: Train, samples: int, layout: Layout, kept: Sequence[int]
    ) -> list[Passes]:
        is_head = self.private_parameters(layout)
        is_body = [not private for private in is_head]
        head_steps, body_steps = self._steps(train, samples)
        return [
            Passes(
                train.samples_of_steps(samples, head_steps), list(kept), counts_where(is_head, kept)
            ),
            Passes(
                train.samples_of_steps(samples, body_steps), list(kept), counts_where(is_body, kept)
            ),
        ]

    def _steps(self, train: Train, samples: int) -> tuple[int, int]:
        """Return the steps of the head and of the body."""
        return divided_steps(train, samples, self.head_epochs, self.body_epochs)
