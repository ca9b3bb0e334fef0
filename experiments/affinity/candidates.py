"""Rules for whom to hear and how much that were tried before `method.affinity` was fixed.

    dispfl run two-classes.toml method=candidates:Candidate method.rule=relative
    dispfl run two-classes.toml method=candidates:Compared method.by=masks
    dispfl run two-classes.toml method=candidates:HeldBack method.rule=settled

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
from dispfl.core.samples import Samples
from dispfl.methods.affinity import (
    RECENT_SIMILARITY,
    SIMILARITY,
    TWINS,
    Head,
    most_similar,
    remembered_similarities,
    running_mean,
)
from dispfl.methods.base import PeerState
from dispfl.methods.dispfl import DisPFL
from dispfl.methods.fedfomo import gain

LEAD = "lead"
"""The key of the running mean of how much smaller the loss of the average by affinity is."""
RECENT_LEAD = 0.3
"""The share of the last round in it."""


class Candidate(DisPFL):
    """Dis-PFL with another rule for the weights of its average."""

    name: Literal["candidate"] = "candidate"  # type: ignore[assignment]
    affinity: Literal["none", "head"] = "head"
    affinity_held_back: float = 0.0
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


class Compared(DisPFL):
    """Dis-PFL with the rule of `method.affinity=head`, for another similarity."""

    name: Literal["compared"] = "compared"  # type: ignore[assignment]
    affinity: Literal["none", "head"] = "head"
    affinity_held_back: float = 0.0
    by: Literal["model", "masks"] = "masks"
    """model: the cosine of all changes since the first weights; masks: overlap beyond chance."""

    def find_affinities(
        self, trainer: Trainer, state: PeerState, received: Mapping[str, PackedModel], T: int
    ) -> dict[str, Tensor]:
        known = remembered_similarities(state)
        similarities = {}
        for name, model in sorted(received.items()):
            if self.by == "masks":
                similarity = overlap_beyond_chance(state.model, model)
            else:
                similarity = cosine_of_changes(state.model, model, trainer.first_weights())
            similarities[name] = similarity
            known[name] = running_mean(known.get(name), similarity, RECENT_SIMILARITY)
        trainer.report.similarities = similarities
        trainer.report.affinities = self.weights(trainer.t, T, similarities, known)
        return {SIMILARITY + name: torch.tensor(value) for name, value in known.items()}


def overlap_beyond_chance(own: PackedModel, other: PackedModel) -> float:
    """Return (o - e) / (1 - e) for the share o of our kept weights that the other keeps, too.

    e is the share that independent masks of the same densities have in common.
    """
    own_flags = torch.from_numpy(own.mask.flags())
    other_flags = torch.from_numpy(other.mask.flags())
    overlap = float((own_flags & other_flags).sum() / own_flags.sum())
    expected = float(other_flags.float().mean())
    return (overlap - expected) / max(1e-6, 1 - expected)


def cosine_of_changes(own: PackedModel, other: PackedModel, first: Tensor) -> float:
    """Return the cosine of two models' changes since the first weights, where both hold them."""
    both = torch.from_numpy(own.mask.flags() & other.mask.flags())
    own_change = (own.flat() - first)[both]
    other_change = (other.flat() - first)[both]
    return float(torch.cosine_similarity(own_change, other_change, dim=0))


class HeldBack(DisPFL):
    """Dis-PFL with another rule for what peers decide on held-back data."""

    name: Literal["held-back"] = "held-back"  # type: ignore[assignment]
    affinity: Literal["none", "head"] = "head"
    rule: Literal["gain", "own", "settled"] = "gain"
    """gain: FedFOMO's weights inside the masked average, the largest 1; our own model counts 1.

    own: the best of the average by affinity, the plain one, and our own model. settled: by affinity
    or plain, as the running mean of the difference of their losses says.
    """

    def step(
        self, trainer: Trainer, state: PeerState, received: Mapping[str, PackedModel]
    ) -> PeerState:
        m_k = state.next_mask
        models = {**received, trainer.peer: state.model}
        memory = self.find_affinities(trainer, state, received, trainer.T)
        held_back = trainer.hold_back(self.held_back(len(trainer.train)))
        if self.rule == "gain":
            w_half = self._by_gain(trainer, models, m_k, held_back)
        else:
            averages = self._averages(trainer, models, m_k)
            losses = {name: trainer.loss(average, held_back) for name, average in averages.items()}
            best = min(losses, key=lambda name: losses[name])
            if self.rule == "settled":
                lead = losses["plain"] - losses["affinity"]
                if LEAD in state.memory:
                    lead = running_mean(float(state.memory[LEAD]), lead, RECENT_LEAD)
                memory[LEAD] = torch.tensor(lead)
                best = "affinity" if lead >= 0 else "plain"
            w_half = averages[best]
        trainer.observe_mixed(w_half)
        w_k = trainer.learn(w_half, m_k)
        next_mask = self.evolve(trainer, w_k, m_k)
        return PeerState(PackedModel.under(w_k, m_k), next_mask, trainer.buffers, memory)

    def _averages(
        self, trainer: Trainer, models: Mapping[str, PackedModel], m_k: Mask
    ) -> dict[str, Tensor]:
        """Return the averages that a peer decides between."""
        in_order = [models[name] for name in sorted(models)]
        averages = {
            "affinity": self.mix(trainer, models, m_k),
            "plain": m_k.average(in_order, trainer.first_weights),
        }
        if self.rule == "own":
            averages["own"] = m_k.average([models[trainer.peer]], trainer.first_weights)
        return averages

    def _by_gain(
        self, trainer: Trainer, models: Mapping[str, PackedModel], m_k: Mask, held_back: Samples
    ) -> Tensor:
        names = sorted(models)
        own = models[trainer.peer].flat()
        own_loss = trainer.loss(own, held_back)
        gains = {}
        for name in names:
            weights = models[name].over(own)
            gains[name] = gain(own, weights, own_loss, trainer.loss(weights, held_back))
        largest = max(gains.values()) or 1.0
        gains[trainer.peer] = largest
        shares = [gains[name] / largest for name in names]
        return m_k.average([models[name] for name in names], trainer.first_weights, shares)
