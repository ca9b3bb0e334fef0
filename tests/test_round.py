"""One round: who publishes what when, the limits of the algorithm, offline peers and peers that fail."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import nan

import torch
from rounds import Backwards, Played, play_from
from torch import Tensor, nn

from dispfl.core.evolve import prune_and_regrow, prune_rate
from dispfl.core.gossip import gossip_average
from dispfl.core.live import LiveModel
from dispfl.core.packed import PackedModel
from dispfl.core.train import Report, Task, Trainer
from dispfl.data.batches import ResidentSamples
from dispfl.methods.base import Around, PeerState
from dispfl.methods.dispfl import DisPFL
from dispfl.methods.dpsgd import DPSGD
from dispfl.methods.local import Local
from dispfl.round import peer_step, start
from dispfl.topology import Full, Ring
from dispfl.work import PeerData, Setting, Step, Work

MakeSetting = Callable[..., Setting]
Play = Callable[..., list[Played]]


def weights_of(steps: Mapping[str, Step]) -> list[Tensor]:
    return [steps[peer].state.model.unpack()[0] for peer in sorted(steps)]


def test_all_peers_start_from_the_same_weights_each_under_a_mask_of_its_own(make_setting: MakeSetting) -> None:
    setting = make_setting(peers=3, method=DisPFL(density=0.5))
    dense = LiveModel(setting.module()).read()
    masks = []
    for state in start(setting).values():
        weights, mask = state.model.unpack()
        assert weights.equal(dense.where(mask, 0.0))
        assert state.next_mask.unpack().equal(mask)
        masks.append(mask)
    assert not masks[0].equal(masks[1])
    assert not masks[1].equal(masks[2])


def test_a_second_round_done_by_hand_gives_the_same_weights_and_masks(make_setting: MakeSetting, play: Play) -> None:
    """Algorithm 1, lines 6-15, on unpacked vectors, in a ring of four."""
    setting = make_setting(peers=4, topology=Ring(), rounds=5)
    first, second = play(setting)[:2]
    before = {peer: step.state for peer, step in first.steps.items()}
    live = LiveModel(setting.module())
    for k, peer in enumerate(setting.roster):
        data = setting.peers[peer]
        trainer = Trainer(live, data.train, data.test, setting.train, setting.task, seed=0, peer=peer, t=1, T=5)
        around = sorted({setting.roster[k - 1], peer, setting.roster[(k + 1) % 4]})
        weights, masks = zip(*(before[j].model.unpack() for j in around), strict=True)
        m_k = before[peer].next_mask.unpack()
        w_half = gossip_average(weights, masks, m_k)
        w_k = trainer.learn(w_half, m_k)
        m_next = prune_and_regrow(w_k, m_k, trainer.gradient(w_k), prune_rate(1, 5, 0.5), live.layout)
        found = second.steps[peer].state
        assert found.model.unpack()[0].equal(w_k)
        assert found.model.unpack()[1].equal(m_k)
        assert found.next_mask.unpack().equal(m_next)


def test_a_regrown_weight_takes_its_neighbours_value_and_zero_where_nobody_holds_it() -> None:
    ours = PackedModel.pack(torch.tensor([4.0, 0.0, 0.0]), torch.tensor([True, False, False]))
    theirs = PackedModel.pack(torch.tensor([2.0, 6.0, 0.0]), torch.tensor([True, True, False]))
    next_mask = torch.tensor([True, True, True])
    assert DisPFL().mix({"000": ours, "001": theirs}, next_mask).tolist() == [3.0, 6.0, 0.0]


def test_the_order_in_which_peers_take_their_step_does_not_matter(make_setting: MakeSetting, play: Play) -> None:
    setting = make_setting(peers=3, rounds=1)
    engine = Backwards(setting)
    backwards = play_from(setting, start(setting), 0, engine)
    assert engine.worked == ["002", "001", "000"]
    assert list(backwards.steps) == ["000", "001", "002"]
    for one, other in zip(weights_of(backwards.steps), weights_of(play(setting)[0].steps), strict=True):
        assert one.equal(other)


def test_steps_that_are_finished_already_are_not_done_again(make_setting: MakeSetting) -> None:
    setting = make_setting(peers=3)
    states = start(setting)
    done = Step(states["001"], Report(loss=42.0))
    engine, told = Backwards(setting), []
    result = play_from(setting, states, 0, engine, {"001": done}, lambda peer, step: told.append(peer))
    assert engine.worked == ["002", "000"]
    assert sorted(told) == ["000", "002"]
    assert result.steps["001"].state is done.state
    assert result.steps["001"].report is done.report


def test_in_a_ring_of_four_every_peer_is_charged_for_two_messages_each_way(make_setting: MakeSetting) -> None:
    setting = make_setting(peers=4, topology=Ring())
    states = start(setting)
    links = play_from(setting, states, 0, Backwards(setting)).ledger.paper
    assert sorted(links) == [
        (sender, receiver)
        for sender in setting.roster
        for receiver in setting.roster
        if (int(sender) - int(receiver)) % 4 in (1, 3)
    ]
    assert all(count == 4 * states[sender].model.mask.kept for (sender, _), count in links.items())


def test_local_sends_nothing(make_setting: MakeSetting) -> None:
    setting = make_setting(method=Local())
    assert not play_from(setting, start(setting), 0, Backwards(setting)).ledger.wire


def test_one_peer_at_density_1_is_local_training_bit_for_bit(make_setting: MakeSetting, play: Play) -> None:
    dispfl = play(make_setting(peers=1, method=DisPFL(density=1.0), rounds=3))
    local = play(make_setting(peers=1, method=Local(), rounds=3))
    for one, other in zip(dispfl, local, strict=True):
        assert weights_of(one.steps)[0].equal(weights_of(other.steps)[0])
        assert one.steps["000"].report.loss == other.steps["000"].report.loss


def test_at_density_1_the_mask_never_changes(make_setting: MakeSetting, play: Play) -> None:
    for round_ in play(make_setting(method=DisPFL(density=1.0), rounds=3)):
        for step in round_.steps.values():
            assert step.state.next_mask.unpack().all()
            assert step.report.mask_change == 0.0


def test_the_mask_changes_less_and_less(make_setting: MakeSetting, play: Play) -> None:
    rounds = play(make_setting(method=DisPFL(density=0.3, regrow="random"), rounds=10))
    changes = [sum(step.report.mask_change or 0 for step in round_.steps.values()) / 3 for round_ in rounds]
    assert changes[0] > changes[5] > changes[9] > 0  # alpha_t falls; counts are rounded up, so never to nothing


def test_an_offline_peer_that_skips_keeps_its_state_and_is_still_scored(make_setting: MakeSetting) -> None:
    setting = make_setting(topology=Full(drop=1.0, offline="skip"))
    states = start(setting)
    result = play_from(setting, states, 0, Backwards(setting))
    for peer, step in result.steps.items():
        assert step.state is states[peer]
        assert step.report.loss is None
        assert step.report.score is not None
    assert not result.ledger.wire


def test_an_offline_peer_that_trains_does_what_it_would_do_alone(make_setting: MakeSetting) -> None:
    setting = make_setting(topology=Full(drop=1.0, offline="train"))
    states = start(setting)
    result = play_from(setting, states, 0, Backwards(setting))
    alone = peer_step(setting, LiveModel(setting.module()), Work("001", 0, states["001"], {}))
    assert weights_of(result.steps)[1].equal(alone.state.model.unpack()[0])
    assert not result.ledger.wire


def test_only_some_offline_means_only_they_are_silent(make_setting: MakeSetting) -> None:
    setting = make_setting(peers=6, topology=Full(drop=0.5, offline="skip"))
    online = setting.topology.online(0, 0, setting.roster)
    assert 1 < len(online) < 6  # the seed does drop some and leaves some
    result = play_from(setting, start(setting), 0, Backwards(setting))
    assert set(result.ledger.wire) == {(j, k) for j in online for k in online if j != k}
    assert {peer for peer, step in result.steps.items() if step.report.loss is not None} == online


def batch_norm_net() -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3))


def with_broken_data(setting: Setting, peer: str) -> Setting:
    """The setting in which one peer's training inputs are nan."""
    data = setting.peers[peer]
    broken = PeerData(ResidentSamples(torch.full((20, 4), nan), torch.zeros(20, dtype=torch.int64)), data.test)
    return replace(setting, peers={**setting.peers, peer: broken})


