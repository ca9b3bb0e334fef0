"""Dis-PFL: every peer trains its own sparse model and averages it with its neighbours' where both
keep a weight.

The paper masks single weights. With `structure = "channels"` the same algorithm masks whole
channels and hidden units, and a peer trains the small dense network that is left: sparsity then
saves time (channels/units.py).
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field, field_validator, model_validator
from torch import Tensor, nn

from dispfl.channels.block_average import block_average, unit_strengths
from dispfl.channels.find_units import find_units
from dispfl.channels.unit_counts import kept_weights, random_units, unit_counts
from dispfl.channels.units import UnitLayout, UnitMask
from dispfl.core.averaging import average_of
from dispfl.core.layout import Layout
from dispfl.core.masks import layer_counts, random_mask
from dispfl.core.packed import PackedMask, PackedModel
from dispfl.core.rng import stream
from dispfl.core.sparsity import (
    erk_densities,
    prune_and_regrow,
    prune_rate,
    replace_units,
    uniform_densities,
)
from dispfl.core.train import Train, Trainer
from dispfl.errors import ConfigError
from dispfl.methods.base import Density, GossipMethod, PeerState, initial_state, spread_densities
from dispfl.robust.averages import Robust


class DisPFL(Robust, GossipMethod):
    """The paper's method, Algorithms 1 and 2."""

    pulls_masked: ClassVar[bool] = True
    name: Literal["dispfl"] = "dispfl"
    density: Density = 0.5
    """Share of weights a peer keeps. The paper's sparsity 0.8 is density 0.2. A list makes groups
    of peers."""
    structure: Literal["weights", "channels"] = "weights"
    """What a mask leaves out: single weights (the paper), or whole channels, which saves time
    too."""
    alpha_0: float = Field(default=0.5, ge=0, le=1)
    """Share of the kept weights that round 0 replaces; cosine-annealed to 0. With 0 the first masks
    stay."""
    horizon: int | None = Field(default=None, ge=1)
    """Rounds over which `alpha_0` is annealed, the T of the paper's prune rate; by default all
    rounds of the run.

    A run with a horizon of its own can be extended to more rounds; masks do not change after the
    horizon.
    """
    regrow: Literal["gradient", "random"] = "gradient"
    """Regrow where the dense gradient is largest (the paper), or at random (the authors' scripts;
    with channels)."""
    layers: Literal["erk", "uniform"] = "erk"
    """How the density is distributed over the layers; with channels, `uniform` unless stated."""
    warm_up: bool = True
    """Start a regrown weight from its neighbours' average (the paper), or from 0; a channel that
    does not start from its neighbours' average has the first weights as its inputs, and zeros as
    its outputs.
    """
    first_masks: Literal["own", "common"] = "own"
    """Whether each peer draws its first mask (the paper), or all peers of a density have the
    same."""
    first_weights: Literal["shared", "own"] = "shared"
    """Whether all peers start from the same weights, or each draws its own (the paper)."""
    keep: tuple[str, ...] = ()
    """With channels: layers whose outputs are never left out."""

    @field_validator("keep", mode="before")
    @classmethod
    def _one_name(cls, value: Any) -> Any:
        """Accept one name, and the numbers that name the layers of an nn.Sequential."""
        return tuple(map(str, value if isinstance(value, (list, tuple)) else [value]))

    @model_validator(mode="after")
    def _keep_needs_channels(self) -> Self:
        if self.keep and self.structure != "channels":
            raise ConfigError(
                f"method.keep is {','.join(self.keep)}, which needs method.structure=channels;"
                " omit it.",
                key="method.keep",
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_channels(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("structure") == "channels":
            return {"regrow": "random", "layers": "uniform"} | given
        return given

    @property
    def depends_on_rounds(self) -> str:
        return "" if self.horizon else "the prune rate depends on it, unless method.horizon is set"

    @property
    def independent_init(self) -> bool:
        return self.first_weights == "own"

    @property
    def searches_by_gradient(self) -> bool:
        """Whether a round takes a batch for the dense gradient; masks that never change need
        none."""
        return self.regrow == "gradient" and self.alpha_0 > 0

    def private_steps(self, train: Train, samples: int) -> int:
        return train.local_steps(samples) + self.searches_by_gradient

    def densities(self, peers: int) -> list[float]:
        return spread_densities(self.density, peers)

    def layout(self, module: nn.Module, example: Callable[[], Tensor]) -> Layout:
        if self.structure == "channels":
            if self.regrow == "gradient":
                raise ConfigError(
                    "method.regrow is gradient, which needs method.structure=weights; channels"
                    " regrow at random.",
                    key="method.regrow",
                )
            return find_units(module, example(), self.keep)
        return Layout.of(module)

    def start(
        self, weights: Tensor, layout: Layout, density: float, *, seed: int, peer: str
    ) -> PeerState:
        """Algorithm 1, line 2. Deviation 0: the weights are the same for all peers, the mask is the
        peer's own."""
        rng = stream(seed, "mask", peer if self.first_masks == "own" else "")
        if isinstance(layout, UnitLayout):
            mask = random_units(layout, unit_counts(layout, density, self.layers), rng=rng)
            return PeerState(PackedModel.pack(weights, mask.unpack(), mask), mask)
        return initial_state(
            weights, random_mask(layout, self._layer_densities(layout, density), rng=rng)
        )

    def kept_counts(self, layout: Layout, density: float) -> tuple[int, ...]:
        """Return the kept weights of each layer, which evolving the mask does not change."""
        if isinstance(layout, UnitLayout):
            return kept_weights(layout, unit_counts(layout, density, self.layers))
        return layer_counts(layout, self._layer_densities(layout, density))

    def _layer_densities(self, layout: Layout, density: float) -> dict[str, float]:
        return (erk_densities if self.layers == "erk" else uniform_densities)(
            layout.by_name, density
        )

    def step(
        self, trainer: Trainer, state: PeerState, received: Mapping[str, PackedModel]
    ) -> PeerState:
        """Algorithm 1, lines 6-15: mix, learn, evolve."""
        models = self._averaged(state, received) | {trainer.peer: state.model}
        if isinstance(state.next_mask, UnitMask):
            return self._step_of_units(trainer, models, state.next_mask)
        m_k = state.next_mask.unpack()
        if (w_half := self.robust_mix(trainer, models, m_k)) is None:
            w_half = self.mix(models, m_k)
        trainer.observe_mixed(w_half)
        w_k = trainer.learn(w_half, m_k)
        next_mask = self.evolve(trainer, w_k, m_k)
        return PeerState(
            PackedModel.pack(w_k, m_k, state.next_mask), PackedMask.pack(next_mask), trainer.buffers
        )

    def _averaged(
        self, state: PeerState, received: Mapping[str, PackedModel]
    ) -> dict[str, PackedModel]:
        """Return what is averaged of the received models: without warm-up only what our own model
        holds too.

        Deviation 2: a regrown weight, which it does not hold, then starts at 0, and a regrown
        channel without outputs.
        """
        if self.warm_up or not state.model.mask.kept:  # a peer that joins later has no model yet
            return dict(received)
        return {name: model.restrict(state.model.mask) for name, model in received.items()}

    def mix(self, models: Mapping[str, PackedModel], m_k: Tensor) -> Tensor:
        """Algorithm 1, line 7: the average of our own and the received models, in roster order.

        Deviation 2: divide by the masks these weights were trained under, then keep our next mask,
        so that a regrown weight starts from its neighbours' value (docs/deviations.md).
        """
        return average_of((models[name] for name in sorted(models)), m_k)

    def evolve(self, trainer: Trainer, w_k: Tensor, m_k: Tensor) -> Tensor:
        """Algorithm 2: the next mask."""
        alpha_t = self._prune_rate(trainer)
        if alpha_t == 0:
            return m_k
        if self.regrow == "gradient":
            growth = trainer.gradient(w_k)
        else:
            growth = torch.rand(w_k.shape, generator=trainer.stream("regrow"))
        return prune_and_regrow(w_k, m_k, growth, alpha_t, trainer.network.layout)

    def _prune_rate(self, trainer: Trainer) -> float:
        T = self.horizon or trainer.T
        return prune_rate(min(trainer.t, T), T, self.alpha_0)

    def _step_of_units(
        self, trainer: Trainer, models: Mapping[str, PackedModel], m_k: UnitMask
    ) -> PeerState:
        """The same with masks of units: all vectors are those of the peer's small network."""
        if (w_half := self.robust_mix(trainer, models, m_k)) is None:
            w_half = block_average(
                [models[name] for name in sorted(models)], m_k, trainer.first_weights()
            )
        trainer.observe_mixed(w_half)
        w_k = trainer.learn(w_half, m_k)
        rng, alpha_t = trainer.stream("regrow"), self._prune_rate(trainer)
        growth = torch.rand(m_k.layout.units, generator=rng, dtype=torch.float64).numpy()
        next_mask = replace_units(m_k, unit_strengths(w_k, m_k), growth, alpha_t, rng=rng)
        return PeerState(PackedModel.under(w_k, m_k), next_mask, trainer.buffers)
