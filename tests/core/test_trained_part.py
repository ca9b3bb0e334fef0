"""Training a part of the weights, and sharpness-aware minimization, by hand and against torch."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from messages import refused
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from dispfl import DisPFL, Privacy, Train
from dispfl.channels.channel_mask import ChannelMask
from dispfl.core.flat_module import FlatModule
from dispfl.core.layout import Layout
from dispfl.core.packed import WeightMask
from dispfl.core.rng import stream
from dispfl.core.samples import PeerData
from dispfl.core.task import Task
from dispfl.core.train import Trainer, TrainingRun
from dispfl.costs.flops import forward_cost
from dispfl.data.batches import ResidentSamples
from dispfl.errors import ConfigError, NonFiniteError
from dispfl.privacy.steps import PrivateSteps, SecretStream

Points = Callable[[int, int], tuple[Tensor, Tensor]]
Net = Callable[[], nn.Module]
SETTINGS: list[dict[str, Any]] = [
    {},
    {"momentum": 0.9, "keep_moments": True},
    {"optimizer": "adamw", "weight_decay": 0.1},
    {"noise_std": 0.1},
    {"sam_rho": 0.05, "momentum": 0.9},
]


def trainer_of(module: nn.Module, points: Points, **settings: Any) -> Trainer:
    """Peer 001 in round 3, with 20 points in batches of 8."""
    samples = ResidentSamples(*points(20, 0))
    train = Train(**{"epochs": 2, "batch_size": 8, **settings})
    run = TrainingRun(train, Task(), seed=5, rounds=10)
    return Trainer(FlatModule(module), PeerData(samples, samples), run, "001", 3)


def half_mask(size: int) -> Tensor:
    return torch.arange(size) % 2 == 0


def head_of(net: Net) -> Tensor:
    """A flag for each weight: whether it is in the last layer."""
    layout = Layout.of(net())
    return layout.flags(layout.matching("head", "only"))


@pytest.mark.parametrize("settings", SETTINGS)
def test_training_only_everything_equals_training_bit_for_bit(
    points: Points, net: Net, settings: dict[str, Any]
) -> None:
    module, mask = net(), half_mask(67)
    weights = torch.where(mask, FlatModule(deepcopy(module)).read(), 0.0)
    whole, *parts = (
        trainer_of(deepcopy(module), points, **settings).learn(weights, mask, only=only)
        for only in (None, "*", ["0.*", "head"], torch.ones(67, dtype=torch.bool), mask)
    )
    assert all(part.equal(whole) for part in parts)


@pytest.mark.parametrize("settings", SETTINGS)
def test_frozen_weights_keep_their_value_and_masked_ones_stay_zero(
    points: Points, net: Net, settings: dict[str, Any]
) -> None:
    head, mask = head_of(net), half_mask(67)
    trainer = trainer_of(net(), points, **settings)
    weights = torch.where(mask, trainer.network.read(), 0.0)
    for only, trained in (("head", head), (~head, ~head), (half_mask(67) & head, head & mask)):
        learned = trainer.learn(weights, mask, only=only, prox=(0.5, torch.ones(67)))
        assert learned[~trained].equal(weights[~trained])
        assert (learned[trained & mask] != weights[trained & mask]).any()
        assert learned[~mask].view(torch.int32).count_nonzero() == 0


def test_training_the_head_equals_torchs_sgd_with_the_body_frozen(points: Points, net: Net) -> None:
    settings = {"momentum": 0.9, "clip_norm": 0.1, "weight_decay": 0.01}
    trainer = trainer_of(net(), points, **settings)
    module = deepcopy(trainer.network.module)
    learned = trainer.learn(trainer.network.read(), torch.ones(67, dtype=torch.bool), only="head")

    head = list(module.parameters())[-2:]
    for parameter in list(module.parameters())[:-2]:
        parameter.requires_grad_(False)
    optimizer = torch.optim.SGD(head, 0.1 * 0.998**3, 0.9, weight_decay=0.01)
    order = stream(5, "batches", "001", 3)
    for _ in range(2):
        for x, y in trainer.train.batches(8, rng=order):
            optimizer.zero_grad()
            functional.cross_entropy(module(x), y).backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(head, 0.1)
            optimizer.step()
    expected = torch.cat([parameter.detach().reshape(-1) for parameter in module.parameters()])
    torch.testing.assert_close(learned, expected, rtol=1e-5, atol=1e-6)


def test_the_moments_of_frozen_weights_are_kept_as_they_are(points: Points, net: Net) -> None:
    head, dense = head_of(net), torch.ones(67, dtype=torch.bool)
    trainer = trainer_of(net(), points, momentum=0.9, weight_decay=0.1)
    weights = trainer.learn(trainer.network.read(), dense, only=~head)
    after_body = trainer.moments["model"].values["momentum_buffer"]
    assert not after_body[head].any()
    trainer.learn(weights, dense, only="head")
    after_head = trainer.moments["model"].values["momentum_buffer"]
    assert after_head[~head].equal(after_body[~head])
    assert after_head[head].all()


def two_weights(
    loss: Callable[[Tensor, Tensor], Tensor], **settings: Any
) -> Callable[..., list[float]]:
    """Train (w_0, w_1) = (3, 4) for one step at a learning rate of 0.1, on the input (1, 1)."""
    samples = ResidentSamples(torch.ones(1, 2), torch.zeros(1))
    defaults = {"steps": 1, "lr": 0.1, "weight_decay": 0.0, "clip_norm": 0.0}
    run = TrainingRun(Train(**{**defaults, **settings}), Task(loss=loss), seed=0, rounds=1)

    class TwoWeights(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w_0 = nn.Parameter(torch.zeros(1))
            self.w_1 = nn.Parameter(torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            return x * torch.cat([self.w_0, self.w_1])

    def train(mask: tuple[bool, bool] = (True, True), only: Any = None) -> list[float]:
        trainer = Trainer(FlatModule(TwoWeights()), PeerData(samples, samples), run, "000", 0)
        learned: list[float] = trainer.learn(
            torch.tensor([3.0, 4.0]) * torch.tensor(mask), torch.tensor(mask), only=only
        ).tolist()
        assert trainer.report.passes[0].samples == (2 if settings.get("sam_rho") else 1)
        return learned

    return train


def half_square(outputs: Tensor, _: Tensor) -> Tensor:
    """A loss whose gradient is w."""
    return (outputs**2).sum() / 2


def cube(outputs: Tensor, _: Tensor) -> Tensor:
    """A loss whose gradient is w^2."""
    return (outputs**3).sum() / 3


def test_the_gradient_is_clipped_to_the_norm_of_the_trained_part() -> None:
    """The gradient is (3, 4): its part (4) is clipped to 2, the whole to (1.2, 1.6)."""
    train = two_weights(half_square, clip_norm=2.0)
    assert train(only="w_1") == pytest.approx([3.0, 4 - 0.1 * 2])
    assert train() == pytest.approx([3 - 0.1 * 1.2, 4 - 0.1 * 1.6])


def test_sharpness_aware_minimization_by_hand() -> None:
    """At w = (3, 4) the gradient is (9, 16), with norm 337^0.5: SAM takes that at the point that is
    rho = 2 further up."""
    train = two_weights(cube, sam_rho=2.0)
    norm = 337**0.5
    up = [3 + 2 * 9 / norm, 4 + 2 * 16 / norm]
    assert train() == pytest.approx([3 - 0.1 * up[0] ** 2, 4 - 0.1 * up[1] ** 2], rel=1e-6)
    # Under a mask, and with a frozen weight, the other one alone moves: by 2.
    assert train(mask=(False, True)) == pytest.approx([0.0, 4 - 0.1 * 6**2])
    assert train(only="w_1") == pytest.approx([3.0, 4 - 0.1 * 6**2])
    # Its gradient, 36, is clipped as any other.
    clipped = two_weights(cube, sam_rho=2.0, clip_norm=10.0)
    assert clipped(only="w_1") == pytest.approx([3.0, 4 - 0.1 * 10])


def test_sam_without_a_slope_takes_a_plain_step() -> None:
    train = two_weights(lambda outputs, _: outputs.sum() * 0.0, sam_rho=0.5)
    assert train() == [3.0, 4.0]


def test_sam_costs_twice_and_is_refused_with_privacy(make_context: Callable[..., Any]) -> None:
    assert Train(sam_rho=0.1, epochs=3).samples_trained(20) == 2 * 3 * 20
    context = make_context(train=Train(sam_rho=0.1), privacy=Privacy(noise_multiplier=1.0))
    with refused(ConfigError, key="train.sam_rho"):
        context.check()


def test_flags_of_the_whole_network_are_those_of_a_small_networks_channels(
    make_context: Callable[..., Any], trainer_for: Callable[..., Trainer]
) -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))

    context = make_context(model=model, method=DisPFL(structure="channels", density=0.5))
    mask = context.layout.random_mask(0.5, "uniform", rng=torch.Generator().manual_seed(0))
    assert isinstance(mask, ChannelMask)
    head = head_of(model)

    def learned(only: Any) -> tuple[Tensor, Tensor]:
        trainer = trainer_for(context)
        trainer.network = trainer.network.for_mask(mask)
        weights = context.first_weights[mask.unpack()]
        return weights, trainer.learn(weights, mask, only=only)

    weights, by_name = learned("head")
    _, by_flags = learned(head)
    assert by_name.equal(by_flags)
    trained = head[mask.unpack()]
    assert by_name[~trained].equal(weights[~trained])
    assert (by_name[trained] != weights[trained]).all()


def test_private_gradients_are_those_of_the_trained_part() -> None:
    """A sample's gradient is its input, (3, 4): its part 3 is clipped to 2. The noise is nil."""
    samples = ResidentSamples(torch.tensor([[3.0, 4.0]]), torch.ones(1))
    settings = Train(steps=1, lr=0.1, weight_decay=0.0)

    def product(outputs: Tensor, labels: Tensor) -> Tensor:
        return (outputs.squeeze(1) * labels).sum()

    run = TrainingRun(settings, Task(loss=product), seed=0, rounds=1)
    network = FlatModule(nn.Linear(2, 1, bias=False))
    trainer = Trainer(network, PeerData(samples, samples), run, "000", 0)
    trainer.private = PrivateSteps(SecretStream(bytes(32)), ("000", 0), 1e-9, 2.0, 1.0, 1.0)
    only = torch.tensor([True, False])
    learned = trainer.learn(torch.ones(2), torch.ones(2, dtype=torch.bool), only=only)
    assert learned.tolist() == pytest.approx([1 - 0.1 * 2, 1.0])


