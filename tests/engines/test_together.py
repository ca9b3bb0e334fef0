"""Peers that learn as one stack: the same up to rounding, the same bits again, and each peer's troubles its own."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from math import nan
from pathlib import Path
from typing import Literal

import pytest
import torch
from rounds import Played
from torch import Tensor, nn

from dispfl import DisPFL, Federation, Local, Train
from dispfl.config import compose
from dispfl.core.packed import PackedModel
from dispfl.core.train import Samples, Task, Trainer
from dispfl.data.batches import ResidentSamples
from dispfl.engines.inprocess import InProcess
from dispfl.engines.together import Stacks
from dispfl.errors import ConfigError
from dispfl.methods.base import GossipMethod, Method, PeerState
from dispfl.methods.ditto import Ditto
from dispfl.methods.dpsgd import DPSGD
from dispfl.methods.fedavg import FedAvg
from dispfl.methods.fedfomo import FedFOMO
from dispfl.methods.finetuned import FedAvgFT
from dispfl.runs.directory import read_config
from dispfl.work import Part, PeerData, Setting

MakeSetting = Callable[..., Setting]
Play = Callable[..., list[Played]]
Points = Callable[[int, int], tuple[Tensor, Tensor]]
Bits = Callable[[PeerState], dict[str, bytes]]


class Uneven(GossipMethod):
    """A method whose peer k learns k + 1 times."""

    name: Literal["uneven"] = "uneven"
    hears = False

    def step(self, peer: Trainer, state: PeerState, heard: Mapping[str, PackedModel]) -> PeerState:
        weights, mask = state.model.unpack()
        for _ in range(int(peer.peer) + 1):
            weights = peer.learn(weights, mask)
        return replace(state, model=PackedModel.pack(weights, mask))


def assert_equal_up_to_rounding(one: Played, other: Played) -> None:
    assert one.steps.keys() == other.steps.keys()
    for peer, step in one.steps.items():
        theirs = other.steps[peer]
        torch.testing.assert_close(theirs.state.model.unpack(), step.state.model.unpack(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(theirs.report.loss, step.report.loss, rtol=1e-4, atol=1e-5)  # None is None
        assert theirs.report.passes == step.report.passes
        assert theirs.carried == step.carried


# A weight regrown otherwise would be no rounding any more, so Dis-PFL's masks evolve only once, after its learning.
@pytest.mark.parametrize(
    ("method", "rounds"),
    [
        (DisPFL(), 1),
        (Local(), 2),
        (DPSGD(), 2),
        (FedAvg(cohort=4), 2),
        (FedAvgFT(cohort=4), 2),
        (Ditto(cohort=4), 2),
        (FedFOMO(), 2),
        (Uneven(), 2),
    ],
    ids=lambda value: value.name if isinstance(value, Method) else str(value),
)
def test_five_peers_two_at_a_time_learn_what_they_learn_one_by_one(
    make_setting: MakeSetting, play: Play, method: Method, rounds: int
) -> None:
    setting = make_setting(peers=5, method=method, rounds=rounds)
    for one, other in zip(play(setting), play(replace(setting, together=2), 2), strict=True):
        assert_equal_up_to_rounding(one, other)
    if one.judged:
        assert other.judged is not None
        for peer, state in one.judged.items():
            torch.testing.assert_close(other.judged[peer].model.values, state.model.values, rtol=1e-4, atol=1e-5)


def calls_of_the_loss(setting: Setting) -> int:
    """In a round, not counting how the engine finds out what the model can."""
    calls = 0

    def loss(outputs: Tensor, labels: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return nn.functional.cross_entropy(outputs, labels)

    with closing(InProcess(replace(setting, task=Task(loss)), 1)) as engine:
        calls = 0
        engine.recall(0)
        list(engine.steps([Part(peer, 0) for peer in setting.roster]))
    return calls


def test_four_peers_with_three_batches_each_compute_their_losses_in_12_calls_or_in_6_or_in_3(
    make_setting: MakeSetting,
) -> None:
    setting = make_setting(peers=4, method=Local())
    assert [calls_of_the_loss(replace(setting, together=size)) for size in (1, 2, 4, 9)] == [12, 6, 3, 3]


def test_the_same_bits_come_again_with_any_number_of_threads(make_setting: MakeSetting, play: Play, bits: Bits) -> None:
    setting = make_setting(peers=7, together=3, rounds=3)
    first, *others = (play(setting, threads)[-1].states for threads in (1, 1, 2, 3))
    for states in others:
        assert {peer: bits(state) for peer, state in states.items()} == {p: bits(state) for p, state in first.items()}


def test_a_peer_with_nan_in_its_data_fails_alone(make_setting: MakeSetting, play: Play) -> None:
    setting = make_setting(peers=4, method=Local(), rounds=1)
    setting.peers["001"].train.inputs[5] = nan  # type: ignore[attr-defined]
    expected, found = play(setting)[0], play(replace(setting, together=4))[0]
    failures = {peer: outcome.report.failure for peer, outcome in found.outcomes.items()}
    assert failures == {peer: outcome.report.failure for peer, outcome in expected.outcomes.items()}
    assert [peer for peer, failure in failures.items() if failure] == ["001"]
    assert_equal_up_to_rounding(expected, found)


def sized(points: Points, *counts: int) -> dict[str, PeerData]:
    """Peers with so many samples each."""
    return {
        f"{k:03}": PeerData(ResidentSamples(*points(count, k)), ResidentSamples(*points(10, 1000 + k)))
        for k, count in enumerate(counts)
    }


def test_only_peers_with_as_many_samples_are_grouped_and_those_that_do_not_learn_stay_alone(
    make_setting: MakeSetting, points: Points
) -> None:
    setting = make_setting(peers=sized(points, 20, 13, 20, 13, 9, 20, 20, 20))
    parts = [Part(peer, 0, idle=peer == "002") for peer in setting.roster]
    names = [[part.peer for part in group] for group in Stacks(setting, 3).of(parts)]
    assert names == [["002"], ["000", "005", "006"], ["001", "003"], ["004"], ["007"]]


def test_peers_with_other_numbers_of_samples_learn_what_they_learn_one_by_one(
    make_setting: MakeSetting, play: Play, points: Points
) -> None:
    setting = make_setting(peers=sized(points, 20, 13, 20, 13, 9), method=Local())
    for one, other in zip(play(setting), play(replace(setting, together=4)), strict=True):
        assert_equal_up_to_rounding(one, other)


class Averaging(nn.Module):
    """A network for signals of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.linear(x.mean(2))
        return outputs


