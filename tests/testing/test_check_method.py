"""`check_method` accepts methods that keep the contract, and names the rule that a defective one
breaks."""

import random
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from messages import refused
from torch import Tensor

from dispfl import (
    DisPFL,
    FedAvg,
    GossipMethod,
    Layout,
    Local,
    Mask,
    Neighbourhood,
    PackedModel,
    PeerState,
    Trainer,
    WeightMask,
    gossip_average,
    initial_state,
)
from dispfl.methods.base import Method
from dispfl.testing import ContractError, check_method

Heard = Mapping[str, PackedModel]


class WithoutName(GossipMethod):
    """A good method: the plain mean, then training."""

    def mix(self, models: Heard, mask: Tensor) -> Tensor:
        weights, masks = zip(*(models[name].unpack() for name in sorted(models)), strict=True)
        return gossip_average(weights, masks, mask)

    def step(self, trainer: Trainer, state: PeerState, received: Heard) -> PeerState:
        mask = state.model.mask.unpack()
        mixed = self.mix({**received, trainer.peer: state.model}, mask)
        model = PackedModel.pack(trainer.learn(mixed, mask), mask)
        return PeerState(model, model.mask, trainer.buffers)


class ModifiesItsState(WithoutName):
    def step(self, trainer: Trainer, state: PeerState, received: Heard) -> PeerState:
        state.model.values.mul_(0.5)
        return super().step(trainer, state, received)


class ModifiesWhatItReceived(WithoutName):
    def step(self, trainer: Trainer, state: PeerState, received: Heard) -> PeerState:
        for model in received.values():
            model.values.add_(1)
        return super().step(trainer, state, received)


class ModifiesItsMemory(WithoutName):
    def step(self, trainer: Trainer, state: PeerState, received: Heard) -> PeerState:
        after = super().step(trainer, state, received)
        steps = state.memory.get("steps", torch.zeros(1))
        steps += 1
        return PeerState(after.model, after.next_mask, after.buffers, {"steps": steps})


class DrawsFromTorch(WithoutName):
    def mix(self, models: Heard, mask: Tensor) -> Tensor:
        return super().mix(models, mask) + 1e-3 * torch.randn(mask.shape)


class DrawsFromNumPy(WithoutName):
    def mix(self, models: Heard, mask: Tensor) -> Tensor:
        return super().mix(models, mask) * float(np.random.uniform(0.9, 1.0))


class DrawsFromPython(WithoutName):
    def choose(
        self, state: PeerState, neighbourhood: Neighbourhood, *, rng: torch.Generator
    ) -> Sequence[str]:
        return [random.choice(neighbourhood.neighbours)] if neighbourhood.neighbours else []


class StartsAtRandom(WithoutName):
    def start(
        self, weights: Tensor, layout: Layout, density: float, *, seed: int, peer: str
    ) -> PeerState:
        return initial_state(torch.rand(layout.size), torch.ones(layout.size, dtype=torch.bool))


class DrawsAnUnnamedSeed(WithoutName):
    def mix(self, models: Heard, mask: Tensor) -> Tensor:
        rng = torch.Generator()
        rng.seed()
        return super().mix(models, mask) + 1e-3 * torch.randn(mask.shape, generator=rng)


class RemembersCalls(WithoutName):
    calls: ClassVar[list[str]] = []

    def mix(self, models: Heard, mask: Tensor) -> Tensor:
        self.calls.append("mix")
        return super().mix(models, mask) * (1 - 1e-3 * len(self.calls))


class KeepsMore(DisPFL):
    def evolve(self, trainer: Trainer, w_k: Tensor, m_k: Mask) -> Mask:
        more = m_k.unpack()
        more[~more] = torch.arange(int((~more).sum())) < 2
        return WeightMask.pack(more)


