"""What several benchmarks measure on: random pictures and a federation of Dis-PFL peers that learn from them."""

import torch

from dispfl import DisPFL, RandomRegular, Train
from dispfl.core.train import Task
from dispfl.data.batches import PictureTransform, ResidentSamples
from dispfl.models.registry import Model
from dispfl.round import start
from dispfl.work import PeerData, Setting, Work


def pictures(channels: int, size: int, samples: int) -> ResidentSamples:
    """Random pictures of ten classes, cropped and mirrored at random when training."""
    rng = torch.Generator().manual_seed(0)
    inputs = torch.randint(256, (samples, size, size, channels), dtype=torch.uint8, generator=rng)
    transform = PictureTransform((0.5,) * channels, (0.25,) * channels, crop=True, flip=True)
    return ResidentSamples(inputs, torch.randint(10, (samples,), generator=rng), None, transform)


def federation(
    model: str, channels: int, size: int, samples: int, tests: int, train: Train, *, peers: int, degree: int
) -> Setting:
    """Peers with as many training and test pictures each."""
    shared = pictures(channels, size, peers * (samples + tests))
    rows = torch.arange(peers * (samples + tests)).view(peers, -1)
    data = {f"{k:03d}": PeerData(shared.take(row[:samples]), shared.take(row[samples:])) for k, row in enumerate(rows)}
    return Setting(
        lambda: Model(name=model).build(channels, 10, size),
        data,
        DisPFL(),
        RandomRegular(degree=degree),
        train,
        Task(),
        seed=0,
        rounds=500,
    )


def first_step(setting: Setting, *, scoring: bool) -> Work:
    """The first peer's part of round 0, in which it hears as many peers as the topology's degree."""
    states = start(setting)
    heard = setting.topology.heard(setting.seed, 0, setting.roster)["000"]
    return Work("000", 0, states["000"], {peer: states[peer].model for peer in heard}, scoring=scoring)
