"""Dis-PFL: its own parts by hand; the whole step is in test_round.py."""

from collections.abc import Callable

import pytest
import torch
from rounds import FinishedRound

from dispfl.core.live import LiveModel
from dispfl.core.masks import hamming, kept_count, kept_per_layer
from dispfl.core.packed import PackedModel
from dispfl.core.sparsity import erk_densities
from dispfl.core.train import Trainer
from dispfl.errors import ConfigError
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
    assert DisPFL().mix({"000": ours, "001": theirs}, torch.tensor([True, True, False])).tolist() == [4.0, 5.0, 0.0]


def test_every_layer_keeps_its_count_through_all_rounds(make_context: MakeContext, run_all: RunAll) -> None:
    context = make_context(method=DisPFL(density=0.4), rounds=4)
    layout = LiveModel(context.module()).layout
    shapes = dict(zip(layout.names, layout.shapes, strict=True))
    evaluates_global = erk_densities(shapes, 0.4)
    allowed = [kept_count(size, evaluates_global[name]) for name, size in zip(layout.names, layout.sizes, strict=True)]
    for states in (initial_states(context), *(round_.states for round_ in run_all(context))):
        for state in states.values():
            assert kept_per_layer(state.model.mask.unpack(), layout) == allowed
            assert kept_per_layer(state.next_mask.unpack(), layout) == allowed


def test_uniform_layers_all_have_the_density(make_context: MakeContext) -> None:
    context = make_context(method=DisPFL(density=0.5, layers="uniform"))
    layout = LiveModel(context.module()).layout
    assert kept_per_layer(initial_states(context)["000"].model.mask.unpack(), layout) == [16, 4, 12, 1]


def test_a_list_of_densities_makes_groups_in_roster_order() -> None:
    assert DisPFL(density=(0.2, 0.6)).densities(4) == [0.2, 0.2, 0.6, 0.6]
    assert DisPFL(density=(0.2, 0.6)).densities(3) == [0.2, 0.2, 0.6]
    with pytest.raises(ConfigError, match=r"method\.density lists 3 groups for 2 peers"):
        DisPFL(density=(0.1, 0.2, 0.3)).densities(2)


def test_the_mask_search_replaces_half_of_a_layer_in_round_0_and_its_smallest_weights(
    make_context: MakeContext, trainer_for: Callable[..., Trainer]
) -> None:
    trainer = trainer_for(make_context(rounds=10))
    weights, mask = torch.arange(1.0, 68.0), torch.ones(67, dtype=torch.bool)
    mask[:16] = False  # half of the first layer; the others are dense
    evolved = DisPFL(regrow="random").evolve(trainer, weights.where(mask, 0.0), mask)
    assert int(evolved[:32].sum()) == 16
    assert evolved[24:].all()  # the larger half of what the layer kept, and the dense layers
    assert 0 < hamming(evolved, mask) <= 16


def test_with_prune_rate_0_the_mask_does_not_change(make_context: MakeContext, run_all: RunAll) -> None:
    for round_ in run_all(make_context(method=DisPFL(alpha_0=0.0))):
        for step in round_.steps.values():
            assert step.next_state.next_mask.unpack().equal(step.next_state.model.mask.unpack())


def test_regrowth_by_gradient_costs_one_dense_batch_and_at_random_nothing(
    make_context: MakeContext, run_all: RunAll
) -> None:
    by_gradient, by_chance = DisPFL(regrow="gradient", layers="uniform"), DisPFL(regrow="random", layers="uniform")
    for method, search in ((by_gradient, [(8, [32, 8, 24, 3])]), (by_chance, [])):
        [round_] = run_all(make_context(method=method, rounds=1))
        assert round_.steps["000"].report.passes == [(20, [16, 4, 12, 1]), *search]


def test_channels_at_density_1_are_the_paper_at_density_1_bit_for_bit(
    make_context: MakeContext, run_all: RunAll
) -> None:
    """And that is D-PSGD (test_dpsgd.py). The mask never changes."""
    runs = [run_all(make_context(method=method, rounds=3)) for method in (DisPFL(density=1), CHANNELS, DPSGD())]
    for ours, channels, dpsgd in zip(*runs, strict=True):
        for peer, state in channels.states.items():
            assert state.model.unpack()[0].equal(ours.states[peer].model.unpack()[0])
            assert state.model.unpack()[0].equal(dpsgd.states[peer].model.unpack()[0])
            assert state.next_mask.kept == state.next_mask.size
            assert channels.steps[peer].report.loss == ours.steps[peer].report.loss


def test_channels_without_pruning_keep_their_first_masks(make_context: MakeContext, run_all: RunAll) -> None:
    context = make_context(method=DisPFL(structure="channels", alpha_0=0), rounds=3)
    start = {peer: state.next_mask.bits for peer, state in initial_states(context).items()}
    assert len({tuple(mask.tolist()) for mask in start.values()}) > 1
    for finished_round in run_all(context):
        assert all(state.next_mask.bits.equal(start[peer]) for peer, state in finished_round.states.items())
    moving = run_all(make_context(method=DisPFL(structure="channels"), rounds=3))[-1]
    assert any(not state.next_mask.bits.equal(start[peer]) for peer, state in moving.states.items())
