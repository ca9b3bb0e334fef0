"""Synthetic data for several benchmarks: random images, and Dis-PFL peers with such images."""

import torch

from dispfl import DisPFL, RandomRegular, Train
from dispfl.core.packed import PackedModel
from dispfl.core.samples import PeerData
from dispfl.data.batches import ImageTransform, ResidentSamples
from dispfl.methods.base import PeerState
from dispfl.models.settings import Model
from dispfl.round.context import PeerTask, RunContext
from dispfl.round.round import initial_states
from dispfl.testing.rounds import simulated_context
from dispfl.topology import peer_names

PAPER_BATCH = 128
PAPER_DEGREE = 10
ROUNDS = 500


def images(channels: int, size: int, samples: int) -> ResidentSamples:
    """Return random images of ten classes, cropped and mirrored at random when training."""
    rng = torch.Generator().manual_seed(0)
    inputs = torch.randint(256, (samples, size, size, channels), dtype=torch.uint8, generator=rng)
    labels = torch.randint(10, (samples,), generator=rng)
    transform = ImageTransform((0.5,) * channels, (0.25,) * channels, crop=True, flip=True)
    return ResidentSamples(inputs, labels, None, transform)


def peers_with_shared_images(
    peers: int, samples: int, train: int, test: int
) -> list[tuple[ResidentSamples, ResidentSamples]]:
    """Return the training and test data of peers that index the same random images."""
    rng = torch.Generator().manual_seed(0)
    inputs = torch.randn(samples, 1, 28, 28, generator=rng)
    labels = torch.randint(10, (samples,), generator=rng)
    shared = ResidentSamples(inputs, labels)
    data = []
    for _ in range(peers):
        rows = torch.randint(samples, (train + test,), generator=rng)
        data.append((shared.take(rows[:train]), shared.take(rows[train:])))
    return data


def federation(
    model: str,
    channels: int,
    size: int,
    samples: int,
    tests: int,
    train: Train,
    *,
    peers: int,
    degree: int,
    method: DisPFL | None = None,
) -> RunContext:
    """Return a run of Dis-PFL peers with this many training and test images each."""
    all_images = images(channels, size, peers * (samples + tests))
    rows = torch.arange(peers * (samples + tests)).view(peers, -1)
    data = {}
    for peer, peer_rows in zip(peer_names(peers), rows, strict=True):
        train_images = all_images.take(peer_rows[:samples])
        test_images = all_images.take(peer_rows[samples:])
        data[peer] = PeerData(train_images, test_images)
    return simulated_context(
        data,
        model=lambda: Model(name=model).build(channels, 10, size),
        method=method or DisPFL(),
        topology=RandomRegular(degree=degree),
        train=train,
        rounds=ROUNDS,
    )


def first_step(
    context: RunContext, *, evaluate: bool
) -> tuple[PeerTask, PeerState, dict[str, PackedModel]]:
    """Return the first peer's task in round 0, its state, and the models that it receives."""
    settings = context.settings
    states = initial_states(context)
    graph = settings.topology.online_neighbours(settings.seed, 0, context.roster)
    peer = context.roster[0]
    received = {sender: states[sender].model for sender in graph[peer]}
    return PeerTask(peer, 0, graph[peer], evaluate=evaluate), states[peer], received
