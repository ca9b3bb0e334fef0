"""FedFOMO: each peer moves towards models that do better than its own on held-back data."""

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from dispfl.core.packed import PackedModel
from dispfl.core.train import Trainer
from dispfl.methods.base import GossipMethod, Neighbourhood, PeerState, share_held_back

PREFERENCE = "preference/"
"""Before a peer's name, the key under which others remember how much its models helped."""


class FedFOMO(GossipMethod):
    """The paper's baseline "FOMO" (Zhang et al.): learn first, then mix.

    With theta the peer's model before the round, and theta_n its own update or a received model:

        w_n   = max(0, (L(theta) - L(theta_n)) / |theta_n - theta|), scaled to sum to 1
        theta <- theta + sum_n w_n (theta_n - theta)

    where L is the loss on held-back data. If no candidate helps, the peer keeps its own update.
    """

    can_be_private: ClassVar[bool] = False
    name: Literal["fedfomo"] = "fedfomo"
    validation: float = Field(default=0.1, gt=0, lt=1)
    """Share of the training data that is held back.

    Validation data (`partition.validation`) are not used, so that sweeps may choose by them.
    """
    models: int = Field(default=10, ge=1)
    """Models that a peer receives in a round, at most; never more than it has neighbours."""
    explore: float = Field(default=0.5, ge=0, le=1)
    """Share of them picked at random; the others are those that helped most so far, where they
    choose this peer too."""

    @property
    def needs_rounds(self) -> str:
        return ""  # without rounds a peer weighs what arrives, and does not choose

    def held_back(self, samples: int) -> int:
        return share_held_back(self.validation, samples)

    def scored_samples(self, samples: int, models: int) -> int:
        candidates = models + 2  # with the peer's own model before and after training
        return candidates * self.held_back(samples)

    def choices(self, neighbours: int, t: int, T: int) -> int:
        count = min(self.models, neighbours)
        return min(count - round(self.explore * count), neighbours - 1)

    def choose(
        self, state: PeerState, neighbourhood: Neighbourhood, *, rng: torch.Generator
    ) -> Sequence[str]:
        """Half by learned preference, out of all that can be reached; half random neighbours."""
        count = min(self.models, len(neighbourhood.neighbours) + neighbourhood.choices)
        scores = preferences(state)
        helpful = []
        for name in neighbourhood.reachable:
            if name in scores and scores[name] > 0:
                helpful.append(name)
        helpful.sort(key=lambda name: (-float(scores[name]), name))
        preferred = helpful[: count - round(self.explore * count)]

        unexplored = [name for name in neighbourhood.neighbours if name not in preferred]
        order = torch.randperm(len(unexplored), generator=rng)
        explored = [unexplored[k] for k in order[: count - len(preferred)].tolist()]
        return sorted(preferred + explored)

    def step(
        self, trainer: Trainer, state: PeerState, received: Mapping[str, PackedModel]
    ) -> PeerState:
        """Learn, weigh the candidates on held-back data, move."""
        theta, mask = state.model.unpack()
        count = self.held_back(len(trainer.train))
        held_back = trainer.hold_back(count) if count else trainer.train
        loss = trainer.loss(theta, held_back)
        update = trainer.learn(theta, mask)
        candidates = {trainer.peer: update}
        for sender, received_model in received.items():
            candidates[sender] = received_model.over(update)  # private weights are our own

        gains = {}
        for name, theta_n in sorted(candidates.items()):
            gains[name] = gain(theta, theta_n, loss, trainer.loss(theta_n, held_back))
        next_theta = update
        if any(gains.values()):
            next_theta = moved(theta, candidates, gains)

        model = PackedModel.pack(next_theta, mask)
        memory = self._remember(state, gains, trainer.peer)
        return PeerState(model, model.mask, trainer.buffers, memory)

    def _remember(
        self, state: PeerState, gains: Mapping[str, float], own: str
    ) -> dict[str, Tensor]:
        """Add each received model's weight in this round's mix to what it earned before."""
        scores = preferences(state)
        total = sum(gains.values())
        for name, value in gains.items():
            if name != own and value:
                scores[name] = scores.get(name, torch.zeros(())) + value / total
        return {PREFERENCE + name: score for name, score in scores.items()}


def preferences(state: PeerState) -> dict[str, Tensor]:
    """Return the weights that the models of others have earned so far, by name."""
    scores = {}
    for key, score in state.memory.items():
        if key.startswith(PREFERENCE):
            scores[key.removeprefix(PREFERENCE)] = score
    return scores


def gain(theta: Tensor, candidate: Tensor, loss: float, candidate_loss: float) -> float:
    """Return how much a candidate lowers the loss for each unit of distance.

    0 if it does not, or if a loss is not finite.
    """
    distance = float(torch.linalg.vector_norm(candidate - theta))
    lowered = loss - candidate_loss
    if not distance or not isfinite(lowered):
        return 0.0
    return max(0.0, lowered / distance)


def moved(theta: Tensor, candidates: Mapping[str, Tensor], gains: Mapping[str, float]) -> Tensor:
    """Return theta + sum_n w_n (theta_n - theta), summed in roster order.

    The weights w_n are the gains, scaled to sum to 1.
    """
    total = sum(gains.values())
    result = theta.clone()
    for name in sorted(gains):
        if gains[name]:
            result.add_(candidates[name] - theta, alpha=gains[name] / total)
    return result
