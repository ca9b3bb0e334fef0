"""Local: every peer trains a dense model alone. The baseline that any federation should beat."""

from collections.abc import Mapping
from typing import ClassVar, Literal

from dispfl.core.packed import PackedModel
from dispfl.core.train import Trainer
from dispfl.methods.base import GossipMethod, PeerState


class Local(GossipMethod):
    """The paper's baseline "Local": the same epochs per round, without any exchange."""

    communicates: ClassVar[bool] = False
    name: Literal["local"] = "local"

    def step(
        self, trainer: Trainer, state: PeerState, received: Mapping[str, PackedModel]
    ) -> PeerState:
        weights, mask = state.model.unpack()
        model = PackedModel.pack(trainer.learn(weights, mask), mask)
        return PeerState(model, model.mask, trainer.buffers)