@pytest.mark.parametrize("only", ["0.*", "2.*", "4.*", ["0.weight", "4.bias"]])
def test_training_a_part_costs_what_torch_counts(only: Any, points: Points) -> None:
    module = nn.Sequential(
        nn.Linear(4, 8, bias=False), nn.ReLU(), nn.Linear(8, 8, bias=False), nn.ReLU(),
        nn.Linear(8, 3),
    )  # fmt: skip
    trainer = trainer_of(module, points, steps=1)
    cost = forward_cost(deepcopy(module), trainer.network.layout, torch.zeros(1, 4))
    with FlopCounterMode(display=False) as counter:
        trainer.learn(trainer.network.read(), torch.ones(123, dtype=torch.bool), only=only, steps=1)
    [passes] = trainer.report.passes
    counted = cost.training(passes.kept, passes.samples, passes.trained)
    # Torch counts products alone; a bias costs 1 a sample, and another 1 if it is trained.
    bias = 3 + 3 * passes.trained[-1] // 3 if passes.trained else 0
    assert counted == counter.get_total_flops() + 8 * bias


def test_frozen_layers_cost_their_inputs_gradient_only_where_a_trained_one_comes_before() -> None:
    """Layers of 2, 6 and 3 weights, each used once: 4, 12 and 6 operations forward."""
    module = nn.Sequential(
        nn.Linear(1, 2, bias=False), nn.Linear(2, 3, bias=False), nn.Linear(3, 1, bias=False)
    )
    cost = forward_cost(module, Layout.of(module), torch.zeros(1, 1))
    forward = 4 + 12 + 6
    assert cost.training([2, 6, 3], 1, [0, 0, 3]) == forward + 6
    assert cost.training([2, 6, 3], 1, [0, 6, 0]) == forward + 12 + 6
    assert cost.training([2, 6, 3], 1, [2, 0, 0]) == forward + 4 + 12 + 6
    # A mask keeps 3 of the 6; 1 of them is trained.
    assert cost.training([2, 3, 3], 1, [0, 1, 0]) == (4 + 6 + 6) + 2 + 6


