"""Rules for whom to hear and how much that were tried before `method.affinity` was fixed.

    dispfl run two-classes.toml method=candidates:Candidate method.rule=relative

Peers hear their topology's neighbours unless `affinity_chosen` is set. docs/results/affinity.md
has the results. They are kept to be repeated, not to be used.
"""

from collections.abc import Mapping
from math import cos, pi
from statistics import fmean
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from dispfl import PackedModel, Trainer
from dispfl.core.packed import Mask
from dispfl.methods.affinity import TWINS, Head, most_similar
from dispfl.methods.dispfl import DisPFL


class Candidate(DisPFL):
    """Dis-PFL with another rule for the weights of its average."""

    name: Literal["candidate"] = "candidate"  # type: ignore[assignment]
    affinity: Literal["none", "head"] = "head"
    rule: Literal["plain", "power", "relative", "gap"] = "plain"
    """plain: 1; power: c^p; relative: (c / c_best)^p; gap: 1 - p (c_best - c)."""
    p: float = 1.0
    centred: bool = True
    """Compare deviations from the running mean; otherwise changes since the first weights."""
    annealed: bool = False
    """Let the rule take effect gradually, as masks settle."""
    begin: int = Field(default=1, ge=1)
    """The first round in which models count differently."""
    own_weight: float = 1.0
    layers: Literal["all", "head"] = "all"
    """Where models count differently; elsewhere the average is plain."""
    gradual: bool = True
    """Choose few peers at first, and `affinity_chosen` of the neighbours in the end."""

    def choices(self, neighbours: int, t: int, T: int) -> int:
        if self.gradual:
            return super().choices(neighbours, t, T)
        return int(self.affinity_chosen * neighbours)

    def similarity(self, own_head: Head, head: Head, mean: Tensor | None) -> float | None:
        return own_head.similarity(head, mean if self.centred else None)

    def weights(
        self, t: int, T: int, similarities: Mapping[str, float], known: Mapping[str, float]
    ) -> dict[str, float]:
        if self.rule == "plain" or not known or t < self.begin:
            return dict.fromkeys(similarities, 1.0)
        best = max(1e-6, fmean(known[name] for name in most_similar(known)[:TWINS]))
        progress = (1 - cos(pi * t / T)) / 2 if self.annealed else 1.0
        weights = {}
        for name, c in similarities.items():
            match self.rule:
                case "power":
                    weight = max(0.0, c) ** self.p
                case "relative":
                    weight = min(1.0, max(0.0, c) / best) ** self.p
                case _:
                    weight = min(1.0, max(0.0, 1 - self.p * (best - c)))
            weights[name] = 1 - progress * (1 - weight)
        return weights

    def mix(self, trainer: Trainer, models: Mapping[str, PackedModel], m_k: Mask) -> Tensor:
        names = sorted(models)
        in_order = [models[name] for name in names]
        affinities = trainer.report.affinities or {}
        shares = []
        for name in names:
            shares.append(self.own_weight if name == trainer.peer else affinities.get(name, 1.0))
        average = m_k.average(in_order, trainer.first_weights, shares)
        if self.layers == "all":
            return average
        plain = m_k.average(in_order, trainer.first_weights)
        is_head = torch.zeros(len(plain), dtype=torch.bool)
        is_head[trainer.run.layout.head] = True
        return torch.where(is_head, average, plain)
