"""Dis-PFL: its own parts by hand; the whole step is in test_round.py."""

from collections.abc import Callable
from copy import deepcopy
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from messages import refused
from rounds import FinishedRound
from tests.channels.test_block_average import TINY, tiny
from torch import Tensor

from dispfl.core.flat_module import FlatModule
from dispfl.core.masks import hamming, kept_count, kept_per_layer
from dispfl.core.packed import PackedModel, WeightMask
from dispfl.core.report import Report
from dispfl.core.rng import stream
from dispfl.core.sparsity import erk_densities
from dispfl.core.train import Trainer
from dispfl.errors import ConfigError
from dispfl.methods.base import PeerState
from dispfl.methods.dispfl import DisPFL
from dispfl.methods.dpsgd import DPSGD
from dispfl.round.context import RunContext
from dispfl.round.round import initial_states

MakeContext = Callable[..., RunContext]
RunAll = Callable[..., list[FinishedRound]]
CHANNELS = DisPFL(density=1, structure="channels")


def test_a_weight_is_averaged_over_its_holders_and_kept_only_under_our_next_mask() -> None:
    ours = PackedModel.pack(torch.tensor([2.0, 0.0, 4.0]), torch.tensor([True, False, True]))
    theirs = PackedModel.pack(torch.tensor([6.0, 5.0, 0.0]), torch.tensor([True, True, False]))
    # Held by both: (2 + 6) / 2. Regrown by us, held by them: 5. Given up by us: 0, whatever it was.
    m_k = WeightMask.pack(torch.tensor([True, True, False]))
    trainer: Any = SimpleNamespace(
        peer="000",
        requested=1,
        report=Report(),
        first_weights=lambda: torch.zeros(3),
        mixing_weights_of=lambda peers: None,
    )
    assert DisPFL().mix(trainer, {"000": ours, "001": theirs}, m_k).tolist() == [4.0, 5.0, 0.0]


def mixed_by(method: DisPFL, state: PeerState, received: PackedModel) -> Tensor:
    """Return the weights that a step starts to train from; the trainer has only what such a step
    needs."""
    found: list[Tensor] = []

    def learn(weights: Tensor, mask: object) -> Tensor:
        found.append(weights)
        return weights

    trainer: Any = SimpleNamespace(
        report=Report(),
        requested=1,
        peer="000",
        t=0,
        now=0,
        T=1,
        learn=learn,
        buffers={},
        observe_mixed=lambda weights: None,
        mixing_weights_of=lambda peers: None,
        stream=lambda name: stream(0),
        network=SimpleNamespace(layout=TINY),
    )
    trainer.first_weights = lambda: torch.arange(1.0, TINY.size + 1) / 100
    method.step(trainer, state, {"001": received})
    return found[0]


@pytest.mark.parametrize(("warm_up", "regrown"), [(True, 5.0), (False, 0.0)])
def test_a_regrown_weight_starts_from_its_neighbours_average_or_from_zero(
    warm_up: bool, regrown: float
) -> None:
    ours = PackedModel.pack(torch.tensor([2.0, 0.0, 4.0]), torch.tensor([True, False, True]))
    theirs = PackedModel.pack(torch.tensor([6.0, 5.0, 0.0]), torch.tensor([True, True, False]))
    state = PeerState(ours, WeightMask.pack(torch.tensor([True, True, False])))
    assert mixed_by(DisPFL(alpha_0=0, warm_up=warm_up), state, theirs).tolist() == [
        4.0,
        regrown,
        0.0,
    ]


def test_without_warm_up_a_peer_that_has_no_model_yet_still_starts_from_its_neighbours() -> None:
    nothing = PackedModel.pack(torch.zeros(3), torch.zeros(3, dtype=torch.bool))
    theirs = PackedModel.pack(torch.tensor([6.0, 5.0, 0.0]), torch.tensor([True, True, False]))
    state = PeerState(nothing, WeightMask.pack(torch.tensor([True, True, False])))
    assert mixed_by(DisPFL(alpha_0=0, warm_up=False), state, theirs).tolist() == [6.0, 5.0, 0.0]


@pytest.mark.parametrize(
    ("warm_up", "expected"),
    [  # units 0 and 2: incoming, biases, outgoing by output (unit 0, unit 2), output biases
        (True, [2, 3, 9, 8, 6, 4, 8, 2, 10, 1, 12, 13]),
        (False, [2, 3, 0.05, 0.06, 6, 0.09, 8, 0, 10, 0, 12, 13]),
    ],
)
def test_a_regrown_channel_starts_from_its_neighbours_or_from_the_first_weights_without_outputs(
    warm_up: bool, expected: list[float]
) -> None:
    """We hold unit 0 and regrow unit 2, which they hold. The first weights are 0.01, 0.02, ..."""
    ours = tiny([True, False, False], 1, 2, 5, 7, 9, 11, 12)
    theirs = tiny([True, False, True], 3, 4, 9, 8, 7, 4, 9, 2, 11, 1, 13, 14)
    state = PeerState(ours, TINY.mask(np.array([True, False, True])))
    mixed = mixed_by(DisPFL(structure="channels", alpha_0=0, warm_up=warm_up), state, theirs)
    assert mixed.tolist() == pytest.approx(expected)


@pytest.mark.parametrize(("first_masks", "groups"), [("own", 4), ("common", 2)])
@pytest.mark.parametrize("structure", ["weights", "channels"])
def test_common_first_masks_are_the_same_for_all_peers_of_a_density(
    make_context: MakeContext, structure: Any, first_masks: Any, groups: int
) -> None:
    method = DisPFL(structure=structure, density=(0.3, 0.6), first_masks=first_masks)
    states = initial_states(make_context(4, method=method))
    assert len({tuple(state.next_mask.bits.tolist()) for state in states.values()}) == groups


