"""The work that all sides do: the network, the peers' data, and the report after each round.

This file imports nothing but torch, because every side has an environment of its own.
"""

import importlib.util
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

LR = 0.1
WEIGHT_DECAY = 5e-4
PROX = 0.5
VARIABLE = "BENCHMARK_WORK"
NETWORKS = Path(__file__).parents[2] / "src/dispfl/models/networks.py"

_steps: list[None] = []


@dataclass(frozen=True)
class Work:
    """Rounds in which all peers train: `fedavg`, `ditto` or `gossip`.

    Ditto divides the epochs between two models.
    """

    method: str
    model: str
    peers: int
    samples: int
    batch: int
    epochs: int
    rounds: int
    fast: bool = False
    """Whether dispfl takes the fastest precision and memory format of this machine."""

    @classmethod
    def from_environment(cls) -> "Work":
        """Return the work of this side, from its environment."""
        return cls(**json.loads(os.environ[VARIABLE]))

    def variable(self) -> dict[str, str]:
        """Return the environment from which a side reads its work."""
        return {VARIABLE: json.dumps(asdict(self))}

    @property
    def ditto_epochs(self) -> tuple[int, int]:
        """The epochs of Ditto's global and personal models."""
        return self.epochs // 2, self.epochs - self.epochs // 2

    @property
    def steps(self) -> int:
        """The optimizer steps of a round."""
        return self.peers * self.epochs * -(-self.samples // self.batch)

    def network(self) -> nn.Module:
        """Return the network, which counts the training batches that pass through it."""
        torch.manual_seed(0)
        module = FiveLayers() if self.model == "five-layers" else _network_of_dispfl(self.model)
        module.register_forward_pre_hook(_count_step)
        return module

    def data(self, peer: int) -> tuple[Tensor, Tensor]:
        """Return a peer's training data: noise of CIFAR-10's shape, normalized, in memory."""
        rng = torch.Generator().manual_seed(peer)
        labels = torch.randint(10, (self.samples,), generator=rng)
        return torch.randn(self.samples, 3, 32, 32, generator=rng), labels


class FiveLayers(nn.Module):
    """Two pooled 5x5 convolutions of 64 channels and three linear layers: 797,962 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 5)
        self.conv2 = nn.Conv2d(64, 64, 5)
        self.hidden1 = nn.Linear(1600, 384)
        self.hidden2 = nn.Linear(384, 192)
        self.linear = nn.Linear(192, 10)

    def forward(self, x: Tensor) -> Tensor:
        for conv in (self.conv1, self.conv2):
            x = functional.max_pool2d(functional.relu(conv(x)), 2)
        for layer in (self.hidden1, self.hidden2):
            x = functional.relu(layer(x.flatten(1)))
        logits: Tensor = self.linear(x)
        return logits


def _network_of_dispfl(name: str) -> nn.Module:
    """Return a network of dispfl, from its file: the other environments have no dispfl."""
    spec = importlib.util.spec_from_file_location("networks", NETWORKS)
    assert spec is not None
    assert spec.loader is not None
    networks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(networks)
    module: nn.Module
    module = networks.ResNet18(3, 10) if name == "resnet18" else networks.SmallCNN(3, 10, 32)
    return module


def _count_step(module: nn.Module, inputs: object) -> None:
    if module.training and torch.is_grad_enabled():
        _steps.append(None)  # atomic: peers may train on several threads


def steps_so_far() -> int:
    """Return the training batches that this process has passed through networks."""
    return len(_steps)


def end_of_round(steps: int | None = None) -> None:
    """Report the end of a round, with the training batches of all rounds so far."""
    print(json.dumps({"steps": steps_so_far() if steps is None else steps}), flush=True)
