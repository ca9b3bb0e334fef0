"""The network as it is deployed: from pictures or rows as anybody has them to probabilities, and its graph."""

import contextlib
import logging
import warnings
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from dispfl.export.card import Card

OUTPUT = "probabilities"
DYNAMIC = ({0: Dim("batch")},)
"""Any number of inputs at once."""


class Deployed(nn.Module):
    """From float32 pictures (N, C, H, W) in [0, 1], or raw rows of a table (N, columns), to probabilities (N, classes).

    Normalization and softmax are inside, so that nobody has to get them right again in another language. Who wants
    logits takes the logarithm: they are the same up to a constant, which no use of logits depends on.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, network: nn.Module, card: Card) -> None:
        super().__init__()
        self.network = network
        per_channel = (-1, *(1 for _ in card.shape[1:]))
        self.register_buffer("mean", torch.tensor(card.mean).view(per_channel))
        self.register_buffer("std", torch.tensor(card.std).view(per_channel))
        self.eval()

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.network((inputs - self.mean) / self.std)
        return logits.softmax(1)


def graph_of(deployed: Deployed, card: Card) -> ExportedProgram:
    """The operators that a deployed network runs, for any number of inputs, without traces of this machine."""
    with quiet():
        two = torch.zeros(2, *card.shape)  # torch takes a 1 for a constant
        program = torch.export.export(deployed, (two,), dynamic_shapes=DYNAMIC, strict=False)
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # the paths of our source files
    return program


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep torch's warnings about its own insides from the user."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
