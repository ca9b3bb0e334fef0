"""Affinities: which peers a peer resembles, and so how much it takes of each received model.

A peer learns from what it receives anyway whose data resemble its own. The last layer of a network
shows which classes, or which values, its peer trains on. Let h_j be the change of peer j's last
layer since the first weights, which all peers share. As models are averaged, all h_j have a growing
part in common. What tells peers apart is the rest: with h_mean, the running mean of the last layers
that peer k met in earlier rounds, its own among them, the similarity of peers k and j is

    c_j = cos(h_k - h_mean, h_j - h_mean)              on the weights that both hold

The most similar peers that k has met, `TWINS` of them, have c_best on average. A received model
then counts

    a_j = 1 - s_t (c_best - c_j)                       at least 0, at most 1
    s_t = s / 2 (1 - cos(pi t / T))                    the strength, which grows as masks settle

and our own counts 1. So first everybody learns from everybody, and in the end a twin counts in full
and a stranger little. Where nobody resembles anybody more than others do, as with independent data,
c_best is about 0, and all count nearly the same. A peer may also choose some of those that it
receives from, where the topology allows it: at first none, in the end a share of them, those with
the largest running similarity.

Whether similar peers help more than all of them depends on the data: peers that differ in degree
learn features from strangers, too. So each peer decides in every round for the average by affinity
or the plain one, by their losses on training data that it holds back.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from operator import and_
from statistics import fmean
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from dispfl.core.layout import Layout
from dispfl.core.packed import Mask, PackedModel
from dispfl.core.sparsity import prune_rate
from dispfl.core.train import Trainer
from dispfl.errors import ConfigError
from dispfl.methods.base import GossipMethod, Neighbourhood, PeerState, share_held_back

SIMILARITY = "similarity/"
"""Before a peer's name, the key under which others remember how similar it is."""
MEAN_HEAD = "mean_head"
"""The key of the running mean of the last layers."""
TWINS = 3
"""The most similar peers, in comparison with which others count less."""
RECENT = 0.3
"""The share of the last round in the running mean of the last layers."""
RECENT_SIMILARITY = 0.5
"""The share of the last measurement in a running similarity."""
MAX_REMEMBERED = 64
"""Peers whose similarity is remembered: the most similar ones."""


class Affinity(GossipMethod):
    """A method whose peers may hear, and count, similar peers more than others."""

    affinity: Literal["none", "head"] = "none"
    """How much received models count: all the same (the paper), or by similarity of the last layer.

    See `docs/affinity.md`.
    """
    affinity_strength: float = Field(default=2.5, ge=0)
    """With an affinity: how much less a model counts for each unit of similarity that it lacks.

    It grows from 0 to this over the rounds. With 0 all count the same.
    """
    affinity_chosen: float = Field(default=0.6, ge=0, lt=1)
    """With an affinity: share of the neighbours that are chosen by similarity, in the end.

    At first none are. A random neighbour takes the place of a peer that does not choose us too.
    """
    affinity_held_back: float = Field(default=0.1, ge=0, lt=1)
    """With an affinity: share of the training data that is held back.

    By it a peer decides in every round whether similar models count more, or all the same. With 0
    it does not decide.
    """

    def private_parameters(self, layout: Layout) -> list[bool]:
        private = super().private_parameters(layout)
        is_head = layout.matching("head", "method.private")
        if self.affinity == "head" and any(map(and_, private, is_head)):
            raise ConfigError(
                "method.affinity is head, but method.private keeps parameters of the last layer at"
                " each peer, so that nobody could compare them; omit one of the two.",
                key="method.affinity",
            )
        return private

    @property
    def chooses(self) -> bool:
        is_overridden = type(self).choose is not Affinity.choose
        return self.affinity != "none" or is_overridden

    @property
    def needs_rounds(self) -> str:
        if self.affinity != "none":
            return f"with method.affinity={self.affinity} peers compare the models of a round"
        return super().needs_rounds

    def held_back(self, samples: int) -> int:
        if self.affinity == "none":
            return 0
        return share_held_back(self.affinity_held_back, samples)

    def scored_samples(self, samples: int, models: int) -> int:
        return 2 * self.held_back(samples)  # both averages

    def choices(self, neighbours: int, t: int, T: int) -> int:
        """A share of the neighbours are those that are most similar in the end; at first none."""
        if self.affinity == "none":
            return 0
        most = int(self.affinity_chosen * neighbours)
        return most - round(prune_rate(min(t, T), T, most))

    def choose(
        self, state: PeerState, neighbourhood: Neighbourhood, *, rng: torch.Generator
    ) -> Sequence[str]:
        """Return the neighbours, and the most similar peers so far besides.

        Peers that were never met come last, in random order.
        """
        similarities = remembered_similarities(state)
        others = [name for name in neighbourhood.reachable if name not in neighbourhood.neighbours]
        order = torch.randperm(len(others), generator=rng)
        others = [others[k] for k in order.tolist()]
        others.sort(key=lambda name: -similarities.get(name, -1.0))
        return sorted([*neighbourhood.neighbours, *others[: neighbourhood.choices]])

    def find_affinities(
        self, trainer: Trainer, state: PeerState, received: Mapping[str, PackedModel], T: int
    ) -> dict[str, Tensor]:
        """Report how much each received model counts; return what is remembered of the senders.

        T is the round in which masks have settled.
        """
        if self.affinity == "none":
            return {}
        where = trainer.run.layout.head
        first = trainer.first_weights()[where]
        requested = torch.from_numpy(state.next_mask.flags()[where])
        own_head = Head.of(state.model, where, first, requested)
        heads = {}
        for name, model in sorted(received.items()):
            heads[name] = Head.of(model, where, first, requested)

        mean = state.memory.get(MEAN_HEAD)
        known = remembered_similarities(state)
        similarities = {}
        for name, head in heads.items():
            similarity = self.similarity(own_head, head, mean)
            if similarity is not None:
                similarities[name] = similarity
                known[name] = running_mean(known.get(name), similarity, RECENT_SIMILARITY)
        affinities = self.weights(trainer.t, T, similarities, known)
        trainer.report.similarities = similarities
        trainer.report.affinities = affinities
        if affinities:
            trainer.report.affinity = fmean(affinities.values())

        memory = {MEAN_HEAD: mean_head(mean, [own_head, *heads.values()])}
        for name in most_similar(known)[:MAX_REMEMBERED]:
            memory[SIMILARITY + name] = torch.tensor(known[name])
        return memory

    @abstractmethod
    def mix(self, trainer: Trainer, models: Mapping[str, PackedModel], m_k: Mask) -> Tensor:
        """Return the average of our own and the received models, by `report.affinities`."""

    def better_mix(self, trainer: Trainer, models: Mapping[str, PackedModel], m_k: Mask) -> Tensor:
        """Return the average by affinity, or the plain one if that is better on held-back data.

        The rest of the step trains on the other data.
        """
        average = self.mix(trainer, models, m_k)
        if self.affinity == "none":
            return average
        held_back_count = self.held_back(len(trainer.train))
        if held_back_count == 0:
            return average
        held_back = trainer.hold_back(held_back_count)
        affinities = trainer.report.affinities or {}
        if all(affinity == 1 for affinity in affinities.values()):
            return average

        trainer.report.affinities = dict.fromkeys(affinities, 1.0)
        plain_average = self.mix(trainer, models, m_k)
        if trainer.loss(plain_average, held_back) < trainer.loss(average, held_back):
            average = plain_average
        else:
            trainer.report.affinities = affinities
        trainer.report.affinity = fmean(trainer.report.affinities.values())
        return average

    def similarity(self, own_head: "Head", head: "Head", mean: Tensor | None) -> float | None:
        """Return how similar two last layers are, at most 1; None if they cannot be compared."""
        return own_head.similarity(head, mean)

    def weights(
        self, t: int, T: int, similarities: Mapping[str, float], known: Mapping[str, float]
    ) -> dict[str, float]:
        """Return how much each sender's model counts in round t, from 0 to 1.

        `similarities` are those of this round, `known` the running ones of all peers met so far.
        """
        s = self.affinity_strength
        strength = s - prune_rate(min(t, T), T, s)
        return affinity_weights(similarities, known, strength)


