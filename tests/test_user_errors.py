"""An exception in a user's function becomes a sentence that names the peer, the round and the
function."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from messages import refused
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from dispfl import (
    FedAvg,
    Federation,
    Full,
    GossipMethod,
    Local,
    Metric,
    PackedModel,
    PeerState,
    Topology,
    Train,
    Trainer,
)
from dispfl.errors import ConfigError, DataError, RunError

Points = Callable[[int, int], tuple[Tensor, Tensor]]
QUICK = Train(epochs=1, batch_size=8)


class BrokenError(Exception):
    """What the users' functions raise."""


@pytest.fixture
def run(net: Callable[[], nn.Module], points: Points) -> Callable[..., Any]:
    """`run(loss=..., ...)`: two rounds of three peers, peer by peer."""

    def attempt(model: Callable[[], nn.Module] = net, peers: Any = None, **changes: Any) -> Any:
        own = [(points(20, k), points(10, 1000 + k)) for k in range(3)]
        callbacks = [changes.pop("callback")] if "callback" in changes else []
        settings: dict[str, Any] = {"topology": Full(), "train": QUICK, "workers": 1} | changes
        return Federation(model, peers or own, **settings, rounds=2).run(callbacks=callbacks)

    return attempt


def fail() -> None:
    raise BrokenError("no such\nthing.")


class ForgetsItsState(GossipMethod):
    """Trains, but returns nothing."""

    def step(  # type: ignore[return]
        self, trainer: Trainer, state: PeerState, received: Mapping[str, PackedModel]
    ) -> PeerState:
        trainer.learn(*state.model.unpack())


def test_a_step_without_a_new_state_is_refused(run: Callable[..., Any]) -> None:
    with refused(RunError):
        run(method=ForgetsItsState())


def loss_that_fails(outputs: Tensor, labels: Tensor) -> Tensor:
    fail()
    return functional.cross_entropy(outputs, labels)


def metric_that_fails(outputs: Tensor, labels: Tensor) -> float:
    fail()
    return 0.0


def optimizer_that_fails(weights: Tensor, layout: Any) -> torch.optim.Optimizer:
    fail()
    return torch.optim.SGD([weights])


def callback_that_fails(run: Any) -> None:
    if len(run.metrics) == 2:
        fail()


class FailsWhenTrained(nn.Linear):
    """Computes, but does not train."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training and torch.is_grad_enabled():
            fail()
        return super().forward(x)


class FailsInItsStep(Local):
    """Fails in round 1 at peer 002."""

    def step(
        self, trainer: Trainer, state: PeerState, received: Mapping[str, PackedModel]
    ) -> PeerState:
        if (trainer.peer, trainer.t) == ("002", 1):
            fail()
        return super().step(trainer, state, received)


class FailsToAggregate(FedAvg):
    def aggregate(self, server: PeerState, uploads: Any, samples: Any) -> PeerState:
        fail()
        return super().aggregate(server, uploads, samples)


class FailsToConnect(Topology):
    def neighbours(self, seed: int, t: int, roster: Sequence[str]) -> dict[str, list[str]]:
        if t == 1:
            fail()
        return {peer: [] for peer in roster}


class FailsAtRowFive(Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        if row == 5:
            fail()
        return torch.ones(4), torch.tensor(row % 3)


HERE = r" \(test_user_errors\.py, line \d+\) raised BrokenError: no such thing\.$"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"loss": loss_that_fails, "metric": "accuracy"},
            "Peer 000, before round 0: loss_that_fails",
        ),
        (
            {"metric": Metric(metric_that_fails, "mine", True)},
            "Peer 000, round 0: metric_that_fails",
        ),
        ({"optimizer": optimizer_that_fails}, "Peer 000, round 0: optimizer_that_fails"),
        ({"model": lambda: FailsWhenTrained(4, 3)}, "Peer 000, round 0: FailsWhenTrained.forward"),
        ({"method": FailsInItsStep()}, "Peer 002, round 1: FailsInItsStep.step"),
        ({"method": FailsToAggregate()}, "Round 0: FailsToAggregate.aggregate"),
        (
            {"topology": FailsToConnect()},
            "topology FailsToConnect, round 1: FailsToConnect.neighbours",
        ),
        ({"callback": callback_that_fails}, "Round 1, callbacks: callback_that_fails"),
        ({"model": lambda: fail()}, "Building the network: <lambda>"),
    ],
    ids=[
        "loss",
        "metric",
        "optimizer",
        "forward",
        "step",
        "aggregate",
        "topology",
        "callback",
        "model",
    ],
)
def test_a_users_function_is_named_with_peer_and_round(
    run: Callable[..., Any], changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(RunError, match=sentence.replace(".", r"\.") + HERE) as refused:
        run(**changes)
    assert isinstance(refused.value.__cause__, BrokenError)


def test_a_users_data_are_named_with_peer_and_round(
    run: Callable[..., Any], points: Points
) -> None:
    peers = [(points(20, 0), points(10, 1)), (FailsAtRowFive(), points(10, 2))]
    with pytest.raises(RunError, match=r"Peer 001, round 0: FailsAtRowFive\.__getitem__" + HERE):
        run(peers=peers)


@pytest.mark.parametrize("vmap_peers", [1, 2])
def test_a_function_of_torch_is_named_too(
    run: Callable[..., Any], points: Points, vmap_peers: int
) -> None:
    """Labels of another type than the loss takes: torch's own function raises."""
    inputs, labels = points(20, 0)
    peers = [((inputs, labels.int()), points(10, k)) for k in range(2)]
    with refused(RunError):
        run(peers=peers, vmap_peers=vmap_peers)


