"""Peers trained at once give what they give one by one, up to rounding."""

from collections.abc import Callable
from math import inf
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dispfl.core.flat_module import FlatModule
from dispfl.core.samples import PeerData
from dispfl.core.task import Task
from dispfl.core.train import Train, Trainer, TrainingRun
from dispfl.core.trained_part import Part, TrainedPart
from dispfl.data.batches import ResidentSamples
from dispfl.engines.vmap_peers import learn_stacked, train_alike, vmap_supports
from dispfl.errors import NonFiniteError
from dispfl.models.settings import Model

Points = Callable[[int, int], tuple[Tensor, Tensor]]


def mlp() -> nn.Module:
    return Model(name="mlp").network((4,), 3)


def trainers(
    points: Points, count: int = 3, network: FlatModule | None = None, **settings: Any
) -> list[Trainer]:
    """Peers with 20 points each, in batches of 8, 8 and 4."""
    network = network or FlatModule(mlp())
    data = [ResidentSamples(*points(20, which)) for which in range(count)]
    train = Train(**{"epochs": 2, "batch_size": 8, **settings})
    run = TrainingRun(train, Task(), seed=5, rounds=10)
    return [Trainer(network, PeerData(own, own), run, f"{k:03}", 3) for k, own in enumerate(data)]


def starts(peers: list[Trainer]) -> tuple[list[Tensor], list[Tensor]]:
    """Other weights and another mask for each peer."""
    rng = torch.Generator().manual_seed(0)
    size = peers[0].network.layout.size
    masks = [torch.rand(size, generator=rng) < 0.5 for _ in peers]
    first = peers[0].network.read()
    return [
        (first + 0.1 * torch.randn(size, generator=rng)).where(mask, 0.0) for mask in masks
    ], masks


def stacked(
    peers: list[Trainer],
    weights: list[Tensor],
    masks: list[Tensor],
    lr: float | None = None,
    only: Part | None = None,
) -> list[Tensor | NonFiniteError]:
    """What `learn_stacked` gives for peers that train as their settings say."""
    first = peers[0]
    parts = [TrainedPart.of(mask, only, first.network.layout) for mask in masks]
    steps = first.settings.local_steps(len(first.train))
    return learn_stacked(peers, weights, parts, steps, lr or first.settings.rate(first.t, first.T))


@pytest.mark.parametrize("only", [None, "head", "hidden1.*"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"clip_norm": 0.05}, {"clip_norm": 0.0}, {"noise_std": 0.1}, {"sam_rho": 0.3}],
)
def test_stacked_peers_learn_the_same_as_one_by_one(
    points: Points, settings: dict[str, Any], only: str | None
) -> None:
    alone, vmap_peers = trainers(points, **settings), trainers(points, **settings)
    weights, masks = starts(alone)
    before = [own.clone() for own in weights]
    expected = [
        peer.learn(own, mask, only=only)
        for peer, own, mask in zip(alone, weights, masks, strict=True)
    ]
    learned = stacked(vmap_peers, weights, masks, only=only)
    torch.testing.assert_close(learned, expected, rtol=1e-4, atol=1e-5)
    assert weights[0].equal(before[0])
    for mine, mask, one, other in zip(learned, masks, vmap_peers, alone, strict=True):
        assert isinstance(mine, Tensor)
        assert mine[~mask].view(torch.int32).count_nonzero() == 0
        assert one.report.passes == other.report.passes
        assert one.report.train_loss == pytest.approx(other.report.train_loss, rel=1e-4)


def test_stacked_peers_learn_with_a_learning_rate_of_their_own_too(points: Points) -> None:
    alone, vmap_peers = trainers(points), trainers(points)
    weights, masks = starts(alone)
    expected = [
        peer.learn(own, mask, lr=0.5) for peer, own, mask in zip(alone, weights, masks, strict=True)
    ]
    torch.testing.assert_close(
        stacked(vmap_peers, weights, masks, lr=0.5), expected, rtol=1e-4, atol=1e-5
    )


def test_the_failure_of_one_peer_does_not_affect_the_others(points: Points) -> None:
    peers = trainers(points)
    weights, masks = starts(peers)
    expected = trainers(points)[2].learn(weights[2], masks[2])
    weights[1] = weights[1].where(~masks[1], inf)
    first, failed, last = stacked(peers, weights, masks)
    assert isinstance(failed, NonFiniteError)
    assert str(failed).startswith("Peer 001, round 3: the training loss became infinite or nan")
    torch.testing.assert_close(last, expected, rtol=1e-4, atol=1e-5)
    assert isinstance(first, Tensor)
    assert peers[1].report.train_loss is None


def test_only_peers_with_equally_many_samples_are_stacked(points: Points) -> None:
    peers = trainers(points)
    assert train_alike(peers)
    peers[1].data = PeerData(ResidentSamples(*points(21, 7)), peers[1].test)
    assert not train_alike(peers)


def test_a_model_with_buffers_is_not_stacked(points: Points) -> None:
    network = FlatModule(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)))
    assert not train_alike(trainers(points, network=network))


class Tied(nn.Module):
    """One layer is used twice, one does not learn."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = nn.Linear(4, 4)
        self.fixed = nn.Linear(4, 4).requires_grad_(False)
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.last(self.fixed(self.twice(torch.tanh(self.twice(x)))))
        return outputs


class DecidesByValue(nn.Linear):
    """A network that looks at its inputs."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if x.max() > 0 else -x)


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (mlp, True),
        (Tied, True),
        (lambda: DecidesByValue(4, 3), False),
        (lambda: nn.Sequential(nn.Linear(4, 3), nn.Dropout()), False),
        (lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), False),
    ],
    ids=["mlp", "tied", "by value", "dropout", "batch norm"],
)
def test_a_batch_shows_which_models_vmap_supports(
    points: Points, module: Callable[[], nn.Module], expected: bool
) -> None:
    network, samples = FlatModule(module()), ResidentSamples(*points(20, 0))
    before = network.read()
    assert vmap_supports(network, Task(), samples) == expected
    assert network.read().equal(before)
    assert network.grad.count_nonzero() == 0


def test_a_model_in_bf16_is_not_stacked(points: Points) -> None:
    assert not vmap_supports(
        FlatModule(mlp(), precision="bf16"), Task(), ResidentSamples(*points(20, 0))
    )


def test_a_model_in_channels_last_is_not_stacked(points: Points) -> None:
    assert not vmap_supports(
        FlatModule(mlp(), memory_format="channels_last"), Task(), ResidentSamples(*points(20, 0))
    )


def test_a_layer_used_twice_and_a_frozen_one_are_stacked_too(points: Points) -> None:
    network = FlatModule(Tied())
    alone, vmap_peers = trainers(points, network=network), trainers(points, network=network)
    weights, masks = starts(alone)
    expected = [
        peer.learn(own, mask) for peer, own, mask in zip(alone, weights, masks, strict=True)
    ]
    torch.testing.assert_close(stacked(vmap_peers, weights, masks), expected, rtol=1e-4, atol=1e-5)
