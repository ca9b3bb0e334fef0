"""D-PSGD: the plain mean, the consensus that is evaluated, and one fixed mask for all."""

from collections.abc import Callable

import pytest
import torch
from rounds import FinishedRound

from dispfl.core.flat_module import FlatModule
from dispfl.core.masks import kept_per_layer
from dispfl.core.packed import PackedModel, WeightMask
from dispfl.core.train import Trainer
from dispfl.methods.dispfl import DisPFL
from dispfl.methods.dpsgd import DPSGD, mean_model
from dispfl.methods.fedavg import weighted_mean
from dispfl.round.context import RunContext
from dispfl.round.round import initial_states
from dispfl.topology import Ring

MakeContext = Callable[..., RunContext]
RunAll = Callable[..., list[FinishedRound]]


def dense(*values: float) -> PackedModel:
    return PackedModel.pack(torch.tensor(values), torch.ones(len(values), dtype=torch.bool))


def test_the_mean_of_three_models_by_hand() -> None:
    models = {"000": dense(1.0, 0.0), "001": dense(2.0, -3.0), "002": dense(6.0, 0.0)}
    assert mean_model(models, torch.ones(2, dtype=torch.bool)).tolist() == [3.0, -1.0]


def test_with_full_masks_dispfls_average_is_the_same_bit_for_bit() -> None:
    rng, full = torch.Generator().manual_seed(0), torch.ones(1000, dtype=torch.bool)
    models = {
        f"{k:03d}": PackedModel.pack(torch.randn(1000, generator=rng), full) for k in range(7)
    }
    average = WeightMask.pack(full).average(list(models.values()), lambda: torch.zeros(1000))
    assert average.equal(mean_model(models, full))


def test_a_run_is_that_of_dispfl_at_density_1_bit_for_bit(
    make_context: MakeContext, run_all: RunAll
) -> None:
    plain, ours = (
        run_all(make_context(peers=4, method=method, topology=Ring(), rounds=3))
        for method in (DPSGD(), DisPFL(density=1))
    )
    for one, other in zip(plain, ours, strict=True):
        for peer in one.steps:
            assert one.steps[peer].next_state.model.values.equal(
                other.steps[peer].next_state.model.values
            )
            assert one.steps[peer].report.train_loss == other.steps[peer].report.train_loss


def test_a_peer_averages_before_it_trains(
    make_context: MakeContext, trainer_for: Callable[..., Trainer], run_all: RunAll
) -> None:
    """In a ring of four, peer 000 receives from 001 and 003."""
    context = make_context(peers=4, method=DPSGD(), topology=Ring())
    first, second = run_all(context)
    w_0, w_1, w_3 = (first.steps[peer].next_state.model.values for peer in ("000", "001", "003"))
    learned = trainer_for(context, "000", 1).learn(
        (w_0 + w_1 + w_3) / 3, torch.ones(67, dtype=torch.bool)
    )
    assert second.steps["000"].next_state.model.values.equal(learned)


def test_every_peer_is_evaluated_with_the_average_of_all_peers(
    make_context: MakeContext, trainer_for: Callable[..., Trainer], run_all: RunAll
) -> None:
    context = make_context(peers=4, method=DPSGD(), topology=Ring())
    last = run_all(context)[-1]
    consensus = weighted_mean(
        {p: s.state.model for p, s in last.steps.items()}, dict.fromkeys(last.steps, 1)
    )
    assert last.evaluated is not None
    for peer, step in last.steps.items():
        torch.testing.assert_close(
            last.evaluated[peer].model.values, consensus, rtol=1e-6, atol=1e-7
        )
        assert step.report.score == trainer_for(context, peer).score(
            last.evaluated[peer].model.values
        )
        assert not step.next_state.model.values.allclose(consensus)  # and continues from its own


@pytest.mark.parametrize("density", [0.2, 0.5])
def test_with_a_density_all_share_one_uniform_mask_that_never_changes(
    make_context: MakeContext, run_all: RunAll, density: float
) -> None:
    context = make_context(peers=4, method=DPSGD(density=density), rounds=3)
    states = initial_states(context)
    mask = states["000"].model.mask.unpack()
    layout = FlatModule(context.module()).layout
    assert kept_per_layer(mask, layout) == [max(1, int(density * size)) for size in (32, 8, 24, 3)]
    for seen in (states, *(round_.states for round_ in run_all(context))):
        for state in seen.values():
            assert state.model.mask.unpack().equal(mask)
            assert state.next_mask is state.model.mask


def test_the_consensus_of_sparse_models_is_as_sparse(
    make_context: MakeContext, run_all: RunAll
) -> None:
    last = run_all(make_context(method=DPSGD(density=0.5)))[-1]
    assert last.evaluated is not None
    for peer, step in last.steps.items():
        assert last.evaluated[peer].model.mask.unpack().equal(step.next_state.model.mask.unpack())
        assert step.report.mask_change is None


def test_another_seed_gives_another_mask(make_context: MakeContext) -> None:
    one, other = (
        initial_states(make_context(method=DPSGD(density=0.5), seed=seed))["000"].model.mask
        for seed in (0, 1)
    )
    assert not one.unpack().equal(other.unpack())