class AnnouncesLess(WithoutName):
    def kept_counts(self, layout: Layout, density: float) -> tuple[int, ...]:
        return tuple(size // 2 for size in layout.sizes)


class PrunesWhatItAnnouncesAsDense(WithoutName):
    def step(self, trainer: Trainer, state: PeerState, received: Heard) -> PeerState:
        after = super().step(trainer, state, received)
        weights, mask = after.model.unpack()
        mask[:5] = False
        return initial_state(weights, mask)


class InArrivalOrder(WithoutName):
    def mix(self, models: Heard, mask: Tensor) -> Tensor:
        mixed = torch.zeros(mask.shape)
        for model in models.values():
            mixed = 0.5 * mixed + model.unpack()[0]
        return mixed


class DividesByNeighbours(WithoutName):
    def step(self, trainer: Trainer, state: PeerState, received: Heard) -> PeerState:
        _ = 1 / len(received)
        return super().step(trainer, state, received)


class TakesTheLastUpload(FedAvg):
    def aggregate(self, server: PeerState, uploads: Heard, samples: Mapping[str, int]) -> PeerState:
        return initial_state(*list(uploads.values())[-1].unpack())


class HearsEveryone(WithoutName):
    def choose(
        self, state: PeerState, neighbourhood: Neighbourhood, *, rng: torch.Generator
    ) -> Sequence[str]:
        strangers = set(neighbourhood.roster) - set(neighbourhood.reachable)
        is_only_the_peer = len(strangers) == 1
        if is_only_the_peer or not neighbourhood.neighbours:
            return neighbourhood.neighbours
        return [*neighbourhood.neighbours, *sorted(strangers)]


class PullsButUsesEverything(DisPFL):
    def mix(self, trainer: Trainer, models: Heard, m_k: Mask) -> Tensor:
        total = sum(float(model.values.sum()) for _, model in sorted(models.items()))
        return super().mix(trainer, models, m_k) * (1 + 1e-3 * total)


class HasNegativeZeros(WithoutName):
    def step(self, trainer: Trainer, state: PeerState, received: Heard) -> PeerState:
        after = super().step(trainer, state, received)
        values = after.model.values.clone()
        values[0] = -0.0
        return PeerState(PackedModel(values, after.model.mask), after.next_mask, after.buffers)


class LosesItsMask(WithoutName):
    def step(self, trainer: Trainer, state: PeerState, received: Heard) -> PeerState:
        after = super().step(trainer, state, received)
        fewer = torch.ones(after.model.mask.size, dtype=torch.bool)
        fewer[0] = False
        return PeerState(
            PackedModel(after.model.values, WeightMask.pack(fewer)), after.next_mask, after.buffers
        )


class BecomesInfinite(WithoutName):
    def mix(self, models: Heard, mask: Tensor) -> Tensor:
        return super().mix(models, mask) * float("inf")


class HasTooFewDensities(WithoutName):
    def densities(self, peers: int) -> list[float]:
        return [1.0]


class ForgetsItsBuffers(WithoutName):
    def step(self, trainer: Trainer, state: PeerState, received: Heard) -> PeerState:
        after = super().step(trainer, state, received)
        return PeerState(after.model, after.next_mask, state.buffers)


class RemembersOutsideOfTheState(WithoutName):
    seen: ClassVar[dict[Any, Tensor]] = {}

    def step(self, trainer: Trainer, state: PeerState, received: Heard) -> PeerState:
        known = self.seen.pop(state.model.values.data_ptr(), None)  # gone after a checkpoint
        after = super().step(trainer, state, received)
        model = (
            after.model
            if known is None
            else PackedModel(after.model.values * 0.5, after.model.mask)
        )
        self.seen[model.values.data_ptr()] = model.values
        return PeerState(model, after.next_mask, after.buffers)


class AnnealsOverAllRounds(WithoutName):
    def step(self, trainer: Trainer, state: PeerState, received: Heard) -> PeerState:
        after = super().step(trainer, state, received)
        model = PackedModel(
            after.model.values * (1 - trainer.t / (2 * trainer.T)), after.model.mask
        )
        return PeerState(model, model.mask, after.buffers)


@pytest.mark.parametrize(
    "method", [WithoutName(), Local(), DisPFL(density=0.3)], ids=lambda method: method.name
)
def test_a_good_method_passes(method: Method) -> None:
    check_method(method)


@pytest.mark.parametrize(
    ("kind", "rule"),
    [
        (ModifiesItsState, "inputs"),
        (ModifiesWhatItReceived, "inputs"),
        (ModifiesItsMemory, "inputs"),
        (DrawsFromTorch, "named_randomness"),
        (DrawsFromNumPy, "named_randomness"),
        (DrawsFromPython, "named_randomness"),
        (StartsAtRandom, "named_randomness"),
        (DrawsAnUnnamedSeed, "reproducible"),
        (RemembersCalls, "reproducible"),
        (KeepsMore, "budget"),
        (AnnouncesLess, "budget"),
        (LosesItsMask, "budget"),
        (PrunesWhatItAnnouncesAsDense, "budget"),
        (InArrivalOrder, "message_order"),
        (TakesTheLastUpload, "message_order"),
        (DividesByNeighbours, "alone"),
        (BecomesInfinite, "alone"),
        (HearsEveryone, "topologies"),
        (PullsButUsesEverything, "wire"),
        (HasNegativeZeros, "zeros"),
        (HasTooFewDensities, "settings"),
        (ForgetsItsBuffers, "evaluation"),
        (RemembersOutsideOfTheState, "checkpoint"),
        (AnnealsOverAllRounds, "extension"),
    ],
)
def test_a_defect_is_found_by_name(kind: type[Method], rule: str) -> None:
    with pytest.raises(ContractError) as caught:
        check_method(kind())
    assert caught.value.rule == rule, str(caught.value)
    assert str(caught.value).startswith(f"{rule}: ")
    assert kind.__name__ in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_exception_of_the_method_is_the_cause() -> None:
    with refused(ContractError) as caught:
        check_method(DividesByNeighbours())
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_the_callers_generator_is_left_as_it_was() -> None:
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    check_method(WithoutName())
    assert torch.get_rng_state().equal(before)
    assert torch.get_num_threads() == threads
