"""A peer with one sample and a tiny linear network, whose steps can be computed by hand."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dispfl.core.packed import PackedModel
from dispfl.core.samples import PeerData
from dispfl.core.task import Task
from dispfl.core.train import Train
from dispfl.data.batches import ResidentSamples
from dispfl.round.context import RunContext


def half_square(outputs: Tensor, labels: Tensor) -> Tensor:
    """The loss z^2 / 2, whose gradient is z."""
    return outputs.square().sum() / 2


def product(factors: int) -> Callable[[], nn.Module]:
    """A network that multiplies its input by this many weights, each a layer of its own."""
    return lambda: nn.Sequential(*[nn.Linear(1, 1, bias=False) for _ in range(factors)])


def one_sample(
    make_context: Callable[..., RunContext],
    loss: Callable[[Tensor, Tensor], Tensor] = half_square,
    factors: int = 1,
    **train: Any,
) -> RunContext:
    """Plain SGD of one peer, whose only input is 1; by default one step with a rate of 0.1."""
    sample = ResidentSamples(torch.ones(1, 1), torch.zeros(1))
    settings = {"lr": 0.1, "epochs": 1, "weight_decay": 0, "clip_norm": 0, **train}
    return make_context(
        peers={"000": PeerData(sample, sample)},
        model=product(factors),
        train=Train(**settings),
        task=Task(loss=loss),
    )


def dense(*values: float) -> PackedModel:
    """A model with these weights."""
    return PackedModel.pack(torch.tensor(values), torch.ones(len(values), dtype=torch.bool))