@dataclass(frozen=True)
class Head:
    """The last layer of a model, as its change from the first weights."""

    change: Tensor
    is_held: Tensor

    @classmethod
    def of(cls, model: PackedModel, where: slice, first: Tensor, requested: Tensor) -> "Head":
        """Return the last layer, at the end of the flat weights, of what a peer requests.

        The rest of the layer, which a simulation has at hand, does not arrive at a real peer.
        """
        is_held = torch.from_numpy(model.mask.flags()[where])
        weights = torch.zeros(len(first))
        held_count = int(is_held.sum())
        weights[is_held] = model.values[len(model.values) - held_count :]
        is_compared = is_held & requested
        return cls(torch.where(is_compared, weights - first, 0.0), is_compared)

    def similarity(self, other: "Head", mean: Tensor | None) -> float | None:
        """Return the cosine of two heads' deviations from a mean, on the weights that both hold.

        None if nothing deviates yet, since all peers start alike, or if weights are too large.
        """
        both = self.is_held & other.is_held
        own_deviation = self.change[both]
        deviation = other.change[both]
        if mean is not None:
            own_deviation = own_deviation - mean[both]
            deviation = deviation - mean[both]
        norms = float(own_deviation.norm() * deviation.norm())
        if not norms or not isfinite(norms):
            return None
        return float(own_deviation @ deviation) / norms


def mean_head(mean: Tensor | None, heads: Sequence[Head]) -> Tensor:
    """Return the running mean of last layers after those of a round; each weight over its holders.

    What nobody holds keeps its mean.
    """
    total = torch.zeros_like(heads[0].change)
    holders = torch.zeros_like(total)
    for head in heads:
        total += head.change
        holders += head.is_held
    of_round = total / holders.clamp(min=1)
    if mean is None:
        return of_round
    return torch.where(holders > 0, (1 - RECENT) * mean + RECENT * of_round, mean)


def affinity_weights(
    similarities: Mapping[str, float], known: Mapping[str, float], strength: float
) -> dict[str, float]:
    """Return how much each sender's model counts: less the farther it is from the most similar."""
    if not known:
        return {}
    best = fmean(known[name] for name in most_similar(known)[:TWINS])
    weights = {}
    for name, similarity in similarities.items():
        weights[name] = min(1.0, max(0.0, 1.0 - strength * (best - similarity)))
    return weights


def most_similar(known: Mapping[str, float]) -> list[str]:
    """Return the peers, the most similar ones first."""
    return sorted(known, key=lambda name: (-known[name], name))


def running_mean(mean: float | None, value: float, recent: float) -> float:
    """Return a running mean after another value."""
    if mean is None:
        return value
    return (1 - recent) * mean + recent * value


def remembered_similarities(state: PeerState) -> dict[str, float]:
    """Return the running similarities of the peers that a peer has met, by name."""
    similarities = {}
    for key, similarity in state.memory.items():
        if key.startswith(SIMILARITY):
            similarities[key.removeprefix(SIMILARITY)] = float(similarity)
    return similarities
