"""What every method owes its callers. A new method joins by its line in the registry."""

from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path

import pytest
import torch

from dispfl.core.live import LiveModel
from dispfl.core.masks import kept_per_layer
from dispfl.core.packed import PackedModel
from dispfl.engines.inprocess import InProcess
from dispfl.methods.base import GossipMethod, PeerState
from dispfl.methods.registry import METHODS
from dispfl.round import Round, Setting, Step, Work, gossip_round, peer_step, start
from dispfl.runs.checkpoint import Checkpoints
from dispfl.topology import Full, Ring

MakeSetting = Callable[..., Setting]
Play = Callable[..., list[Round]]


@pytest.fixture(params=METHODS)
def method(request: pytest.FixtureRequest) -> GossipMethod:
    """Each method of the registry, as it comes."""
    return METHODS[request.param](name=request.param)


def fingerprint(state: PeerState) -> tuple[bytes, ...]:
    """Every bit of a state."""
    buffers = [buffer.numpy().tobytes() for buffer in state.buffers.values()]
    masks = [mask.bits.numpy().tobytes() for mask in (state.model.mask, state.next_mask)]
    return state.model.values.numpy().tobytes(), *masks, *buffers


def fingerprints(steps: Mapping[str, Step]) -> dict[str, tuple[bytes, ...]]:
    return {peer: fingerprint(step.state) for peer, step in steps.items()}


def budgets(setting: Setting, states: Mapping[str, PeerState]) -> dict[str, list[int]]:
    """How many weights each peer keeps in each layer."""
    layout = LiveModel(setting.module()).layout
    return {peer: kept_per_layer(state.model.mask.unpack(), layout) for peer, state in states.items()}


def healthy(round_: Round) -> bool:
    """Whether every peer learned something and has finite weights and a score."""
    return all(
        step.report.failure is None
        and step.report.loss is not None
        and step.report.score is not None
        and bool(step.state.model.values.isfinite().all())
        for step in round_.steps.values()
    )


def test_the_budget_of_every_layer_is_kept_through_all_rounds(
    method: GossipMethod, make_setting: MakeSetting, play: Play
) -> None:
    setting = make_setting(peers=3, method=method, rounds=4)
    allowed = budgets(setting, start(setting))
    for round_ in play(setting):
        assert budgets(setting, {peer: step.state for peer, step in round_.steps.items()}) == allowed
        for step in round_.steps.values():
            assert step.state.next_mask.kept == step.state.model.mask.kept == step.state.model.values.numel()


def test_weights_outside_the_mask_are_exactly_zero(method: GossipMethod, make_setting: MakeSetting, play: Play) -> None:
    for step in play(make_setting(peers=3, method=method))[-1].steps.values():
        weights, mask = step.state.model.unpack()
        assert weights[~mask].view(torch.int32).count_nonzero() == 0
        assert not weights[weights == 0].signbit().any()  # never -0.0


def test_a_step_leaves_the_state_and_the_heard_models_as_they_were(
    method: GossipMethod, make_setting: MakeSetting
) -> None:
    setting = make_setting(peers=3, method=method)
    states = start(setting)
    heard = {peer: method.publish(states[peer]) for peer in ("001", "002")}
    before = {peer: fingerprint(state) for peer, state in states.items()}
    said = {peer: (model.values.clone(), model.mask.unpack()) for peer, model in heard.items()}
    step = peer_step(setting, LiveModel(setting.module()), Work("000", 0, states["000"], heard))
    assert fingerprint(step.state) != before["000"]
    assert {peer: fingerprint(state) for peer, state in states.items()} == before
    for peer, (values, mask) in said.items():
        assert heard[peer].values.equal(values)
        assert heard[peer].mask.unpack().equal(mask)


def test_the_same_seed_gives_the_same_bits_and_another_seed_others(
    method: GossipMethod, make_setting: MakeSetting, play: Play
) -> None:
    first, again, other = (
        fingerprints(play(make_setting(peers=3, method=method, seed=seed))[-1].steps) for seed in (0, 0, 1)
    )
    assert first == again
    assert first != other


def test_the_order_in_which_messages_arrive_does_not_matter(
    method: GossipMethod, make_setting: MakeSetting, play: Play
) -> None:
    setting = make_setting(peers=4, method=method)
    # After a round: before it, all hold the same values, whose sum is the same in any order.
    states = {peer: step.state for peer, step in play(setting)[0].steps.items()}
    others = [(peer, method.publish(states[peer])) for peer in ("001", "002", "003")]
    live = LiveModel(setting.module())
    results = [
        fingerprint(peer_step(setting, live, Work("000", 1, states["000"], dict(order))).state)
        for order in (others, others[::-1])
    ]
    assert results[0] == results[1]


@pytest.mark.parametrize("peers", [1, 2])
def test_one_peer_alone_and_two_peers_work(
    method: GossipMethod, make_setting: MakeSetting, play: Play, peers: int
) -> None:
    assert all(healthy(round_) for round_ in play(make_setting(peers=peers, method=method, topology=Ring())))


def test_a_peer_whose_neighbours_are_all_offline_goes_on(method: GossipMethod, make_setting: MakeSetting) -> None:
    setting = make_setting(peers=3, method=method)
    nobody: dict[str, PackedModel] = {}
    step = peer_step(setting, LiveModel(setting.module()), Work("000", 0, start(setting)["000"], nobody))
    assert step.report.failure is None
    assert step.state.model.values.isfinite().all()


def test_rounds_with_offline_peers_work(method: GossipMethod, make_setting: MakeSetting, play: Play) -> None:
    setting = make_setting(peers=4, method=method, topology=Full(drop=0.5), rounds=3)
    online = [len(setting.topology.online(0, t, setting.roster)) for t in range(3)]
    assert min(online) < 4  # the seed does drop someone
    assert all(healthy(round_) for round_ in play(setting))


def test_peers_of_unequal_densities_work_and_keep_their_own(
    method: GossipMethod, make_setting: MakeSetting, play: Play
) -> None:
    if "density" not in type(method).model_fields:
        assert method.densities(4) == [1.0] * 4
        return
    unequal = type(method).model_validate({"name": method.name, "density": (0.2, 0.8)})
    setting = make_setting(peers=4, method=unequal)
    rounds = play(setting)
    kept = [step.state.model.mask.kept for step in rounds[-1].steps.values()]
    assert kept[0] == kept[1] < 67 * 0.3
    assert kept[2] == kept[3] > 67 * 0.7
    assert all(healthy(round_) for round_ in rounds)


def test_states_survive_a_checkpoint_bit_for_bit_and_the_next_round_is_the_same(
    method: GossipMethod, make_setting: MakeSetting, play: Play, tmp_path: Path
) -> None:
    whole = play(make_setting(peers=3, method=method, rounds=2))
    checkpoints = Checkpoints(tmp_path)
    for peer, step in whole[0].steps.items():
        checkpoints.add(0, peer, step)
    checkpoints.complete(0)

    loaded = Checkpoints(tmp_path).load(1)
    assert fingerprints(loaded) == fingerprints(whole[0].steps)
    assert {peer: step.report for peer, step in loaded.items()} == {p: s.report for p, s in whole[0].steps.items()}

    setting = make_setting(peers=3, method=method, rounds=2)
    states = {peer: step.state for peer, step in loaded.items()}
    with closing(InProcess(setting, 1)) as engine:
        resumed = gossip_round(setting, states, 1, engine)
    assert fingerprints(resumed.steps) == fingerprints(whole[1].steps)