def test_a_peer_whose_loss_is_nan_keeps_its_last_good_state_and_says_so(make_setting: MakeSetting, play: Play) -> None:
    setting = with_broken_data(make_setting(peers=3, rounds=2), "001")
    first = start(setting)["001"]
    rounds = play(setting)
    for t, round_ in enumerate(rounds):
        step = round_.steps["001"]
        assert step.report.failure is not None
        assert step.report.failure.startswith(f"Peer 001, round {t}: the training loss became infinite or nan")
        assert step.state.model.values.equal(first.model.values)
        assert step.report.loss is None
        assert step.report.score is not None


def test_a_failing_peers_buffers_stay_good_too(make_setting: MakeSetting, play: Play) -> None:
    setting = make_setting(peers=2, model=batch_norm_net, rounds=1)
    steps = play(with_broken_data(setting, "001"))[0].steps
    assert steps["001"].state.buffers["0.running_mean"].tolist() == [0.0] * 4
    assert steps["000"].state.buffers["0.running_mean"].count_nonzero() == 4


def test_a_peer_that_fails_in_the_mask_search_is_scored_as_it_was_before_the_round(make_setting: MakeSetting) -> None:
    losses = iter([1.0, 1.0, 1.0, nan])  # three batches to learn from, then the search
    task = Task(
        loss=lambda outputs, labels: next(losses) * outputs.square().mean(),
        metric=lambda outputs, labels: float(outputs.sum()),
    )
    setting = make_setting(peers=1, model=batch_norm_net, task=task)
    live, state = LiveModel(setting.module()), start(setting)["000"]
    idle = peer_step(setting, live, Work("000", 0, state, {}, idle=True))
    failed = peer_step(setting, live, Work("000", 0, state, {}))
    assert failed.report.failure is not None
    assert "the gradient became infinite or nan" in failed.report.failure
    assert failed.state is state
    assert failed.report.score == idle.report.score


