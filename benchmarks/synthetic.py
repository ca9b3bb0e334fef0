"""Synthetic data for several benchmarks: random images, and a federation of Dis-PFL peers with
them."""

import torch

from dispfl import DisPFL, RandomRegular, Train
from dispfl.core.packed import PackedModel
from dispfl.core.samples import PeerData
from dispfl.core.task import Task
from dispfl.data.batches import ImageTransform, ResidentSamples
from dispfl.methods.base import PeerState
from dispfl.models.settings import Model
from dispfl.round.context import PeerTask, RunContext
from dispfl.round.round import initial_states


def images(channels: int, size: int, samples: int) -> ResidentSamples:
    """Random images of ten classes, cropped and mirrored at random when training."""
    rng = torch.Generator().manual_seed(0)
    inputs = torch.randint(256, (samples, size, size, channels), dtype=torch.uint8, generator=rng)
    transform = ImageTransform((0.5,) * channels, (0.25,) * channels, crop=True, flip=True)
    return ResidentSamples(inputs, torch.randint(10, (samples,), generator=rng), None, transform)


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
    """Dis-PFL peers with this many training and test images each."""
    shared = images(channels, size, peers * (samples + tests))
    rows = torch.arange(peers * (samples + tests)).view(peers, -1)
    data = {
        f"{k:03d}": PeerData(shared.take(row[:samples]), shared.take(row[samples:]))
        for k, row in enumerate(rows)
    }
    return RunContext(
        lambda: Model(name=model).build(channels, 10, size),
        data,
        method or DisPFL(),
        RandomRegular(degree=degree),
        train,
        Task(),
        seed=0,
        rounds=500,
    )


def first_step(
    context: RunContext, *, evaluate: bool
) -> tuple[PeerTask, PeerState, dict[str, PackedModel]]:
    """The first peer's task in round 0, its state, and the models of its neighbours, as many as the
    degree."""
    states = initial_states(context)
    graph = context.settings.topology.online_neighbours(context.settings.seed, 0, context.roster)
    return (
        PeerTask("000", 0, graph, evaluate=evaluate),
        states["000"],
        {p: states[p].model for p in graph["000"]},
    )
