"""Local training in the round loop against the bare loop: forward, backward, SGD step, mask; ratio of times.

The bare loop gets its batches ready-made, in channels-last memory, and does nothing else: no shuffling, no crops and
flips, no clipping, no checks. Its parameters are ordinary tensors and its optimizer is `torch.optim.SGD`.
"""

import sys

import torch
from torch import nn

from dispfl import DisPFL, Full, Train
from dispfl.core.live import LiveModel
from dispfl.core.train import Task, Trainer
from dispfl.data.batches import PictureTransform, ResidentSamples
from dispfl.models.registry import Model
from dispfl.round import PeerData, Setting, start
from measure import best_times, report

LIMIT = 1.15


def measure(name: str, channels: int, size: int, samples: int, epochs: int, repeats: int) -> None:
    """One model on random pictures."""
    torch.set_num_threads(1)
    rng = torch.Generator().manual_seed(0)
    pictures = torch.randint(256, (samples, size, size, channels), dtype=torch.uint8, generator=rng)
    labels = torch.randint(10, (samples,), generator=rng)
    transform = PictureTransform((0.5,) * channels, (0.25,) * channels, crop=True, flip=True)
    data = ResidentSamples(pictures, labels, None, transform)
    settings = Train(epochs=epochs)
    setting = Setting(
        lambda: Model(name=name).build(channels, 10, size),
        {"000": PeerData(data, data)},
        DisPFL(),
        Full(),
        settings,
        Task(),
        seed=0,
        rounds=1,
    )
    state = start(setting)["000"]
    weights, mask = state.model.unpack()
    live = LiveModel(setting.module())

    def ours() -> None:
        Trainer(live, data, data, settings, Task(), 0, "000", 0, 1, buffers=state.buffers).learn(weights, mask)

    batches = [batch for _ in range(epochs) for batch in data.batches(settings.batch, rng=rng)]
    module = setting.module()
    masks = [view.float() for view in live.layout.views(mask)]

    def bare() -> None:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, weight_decay=5e-4)
        for x, y in batches:
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(x), y).backward()
            optimizer.step()
            with torch.no_grad():
                for parameter, m in zip(module.parameters(), masks, strict=True):
                    parameter.mul_(m)

    mine, limit = best_times(ours, bare, repeats=repeats)
    report("local_training", mine / limit, LIMIT, model=name, batches=len(batches), seconds_a_batch=mine / len(batches))


if __name__ == "__main__":
    measure("cnn", 1, 28, samples=640, epochs=4, repeats=9)
    measure("cnn", 3, 32, samples=640, epochs=4, repeats=9)
    if "--quick" not in sys.argv:
        measure("resnet18", 3, 32, samples=256, epochs=1, repeats=5)