def test_a_part_that_the_mask_leaves_out_trains_nothing(points: Points, net: Net) -> None:
    head = head_of(net)
    trainer = trainer_of(net(), points)
    weights = torch.where(head, 0.0, trainer.network.read())
    parts_without_weights: list[Any] = ["head", head, []]
    for nothing in parts_without_weights:
        assert trainer.learn(weights, ~head, only=nothing).equal(weights)
    assert trainer.report.passes == []


@pytest.mark.parametrize(
    "only",
    ["tail", torch.ones(66, dtype=torch.bool), torch.ones(67)],
    ids=["no match", "too few flags", "no flags"],
)
def test_what_names_no_part_of_the_network_is_refused(points: Points, net: Net, only: Any) -> None:
    trainer = trainer_of(net(), points)
    with refused(ConfigError, key="only"):
        trainer.learn(trainer.network.read(), torch.ones(67, dtype=torch.bool), only=only)


def test_a_failed_training_of_a_part_leaves_the_network_trainable(points: Points, net: Net) -> None:
    trainer = trainer_of(net(), points)
    dense = torch.ones(67, dtype=torch.bool)
    with pytest.raises(NonFiniteError):
        trainer.learn(torch.full((67,), torch.inf), dense, only="head")
    network = trainer.network.for_mask(WeightMask.pack(dense))
    assert all(parameter.requires_grad for parameter in network.module.parameters())


