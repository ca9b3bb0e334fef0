"""Dis-PFL: peers train sparse models, and average the weights that they and neighbours both keep.

The paper masks single weights. With `structure = "channels"` the same algorithm masks whole
channels and hidden units, and a peer trains the small dense network that is left: sparsity then
saves time (channels/channel_mask.py).
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator
from torch import Tensor, nn

from dispfl.channels.find_units import find_units
from dispfl.core.layout import LayerDensities, Layout
from dispfl.core.packed import Mask, PackedModel
from dispfl.core.rng import stream
from dispfl.core.sparsity import prune_rate
from dispfl.core.train import Train, Trainer
from dispfl.errors import ConfigError
from dispfl.methods.affinity import Affinity
from dispfl.methods.base import Density, PeerState, initial_state, spread_densities
from dispfl.robust.averages import Robust


class DisPFL(Robust, Affinity):
    """The paper's method, Algorithms 1 and 2."""

    pulls_masked: ClassVar[bool] = True
    name: Literal["dispfl"] = "dispfl"
    density: Density = 0.5
    """Share of weights a peer keeps; a list makes groups of peers.

    The paper's sparsity 0.8 is density 0.2. `fit`: as much as each peer's device manages in the
    time of the table `fit`.
    """
    structure: Literal["weights", "channels"] = "weights"
    """What a mask leaves out: single weights (the paper), or whole channels, to save time too."""
    alpha_0: float = Field(default=0.5, ge=0, le=1)
    """Share of the kept weights that round 0 replaces, cosine-annealed to 0.

    With 0 the first masks stay.
    """
    horizon: int | None = Field(default=None, ge=1)
    """Rounds over which `alpha_0` is annealed (T in the paper); by default all rounds of the run.

    A run with a horizon of its own can be extended to more rounds; masks do not change after the
    horizon.
    """
    regrow: Literal["gradient", "random"] = "gradient"
    """Regrow where the dense gradient is largest (the paper), or at random (the authors' scripts).

    Channels regrow at random.
    """
    layers: LayerDensities = "erk"
    """How the density is distributed over the layers; with channels, `uniform` unless stated."""
    warm_up: bool = True
    """Start a regrown weight from its neighbours' average (the paper), or from 0.

    A channel that does not start from its neighbours' average has the first weights as its inputs,
    and zeros as its outputs.
    """
    first_masks: Literal["own", "common"] = "own"
    """Whether each peer draws its first mask (the paper), or all peers of a density share one."""
    first_weights: Literal["shared", "own"] = "shared"
    """Whether all peers start from the same weights, or each draws its own (the paper)."""
    keep: tuple[str, ...] = ()
    """With channels: layers whose outputs are never left out."""

    @field_validator("keep", mode="before")
    @classmethod
    def _one_name(cls, value: Any) -> Any:
        """Accept one name, and the numbers that name the layers of an nn.Sequential."""
        if isinstance(value, (list, tuple)):
            return tuple(map(str, value))
        return (str(value),)

    @model_validator(mode="after")
    def _keep_needs_channels(self) -> Self:
        if self.keep and not self.masks_channels:
            raise ConfigError(
                f"method.keep is {','.join(self.keep)}, which needs method.structure=channels;"
                " omit it.",
                key="method.keep",
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_channels(cls, settings: Any) -> Any:
        if isinstance(settings, dict) and settings.get("structure") == "channels":
            return {"regrow": "random", "layers": "uniform"} | settings
        return settings

    @model_validator(mode="after")
    def _affinity_fits(self) -> Self:
        if self.affinity == "none":
            return self
        if self.robust in ("trim", "nnm"):
            raise ConfigError(
                f"method.affinity is {self.affinity}, but method.robust={self.robust} weighs models"
                " by itself; use method.robust=clip or none.",
                key="method.affinity",
            )
        if self.first_weights == "own":
            raise ConfigError(
                f"method.affinity is {self.affinity}, which compares what peers have learned since"
                " the first weights that they share; leave method.first_weights shared.",
                key="method.affinity",
            )
        return self

    @property
    def masks_channels(self) -> bool:
        return self.structure == "channels"

    @property
    def depends_on_rounds(self) -> str:
        if self.horizon:
            return ""
        return "the prune rate depends on it, unless method.horizon is set"

    @property
    def independent_init(self) -> bool:
        return self.first_weights == "own"

    @property
    def uses_mixing_weights(self) -> bool:
        return self.robust == "none"

    @property
    def searches_by_gradient(self) -> bool:
        """Whether a round takes a batch for the dense gradient: not if masks never change."""
        return self.regrow == "gradient" and self.alpha_0 > 0

    def choices(self, neighbours: int, t: int, T: int) -> int:
        return super().choices(neighbours, t, self.horizon or T)

    def searched_samples(self, train: Train) -> int:
        if self.masks_channels or not self.searches_by_gradient:
            return 0
        return train.batch_size

    def private_steps(self, train: Train, samples: int) -> int:
        return train.local_steps(samples) + self.searches_by_gradient

    def densities(self, peers: int) -> list[float]:
        return spread_densities(self.density, peers)

    def layout(self, module: nn.Module, example: Callable[[], Tensor]) -> Layout:
        if not self.masks_channels:
            return Layout.of(module)
        if self.regrow == "gradient":
            raise ConfigError(
                "method.regrow is gradient, which needs method.structure=weights; channels regrow"
                " at random.",
                key="method.regrow",
            )
        return find_units(module, example(), self.keep)

    def start(
        self, weights: Tensor, layout: Layout, density: float, *, seed: int, peer: str
    ) -> PeerState:
        """Algorithm 1, line 2. Deviation 0: peers share the weights, each draws its own mask."""
        drawn_by = peer if self.first_masks == "own" else ""
        rng = stream(seed, "mask", drawn_by)
        return initial_state(weights, layout.random_mask(density, self.layers, rng=rng))

    def kept_counts(self, layout: Layout, density: float) -> tuple[int, ...]:
        """Return the kept weights of each layer, which evolving the mask does not change."""
        return layout.kept_counts(density, self.layers)

    def step(
        self, trainer: Trainer, state: PeerState, received: Mapping[str, PackedModel]
    ) -> PeerState:
        """Algorithm 1, lines 6-15: mix, learn, evolve.

        All weights are those of the network that computes a model under the mask m_k.
        """
        m_k = state.next_mask
        models = self._models_to_average(state, received) | {trainer.peer: state.model}
        memory = self.find_affinities(trainer, state, received, self.horizon or trainer.T)
        w_half = self.better_mix(trainer, models, m_k)
        trainer.observe_mixed(w_half)
        w_k = trainer.learn(w_half, m_k)
        next_mask = self.evolve(trainer, w_k, m_k)
        return PeerState(PackedModel.under(w_k, m_k), next_mask, trainer.buffers, memory)

    def mix(self, trainer: Trainer, models: Mapping[str, PackedModel], m_k: Mask) -> Tensor:
        """Algorithm 1, line 7: the average of our own and the received models, in roster order.

        Deviation 2: divide by the masks these weights were trained under, then keep our next mask,
        so that a regrown weight starts from its neighbours' value (docs/deviations.md).
        """
        robust_average = self.robust_mix(trainer, models, m_k)
        if robust_average is not None:
            return robust_average
        names = sorted(models)
        in_order = [models[name] for name in names]
        return m_k.average(in_order, trainer.first_weights, trainer.mixing_weights_of(names))

    def _models_to_average(
        self, state: PeerState, received: Mapping[str, PackedModel]
    ) -> dict[str, PackedModel]:
        """Return what is averaged of the received models.

        Without warm-up it is only what our own model holds too. Deviation 2: a regrown weight,
        which it does not hold, then starts at 0, and a regrown channel with zeros as its outputs.
        """
        if self.warm_up or not state.model.mask.kept:  # a peer that joins later has no model yet
            return dict(received)
        return {name: model.restrict(state.model.mask) for name, model in received.items()}

    def evolve(self, trainer: Trainer, w_k: Tensor, m_k: Mask) -> Mask:
        """Algorithm 2: the next mask, by prune and regrow."""
        T = self.horizon or trainer.T
        alpha_t = prune_rate(min(trainer.now, T), T, self.alpha_0)
        if alpha_t == 0:
            trainer.report.mask_change = 0.0
            return m_k
        gradient = None
        if self.regrow == "gradient":
            gradient = trainer.gradient(w_k)
        layout = trainer.network.layout
        rng = trainer.stream("regrow")
        return m_k.evolve(w_k, alpha_t, layout, gradient=gradient, rng=rng)
