"""What every method owes its callers. A new method joins by its line in the registry."""

from collections.abc import Callable, Mapping
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from rounds import OneByOne, Played, play_from
from torch import Tensor, nn

from dispfl.core.live import LiveModel
from dispfl.core.masks import kept_per_layer
from dispfl.core.packed import PackedModel
from dispfl.core.train import Report, Train, accuracy
from dispfl.errors import ConfigError
from dispfl.federation import Federation
from dispfl.methods.base import SERVER, GossipMethod, Method, PeerState, ServerMethod
from dispfl.methods.registry import METHODS
from dispfl.round import peer_step, start
from dispfl.runs.checkpoint import Checkpoints
from dispfl.topology import TOPOLOGIES, Full, RandomRegular, Ring
from dispfl.work import Outcome, Setting, Step, Work

MakeSetting = Callable[..., Setting]
Play = Callable[..., list[Played]]
Bits = Callable[[PeerState], dict[str, bytes]]

LIVELY: dict[str, dict[str, Any]] = {
    "fedavg": {"cohort": 2},
    "fedavg-ft": {"cohort": 2, "tune_every": 2},
    "ditto": {"cohort": 2},
    "fedfomo": {"models": 2},
    "subfedavg": {"cohort": 2, "prune": 0.3, "min_accuracy": 0.0},
    "dpsgd": {"density": 0.6},
    "dpsgd-ft": {"tune_every": 2},
}
"""Settings under which two rounds of three tiny peers see what a method can do: somebody waits, something is pruned."""


def lively(name: str, **changes: Any) -> Method:
    return METHODS[name](**{"name": name, **LIVELY.get(name, {}), **changes})


def takes_a_list_of_densities(name: str) -> bool:
    try:
        lively(name, density=(0.2, 0.8))
    except ConfigError:
        return False
    return True


GOSSIP = [name for name, kind in METHODS.items() if issubclass(kind, GossipMethod)]
SERVERS = [name for name, kind in METHODS.items() if issubclass(kind, ServerMethod)]
UNEQUAL = [name for name in METHODS if takes_a_list_of_densities(name)]


@pytest.fixture(params=METHODS)
def method(request: pytest.FixtureRequest) -> Method:
    """Each method of the registry."""
    return lively(request.param)


@pytest.fixture
def tiny(make_setting: MakeSetting) -> MakeSetting:
    """A setting of two local epochs, because some methods compare one epoch with the next."""
    return lambda **changes: make_setting(**{"train": Train(epochs=2, batch=8), **changes})


def everything(round_: Played, bits: Bits) -> dict[str, tuple[dict[str, bytes], Report | None]]:
    """Every bit of everyone's next state, the server's too, with the peers' reports."""
    reports = {peer: step.report for peer, step in round_.steps.items()}
    return {name: (bits(state), reports.get(name)) for name, state in round_.states.items()}


def received(method: Method, states: Mapping[str, PeerState], peer: str, *senders: str) -> dict[str, PackedModel]:
    """What a peer hears from these peers, or from the server where there is one."""
    if isinstance(method, ServerMethod):
        return {SERVER: method.broadcast(states[SERVER], states[peer])}
    assert isinstance(method, GossipMethod)
    return {sender: method.publish(states[sender]) for sender in senders}


def check_healthy(setting: Setting, rounds: list[Played]) -> None:
    """Nobody failed, all weights are finite, whoever had work learned, and scores are there when they are due."""
    for t, round_ in enumerate(rounds):
        assert list(round_.steps) == setting.roster
        assert all(state.model.values.isfinite().all() for state in round_.states.values())
        for step in round_.steps.values():
            assert step.report.failure is None
            assert (step.report.loss is not None) == bool(step.report.passes)
            assert (step.report.score is not None) == setting.scores(t)
            assert step.state.sent is None  # the server has it
    assert setting.scores(setting.rounds - 1)


def at_work(round_: Played) -> set[str]:
    return {peer for peer, step in round_.steps.items() if step.report.loss is not None}