def test_peers_with_inputs_of_other_shapes_learn_what_they_learn_one_by_one_and_their_equals_are_stacked(
    make_setting: MakeSetting, play: Play, points: Points
) -> None:
    def signals(length: int, which: int) -> PeerData:
        (x, y), (x_test, y_test) = points(20, which), points(10, 1000 + which)
        long = (x.unsqueeze(2).repeat(1, 1, length), x_test.unsqueeze(2).repeat(1, 1, length))
        return PeerData(ResidentSamples(long[0], y), ResidentSamples(long[1], y_test))

    peers = {f"{k:03}": signals(length, k) for k, length in enumerate((5, 7, 5, 7))}
    setting = make_setting(peers=peers, model=Averaging, method=Local())
    for one, other in zip(play(setting), play(replace(setting, together=4)), strict=True):
        assert_equal_up_to_rounding(one, other)
    assert calls_of_the_loss(replace(setting, together=4)) == 6  # two stacks of three batches


class DecidesByValue(nn.Module):
    """A network that cannot be mapped over a stack: it looks at its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.linear(x if x.max() > 0 else -x)
        return outputs


def dropout_net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))


def batch_norm_net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


@pytest.mark.parametrize("model", [DecidesByValue, dropout_net, batch_norm_net])
def test_a_model_that_cannot_be_stacked_gives_the_bits_of_peers_one_by_one(
    make_setting: MakeSetting, play: Play, bits: Bits, model: Callable[[], nn.Module]
) -> None:
    setting = make_setting(peers=3, model=model)
    one, other = (play(replace(setting, together=size))[-1].states for size in (1, 3))
    assert {peer: bits(state) for peer, state in one.items()} == {peer: bits(state) for peer, state in other.items()}


class UsersOwnError(Exception):
    """Something of the user's own."""


