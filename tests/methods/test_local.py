"""Local: everyone alone."""

from collections.abc import Callable
from dataclasses import replace

import torch
from rounds import Played

from dispfl.core.live import LiveModel
from dispfl.core.packed import PackedModel
from dispfl.core.train import Train, Trainer
from dispfl.methods.local import Local
from dispfl.round import peer_step, start
from dispfl.work import Setting, Work

MakeSetting = Callable[..., Setting]


def test_a_round_is_the_settings_epochs_of_training_and_nothing_else(
    make_setting: MakeSetting, trainer_for: Callable[..., Trainer], play: Callable[..., list[Played]]
) -> None:
    setting = make_setting(method=Local(), train=Train(epochs=5, batch=8), rounds=1)
    [round_] = play(setting)
    for peer in setting.roster:
        weights, mask = start(setting)[peer].model.unpack()
        assert round_.steps[peer].state.model.values.equal(trainer_for(setting, peer).learn(weights, mask))
        assert round_.steps[peer].report.passes == [(5 * 20, [32, 8, 24, 3])]
    assert not round_.ledger.wire


def test_a_model_that_somebody_sends_all_the_same_is_not_used(make_setting: MakeSetting) -> None:
    setting = make_setting(method=Local())
    live, state = LiveModel(setting.module()), start(setting)["000"]
    stranger = PackedModel.pack(torch.full((67,), 9.0), torch.ones(67, dtype=torch.bool))
    alone = peer_step(setting, live, Work("000", 0, state, {}))
    told = peer_step(setting, live, Work("000", 0, state, {"001": stranger}))
    assert told.state.model.values.equal(alone.state.model.values)


def test_other_peers_data_make_no_difference(make_setting: MakeSetting, play: Callable[..., list[Played]]) -> None:
    setting = make_setting(method=Local())
    swapped = replace(setting, peers={**setting.peers, "001": setting.peers["002"]})
    one, other = (play(given)[-1].steps for given in (setting, swapped))
    assert one["000"].state.model.values.equal(other["000"].state.model.values)
    assert not one["001"].state.model.values.equal(other["001"].state.model.values)