def test_epochs_and_steps_mean_the_same_in_learn_and_in_batches(points: Points, net: Net) -> None:
    dense = torch.ones(67, dtype=torch.bool)
    durations: list[tuple[dict[str, Any], int]] = [({}, 6), ({"epochs": 1}, 3), ({"steps": 5}, 5)]
    for arguments, steps in durations:
        batches = trainer_of(net(), points).batches(**arguments)
        assert len(list(batches)) == steps
        trainer = trainer_of(net(), points)
        trainer.learn(trainer.network.read(), dense, **arguments)
        full_epochs, last_steps = divmod(steps, 3)
        assert trainer.report.passes[0].samples == 20 * full_epochs + 8 * last_steps
    for key in ("epochs", "steps"):
        for count in (0, 1.5):
            wrong: dict[str, Any] = {key: count}
            trainer = trainer_of(net(), points)
            with refused(ConfigError, key=key):
                next(trainer.batches(**wrong))
            with refused(ConfigError, key=key):
                trainer.learn(trainer.network.read(), dense, **wrong)


def test_a_loop_of_ones_own_trains_a_part_and_ends_with_a_number(points: Points, net: Net) -> None:
    head = head_of(net)
    trainer = trainer_of(net(), points)
    weights = trainer.network.read()
    trainer.begin(weights, torch.ones(67, dtype=torch.bool), only="head")
    total = 0.0
    for x, y in trainer.batches(steps=2):
        total += float(trainer.backward(x, y))
        trainer.network.weights.mul_(0.9).sub_(trainer.network.grad)
        trainer.restore_frozen()
    learned = trainer.end(total / 2)
    assert learned[~head].equal(weights[~head])
    assert trainer.report.train_loss == total / 2
    with pytest.raises(NonFiniteError):
        trainer.end(float("nan"))