@pytest.mark.parametrize(
    ("metric", "reason"),
    [
        (functional.cosine_similarity, "RuntimeError: The size of tensor a"),
        (lambda outputs, labels: None, r"TypeError: float\(\) argument must be"),
    ],
    ids=["written in C", "no number"],
)
def test_a_metric_without_a_line_of_its_own_is_named_by_its_role(
    run: Callable[..., Any], metric: Any, reason: str
) -> None:
    with pytest.raises(RunError, match=f"^Peer 000, round 0: the metric raised {reason}"):
        run(metric=Metric(metric, "mine", higher_is_better=True))


def test_inputs_that_the_network_does_not_take_are_refused_before_anything_is_written(
    net: Callable[[], nn.Module], points: Points, tmp_path: Any
) -> None:
    inputs, labels = points(20, 0)
    with refused(RunError):
        Federation(net, [((inputs[:, :3], labels), (inputs, labels))], rounds=1).run(
            out=tmp_path / "run"
        )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("wrong", "which"), [(3, "training"), (-1, "test")])
def test_a_label_beyond_the_outputs_is_a_sentence(
    run: Callable[..., Any], points: Points, wrong: int, which: str
) -> None:
    peers = [(points(20, k), points(10, 10 + k)) for k in range(2)]
    peers[1][0 if which == "training" else 1][1][4] = wrong
    with pytest.raises(DataError) as refused:
        run(peers=peers)
    assert (
        str(refused.value)
        == f"Peer 001's {which} data have the label {wrong}, but the model has 3 outputs, for the"
        " labels 0 to 2. Give it more outputs, or correct the labels."
    )


def test_a_label_to_ignore_is_allowed(run: Callable[..., Any], points: Points) -> None:
    peers = [(points(20, k), points(10, 10 + k)) for k in range(2)]
    peers[1][0][1][4] = -100
    assert len(run(peers=peers).metrics) == 2


class Strangers(Topology):
    def neighbours(self, seed: int, t: int, roster: Sequence[str]) -> dict[str, list[str]]:
        return {peer: ["alice"] for peer in roster}


def test_a_topology_that_names_an_unknown_peer_is_a_sentence(run: Callable[..., Any]) -> None:
    with refused(ConfigError, key="topology"):
        run(topology=Strangers())


def nan_score(outputs: Tensor, labels: Tensor) -> float:
    return float("nan")


def test_a_metric_that_is_nan_for_every_peer_is_announced_once(
    run: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "dispfl"):
        assert run(metric=Metric(nan_score, higher_is_better=True)).scores == {}
    assert caplog.messages == [
        "Round 0: the metric nan_score is infinite or nan for every peer, so there are no scores."
    ]


class Unfinished(GossipMethod):
    def step(
        self, trainer: Trainer, state: PeerState, received: Mapping[str, PackedModel]
    ) -> PeerState:
        return PeerState(None, state.next_mask)  # type: ignore[arg-type]


def test_a_mistake_that_shows_in_our_own_code_keeps_its_exception(run: Callable[..., Any]) -> None:
    with pytest.raises(AttributeError, match="'NoneType' object has no attribute"):
        run(method=Unfinished())
