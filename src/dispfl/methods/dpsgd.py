"""D-PSGD: peers average plainly with their neighbours, then train towards one consensus model."""

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

from pydantic import Field
from torch import Tensor

from dispfl.core.averaging import average_of
from dispfl.core.layout import Layout
from dispfl.core.packed import Mask, PackedModel
from dispfl.core.rng import stream
from dispfl.core.train import Trainer
from dispfl.methods.base import GossipMethod, PeerState, initial_state
from dispfl.robust.averages import Robust


class DPSGD(Robust, GossipMethod):
    """The paper's baseline "D-PSGD", with several local epochs instead of one step.

    Deviation 8: evaluated on the average of all peers' models, as in the paper.
    """

    evaluates_global: ClassVar[bool] = True
    name: Literal["dpsgd"] = "dpsgd"
    density: float = Field(default=1.0, gt=0, le=1)
    """Below 1, all peers share one fixed mask, uniform over the layers.

    The paper's "20 % params" rows.
    """

    @property
    def uses_mixing_weights(self) -> bool:
        return self.robust == "none"

    def densities(self, peers: int) -> list[float]:
        return [self.density] * peers

    def start(
        self, weights: Tensor, layout: Layout, density: float, *, seed: int, peer: str
    ) -> PeerState:
        if density == 1:
            return super().start(weights, layout, density, seed=seed, peer=peer)
        rng = stream(seed, "mask", "everyone")
        return initial_state(weights, layout.random_mask(density, "uniform", rng=rng))

    def kept_counts(self, layout: Layout, density: float) -> tuple[int, ...]:
        return layout.kept_counts(density, "uniform")

    def step(
        self, trainer: Trainer, state: PeerState, received: Mapping[str, PackedModel]
    ) -> PeerState:
        """Average, then learn."""
        mask = state.model.mask
        mixed = self.average(trainer, {**received, trainer.peer: state.model}, mask)
        trained = PackedModel.under(trainer.learn(mixed, mask), mask)
        return PeerState(trained, mask, trainer.buffers)

    def average(self, trainer: Trainer, models: Mapping[str, PackedModel], mask: Mask) -> Tensor:
        """Return the average of our own and the received models, by the robust rule if any."""
        robust_average = self.robust_mix(trainer, models, mask)
        if robust_average is not None:
            return robust_average
        return mean_model(models, mask.unpack(), trainer.mixing_weights_of(sorted(models)))

    def global_model(self, states: Mapping[str, PeerState]) -> PackedModel:
        """Return the consensus: the average of all peers' models."""
        models = {peer: state.model for peer, state in states.items()}
        mask = next(iter(models.values())).mask.unpack()
        return PackedModel.pack(mean_model(models, mask), mask)


def mean_model(
    models: Mapping[str, PackedModel], mask: Tensor, mixing_weights: Sequence[float] | None = None
) -> Tensor:
    """The mean of models that share a mask, summed in roster order.

    With mixing weights:  w_k <- sum_j p_kj w_j / sum_j p_kj
    """
    return average_of((models[name] for name in sorted(models)), mask, mixing_weights)