def test_nobody_keeps_more_of_a_layer_than_before_and_masks_fit_their_values(
    method: Method, tiny: MakeSetting, play: Play
) -> None:
    setting = tiny(method=method, rounds=4)
    layout = LiveModel(setting.module()).layout

    def budgets(states: Mapping[str, PeerState]) -> dict[str, list[int]]:
        return {peer: kept_per_layer(state.model.mask.unpack(), layout) for peer, state in states.items()}

    allowed = budgets(start(setting))
    for round_ in play(setting):
        kept = budgets(round_.states)
        assert all(now <= then for peer in allowed for now, then in zip(kept[peer], allowed[peer], strict=True))
        for state in round_.states.values():
            assert state.next_mask.kept == state.model.mask.kept == state.model.values.numel()
        allowed = kept


def test_weights_outside_the_mask_are_exactly_zero(method: Method, tiny: MakeSetting, play: Play) -> None:
    for state in play(tiny(method=method))[-1].states.values():
        weights, mask = state.model.unpack()
        assert weights[~mask].view(torch.int32).count_nonzero() == 0
        assert not weights[weights == 0].signbit().any()  # never -0.0


def test_a_step_leaves_the_state_and_the_heard_models_as_they_were(
    method: Method, tiny: MakeSetting, play: Play, bits: Bits
) -> None:
    setting = tiny(method=method)
    states = play(setting)[0].states
    heard = received(method, states, "000", "001", "002")
    before = {peer: bits(state) for peer, state in states.items()}
    said = {sender: (model.values.clone(), model.mask.unpack()) for sender, model in heard.items()}
    step = peer_step(setting, LiveModel(setting.module()), Work("000", 1, states["000"], heard))
    assert bits(step.state) != before["000"]
    assert {peer: bits(state) for peer, state in states.items()} == before
    for sender, (values, mask) in said.items():
        assert heard[sender].values.equal(values)
        assert heard[sender].mask.unpack().equal(mask)


def test_a_round_leaves_all_states_as_they_were(method: Method, tiny: MakeSetting, bits: Bits) -> None:
    setting = tiny(method=method, rounds=1)
    states = start(setting)
    before = {name: bits(state) for name, state in states.items()}
    with closing(OneByOne(setting, 1)) as engine:
        after = play_from(setting, states, 0, engine).states
    assert {name: bits(state) for name, state in states.items()} == before
    assert set(after) == set(before)
    assert {name: bits(state) for name, state in after.items()} != before


def test_the_same_seed_gives_the_same_bits_and_another_seed_others(
    method: Method, tiny: MakeSetting, play: Play, bits: Bits
) -> None:
    first, again, other = (everything(play(tiny(method=method, seed=seed))[-1], bits) for seed in (0, 0, 1))
    assert first == again
    assert first != other


def test_the_number_of_threads_does_not_matter(method: Method, tiny: MakeSetting, play: Play, bits: Bits) -> None:
    one, three = (
        [everything(round_, bits) for round_ in play(tiny(peers=4, method=method), threads)] for threads in (1, 3)
    )
    assert one == three


@pytest.mark.parametrize("name", GOSSIP)
def test_the_order_in_which_messages_arrive_does_not_matter(
    name: str, tiny: MakeSetting, play: Play, bits: Bits
) -> None:
    setting = tiny(peers=4, method=lively(name))
    # After a round: before it, all hold the same values, whose sum is the same in any order.
    states = play(setting)[0].states
    others = list(received(setting.method, states, "000", "001", "002", "003").items())
    live = LiveModel(setting.module())
    one, other = (
        bits(peer_step(setting, live, Work("000", 1, states["000"], dict(order))).state)
        for order in (others, others[::-1])
    )
    assert one == other


@pytest.mark.parametrize("name", SERVERS)
def test_the_order_in_which_the_server_gets_its_answers_does_not_matter(name: str, bits: Bits) -> None:
    method, rng = lively(name), torch.Generator().manual_seed(0)
    assert isinstance(method, ServerMethod)
    full = torch.ones(50, dtype=torch.bool)
    answers = [(peer, PackedModel.pack(torch.randn(50, generator=rng), full)) for peer in ("000", "001", "002")]
    samples = {"000": 3, "001": 5, "002": 7}
    server = PeerState(answers[0][1], answers[0][1].mask)
    one, other = (bits(method.aggregate(server, dict(order), samples)) for order in (answers, answers[::-1]))
    assert one == other