class OwnSamples:
    """A user's samples: so many times over in an epoch, each time after something else is done."""

    def __init__(self, under: Samples, times: int, first: Callable[[], None] = lambda: None) -> None:
        self.under, self.times, self.first = under, times, first

    def __len__(self) -> int:
        return len(self.under)

    def batches(self, size: int, *, rng: torch.Generator | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(self.times):
            self.first()
            yield from self.under.batches(size, rng=rng)

    def take(self, rows: Tensor) -> Samples:
        return self.under.take(rows)


def with_samples(setting: Setting, own: Mapping[str, Samples]) -> Setting:
    return replace(setting, peers={p: PeerData(own.get(p, d.train), d.test) for p, d in setting.peers.items()})


@pytest.mark.parametrize("method", [Local(), Uneven()], ids=["while stacked", "or later"])
def test_an_exception_in_a_users_data_comes_out_as_itself_and_the_engine_can_go_on(
    make_setting: MakeSetting, method: Method
) -> None:
    setting, broken, read = make_setting(peers=3, method=method, together=3), True, 0
    when = 2 if isinstance(method, Local) else 4  # after a first look; peer 002 learns three times, the third by itself

    def first() -> None:
        nonlocal read
        read += 1
        if broken and read == when:
            raise UsersOwnError("cannot be read")

    setting = with_samples(setting, {"002": OwnSamples(setting.peers["002"].train, 1, first)})
    parts = [Part(peer, 0) for peer in setting.roster]
    before = threading.active_count()
    with closing(InProcess(setting, 2)) as engine:
        engine.recall(0)
        with pytest.raises(UsersOwnError, match="cannot be read"):
            list(engine.steps(parts))
        broken = False
        engine.recall(0)
        assert sorted(peer for peer, _ in engine.steps(parts)) == ["000", "001", "002"]
    assert threading.active_count() == before


def test_leaving_off_in_the_middle_stops_a_stack_between_two_batches(make_setting: MakeSetting, points: Points) -> None:
    """Peer 000 finishes; the stack of the others would train for minutes, and is stopped when the caller goes away."""
    setting = make_setting(peers=sized(points, 9, 20, 20), together=2)
    times: list[int] = []
    lengthy = {peer: OwnSamples(setting.peers[peer].train, 20_000, lambda: times.append(1)) for peer in ("001", "002")}
    setting = with_samples(setting, lengthy)
    with closing(InProcess(setting, 2)) as engine:
        engine.recall(0)
        outcomes = engine.steps([Part(peer, 0) for peer in setting.roster])
        assert next(iter(outcomes))[0] == "000"
        outcomes.close()  # type: ignore[attr-defined]
    assert len(times) < 2 * 20_000


def test_stacks_are_refused_with_ray_and_a_number_below_one_is_no_number_of_peers(
    points: Points, net: Callable[[], nn.Module]
) -> None:
    pytest.importorskip("ray")
    said = "together is 4, but engine=ray trains peers one by one; use engine=inprocess."
    with pytest.raises(ConfigError, match=said):
        compose({}, ["together=4", "engine=ray"])
    pair = (points(20, 0), points(10, 1))
    with pytest.raises(ConfigError, match=said):
        Federation(net, [pair, pair], together=4, engine="ray")
    with pytest.raises(ConfigError, match="together must be a whole number of at least 1, got 0"):
        Federation(net, [pair, pair], together=0)


def test_a_run_goes_on_with_as_many_together_and_an_older_one_counts_as_one_by_one(
    tmp_path: Path, points: Points, net: Callable[[], nn.Module]
) -> None:
    pairs = [(points(20, k), points(10, 1000 + k)) for k in range(3)]

    def federation(together: int) -> Federation:
        return Federation(net, pairs, Local(), train=Train(epochs=1, batch=8), together=together)

    run = federation(3).run(2, out=tmp_path / "new")
    assert federation(3).run(2, out=tmp_path / "new", resume=True).accuracy == run.accuracy
    with pytest.raises(ConfigError, match="was run with together = 3, got 1; use the same to resume"):
        federation(1).run(2, out=tmp_path / "new", resume=True)
    federation(1).run(2, out=tmp_path / "old")
    config = tmp_path / "old" / "config.toml"
    config.write_text(config.read_text().replace("together = 1\n", ""))
    assert "together" not in read_config(tmp_path / "old")
    federation(1).run(2, out=tmp_path / "old", resume=True)


def test_an_experiment_hands_on_how_many_learn_together() -> None:
    assert compose({}).together == 1
    assert compose({}, ["together=16"]).to_toml()["together"] == 16
