"""bf16: a network computes in 16 bits; its weights, gradients, losses and scores stay float32."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy

import pytest
import torch
from messages import refused
from torch import Tensor, nn

from dispfl.core.flat_module import FlatModule, Precision
from dispfl.core.metric import Metric
from dispfl.core.samples import PeerData
from dispfl.core.task import Task
from dispfl.core.train import Train, Trainer, TrainingRun
from dispfl.data.batches import ResidentSamples
from dispfl.errors import ConfigError
from dispfl.models.settings import Model

Points = Callable[[int, int], tuple[Tensor, Tensor]]


def trainer(
    points: Points, module: nn.Module, precision: Precision = "bf16", task: Task | None = None
) -> Trainer:
    """60 training and 200 test points, four epochs."""
    network = FlatModule(module, precision=precision)
    train, test = ResidentSamples(*points(60, 0)), ResidentSamples(*points(200, 1))
    run = TrainingRun(Train(epochs=4, batch_size=8), task or Task(), seed=5, rounds=10)
    return Trainer(network, PeerData(train, test), run, "001", 3)


def every(network: FlatModule) -> Tensor:
    return torch.ones(network.layout.size, dtype=torch.bool)


def learned(trainer: Trainer) -> Tensor:
    return trainer.learn(trainer.network.read(), every(trainer.network))


def test_a_product_is_rounded_to_8_bits_and_returned_as_float32() -> None:
    network = FlatModule(nn.Linear(1, 1, bias=False), precision="bf16")
    network.weights.fill_(1 + 2**-9)  # 8 bits cannot hold it
    output = network(torch.ones(1, 1))
    assert output.item() == 1.0
    assert output.dtype == torch.float32
    assert network.read().item() == 1 + 2**-9


def test_the_loss_and_the_metric_get_float32(points: Points, net: Callable[[], nn.Module]) -> None:
    seen = []

    def loss(outputs: Tensor, labels: Tensor) -> Tensor:
        seen.append((outputs.dtype, torch.is_autocast_enabled("cpu")))
        return nn.functional.cross_entropy(outputs, labels)

    def metric(outputs: Tensor, labels: Tensor) -> float:
        return float(loss(outputs, labels))

    peer = trainer(points, net(), task=Task(loss, (Metric(metric, higher_is_better=True),)))
    peer.score(learned(peer))
    assert set(seen) == {(torch.float32, False)}


def test_weights_gradients_and_buffers_stay_float32(points: Points) -> None:
    module = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    peer = trainer(points, module)
    peer.buffers = peer.network.read_buffers()
    tensors = (
        learned(peer),
        peer.gradient(peer.network.read()),
        peer.network.weights,
        peer.network.grad,
    )
    assert {tensor.dtype for tensor in tensors} == {torch.float32}
    assert peer.buffers["1.running_mean"].dtype == torch.float32


def test_a_step_too_small_for_8_bits_is_not_lost() -> None:
    """0.1 * 0.01 is lost in bf16 beside 1, whose next smaller neighbour there is 1 - 2^-8."""
    network = FlatModule(nn.Linear(1, 1, bias=False), precision="bf16")
    data = ResidentSamples(torch.ones(1, 1), torch.zeros(1))
    task = Task(loss=lambda outputs, labels: 0.01 * outputs.sum())
    settings = Train(epochs=1, lr=0.1, weight_decay=0, clip_norm=0)
    run = TrainingRun(settings, task, seed=5, rounds=10)
    trainer = Trainer(network, PeerData(data, data), run, "001", 0)
    after = trainer.learn(torch.ones(1), every(network))
    assert after.item() == pytest.approx(0.999, abs=1e-5)


def test_results_are_near_those_of_float32_and_not_the_same(
    points: Points, net: Callable[[], nn.Module]
) -> None:
    module = net()
    fine, coarse = (
        trainer(points, deepcopy(module), precision) for precision in ("float32", "bf16")
    )
    one, other = learned(fine), learned(coarse)
    assert one.isfinite().all()
    assert not other.equal(one)
    torch.testing.assert_close(other, one, rtol=0, atol=0.02)
    assert coarse.report.train_loss == pytest.approx(fine.report.train_loss, abs=0.01)
    assert coarse.score(other) == pytest.approx(fine.score(one), abs=0.05)


def tied() -> nn.Module:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    return nn.Sequential(first, nn.ReLU(), second)


@pytest.mark.parametrize("build", [tied, lambda: Model(name="mlp").network((4,), 3)])
def test_every_run_gives_the_same_bits_with_several_threads_too(
    points: Points, build: Callable[[], nn.Module]
) -> None:
    module = build()
    alone = learned(trainer(points, deepcopy(module)))
    with ThreadPoolExecutor(4, initializer=torch.set_num_threads, initargs=(1,)) as threads:
        trainers = [trainer(points, deepcopy(module)) for _ in range(8)]
        assert all(one.equal(alone) for one in threads.map(learned, trainers))


def test_float32_is_the_bare_module_to_the_bit(
    points: Points, net: Callable[[], nn.Module]
) -> None:
    module, x = net(), points(20, 3)[0]
    assert FlatModule(deepcopy(module), precision="float32")(x).equal(module(x))
    assert FlatModule(deepcopy(module))(x).equal(module(x))


def test_a_convolution_learns_in_bf16() -> None:
    images, labels = (
        torch.randn(8, 1, 8, 8, generator=torch.Generator().manual_seed(0)),
        torch.arange(8) % 3,
    )
    network = FlatModule(Model(name="cnn").network((1, 8, 8), 3), precision="bf16")
    data = ResidentSamples(images, labels)
    run = TrainingRun(Train(epochs=15, batch_size=8), Task(), seed=5, rounds=10)
    peer = Trainer(network, PeerData(data, data), run, "001", 0)
    assert peer.score(learned(peer)) == 1.0


def test_a_precision_that_does_not_exist_is_refused() -> None:
    with refused(ConfigError, key="precision"):
        FlatModule(nn.Linear(1, 1), precision="fp8")  # type: ignore[arg-type]
