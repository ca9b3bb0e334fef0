"""Training steps in channels_last against row-major ones, on one thread; ratio of times.

The limit is for a network that gains: two large convolutions with max-pooling and without a norm,
800,000 parameters, in batches of 128. The small CNN, VGG-11 and ResNet-18, which
have group norms, are measured only. `--quick` leaves out the large ones.
"""

import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from dispfl import Train
from dispfl.core.flat_module import FlatModule, MemoryFormat
from dispfl.core.samples import PeerData
from dispfl.core.task import Task
from dispfl.core.train import Trainer, TrainingRun
from dispfl.data.batches import ResidentSamples
from dispfl.models.settings import Model
from measure import best_times, report

LIMIT = 0.9
CLASSES = 10


class PoolingCNN(nn.Module):
    """Two 5x5 convolutions with max-pooling, and two linear layers."""

    def __init__(self, channels: int, size: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 32, 5, padding=2)
        self.conv2 = nn.Conv2d(32, 64, 5, padding=2)
        self.hidden = nn.Linear(64 * (size // 4) ** 2, 180)
        self.linear = nn.Linear(180, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.max_pool2d(functional.relu(self.conv1(x)), 2)
        x = functional.max_pool2d(functional.relu(self.conv2(x)), 2)
        logits: Tensor = self.linear(functional.relu(self.hidden(x.flatten(1))))
        return logits


def training(
    module: nn.Module, memory_format: MemoryFormat, shape: tuple[int, ...], batch: int, steps: int
) -> Callable[[], object]:
    """Return a function that trains so many steps on random images."""
    rng = torch.Generator().manual_seed(0)
    images = torch.randn(batch, *shape, generator=rng)
    samples = ResidentSamples(images, torch.arange(batch) % CLASSES)
    network = FlatModule(module, memory_format=memory_format)
    run = TrainingRun(Train(steps=steps, batch_size=batch, lr=0.001), Task(), seed=0, rounds=1)
    trainer = Trainer(network, PeerData(samples, samples), run, "000", 0)
    weights = network.read()
    every_weight = torch.ones(network.layout.size, dtype=torch.bool)
    return lambda: trainer.learn(weights, every_weight)


def measure(
    name: str,
    build: Callable[[], nn.Module],
    shape: tuple[int, ...],
    batch: int,
    steps: int,
    limit: float | None = None,
    repeats: int = 7,
) -> bool | None:
    """Report the ratio for one network and one batch size."""
    rows = training(build(), "contiguous", shape, batch, steps)
    last = training(build(), "channels_last", shape, batch, steps)
    rows_time, last_time = best_times(rows, last, repeats=repeats, clock=time.thread_time)
    return report(
        "memory_format",
        last_time / rows_time,
        limit,
        model=name,
        shape=shape,
        batch=batch,
        milliseconds_a_step=round(1e3 * rows_time / steps, 1),
    )


def main() -> int:
    """Return 1 beyond the limit."""
    torch.set_num_threads(1)
    image = (3, 32, 32)
    grey = (1, 28, 28)
    held = measure("pooling", lambda: PoolingCNN(3, 32), image, 128, 3, LIMIT)
    measure("pooling", lambda: PoolingCNN(3, 32), image, 32, 6)
    measure("pooling", lambda: PoolingCNN(1, 28), grey, 128, 3)
    for batch in (32, 128):
        measure("cnn", lambda: Model(name="cnn").network(grey, CLASSES), grey, batch, 10)
    if "--quick" not in sys.argv:
        for model in ("vgg11", "resnet18"):
            build = partial(Model(name=model).network, image, CLASSES)
            measure(model, build, image, 32, 1, repeats=3)
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