def test_the_others_go_on_as_if_the_failing_peer_had_stood_still(make_setting: MakeSetting, play: Play) -> None:
    rounds = play(with_broken_data(make_setting(peers=3, rounds=2), "001"))
    for round_ in rounds:
        for peer in ("000", "002"):
            assert round_.steps[peer].report.failure is None
            assert round_.steps[peer].state.model.values.isfinite().all()
    assert not weights_of(rounds[0].steps)[0].equal(weights_of(rounds[1].steps)[0])


def test_the_last_round_is_scored_even_where_eval_every_does_not_say_so(make_setting: MakeSetting, play: Play) -> None:
    rounds = play(make_setting(eval_every=2, rounds=5))
    assert [round_.steps["000"].report.score is not None for round_ in rounds] == [False, True, False, True, True]
    assert [round_.steps["000"].report.mixed is not None for round_ in rounds] == [False, True, False, True, True]


def test_states_of_the_round_before_are_what_is_heard(make_setting: MakeSetting) -> None:
    """A peer that steps last hears what the first had published, not what it made of it."""
    setting = make_setting(peers=2, method=Copycat(), rounds=1)
    states = {
        peer: replace(state, model=PackedModel.pack(torch.full((67,), float(k)), torch.ones(67, dtype=torch.bool)))
        for k, (peer, state) in enumerate(start(setting).items())
    }
    one, other = weights_of(play_from(setting, states, 0, Backwards(setting)).steps)
    assert (float(one[0]), float(other[0])) == (1.0, 0.0)


def test_a_peer_hears_whom_its_method_chooses_and_only_they_are_charged(make_setting: MakeSetting) -> None:
    setting = make_setting(peers=4, method=Choosy(), rounds=1)
    result = play_from(setting, start(setting), 0, Backwards(setting))
    assert set(result.ledger.paper) == {("003", "000"), ("003", "001"), ("003", "002"), ("002", "003")}


def test_a_peer_that_is_offline_or_has_only_offline_neighbours_is_not_asked_whom_it_prefers(
    make_setting: MakeSetting,
) -> None:
    setting = make_setting(peers=3, method=Choosy(), topology=Full(drop=0.7), rounds=50)
    alone = next(t for t in range(50) if len(setting.topology.online(0, t, setting.roster)) == 1)
    assert not play_from(setting, start(setting), alone, Backwards(setting)).ledger.paper


def test_a_model_that_all_share_is_judged_once_at_the_end_and_not_after_each_step(make_setting: MakeSetting) -> None:
    setting = make_setting(method=DPSGD(), eval_every=2, rounds=3)
    engine, told = Backwards(setting), []
    states = start(setting)
    for t, worked in enumerate([3, 6, 6]):  # three steps, then three judgements where the round is scored
        engine.worked = []
        result = play_from(
            setting, states, t, engine, on_outcome=lambda peer, outcome: told.append(outcome.report.score)
        )
        assert len(engine.worked) == worked
        assert (result.judged is not None) == (worked == 6)
        assert all((step.report.score is not None) == (worked == 6) for step in result.steps.values())
        states = result.states
    assert told == [None] * 9


class Choosy(Local):
    """Wants to hear the last of its neighbours only."""

    hears = True

    def choose(self, state: PeerState, around: Around, *, rng: torch.Generator) -> Sequence[str]:
        return around.neighbours[-1:]


class Copycat(Local):
    """Takes over what the one neighbour said."""

    hears = True

    def step(self, peer: Trainer, state: PeerState, heard: Mapping[str, PackedModel]) -> PeerState:
        [model] = heard.values()
        return PeerState(model, model.mask, state.buffers)
