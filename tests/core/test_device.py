"""Training on a device that is not the host's memory.

Every build of torch has a second device that computes on the CPU but refuses the CPU's tensors: the
lazy tensors'. So what would fail on a graphics card, a host tensor among the device's, fails here
too.
"""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from rounds import FinishedRound
from torch import Tensor, nn
from torch.nn import functional

from dispfl.core.flat_module import FlatModule, resolve_device
from dispfl.core.optimizers import sgd_step
from dispfl.core.samples import PeerData
from dispfl.core.task import Task
from dispfl.core.train import Train, Trainer, TrainingRun
from dispfl.data.batches import ResidentSamples
from dispfl.errors import ConfigError
from dispfl.registry import METHODS
from dispfl.round.context import RunContext

Points = Callable[[int, int], tuple[Tensor, Tensor]]


@pytest.fixture(scope="module")
def remote_peers() -> str:
    """The second device's name."""
    backend = pytest.importorskip("torch._lazy.ts_backend")
    backend.init()
    return "lazy"


def test_the_second_device_refuses_the_hosts_tensors(remote_peers: str) -> None:
    with pytest.raises(RuntimeError, match="not a lazy tensor"):
        _ = torch.ones(3, device=remote_peers) + torch.ones(3)


def stepwise(outputs: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy; and the device computes what it has put off, before it becomes one large
    program to compile."""
    torch._lazy.mark_step()
    return functional.cross_entropy(outputs, labels)


def normed_net() -> nn.Module:
    """With buffers."""
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def trainer(points: Points, module: nn.Module, device: str, **settings: Any) -> Trainer:
    network = FlatModule(module, device)
    train, test = (ResidentSamples(*points(20, which)) for which in (0, 1))
    trainer_ = Train(**{"epochs": 2, "batch_size": 8, **settings})
    run = TrainingRun(trainer_, Task(stepwise), seed=5, rounds=10)
    return Trainer(network, PeerData(train, test), run, "001", 3, buffers=network.read_buffers())


@pytest.mark.parametrize("clip_norm", [0.05, 10.0, 0.0])
def test_learning_on_another_device_gives_the_same_result(
    remote_peers: str, points: Points, clip_norm: float
) -> None:
    module = normed_net()
    results = []
    for device in ("cpu", remote_peers):
        trainer_ = trainer(points, deepcopy(module), device, clip_norm=clip_norm, noise_std=0.01)
        weights = trainer_.network.read()
        mask = torch.arange(weights.numel()) % 3 > 0
        weights = weights.where(mask, 0.0)
        learned = trainer_.learn(weights, mask, prox=(0.1, weights))
        gradient, loss = trainer_.gradient(learned), trainer_.loss(learned, trainer_.test)
        assert {
            tensor.device.type for tensor in (learned, gradient, *trainer_.buffers.values())
        } == {"cpu"}
        assert learned[~mask].count_nonzero() == 0
        results.append(
            (learned, gradient, trainer_.buffers, torch.tensor([loss, trainer_.score(learned)]))
        )
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-6)


def test_a_peers_tensors_stay_on_the_host_and_unchanged(remote_peers: str, points: Points) -> None:
    trainer_ = trainer(points, normed_net(), remote_peers)
    assert {tensor.device.type for tensor in (trainer_.network.weights, trainer_.network.grad)} == {
        remote_peers
    }
    weights, buffers = trainer_.network.read(), trainer_.buffers
    before = weights.clone(), deepcopy(buffers)
    learned = trainer_.learn(weights, torch.ones(weights.numel(), dtype=torch.bool))
    assert not learned.equal(weights)
    torch.testing.assert_close((weights, buffers), before, rtol=0, atol=0)


def test_the_number_of_device_synchronizations_does_not_grow_with_the_steps(
    remote_peers: str, points: Points
) -> None:
    from torch._lazy import metrics

    counts = []
    for epochs in (1, 4):
        trainer_ = trainer(
            points, normed_net(), remote_peers, epochs=epochs, clip_norm=0.05, noise_std=0.01
        )
        weights = trainer_.network.read()
        metrics.reset()  # type: ignore[no-untyped-call]
        trainer_.learn(weights, torch.ones(weights.numel(), dtype=torch.bool))
        counts.append(
            [metrics.counter_value(f"aten::{read}") for read in ("_local_scalar_dense", "copy")]
        )
    assert counts[0] == counts[1]
    assert counts[0][0] > 0  # the checks at the end are seen


def test_a_clipped_step_on_a_device_by_hand(remote_peers: str) -> None:
    weights, grad, bits = (
        torch.tensor(values).to(remote_peers)
        for values in ([1.0, 2.0, 0.0], [3.0, 4.0, 9.0], [-1, -1, 0])
    )
    sgd_step(weights, grad, bits.to(torch.int32), lr=0.1, weight_decay=0.5, clip_norm=1.0)
    # The gradient (3, 4) is clipped to (0.6, 0.8); decay adds 0.5 * (1, 2).
    assert weights.tolist() == pytest.approx([1 - 0.1 * (0.6 + 0.5), 2 - 0.1 * (0.8 + 1.0), 0.0])


RunAll = Callable[..., list[FinishedRound]]


@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_on_another_device_with_the_same_result(
    method: str, remote_peers: str, make_context: Callable[..., RunContext], run_all: RunAll
) -> None:
    def models(device: str) -> list[tuple[Tensor, Tensor]]:
        settings = {"private": "head"} if method == "fedbn" else {}  # there is no norm layer
        context = make_context(
            peers=3, method=METHODS[method](name=method, **settings), task=Task(stepwise)
        )
        last = run_all(context.changed(device=device))[-1]
        assert not any(result.report.failure for result in last.steps.values())
        return [state.model.unpack() for state in (last.evaluated or last.states).values()]

    torch.testing.assert_close(models(remote_peers), models("cpu"), rtol=1e-3, atol=1e-5)


def test_auto_is_the_best_available_device() -> None:
    best = (
        "cuda"
        if torch.cuda.is_available()
        else "mps"
        if torch.backends.mps.is_available()
        else "cpu"
    )
    assert resolve_device("auto") == best


def test_an_available_device_is_used_by_name() -> None:
    assert resolve_device("cpu") == "cpu"
    assert resolve_device("cpu:0") == "cpu:0"


@pytest.mark.parametrize("device", ["abacus", "cpu:1", "cuda:99", "cpu:x", "", "Auto"])
def test_an_unavailable_device_is_refused_with_a_sentence(device: str) -> None:
    with pytest.raises(
        ConfigError,
        match=f"^device is '{device}', which this machine or this build of torch does not",
    ):
        resolve_device(device)
