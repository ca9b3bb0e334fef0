"""Peers that train as one stack: equal up to rounding, reproducible, and failures stay separate."""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from math import nan
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from messages import refused
from rounds import FinishedRound
from torch import Tensor, nn

from dispfl import DisPFL, Federation, Local, Train
from dispfl.config import compose
from dispfl.core.packed import PackedModel
from dispfl.core.samples import PeerData, Samples
from dispfl.core.task import Task
from dispfl.core.train import Trainer
from dispfl.data.batches import ResidentSamples
from dispfl.engines.inprocess import InProcess
from dispfl.engines.vmap_peers import PeerGroups
from dispfl.errors import ConfigError, RunError
from dispfl.methods.apfl import APFL
from dispfl.methods.base import FineTuning, GossipMethod, Method, PeerState
from dispfl.methods.da_dpfl import DADPFL
from dispfl.methods.dfedpgp import DFedPGP
from dispfl.methods.ditto import Ditto
from dispfl.methods.dpsgd import DPSGD
from dispfl.methods.fedala import FedALA
from dispfl.methods.fedavg import FedAvg
from dispfl.methods.fedfomo import FedFOMO
from dispfl.methods.fedrep import FedRep
from dispfl.methods.finetuned import FedAvgFT
from dispfl.methods.scaffold import SCAFFOLD
from dispfl.methods.ssfl import SSFL
from dispfl.round.context import PeerTask, RunContext

MakeContext = Callable[..., RunContext]
RunAll = Callable[..., list[FinishedRound]]
Points = Callable[[int, int], tuple[Tensor, Tensor]]
Bits = Callable[[PeerState], dict[str, bytes]]


class Uneven(GossipMethod):
    """A method whose peer k learns k + 1 times."""

    name: Literal["uneven"] = "uneven"
    communicates = False

    def step(
        self, trainer: Trainer, state: PeerState, received: Mapping[str, PackedModel]
    ) -> PeerState:
        weights, mask = state.model.unpack()
        for _ in range(int(trainer.peer) + 1):
            weights = trainer.learn(weights, mask)
        return replace(state, model=PackedModel.pack(weights, mask))


def assert_equal_up_to_rounding(one: FinishedRound, other: FinishedRound) -> None:
    assert one.steps.keys() == other.steps.keys()
    for peer, step in one.steps.items():
        theirs = other.steps[peer]
        torch.testing.assert_close(
            theirs.next_state.model.unpack(), step.next_state.model.unpack(), rtol=1e-4, atol=1e-5
        )
        torch.testing.assert_close(
            theirs.report.train_loss, step.report.train_loss, rtol=1e-4, atol=1e-5
        )  # None is None
        assert theirs.report.passes == step.report.passes
        assert theirs.messages == step.messages


# A weight regrown otherwise would be no rounding any more, so Dis-PFL's masks evolve only once,
# after its learning.
@pytest.mark.parametrize(
    ("method", "rounds"),
    [
        (DisPFL(), 1),
        (DisPFL(density=(0.3, 0.8), structure="channels"), 1),
        (Local(), 2),
        (DPSGD(), 2),
        (FedAvg(cohort=4), 2),
        (FedAvgFT(cohort=4), 2),
        (Ditto(cohort=4), 2),
        (FedFOMO(), 2),
        (APFL(cohort=4), 2),
        (SCAFFOLD(cohort=4), 2),
        (FedRep(cohort=4), 2),
        (FedALA(cohort=4), 3),
        (DFedPGP(), 2),
        (DADPFL(threshold=10.0), 2),
        (SSFL(score_rounds=1), 2),
        (Uneven(), 2),
    ],
    ids=lambda value: value.name if isinstance(value, Method) else str(value),
)
def test_five_peers_in_stacks_of_two_learn_the_same_as_one_by_one(
    make_context: MakeContext, run_all: RunAll, method: Method, rounds: int
) -> None:
    context = make_context(peers=5, method=method, rounds=rounds)
    for one, other in zip(run_all(context), run_all(context.changed(vmap_peers=2), 2), strict=True):
        assert_equal_up_to_rounding(one, other)
    if one.evaluated:
        assert other.evaluated is not None
        for peer, state in one.evaluated.items():
            torch.testing.assert_close(
                other.evaluated[peer].model.values, state.model.values, rtol=1e-4, atol=1e-5
            )


