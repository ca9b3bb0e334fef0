"""A network whose training takes time without keeping a processor busy: where a test must observe
or disturb peers in the middle of a round, and there are more peers than cores."""

import time

import torch
from torch import Tensor, nn

BATCH_SECONDS = 0.4
SLOW = ["model=slow_network:slow", "train.batch_size=40"]
"""Settings of rounds with one batch."""


class Pause(nn.Module):
    """Wait while training; pass everything on unchanged."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training and torch.is_grad_enabled():
            time.sleep(BATCH_SECONDS)
        return x


def slow() -> nn.Module:
    """A small network for the bundled images."""
    return nn.Sequential(Pause(), nn.Flatten(), nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, 10))
