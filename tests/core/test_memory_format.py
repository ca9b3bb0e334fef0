"""channels_last: activations of images have their channels last; all else stays row-major."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from typing import Any

import pytest
import torch
from messages import refused
from torch import Tensor, nn

from dispfl.core.flat_module import FlatModule, MemoryFormat
from dispfl.core.samples import PeerData
from dispfl.core.task import Task
from dispfl.core.train import Train, Trainer, TrainingRun
from dispfl.data.batches import ResidentSamples
from dispfl.errors import ConfigError
from dispfl.models.settings import Model

Points = Callable[[int, int], tuple[Tensor, Tensor]]


class Pooling(nn.Module):
    """Convolutions with max-pooling and without a norm, which keeps what its layers got."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 4, 3, padding=1)
        self.conv2 = nn.Conv2d(4, 6, 3, padding=1)
        self.linear = nn.Linear(6 * 2 * 2, 3)
        self.inputs_of_conv2: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.max_pool2d(nn.functional.relu(self.conv1(x)), 2)
        self.inputs_of_conv2.append(x.detach())
        x = nn.functional.max_pool2d(nn.functional.relu(self.conv2(x)), 2)
        logits: Tensor = self.linear(x.flatten(1))
        return logits


class Viewing(nn.Module):
    """A network that flattens its activations with `view`."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.linear = nn.Linear(4 * 8 * 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.linear(self.conv(x).view(len(x), -1))
        return logits


def images(channels: int = 3, count: int = 24) -> ResidentSamples:
    rng = torch.Generator().manual_seed(0)
    return ResidentSamples(
        torch.randn(count, channels, 8, 8, generator=rng), torch.arange(count) % 3
    )


def trainer(
    module: nn.Module, data: ResidentSamples, memory_format: MemoryFormat = "channels_last"
) -> Trainer:
    network = FlatModule(module, memory_format=memory_format)
    run = TrainingRun(Train(epochs=3, batch_size=8), Task(), seed=5, rounds=10)
    return Trainer(network, PeerData(data, data), run, "001", 0)


def learned(trainer: Trainer) -> Tensor:
    every = torch.ones(trainer.network.layout.size, dtype=torch.bool)
    return trainer.learn(trainer.network.read(), every)


def is_channels_last(activations: Tensor) -> bool:
    last = activations.is_contiguous(memory_format=torch.channels_last)
    return last and not activations.is_contiguous()


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("memory_format", ["channels_last", "contiguous"])
def test_layers_get_activations_in_this_order_in_training_and_evaluation(
    channels: int, memory_format: Any
) -> None:
    """Also for grey images, whose one channel is first and last."""
    module = Pooling(channels)
    peer = trainer(module, images(channels), memory_format)
    expected = memory_format == "channels_last"
    weights = learned(peer)
    assert {is_channels_last(x) for x in module.inputs_of_conv2} == {expected}
    module.inputs_of_conv2.clear()
    peer.score(weights)
    assert {is_channels_last(x) for x in module.inputs_of_conv2} == {expected}


def test_weights_and_gradients_are_those_of_row_major_up_to_rounding() -> None:
    module = Pooling(3)
    rows = trainer(deepcopy(module), images(), "contiguous")
    last = trainer(deepcopy(module), images())
    start = rows.network.read()
    torch.testing.assert_close(last.gradient(start), rows.gradient(start), rtol=1e-4, atol=1e-6)
    weights = learned(last)
    torch.testing.assert_close(weights, learned(rows), rtol=1e-4, atol=1e-5)
    assert not weights.equal(start)
    assert last.report.train_loss == pytest.approx(rows.report.train_loss, rel=1e-4)


def test_parameters_and_gradients_stay_row_major_views_of_the_flat_vector() -> None:
    peer = trainer(Pooling(3), images())
    weights = learned(peer)
    network = peer.network
    flat_weights = torch.cat([parameter.reshape(-1) for parameter in network.module.parameters()])
    assert flat_weights.equal(weights)
    for parameter in network.module.parameters():
        assert parameter.is_contiguous()
        assert parameter.grad is not None
        assert parameter.grad.is_contiguous()
        assert parameter.grad.untyped_storage().data_ptr() == (
            network.grad.untyped_storage().data_ptr()
        )
    assert network.layout == FlatModule(Pooling(3)).layout


def test_contiguous_is_the_bare_module_to_the_bit() -> None:
    module = Pooling(3)
    x, _ = next(images().batches(8))
    assert FlatModule(deepcopy(module), memory_format="contiguous")(x).equal(module(x))
    assert FlatModule(deepcopy(module))(x).equal(module(x))


def test_inputs_that_are_no_images_are_not_changed(
    points: Points, net: Callable[[], nn.Module]
) -> None:
    module = net()
    x, _ = points(20, 3)
    assert FlatModule(deepcopy(module), memory_format="channels_last")(x).equal(module(x))


def test_a_loss_gets_row_major_outputs_of_pixels() -> None:
    network = FlatModule(Model(name="unet").network((3, 8, 8), 2), memory_format="channels_last")
    outputs = network(torch.randn(2, 3, 8, 8))
    assert outputs.shape == (2, 2, 8, 8)
    assert outputs.is_contiguous()


def test_every_run_gives_the_same_bits_with_several_threads_too() -> None:
    module = Model(name="cnn").network((1, 8, 8), 3)
    alone = learned(trainer(deepcopy(module), images(1)))
    with ThreadPoolExecutor(4, initializer=torch.set_num_threads, initargs=(1,)) as threads:
        trainers = [trainer(deepcopy(module), images(1)) for _ in range(8)]
        assert all(weights.equal(alone) for weights in threads.map(learned, trainers))


def test_it_works_together_with_bf16() -> None:
    network = FlatModule(Pooling(3), precision="bf16", memory_format="channels_last")
    outputs = network(torch.randn(2, 3, 8, 8))
    assert outputs.dtype == torch.float32
    assert is_channels_last(network.module.inputs_of_conv2[0])  # type: ignore[arg-type, index]


def test_a_network_that_uses_view_is_refused_with_the_fix() -> None:
    x = torch.randn(2, 3, 8, 8)
    FlatModule(Viewing())(x)
    with refused(ConfigError, key="memory_format"):
        FlatModule(Viewing(), memory_format="channels_last")(x)


def test_another_error_of_a_network_stays_as_it_is() -> None:
    network = FlatModule(Pooling(3), memory_format="channels_last")
    with pytest.raises(RuntimeError, match="channels"):
        network(torch.randn(2, 1, 8, 8))


def test_a_memory_format_that_does_not_exist_is_refused() -> None:
    with refused(ConfigError, key="memory_format"):
        FlatModule(nn.Linear(1, 1), memory_format="nhwc")  # type: ignore[arg-type]