def loss_calls(context: RunContext, tuning: FineTuning | None = None) -> int:
    """Count the calls of the loss in a round or in fine-tuning, without those of the engine's check
    of the model."""
    calls = 0

    def loss(outputs: Tensor, labels: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return nn.functional.cross_entropy(outputs, labels)

    with closing(InProcess(replace(context, task=Task(loss)), 1)) as engine:
        calls = 0
        engine.restore(0)
        tasks = [
            PeerTask(peer, 0, idle=tuning is not None, fine_tuning=tuning, evaluate=False)
            for peer in context.roster
        ]
        list(engine.run_tasks(tasks))
    return calls


def test_four_peers_with_three_batches_each_call_the_loss_12_6_or_3_times(
    make_context: MakeContext,
) -> None:
    context = make_context(peers=4, method=Local())
    assert [loss_calls(context.changed(vmap_peers=size)) for size in (1, 2, 4, 9)] == [12, 6, 3, 3]


@pytest.mark.parametrize("rate", ["initial", "current"])
def test_four_peers_are_fine_tuned_in_one_stack_at_either_learning_rate(
    make_context: MakeContext, rate: Literal["initial", "current"]
) -> None:
    method = FedAvgFT(cohort=4, tune_epochs=2, tune_rate=rate)
    context = make_context(peers=4, method=method)
    assert [
        loss_calls(context.changed(vmap_peers=size), method.fine_tuning) for size in (1, 4)
    ] == [24, 6]


def test_networks_of_one_density_are_stacked_where_others_are_smaller(
    make_context: MakeContext,
) -> None:
    """Two peers keep 2 of 8 units and two keep 6: a stack of two sizes is two stacks."""
    context = make_context(peers=4, method=DisPFL(density=(0.3, 0.8), structure="channels"))
    assert [loss_calls(context.changed(vmap_peers=size)) for size in (1, 2, 4)] == [12, 6, 6]


@pytest.mark.parametrize(
    ("changes", "seconds"),
    [
        ({"train": Train(epochs=1, batch_size=8)}, [0.75] * 4),
        ({"train": Train(epochs=1, batch_size=8, optimizer="adam")}, [3.0] * 4),
        ({"train": Train(epochs=1, batch_size=8, momentum=0.9)}, [3.0] * 4),
        (
            {"method": DisPFL(density=(0.3, 0.8, 0.8, 0.8), structure="channels")},
            [3.0, 1.0, 1.0, 1.0],
        ),
    ],
    ids=["stacked", "adam", "momentum", "one of another size"],
)
@pytest.mark.parametrize("threads", [1, 8], ids=["processor time", "wall time"])
def test_each_batch_counts_once_in_the_seconds_of_the_peers_that_it_trains(
    make_context: MakeContext,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    seconds: list[float],
    threads: int,
) -> None:
    """Four peers have three batches each. A batch takes a second, of which each peer of a stack has
    its share."""
    passed: dict[int, float] = defaultdict(float)
    clock = SimpleNamespace(
        thread_time=lambda: passed[threading.get_ident()],
        perf_counter=lambda: sum(list(passed.values())),
    )
    monkeypatch.setattr("dispfl.core.train.time", clock)

    def loss(outputs: Tensor, labels: Tensor) -> Tensor:
        passed[threading.get_ident()] += 1
        return nn.functional.cross_entropy(outputs, labels)

    context = make_context(
        **{"peers": 4, "method": Local(), "vmap_peers": 4} | changes, task=Task(loss)
    )
    with closing(InProcess(context, threads)) as engine:
        engine.restore(0)
        tasks = [PeerTask(peer, 0, evaluate=False) for peer in context.roster]
        results = dict(engine.run_tasks(tasks))
    assert [results[peer].report.seconds for peer in context.roster] == pytest.approx(seconds)


def test_any_number_of_threads_gives_the_same_bits(
    make_context: MakeContext, run_all: RunAll, bits: Bits
) -> None:
    context = make_context(peers=7, vmap_peers=3, rounds=3)
    first, *others = (run_all(context, threads)[-1].states for threads in (1, 1, 2, 3))
    for states in others:
        assert {peer: bits(state) for peer, state in states.items()} == {
            p: bits(state) for p, state in first.items()
        }


def test_a_peer_with_nan_in_its_data_fails_alone(
    make_context: MakeContext, run_all: RunAll
) -> None:
    context = make_context(peers=4, method=Local(), rounds=1)
    context.data.peers["001"].train.inputs[5] = nan  # type: ignore[attr-defined]
    expected, found = run_all(context)[0], run_all(context.changed(vmap_peers=4))[0]
    failures = {peer: result.report.failure for peer, result in found.results.items()}
    assert failures == {peer: result.report.failure for peer, result in expected.results.items()}
    assert [peer for peer, failure in failures.items() if failure] == ["001"]
    assert_equal_up_to_rounding(expected, found)


def sized(points: Points, *counts: int) -> dict[str, PeerData]:
    """Peers with these numbers of samples."""
    return {
        f"{k:03}": PeerData(
            ResidentSamples(*points(count, k)), ResidentSamples(*points(10, 1000 + k))
        )
        for k, count in enumerate(counts)
    }


def test_only_peers_with_equally_many_samples_are_grouped_and_idle_ones_are_not(
    make_context: MakeContext, points: Points
) -> None:
    context = make_context(peers=sized(points, 20, 13, 20, 13, 9, 20, 20, 20))
    tasks = [PeerTask(peer, 0, idle=peer == "002") for peer in context.roster]
    names = [[task.peer for task in group] for group in PeerGroups(context, 3).of(tasks)]
    assert names == [["002"], ["000", "005", "006"], ["001", "003"], ["004"], ["007"]]


def test_peers_with_different_numbers_of_samples_learn_the_same_as_one_by_one(
    make_context: MakeContext, run_all: RunAll, points: Points
) -> None:
    context = make_context(peers=sized(points, 20, 13, 20, 13, 9), method=Local())
    for one, other in zip(run_all(context), run_all(context.changed(vmap_peers=4)), strict=True):
        assert_equal_up_to_rounding(one, other)


class Averaging(nn.Module):
    """A network for signals of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.linear(x.mean(2))
        return outputs


def test_peers_are_stacked_by_input_shape_and_learn_the_same_as_one_by_one(
    make_context: MakeContext, run_all: RunAll, points: Points
) -> None:
    def signals(length: int, which: int) -> PeerData:
        (x, y), (x_test, y_test) = points(20, which), points(10, 1000 + which)
        long = (x.unsqueeze(2).repeat(1, 1, length), x_test.unsqueeze(2).repeat(1, 1, length))
        return PeerData(ResidentSamples(long[0], y), ResidentSamples(long[1], y_test))

    peers = {f"{k:03}": signals(length, k) for k, length in enumerate((5, 7, 5, 7))}
    context = make_context(peers=peers, model=Averaging, method=Local())
    for one, other in zip(run_all(context), run_all(context.changed(vmap_peers=4)), strict=True):
        assert_equal_up_to_rounding(one, other)
    assert loss_calls(context.changed(vmap_peers=4)) == 6  # two stacks of three batches


class DecidesByValue(nn.Module):
    """A network that cannot be mapped over a stack: its control flow depends on its inputs."""

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
def test_a_model_that_cannot_be_stacked_trains_peer_by_peer_with_the_same_bits(
    make_context: MakeContext, run_all: RunAll, bits: Bits, model: Callable[[], nn.Module]
) -> None:
    context = make_context(peers=3, model=model)
    one, other = (run_all(context.changed(vmap_peers=size))[-1].states for size in (1, 3))
    assert {peer: bits(state) for peer, state in one.items()} == {
        peer: bits(state) for peer, state in other.items()
    }


class UserError(Exception):
    """A user's exception."""


class RepeatedSamples:
    """A user's samples: repeated in an epoch, with a callback before each repetition."""

    def __init__(
        self, under: Samples, times: int, first: Callable[[], None] = lambda: None
    ) -> None:
        self.under, self.times, self.first = under, times, first

    def __len__(self) -> int:
        return len(self.under)

    def batches(
        self, size: int, *, rng: torch.Generator | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(self.times):
            self.first()
            yield from self.under.batches(size, rng=rng)

    def take(self, rows: Tensor) -> Samples:
        return self.under.take(rows)


def with_samples(context: RunContext, own: Mapping[str, Samples]) -> RunContext:
    return replace(
        context,
        data=context.data.with_peers(
            {p: PeerData(own.get(p, d.train), d.test) for p, d in context.data.peers.items()}
        ),
    )


@pytest.mark.parametrize("method", [Local(), Uneven()], ids=["while stacked", "or later"])
def test_an_exception_in_a_users_data_is_the_cause_of_a_sentence_and_the_engine_stays_usable(
    make_context: MakeContext, method: Method
) -> None:
    context, broken, read = make_context(peers=3, method=method, vmap_peers=3), True, 0
    when = (
        2 if isinstance(method, Local) else 4
    )  # after a first look; peer 002 learns three times, the third by itself

    def first() -> None:
        nonlocal read
        read += 1
        if broken and read == when:
            raise UserError("cannot be read")

    context = with_samples(
        context, {"002": RepeatedSamples(context.data.peers["002"].train, 1, first)}
    )
    tasks = [PeerTask(peer, 0) for peer in context.roster]
    before = threading.active_count()
    with closing(InProcess(context, 2)) as engine:
        engine.restore(0)
        with refused(RunError) as raised:
            list(engine.run_tasks(tasks))
        assert isinstance(raised.value.__cause__, UserError)
        broken = False
        engine.restore(0)
        assert sorted(peer for peer, _ in engine.run_tasks(tasks)) == ["000", "001", "002"]
    assert threading.active_count() == before


def test_closing_the_iterator_stops_a_stack_between_two_batches(
    make_context: MakeContext, points: Points
) -> None:
    """Peer 000 finishes; the stack of the others would train for minutes, but stops when the
    iterator is closed."""
    context = make_context(peers=sized(points, 9, 20, 20), vmap_peers=2)
    times: list[int] = []
    lengthy = {
        peer: RepeatedSamples(context.data.peers[peer].train, 20_000, lambda: times.append(1))
        for peer in ("001", "002")
    }
    context = with_samples(context, lengthy)
    with closing(InProcess(context, 2)) as engine:
        engine.restore(0)
        results = engine.run_tasks([PeerTask(peer, 0) for peer in context.roster])
        assert next(iter(results))[0] == "000"
        results.close()  # type: ignore[attr-defined]
    assert len(times) < 2 * 20_000


def test_vmap_peers_is_refused_with_ray_and_below_one(
    points: Points, net: Callable[[], nn.Module]
) -> None:
    pytest.importorskip("ray")
    sentence = "vmap_peers is 4, but engine=ray trains peers one by one; use engine=inprocess."
    with pytest.raises(ConfigError, match=sentence):
        compose({}, ["vmap_peers=4", "engine=ray"])
    pair = (points(20, 0), points(10, 1))
    with pytest.raises(ConfigError, match=sentence):
        Federation(net, [pair, pair], vmap_peers=4, engine="ray")
    with refused(ConfigError, key="vmap_peers"):
        Federation(net, [pair, pair], vmap_peers=0)


def test_a_run_is_resumed_with_the_same_vmap_peers_only(
    tmp_path: Path, points: Points, net: Callable[[], nn.Module]
) -> None:
    pairs = [(points(20, k), points(10, 1000 + k)) for k in range(3)]

    def federation(vmap_peers: int) -> Federation:
        return Federation(
            net,
            pairs,
            Local(),
            train=Train(epochs=1, batch_size=8),
            vmap_peers=vmap_peers,
            rounds=2,
        )

    run = federation(3).run(out=tmp_path / "new")
    assert federation(3).run(out=tmp_path / "new", resume=True).accuracy == run.accuracy
    with refused(ConfigError, key="vmap_peers"):
        federation(1).run(out=tmp_path / "new", resume=True)


def test_an_experiments_config_has_vmap_peers() -> None:
    assert compose({}).vmap_peers == 1
    assert compose({}, ["vmap_peers=16"]).to_toml()["vmap_peers"] == 16