@pytest.mark.parametrize("peers", [1, 2])
def test_one_peer_alone_and_two_peers_work(method: Method, tiny: MakeSetting, play: Play, peers: int) -> None:
    setting = tiny(peers=peers, method=method, topology=Ring())
    rounds = play(setting)
    check_healthy(setting, rounds)
    assert all(at_work(round_) == set(setting.roster) for round_ in rounds)


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("name", GOSSIP)
def test_every_topology_works_and_only_its_links_carry_anything(
    name: str, topology: str, tiny: MakeSetting, play: Play
) -> None:
    links = RandomRegular(degree=2) if topology == "random" else TOPOLOGIES[topology](name=topology)
    setting = tiny(peers=5, method=lively(name), topology=links)
    rounds = play(setting)
    check_healthy(setting, rounds)
    for t, round_ in enumerate(rounds):
        heard = links.heard(0, t, setting.roster)
        allowed = {(sender, peer) for peer in setting.roster for sender in links.reachable(heard, peer)}
        assert set(round_.ledger.paper) <= allowed
        assert set(round_.ledger.wire) <= allowed | {(peer, sender) for sender, peer in allowed}  # requests go back
        for peer in setting.roster:
            assert sum(receiver == peer for _, receiver in round_.ledger.paper) <= len(heard[peer])


@pytest.mark.parametrize("name", GOSSIP)
def test_a_peer_whose_neighbours_are_all_offline_goes_on(name: str, tiny: MakeSetting) -> None:
    setting = tiny(method=lively(name))
    step = peer_step(setting, LiveModel(setting.module()), Work("000", 0, start(setting)["000"], {}))
    assert step.report.failure is None
    assert step.report.loss is not None
    assert step.state.model.values.isfinite().all()


@pytest.mark.parametrize("drop", [0.5, 0.9])
@pytest.mark.parametrize("offline", ["train", "skip"])
def test_rounds_with_offline_peers_work_and_these_are_neither_heard_nor_charged(
    method: Method, tiny: MakeSetting, play: Play, drop: float, offline: Literal["train", "skip"]
) -> None:
    setting = tiny(peers=4, method=method, topology=Full(drop=drop, offline=offline), rounds=3)
    online = [setting.topology.online(0, t, setting.roster) for t in range(3)]
    assert min(len(names) for names in online) < 4  # the seed does drop someone
    rounds = play(setting)
    check_healthy(setting, rounds)
    for names, round_ in zip(online, rounds, strict=True):
        assert {name for link in round_.ledger.wire for name in link} <= names | {SERVER}


@pytest.mark.parametrize("online", [0, 1])
def test_a_round_with_one_peer_online_or_none_works(method: Method, tiny: MakeSetting, bits: Bits, online: int) -> None:
    setting = tiny(peers=3, method=method, topology=Full(drop=0.7, offline="skip"), rounds=50)
    present = [setting.topology.online(0, t, setting.roster) for t in range(50)]
    t = next(t for t in range(50) if len(present[t]) == online)
    states = start(setting)
    with closing(OneByOne(setting, 1)) as engine:
        round_ = play_from(setting, states, t, engine)
    assert all(step.report.failure is None for step in round_.steps.values())
    if isinstance(method, GossipMethod):
        assert not round_.ledger.wire
        assert at_work(round_) == (present[t] if method.hears else set(setting.roster))
    else:
        assert set(round_.ledger.wire) == {link for peer in present[t] for link in ((SERVER, peer), (peer, SERVER))}
        assert at_work(round_) == present[t]
        assert (bits(round_.states[SERVER]) == bits(states[SERVER])) == (online == 0)