def test_own_first_weights_differ_between_peers_and_follow_from_the_seed(
    make_context: MakeContext,
) -> None:
    context = make_context(method=DisPFL(first_weights="own", density=1))
    weights = [state.model.values for state in initial_states(context).values()]
    assert not any(
        one.equal(other) for one, other in combinations([*weights, context.first_weights], 2)
    )
    again = initial_states(make_context(method=DisPFL(first_weights="own", density=1)), ["001"])[
        "001"
    ]
    assert again.model.values.equal(weights[1])


def test_own_first_weights_of_a_network_that_draws_none_are_refused(
    make_context: MakeContext,
) -> None:
    network = make_context().module()
    context = make_context(method=DisPFL(first_weights="own"), model=lambda: deepcopy(network))
    with refused(ConfigError, key="method.first_weights"):
        initial_states(context)


def test_every_layer_keeps_its_count_through_all_rounds(
    make_context: MakeContext, run_all: RunAll
) -> None:
    context = make_context(method=DisPFL(density=0.4), rounds=4)
    layout = FlatModule(context.module()).layout
    shapes = dict(zip(layout.names, layout.shapes, strict=True))
    evaluates_global = erk_densities(shapes, 0.4)
    allowed = [
        kept_count(size, evaluates_global[name])
        for name, size in zip(layout.names, layout.sizes, strict=True)
    ]
    for states in (initial_states(context), *(round_.states for round_ in run_all(context))):
        for state in states.values():
            assert kept_per_layer(state.model.mask.unpack(), layout) == allowed
            assert kept_per_layer(state.next_mask.unpack(), layout) == allowed


def test_uniform_layers_all_have_the_density(make_context: MakeContext) -> None:
    context = make_context(method=DisPFL(density=0.5, layers="uniform"))
    layout = FlatModule(context.module()).layout
    assert kept_per_layer(initial_states(context)["000"].model.mask.unpack(), layout) == [
        16,
        4,
        12,
        1,
    ]


def test_a_list_of_densities_makes_groups_in_roster_order() -> None:
    assert DisPFL(density=(0.2, 0.6)).densities(4) == [0.2, 0.2, 0.6, 0.6]
    assert DisPFL(density=(0.2, 0.6)).densities(3) == [0.2, 0.2, 0.6]
    with refused(ConfigError, key="method.density"):
        DisPFL(density=(0.1, 0.2, 0.3)).densities(2)


def test_the_mask_search_replaces_half_of_a_layer_in_round_0_and_its_smallest_weights(
    make_context: MakeContext, trainer_for: Callable[..., Trainer]
) -> None:
    trainer = trainer_for(make_context(rounds=10))
    weights, mask = torch.arange(1.0, 68.0), torch.ones(67, dtype=torch.bool)
    mask[:16] = False  # half of the first layer; the others are dense
    m_k = WeightMask.pack(mask)
    evolved = DisPFL(regrow="random").evolve(trainer, weights.where(mask, 0.0), m_k).unpack()
    assert int(evolved[:32].sum()) == 16
    assert evolved[24:].all()  # the larger half of what the layer kept, and the dense layers
    assert 0 < hamming(evolved, mask) <= 16


def test_with_prune_rate_0_the_mask_does_not_change(
    make_context: MakeContext, run_all: RunAll
) -> None:
    for round_ in run_all(make_context(method=DisPFL(alpha_0=0.0))):
        for step in round_.steps.values():
            assert step.next_state.next_mask.unpack().equal(step.next_state.model.mask.unpack())


def test_regrowth_by_gradient_costs_one_dense_batch_and_at_random_or_never_nothing(
    make_context: MakeContext, run_all: RunAll
) -> None:
    by_gradient, by_chance = (
        DisPFL(regrow="gradient", layers="uniform"),
        DisPFL(regrow="random", layers="uniform"),
    )
    never = DisPFL(alpha_0=0, layers="uniform")
    for method, search in (
        (by_gradient, [(8, [32, 8, 24, 3], None)]),
        (by_chance, []),
        (never, []),
    ):
        [round_] = run_all(make_context(method=method, rounds=1))
        assert round_.steps["000"].report.passes == [(20, [16, 4, 12, 1], None), *search]


def test_channels_at_density_1_are_the_paper_at_density_1_bit_for_bit(
    make_context: MakeContext, run_all: RunAll
) -> None:
    """And that is D-PSGD (test_dpsgd.py). The mask never changes."""
    runs = [
        run_all(make_context(method=method, rounds=3))
        for method in (DisPFL(density=1), CHANNELS, DPSGD())
    ]
    for ours, channels, dpsgd in zip(*runs, strict=True):
        for peer, state in channels.states.items():
            assert state.model.unpack()[0].equal(ours.states[peer].model.unpack()[0])
            assert state.model.unpack()[0].equal(dpsgd.states[peer].model.unpack()[0])
            assert state.next_mask.kept == state.next_mask.size
            assert channels.steps[peer].report.train_loss == ours.steps[peer].report.train_loss


def test_channels_without_pruning_keep_their_first_masks(
    make_context: MakeContext, run_all: RunAll
) -> None:
    context = make_context(method=DisPFL(structure="channels", alpha_0=0), rounds=3)
    start = {peer: state.next_mask.bits for peer, state in initial_states(context).items()}
    assert len({tuple(mask.tolist()) for mask in start.values()}) > 1
    for finished_round in run_all(context):
        assert all(
            state.next_mask.bits.equal(start[peer]) for peer, state in finished_round.states.items()
        )
    moving = run_all(make_context(method=DisPFL(structure="channels"), rounds=3))[-1]
    assert any(not state.next_mask.bits.equal(start[peer]) for peer, state in moving.states.items())
