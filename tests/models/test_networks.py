"""The built-in networks: number of parameters, inputs and outputs."""

from pathlib import Path

import pytest
import torch
from messages import refused
from torch import nn

from dispfl.core.layout import Layout
from dispfl.errors import ConfigError
from dispfl.models.settings import FOR_PIXELS, MODELS, Model

FOR_IMAGES = sorted(MODELS.keys() - {"text"})


def built(name: str, channels: int, classes: int, size: int) -> nn.Module:
    """A network whose tensors have shapes and no numbers."""
    with torch.device("meta"):
        return Model(name=name).build(channels, classes, size)


@pytest.mark.parametrize(
    ("name", "channels", "classes", "size", "parameters"),
    [
        ("resnet18", 3, 10, 32, 11_173_962),
        ("resnet18", 3, 100, 32, 11_220_132),
        ("resnet18", 3, 200, 64, 11_271_432),
        ("vgg11", 3, 10, 32, 9_231_114),
        ("cnn", 1, 10, 28, 105_962),
        ("unet", 3, 2, 32, 118_930),
        ("text", 1, 2, 32, 133_314),
    ],
)
def test_parameter_counts(
    name: str, channels: int, classes: int, size: int, parameters: int
) -> None:
    assert Layout.of(built(name, channels, classes, size)).size == parameters


@pytest.mark.parametrize("name", FOR_IMAGES)
@pytest.mark.parametrize(("channels", "classes", "size"), [(1, 10, 32), (3, 10, 32), (3, 200, 64)])
def test_a_batch_of_two_gives_one_output_per_class(
    name: str, channels: int, classes: int, size: int
) -> None:
    images = torch.empty(2, channels, size, size, device="meta")
    pixels = (size, size) if name in FOR_PIXELS else ()
    assert built(name, channels, classes, size)(images).shape == (2, classes, *pixels)


@pytest.mark.parametrize("size", [27, 28, 29, 30])
def test_the_small_cnn_takes_any_image_size(size: int) -> None:
    assert built("cnn", 1, 10, size)(torch.empty(1, 1, size, size, device="meta")).shape == (1, 10)


@pytest.mark.parametrize("name", FOR_IMAGES)
def test_no_network_has_buffers_because_group_norm_needs_none(name: str) -> None:
    module = built(name, 3, 10, 32)
    assert not list(module.buffers())
    assert any(isinstance(layer, nn.GroupNorm) for layer in module.modules())


def test_images_in_channels_last_memory_give_the_same_outputs() -> None:
    network = Model(name="cnn").build(3, 10, 16)
    images = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(
        network(images.to(memory_format=torch.channels_last)), network(images)
    )


def test_an_unknown_network_is_refused_with_the_nearest_name() -> None:
    with refused(ConfigError, key="model.name"):
        Model(name="resnet")


def test_vgg_refuses_images_too_small_for_five_poolings() -> None:
    with refused(ConfigError, key="model"):
        Model(name="vgg11").build(1, 10, 28)


def test_kaiming_initialization_draws_convolutions_with_the_fan_out_of_the_authors_vgg11() -> None:
    torch.manual_seed(0)
    theirs, ours = (
        Model(name="vgg11", init=init).build(3, 10, 32) for init in ("kaiming", "torch")
    )
    last = [
        [m for m in network.modules() if isinstance(m, torch.nn.Conv2d)][-1].weight
        for network in (theirs, ours)
    ]
    assert last[0].std().item() == pytest.approx((2 / (512 * 9)) ** 0.5, rel=0.01)
    assert (last[0].std() / last[1].std()).item() == pytest.approx(6**0.5, rel=0.01)


def test_the_papers_experiments_start_vgg11_as_the_authors_do() -> None:
    files = (Path(__file__).parents[2] / "experiments" / "paper").glob("*.toml")
    with_vgg = [text for path in files if "vgg11" in (text := path.read_text())]
    assert len(with_vgg) == 2
    assert all(
        text.count("vgg11") == text.count('{ name = "vgg11", init = "kaiming" }')
        for text in with_vgg
    )
