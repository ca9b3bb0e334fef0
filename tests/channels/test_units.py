"""The small network of a mask of units is the same function as the large one whose left-out units
are masked."""

import pickle
from collections.abc import Callable

import numpy as np
import pytest
import torch
from messages import refused
from torch import Tensor, nn
from torch.nn import functional

from dispfl.channels.channel_mask import ChannelLayout, ChannelMask, channel_layout
from dispfl.channels.find_units import find_units
from dispfl.channels.kept_units import random_units, unit_counts
from dispfl.core.flat_module import FlatModule
from dispfl.core.layout import Layout
from dispfl.core.packed import PackedModel
from dispfl.errors import ConfigError
from dispfl.models.networks import MLP, VGG11, ResNet18, SmallCNN


class Convolutions(nn.Module):
    """Batch norm, a depthwise and a transposed convolution, concatenation, a tied parameter-free
    head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 24, 3)
        self.norm = nn.BatchNorm2d(24)
        self.depthwise = nn.Conv2d(24, 24, 3, groups=24)
        self.up = nn.ConvTranspose2d(24, 20, 3)
        self.act = nn.PReLU(20)
        self.side = nn.Conv2d(20, 8, 1)
        self.linear = nn.Linear(28, 10)

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.up(self.depthwise(torch.relu(self.norm(self.conv(x))))))
        return self.linear(torch.cat([y, self.side(y)], 1).mean((2, 3)))  # type: ignore[no-any-return]


class Normalized(nn.Module):
    """Layer norm on a residual stream, and RMS norm on hidden units."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(12, 32)
        self.norm = nn.LayerNorm(32)
        self.inner = nn.Linear(32, 48)
        self.rms = nn.RMSNorm(48)
        self.outer = nn.Linear(48, 32)
        self.linear = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        return self.linear(x + self.outer(functional.gelu(self.rms(self.inner(self.norm(x))))))  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(8, 16, batch_first=True)
        self.hidden = nn.Linear(16, 32)
        self.linear = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(torch.relu(self.hidden(self.gru(x)[0][:, -1])))  # type: ignore[no-any-return]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.block = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0)
        self.linear = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.block(self.embed(x)).mean(1))  # type: ignore[no-any-return]


IMAGES = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
NETWORKS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "cnn": (lambda: SmallCNN(3, 10, 32), IMAGES),
    "mlp": (lambda: MLP(30, 4), IMAGES.flatten(1)[:, :30]),
    "resnet18": (lambda: ResNet18(3, 10), IMAGES),
    "vgg11": (lambda: VGG11(3, 10), IMAGES),
    "convolutions": (Convolutions, IMAGES),
    "normalized": (Normalized, IMAGES.flatten(1)[:, :12]),
    "recurrent": (Recurrent, IMAGES.flatten(1)[:, :48].reshape(4, 6, 8)),
    "attention": (Attention, torch.arange(28).reshape(4, 7)),
}
LAYOUTS: dict[str, ChannelLayout] = {}


def units_of(name: str) -> ChannelLayout:
    """Found once: tracing a ResNet takes seconds."""
    if name not in LAYOUTS:
        build, example = NETWORKS[name]
        LAYOUTS[name] = find_units(build(), example)
    return LAYOUTS[name]


