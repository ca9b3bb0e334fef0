"""DA-DPFL: Dis-PFL whose peers prune further once their models have settled."""

from collections.abc import Collection, Mapping
from math import ceil
from typing import ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from dispfl.core.layout import Layout
from dispfl.core.masks import true_indices
from dispfl.core.packed import PackedModel, WeightMask
from dispfl.core.sparsity import smallest
from dispfl.core.tensors import TensorSpec
from dispfl.core.train import Trainer
from dispfl.errors import ConfigError
from dispfl.methods.base import PeerState
from dispfl.methods.dispfl import DisPFL

LARGEST_CUT = 0.9
"""The largest share of a layer's kept weights that one pruning removes."""
PRUNINGS = 9
"""How often a peer prunes at most."""


class DADPFL(DisPFL):
    """DA-DPFL (Long, Wang, Anagnostopoulos, Bi, 2024), Algorithm 1: dynamic pruning.

    With D_t = sum over layers of |w_t - w_0|, a peer's model has settled in round t if

        |D_t - D_(t-1)| / D_0 <= `threshold`

    Let a be the first round after which at least half of the peer and its neighbours have settled.
    It prunes after round a, a + a/c, a + a/c + a/c^2, ..., where c is the `pace`, until its density
    is `target_density` or less. Of the d weights that a layer keeps, the m largest stay:

        m = ceil(d (1 + eta)^(q / (p - q)) (1 - I)^(q p / (q - p)))
        I = 1 - (mean |w|^p)^(1/p) / (mean |w|^q)^(1/q)                      (the PQ index)
    """

    density_falls: ClassVar[bool] = True
    name: Literal["da-dpfl"] = "da-dpfl"  # type: ignore[assignment]
    alpha_0: float = Field(default=0.3, ge=0, le=1)
    """Share of the kept weights that round 0 replaces, cosine-annealed to 0."""
    target_density: float = Field(default=0.2, gt=0, le=1)
    """The density at which pruning stops; the last pruning may fall below it."""
    threshold: float = Field(default=0.02, ge=0)
    """How little a model changes in a round once it has settled."""
    pace: float = Field(default=1.3, gt=1)
    """c: how much shorter each interval between two prunings is than the one before."""
    p: float = Field(default=0.5, gt=0, le=1)
    """p of the PQ index; less than q."""
    q: float = Field(default=1.0, gt=0)
    """q of the PQ index."""
    eta: float = Field(default=0.0, gt=-1)
    """eta of the PQ index: a larger one prunes more."""

    @model_validator(mode="after")
    def _check_pruning(self) -> Self:
        if self.masks_channels:
            raise ConfigError(
                "method.structure is channels, but da-dpfl prunes single weights; omit it.",
                key="method.structure",
            )
        if self.p >= self.q:
            raise ConfigError(
                f"method.p must be below method.q ({self.q:g}), got {self.p:g}.", key="method.p"
            )
        return self

    def always_dense(self, layout: Layout, densities: Collection[float]) -> list[bool]:
        """Return the layers that are dense in round 0 and never pruned: biases and norms."""
        always_dense = super().always_dense(layout, densities)
        for layer, shape in enumerate(layout.shapes):
            if len(shape) > 1:
                always_dense[layer] = False
        return always_dense

    def tensors(self, layout: Layout) -> Mapping[str, TensorSpec]:
        """Return the vote of a peer: whether its model has settled."""
        return {"settled": TensorSpec(dtype="uint8")}

    def publish(self, state: PeerState) -> PackedModel:
        settled = state.memory.get("settled", torch.tensor(0, dtype=torch.uint8))
        return state.model.with_tensors(settled=settled)

    def step(
        self, trainer: Trainer, state: PeerState, received: Mapping[str, PackedModel]
    ) -> PeerState:
        """Mix, learn, prune further when it is time, evolve."""
        m_k = state.next_mask
        models = self._models_to_average(state, received) | {trainer.peer: state.model}
        T = self.horizon or trainer.T
        affinity_memory = self.find_affinities(trainer, state, received, T)
        w_half = self.better_mix(trainer, models, m_k)
        trainer.observe_mixed(w_half)
        w_k = trainer.learn(w_half, m_k)

        first_pruning = self.first_pruning(trainer.t, state, received)
        memory = affinity_memory | self.measured(trainer, state, w_k)
        smaller_mask = m_k
        if first_pruning is not None:
            memory["first_pruning"] = torch.tensor(first_pruning)
            is_due = trainer.t - 1 in pruning_rounds(first_pruning, self.pace)
            if is_due and m_k.kept > self.target_density * m_k.size:
                flags = self.pruned(w_k, m_k.unpack(), trainer.network.layout)
                smaller_mask = WeightMask.pack(flags)

        next_mask = self.evolve(trainer, w_k, smaller_mask)
        return PeerState(PackedModel.under(w_k, m_k), next_mask, trainer.buffers, memory)

    def first_pruning(
        self, t: int, state: PeerState, received: Mapping[str, PackedModel]
    ) -> int | None:
        """Return a, the round after which at least half of the neighbourhood had settled."""
        if "first_pruning" in state.memory:
            return int(state.memory["first_pruning"])
        settled = int(state.memory.get("settled", 0))
        for model in received.values():
            settled += int(model.tensors["settled"])
        if 2 * settled >= 1 + len(received):
            return t - 1
        return None

    def measured(self, trainer: Trainer, state: PeerState, w_k: Tensor) -> dict[str, Tensor]:
        """Return how far the model is from the first weights, and whether it has settled."""
        mask = state.next_mask.unpack()
        difference = torch.where(mask, w_k - trainer.first_weights(), 0.0)
        change = torch.zeros(())
        for where in trainer.network.layout.slices:
            change += difference[where].norm()
        if "change" not in state.memory:
            return {"first_change": change, "change": change.clone()}
        ratio = (change - state.memory["change"]).abs() / state.memory["first_change"]
        settled = (ratio <= self.threshold).to(torch.uint8)
        return {
            "first_change": state.memory["first_change"],
            "change": change,
            "settled": settled,
        }

    def pruned(self, w_k: Tensor, mask: Tensor, layout: Layout) -> Tensor:
        """Return the mask without the smallest weights of each layer, as the PQ index says."""
        mask = mask.clone()
        exponent = self.q * self.p / (self.q - self.p)
        factor = (1 + self.eta) ** (self.q / (self.p - self.q))
        for shape, where in zip(layout.shapes, layout.slices, strict=True):
            positions = true_indices(mask[where])
            d = len(positions)
            if len(shape) < 2 or d == 0:
                continue
            magnitudes = w_k[where][positions].abs()
            index = pq_index(magnitudes, self.p, self.q)
            m = ceil(d * factor * (1 - index) ** exponent)
            cut = min(max(1 - m / d, 0.0), LARGEST_CUT)
            count = int(d * cut)
            if count:
                mask[where][positions[smallest(magnitudes, count)]] = False
        return mask


def pruning_rounds(a: int, pace: float) -> list[int]:
    """Return a, a + a/c, a + a/c + a/c^2, ..., each interval rounded."""
    rounds = [a]
    interval = a
    for _ in range(PRUNINGS - 1):
        interval = round(interval / pace)
        rounds.append(rounds[-1] + interval)
    return rounds


def pq_index(magnitudes: Tensor, p: float, q: float) -> float:
    """Return the PQ index of some weights: 0 if all have the same magnitude, near 1 if few count.

    I = 1 - (mean |w|^p)^(1/p) / (mean |w|^q)^(1/q)
    """
    norm_p = magnitudes.double().pow(p).mean().pow(1 / p)
    norm_q = magnitudes.double().pow(q).mean().pow(1 / q)
    if norm_q == 0:
        return 0.0
    return max(0.0, float(1 - norm_p / norm_q))
