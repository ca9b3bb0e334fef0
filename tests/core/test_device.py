"""Training on a device that is not the host's memory.

Every build of torch has a second device that computes on the CPU but refuses the CPU's tensors: the lazy tensors'. So
what would fail on a graphics card, a host tensor among the device's, fails here too.
"""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from rounds import Played
from torch import Tensor, nn
from torch.nn import functional

from dispfl.core.live import LiveModel, resolve_device
from dispfl.core.train import Task, Train, Trainer, sgd_step
from dispfl.data.batches import ResidentSamples
from dispfl.errors import ConfigError
from dispfl.methods.registry import METHODS
from dispfl.work import Setting

Points = Callable[[int, int], tuple[Tensor, Tensor]]


@pytest.fixture(scope="module")
def elsewhere() -> str:
    """The second device's name."""
    backend = pytest.importorskip("torch._lazy.ts_backend")
    backend.init()
    return "lazy"


def test_the_second_device_refuses_the_hosts_tensors(elsewhere: str) -> None:
    with pytest.raises(RuntimeError, match="not a lazy tensor"):
        _ = torch.ones(3, device=elsewhere) + torch.ones(3)


def stepwise(outputs: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy; and the device computes what it has put off, before it becomes one large program to compile."""
    torch._lazy.mark_step()
    return functional.cross_entropy(outputs, labels)


def normed_net() -> nn.Module:
    """With buffers."""
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def trainer(points: Points, module: nn.Module, device: str, **settings: Any) -> Trainer:
    live = LiveModel(module, device)
    train, test = (ResidentSamples(*points(20, which)) for which in (0, 1))
    hands = Train(**{"epochs": 2, "batch": 8, **settings})
    return Trainer(live, train, test, hands, Task(stepwise), 5, "001", 3, 10, buffers=live.read_buffers())


@pytest.mark.parametrize("clip_norm", [0.05, 10.0, 0.0])
def test_learning_elsewhere_gives_what_it_gives_here(elsewhere: str, points: Points, clip_norm: float) -> None:
    module = normed_net()
    outcomes = []
    for device in ("cpu", elsewhere):
        hands = trainer(points, deepcopy(module), device, clip_norm=clip_norm, noise=0.01)
        weights = hands.live.read()
        mask = torch.arange(weights.numel()) % 3 > 0
        weights = weights.where(mask, 0.0)
        learned = hands.learn(weights, mask, pull=(0.1, weights))
        gradient, loss = hands.gradient(learned), hands.loss(learned, hands.test)
        assert {tensor.device.type for tensor in (learned, gradient, *hands.buffers.values())} == {"cpu"}
        assert learned[~mask].count_nonzero() == 0
        outcomes.append((learned, gradient, hands.buffers, torch.tensor([loss, hands.score(learned)])))
    torch.testing.assert_close(*outcomes, rtol=1e-4, atol=1e-6)


def test_a_peers_own_tensors_stay_on_the_host_and_as_they_were(elsewhere: str, points: Points) -> None:
    hands = trainer(points, normed_net(), elsewhere)
    assert {tensor.device.type for tensor in (hands.live.weights, hands.live.grad)} == {elsewhere}
    weights, buffers = hands.live.read(), hands.buffers
    before = weights.clone(), deepcopy(buffers)
    learned = hands.learn(weights, torch.ones(weights.numel(), dtype=torch.bool))
    assert not learned.equal(weights)
    torch.testing.assert_close((weights, buffers), before, rtol=0, atol=0)


def test_steps_do_not_wait_for_the_device_however_many_they_are(elsewhere: str, points: Points) -> None:
    from torch._lazy import metrics

    counts = []
    for epochs in (1, 4):
        hands = trainer(points, normed_net(), elsewhere, epochs=epochs, clip_norm=0.05, noise=0.01)
        weights = hands.live.read()
        metrics.reset()  # type: ignore[no-untyped-call]
        hands.learn(weights, torch.ones(weights.numel(), dtype=torch.bool))
        counts.append([metrics.counter_value(f"aten::{read}") for read in ("_local_scalar_dense", "copy")])
    assert counts[0] == counts[1]
    assert counts[0][0] > 0  # the checks at the end are seen


def test_a_clipped_step_on_a_device_by_hand(elsewhere: str) -> None:
    weights, grad, bits = (
        torch.tensor(values).to(elsewhere) for values in ([1.0, 2.0, 0.0], [3.0, 4.0, 9.0], [-1, -1, 0])
    )
    sgd_step(weights, grad, bits.to(torch.int32), lr=0.1, weight_decay=0.5, clip_norm=1.0)
    # The gradient (3, 4) is clipped to (0.6, 0.8); decay adds 0.5 * (1, 2).
    assert weights.tolist() == pytest.approx([1 - 0.1 * (0.6 + 0.5), 2 - 0.1 * (0.8 + 1.0), 0.0])


Play = Callable[..., list[Played]]


@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_elsewhere_as_here(
    method: str, elsewhere: str, make_setting: Callable[..., Setting], play: Play
) -> None:
    def models(device: str) -> list[tuple[Tensor, Tensor]]:
        setting = make_setting(peers=3, method=METHODS[method](name=method), task=Task(stepwise), device=device)
        last = play(setting)[-1]
        assert not any(outcome.report.failure for outcome in last.steps.values())
        return [state.model.unpack() for state in (last.judged or last.states).values()]

    torch.testing.assert_close(models(elsewhere), models("cpu"), rtol=1e-3, atol=1e-5)


def test_auto_is_the_best_device_there_is() -> None:
    best = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    assert resolve_device("auto") == best


def test_a_device_that_is_there_is_taken_by_name() -> None:
    assert resolve_device("cpu") == "cpu"
    assert resolve_device("cpu:0") == "cpu:0"


@pytest.mark.parametrize("device", ["abacus", "cpu:1", "cuda:99", "cpu:x", "", "Auto"])
def test_a_device_that_is_not_there_is_refused_in_a_sentence(device: str) -> None:
    with pytest.raises(ConfigError, match=f"^device is '{device}', which this machine or this build of torch does not"):
        resolve_device(device)