def test_what_an_offline_peer_holds_changes_nothing_for_the_others(
    method: Method, tiny: MakeSetting, bits: Bits
) -> None:
    setting = tiny(peers=6, method=method, topology=Full(drop=0.5), rounds=20)  # round 0 is not scored by all methods
    online = setting.topology.online(0, 0, setting.roster)
    absent = min(set(setting.roster) - online)
    states = start(setting)
    weights, mask = states[absent].model.unpack()
    changed = {**states, absent: replace(states[absent], model=PackedModel.pack(weights + 1, mask))}
    with closing(OneByOne(setting, 1)) as engine:
        as_it_was, with_another = (play_from(setting, given, 0, engine).states for given in (states, changed))
    assert len(online) > 1
    for name in online | (set(states) - set(setting.roster)):
        assert bits(as_it_was[name]) == bits(with_another[name])


@pytest.mark.parametrize("name", UNEQUAL)
def test_peers_of_unequal_densities_work_and_keep_their_own(name: str, tiny: MakeSetting, play: Play) -> None:
    setting = tiny(peers=4, method=lively(name, density=(0.2, 0.8)))
    rounds = play(setting)
    kept = [step.state.model.mask.kept for step in rounds[-1].steps.values()]
    assert kept[0] == kept[1] < 67 * 0.3
    assert kept[2] == kept[3] > 67 * 0.7
    check_healthy(setting, rounds)


def saved(folder: Path, t: int, steps: Mapping[str, Step]) -> dict[str, Step]:
    """The steps of round t as they come back from the disk."""
    checkpoints = Checkpoints(folder)
    for peer, step in steps.items():
        checkpoints.add(t, peer, step)
    checkpoints.complete(t)
    return Checkpoints(folder).load(t + 1)


def test_states_survive_a_checkpoint_bit_for_bit_and_the_next_round_is_the_same(
    method: Method, tiny: MakeSetting, play: Play, bits: Bits, tmp_path: Path
) -> None:
    setting = tiny(method=method)
    first, second = play(setting)
    server = {} if first.server is None else {SERVER: Step(first.server, Report())}
    loaded = saved(tmp_path, 0, {**first.steps, **server})
    assert {name: bits(step.state) for name, step in loaded.items()} == {
        name: bits(state) for name, state in first.states.items()
    }
    assert {peer: loaded[peer].report for peer in setting.roster} == {p: s.report for p, s in first.steps.items()}
    with closing(OneByOne(setting, 1)) as engine:
        resumed = play_from(setting, {name: step.state for name, step in loaded.items()}, 1, engine)
    assert everything(resumed, bits) == everything(second, bits)


def test_a_round_killed_after_any_step_and_resumed_is_the_same_round(
    method: Method, tiny: MakeSetting, play: Play, bits: Bits, tmp_path: Path
) -> None:
    setting = tiny(method=method)
    states = play(setting)[0].states
    written = Checkpoints(tmp_path / "whole")
    with closing(OneByOne(setting, 1, written)) as engine:
        whole = play_from(setting, states, 1, engine)
        engine.flush(1)
    done = written.load(2)
    assert len(done) == 3
    with closing(OneByOne(setting, 1)) as engine:
        for count in range(1, 4):
            finished = saved(tmp_path / str(count), 1, dict(list(done.items())[:count]))
            assert all(bits(step.state) == bits(done[peer].state) for peer, step in finished.items())
            again: dict[str, Outcome] = {}
            resumed = play_from(setting, states, 1, engine, finished, again.__setitem__)
            assert everything(resumed, bits) == everything(whole, bits)
            assert resumed.ledger == whole.ledger
            assert set(again) == set(done) - set(finished)


def batch_norm_net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


@pytest.mark.parametrize("buffers", [False, True], ids=["plain", "with buffers"])
def test_a_peers_model_scores_what_the_run_says(
    method: Method, net: Callable[[], nn.Module], points: Callable[[int, int], tuple[Tensor, Tensor]], buffers: bool
) -> None:
    peers = [(points(20, which), points(10, 1000 + which)) for which in range(3)]
    model = batch_norm_net if buffers else net
    federation = Federation(model, peers, method, Full(), train=Train(epochs=2, batch=8), threads=1)
    with pytest.warns(UserWarning, match="The model has buffers") if buffers else nullcontext():
        run = federation.run(3)
    for k, (_, (inputs, labels)) in enumerate(peers):
        with torch.no_grad():
            assert accuracy(run.model(k)(inputs), labels) == run.accuracy[k]
    assert len(run.accuracy) == 3