def half_of(layout: ChannelLayout, seed: int = 0) -> ChannelMask:
    """A random half of the units of each group, equally many of each norm group."""
    counts = [max(1, group.units // group.strata // 2) * group.strata for group in layout.groups]
    return random_units(layout, counts, rng=torch.Generator().manual_seed(seed))


def over_kept_channels(layer: nn.Module, held: Tensor) -> Callable[..., Tensor]:
    """The layer's forward by its definition, with mean and variance over the held channels of each
    norm group."""

    def forward(x: Tensor) -> Tensor:
        last = not isinstance(layer, nn.GroupNorm)
        groups = 1 if last else layer.num_groups
        rows = (x if last else x.reshape(*x.shape[:2], -1).movedim(1, -1)).unflatten(
            -1, (groups, -1)
        )
        kept = held.to(x.dtype).unflatten(0, (groups, -1))
        dims = (-1,) if last else (1, -1)
        count = kept.sum(-1, keepdim=True) * (1 if last else rows.shape[1])
        mean = (rows * kept).sum(dims, keepdim=True) / count
        if isinstance(layer, nn.RMSNorm):
            mean = torch.zeros_like(mean)
        variance = ((rows - mean) ** 2 * kept).sum(dims, keepdim=True) / count
        eps = torch.finfo(x.dtype).eps if layer.eps is None else layer.eps
        normal = ((rows - mean) * (variance + eps).rsqrt()).flatten(-2)
        if not last:
            normal = normal.movedim(-1, 1).reshape(x.shape)
        shape = [1, -1] + [1] * (x.ndim - 2) if not last else [-1]
        weight, bias = layer.get_parameter("weight"), getattr(layer, "bias", None)
        return normal * weight.view(shape) + (0 if bias is None else bias.view(shape))

    return forward


def masked_large(build: Callable[[], nn.Module], mask: ChannelMask) -> nn.Module:
    """The large network with zeros for the left-out units, in float64, by hand."""
    large = build().double()
    flags = dict(zip(mask.layout.names, mask.layout.views(mask.unpack()), strict=True))
    with torch.no_grad():
        for name, parameter in large.named_parameters():
            parameter.mul_(flags[name])
    for name, layer in large.named_modules():
        if isinstance(layer, (nn.LayerNorm, nn.RMSNorm)) or (
            isinstance(layer, nn.GroupNorm) and layer.num_groups == 4
        ):
            layer.forward = over_kept_channels(layer, flags[f"{name}.weight"])  # type: ignore[method-assign]
    return large


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("seed", [0, 1])
def test_small_and_masked_network_have_the_same_outputs_loss_and_gradients(
    name: str, seed: int
) -> None:
    build, inputs = NETWORKS[name]
    torch.manual_seed(seed)
    first = build()
    weights = FlatModule(first).read()
    mask = half_of(units_of(name), seed)
    packed = PackedModel.pack(weights, mask)

    def restored() -> nn.Module:
        module = build()
        nn.utils.vector_to_parameters(weights, module.parameters())
        return module

    large = masked_large(restored, mask)
    small = mask.small_network(restored())
    nn.utils.vector_to_parameters(packed.values, small.parameters())
    for buffer, axis in mask.layout.buffer_axes.items():
        small.get_buffer(buffer).copy_(
            large.get_buffer(buffer)[torch.from_numpy(mask.positions[axis])]
        )
    small = small.double()
    x = inputs.double() if inputs.is_floating_point() else inputs
    labels = torch.arange(len(x)) % 4
    for training in (False, True):
        outputs, losses = [], []
        for module in (large, small):
            module.train(training)
            module.zero_grad()
            outputs.append(module(x))
            losses.append(functional.cross_entropy(outputs[-1], labels))
            losses[-1].backward()  # type: ignore[no-untyped-call]
        assert outputs[0].std() > 0.01  # it is no constant
        torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-9, atol=1e-9)
        dense = torch.cat([p.grad.flatten() for p in large.parameters() if p.grad is not None])
        compact = torch.cat([p.grad.flatten() for p in small.parameters() if p.grad is not None])
        assert compact.abs().max() > 0
        torch.testing.assert_close(compact, dense[mask.unpack()], rtol=1e-8, atol=1e-9)


def test_units_of_the_small_cnn() -> None:
    """Equally many channels of each of four norm groups; the hidden layer's inputs are 64 positions
    of each channel."""
    layout = units_of("cnn")
    assert [(g.name, g.units, g.channels, g.strata) for g in layout.groups] == [
        ("conv1", 16, 1, 4),
        ("conv2", 32, 1, 4),
        ("hidden", 64, 1, 1),
    ]
    rows, columns = layout.axes[layout.names.index("hidden.weight")]
    assert rows is not None
    assert columns is not None
    assert layout.axis_units[rows] == tuple(range(48, 112))
    assert layout.axis_units[columns] == tuple(np.repeat(np.arange(16, 48), 64).tolist())
    assert layout.axes[layout.names.index("conv1.weight")][1] is None  # inputs are never left out
    assert layout.axes[layout.names.index("linear.weight")][0] is None  # nor are the classes


def test_units_of_resnet_are_norm_groups_and_residual_sums_share_them() -> None:
    layout = units_of("resnet18")
    assert {(group.units, group.strata) for group in layout.groups} == {(32, 1)}
    assert [group.channels for group in layout.groups] == [2] * 3 + [4] * 3 + [8] * 3 + [16] * 3
    axes = dict(zip(layout.names, layout.axes, strict=True))
    stream = axes["conv1.weight"][0]
    assert axes["stages.0.0.conv2.weight"][0] == axes["stages.0.1.conv2.weight"][0] == stream
    assert axes["stages.1.0.shortcut.0.weight"] == (
        axes["stages.1.0.conv2.weight"][0],
        stream,
        None,
        None,
    )


def test_recurrent_and_attention_layers_stay_dense_and_are_named() -> None:
    assert units_of("recurrent").dense_layers == ["gru"]
    assert [group.name for group in units_of("recurrent").groups] == ["hidden"]
    assert [group.name for group in units_of("attention").groups] == ["block.linear1"]
    assert "block.self_attn" in units_of("attention").dense_layers


def test_a_named_layer_is_kept_whole() -> None:
    build, example = NETWORKS["cnn"]
    layout = find_units(build(), example, keep=["conv2"])
    assert [group.name for group in layout.groups] == ["conv1", "hidden"]
    layout = find_units(NETWORKS["resnet18"][0](), IMAGES[:2], keep=["stages.3"])
    assert [group.name for group in layout.groups][-1] == "stages.2.1.conv1"


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    build, example = NETWORKS["cnn"]
    with refused(ConfigError, key="method.keep"):
        find_units(build(), example, keep=["conv3"])


class WithSizes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, stride=2)
        self.linear = nn.Linear(16 * 15 * 15, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(torch.relu(self.conv(x)).view(-1, 3600))  # type: ignore[no-any-return]


class Untraceable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("no forward today")


@pytest.mark.parametrize(
    ("module", "sentence"),
    [
        (WithSizes(), "the network's forward fails with fewer channels of conv .* x.flatten(1)"),
        (
            nn.Sequential(nn.Flatten(), nn.Linear(3072, 10)),
            "this network has no channels that can be left out",
        ),
        (Untraceable(), "the network cannot be traced (RuntimeError: no forward today)"),
    ],
)
def test_networks_that_cannot_be_cut_are_refused_in_a_sentence(
    module: nn.Module, sentence: str
) -> None:
    pattern = sentence.replace("(", r"\(").replace(")", r"\)")
    with pytest.raises(ConfigError, match=pattern):
        find_units(module, IMAGES)


class Mixing(nn.Module):
    """Mixes channels by an operation that looks like one on single elements; the last layer starts
    with zeros."""

    def __init__(self, mix: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.mix = mix
        self.conv = nn.Conv2d(3, 16, 3, stride=2)
        self.inner = nn.Conv2d(16, 16, 3, stride=2)
        self.linear = nn.Linear(16, 10)
        nn.init.zeros_(self.linear.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.inner(self.mix(self.conv(x))))
        return self.linear(x.mean((2, 3)))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "mix", [lambda x: x.flip(1), lambda x: x.softmax(1), lambda x: x.roll(1, 1)]
)
def test_channels_that_are_mixed_stay_dense(mix: Callable[[Tensor], Tensor]) -> None:
    layout = find_units(Mixing(mix), IMAGES)
    assert [group.name for group in layout.groups] == ["inner"]


def test_finding_units_does_not_change_the_network() -> None:
    module = Convolutions().train()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    find_units(module, IMAGES)
    assert module.training
    assert all(tensor.equal(before[name]) for name, tensor in module.state_dict().items())
    assert not any(parameter.grad is not None for parameter in module.parameters())


@pytest.mark.parametrize("name", ["cnn", "resnet18", "convolutions"])
def test_a_layout_is_the_same_after_json_and_pickle(name: str) -> None:
    layout = units_of(name)
    assert channel_layout(layout.spec()) == layout
    assert pickle.loads(pickle.dumps(layout)) == layout
    mask = half_of(layout)
    again = pickle.loads(pickle.dumps(mask))
    assert again.units.tolist() == mask.units.tolist()


def test_counts_of_a_mask_are_those_of_its_single_weights() -> None:
    for name in ("cnn", "convolutions"):
        mask, other = half_of(units_of(name), 0), half_of(units_of(name), 1)
        flags, others = mask.unpack(), other.unpack()
        assert mask.kept == int(flags.sum())
        assert mask.kept_per_layer(mask.layout) == [
            int(flags[where].sum()) for where in mask.layout.slices
        ]
        assert mask.overlap(other) == int((flags & others).sum())
        assert mask.small.size == mask.kept


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("layers", ["uniform", "erk"])
def test_widths_use_the_density_and_never_exceed_it(name: str, layers: str) -> None:
    layout = units_of(name)
    assert unit_counts(layout, 1.0, layers) == tuple(group.units for group in layout.groups)
    for density in (0.75, 0.9):
        kept = (
            random_units(layout, unit_counts(layout, density, layers), rng=torch.Generator()).kept
            / layout.size
        )
        assert density - 0.04 <= kept <= density
    if name in ("resnet18", "vgg11", "cnn"):
        for density in (0.125, 0.2, 0.25, 0.5):
            kept = (
                random_units(
                    layout, unit_counts(layout, density, layers), rng=torch.Generator()
                ).kept
                / layout.size
            )
            assert 0.93 * density <= kept <= density


def test_widths_of_resnet_are_equal_shares_and_multiples_of_eight() -> None:
    layout = units_of("resnet18")
    counts = unit_counts(layout, 0.25, "uniform")
    assert counts == (16,) * 9 + counts[9:]  # half of the channels: a quarter of the weights
    assert all(
        count * group.channels % 8 == 0 for count, group in zip(counts, layout.groups, strict=True)
    )
    wide, narrow = unit_counts(layout, 0.25, "erk")[0], unit_counts(layout, 0.25, "erk")[-1]
    assert wide > 2 * narrow  # large layers are sparser, as with ERK


def test_a_density_without_units_is_refused() -> None:
    with refused(ConfigError, key="method.density"):
        unit_counts(units_of("cnn"), 0.001, "uniform")
    with refused(ConfigError, key="method.density"):
        unit_counts(units_of("recurrent"), 0.5, "uniform")


def test_frozen_parameters_are_neither_in_the_layout_nor_cut() -> None:
    module = nn.Sequential(
        nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3)
    )
    for parameter in module[0].parameters():
        parameter.requires_grad_(False)
    layout = find_units(module, torch.randn(2, 6))
    assert layout.names == Layout.of(module).names
    assert [group.name for group in layout.groups] == ["2"]
