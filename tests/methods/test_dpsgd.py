"""D-PSGD: the plain mean, the consensus it is judged on, and one fixed mask for all."""

from collections.abc import Callable

import pytest
import torch
from rounds import Played

from dispfl.core.live import LiveModel
from dispfl.core.masks import kept_per_layer
from dispfl.core.packed import PackedModel
from dispfl.core.train import Trainer
from dispfl.methods.dispfl import DisPFL
from dispfl.methods.dpsgd import DPSGD, mean_model
from dispfl.methods.fedavg import weighted_mean
from dispfl.round import start
from dispfl.topology import Ring
from dispfl.work import Setting

MakeSetting = Callable[..., Setting]
Play = Callable[..., list[Played]]


def dense(*values: float) -> PackedModel:
    return PackedModel.pack(torch.tensor(values), torch.ones(len(values), dtype=torch.bool))


def test_the_mean_of_three_models_by_hand() -> None:
    models = {"000": dense(1.0, 0.0), "001": dense(2.0, -3.0), "002": dense(6.0, 0.0)}
    assert mean_model(models, torch.ones(2, dtype=torch.bool)).tolist() == [3.0, -1.0]


def test_with_full_masks_dispfls_average_is_the_same_bit_for_bit() -> None:
    rng, full = torch.Generator().manual_seed(0), torch.ones(1000, dtype=torch.bool)
    models = {f"{k:03d}": PackedModel.pack(torch.randn(1000, generator=rng), full) for k in range(7)}
    assert DisPFL().mix(models, full).equal(mean_model(models, full))


def test_a_run_is_that_of_dispfl_at_density_1_bit_for_bit(make_setting: MakeSetting, play: Play) -> None:
    plain, ours = (
        play(make_setting(peers=4, method=method, topology=Ring(), rounds=3)) for method in (DPSGD(), DisPFL(density=1))
    )
    for one, other in zip(plain, ours, strict=True):
        for peer in one.steps:
            assert one.steps[peer].state.model.values.equal(other.steps[peer].state.model.values)
            assert one.steps[peer].report.loss == other.steps[peer].report.loss


def test_a_peer_averages_first_and_trains_then(
    make_setting: MakeSetting, trainer_for: Callable[..., Trainer], play: Play
) -> None:
    """In a ring of four, peer 000 hears 001 and 003."""
    setting = make_setting(peers=4, method=DPSGD(), topology=Ring())
    first, second = play(setting)
    w_0, w_1, w_3 = (first.steps[peer].state.model.values for peer in ("000", "001", "003"))
    learned = trainer_for(setting, "000", 1).learn((w_0 + w_1 + w_3) / 3, torch.ones(67, dtype=torch.bool))
    assert second.steps["000"].state.model.values.equal(learned)


def test_everyone_is_judged_on_the_average_of_all_peers_even_of_those_it_never_hears(
    make_setting: MakeSetting, trainer_for: Callable[..., Trainer], play: Play
) -> None:
    setting = make_setting(peers=4, method=DPSGD(), topology=Ring())
    last = play(setting)[-1]
    consensus, _ = weighted_mean({p: s.state.model for p, s in last.steps.items()}, dict.fromkeys(last.steps, 1))
    assert last.judged is not None
    for peer, step in last.steps.items():
        torch.testing.assert_close(last.judged[peer].model.values, consensus, rtol=1e-6, atol=1e-7)
        assert step.report.score == trainer_for(setting, peer).score(last.judged[peer].model.values)
        assert not step.state.model.values.allclose(consensus)  # and goes on from its own


@pytest.mark.parametrize("density", [0.2, 0.5])
def test_with_a_density_all_share_one_uniform_mask_that_never_changes(
    make_setting: MakeSetting, play: Play, density: float
) -> None:
    setting = make_setting(peers=4, method=DPSGD(density=density), rounds=3)
    states = start(setting)
    mask = states["000"].model.mask.unpack()
    layout = LiveModel(setting.module()).layout
    assert kept_per_layer(mask, layout) == [max(1, int(density * size)) for size in (32, 8, 24, 3)]
    for seen in (states, *(round_.states for round_ in play(setting))):
        for state in seen.values():
            assert state.model.mask.unpack().equal(mask)
            assert state.next_mask is state.model.mask


def test_the_consensus_of_sparse_models_is_as_sparse(make_setting: MakeSetting, play: Play) -> None:
    last = play(make_setting(method=DPSGD(density=0.5)))[-1]
    assert last.judged is not None
    for peer, step in last.steps.items():
        assert last.judged[peer].model.mask.unpack().equal(step.state.model.mask.unpack())
        assert step.report.mask_change is None


def test_another_seed_gives_another_mask(make_setting: MakeSetting) -> None:
    one, other = (start(make_setting(method=DPSGD(density=0.5), seed=seed))["000"].model.mask for seed in (0, 1))
    assert not one.unpack().equal(other.unpack())
