"""The training or test data of a peer, as training and evaluation see them."""

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor


class Samples(Protocol):
    """One peer's training or test data, as batches of (inputs, labels)."""

    def __len__(self) -> int: ...

    def batches(
        self, size: int, *, rng: torch.Generator | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """With a generator: shuffled and augmented, for training. Without: in order and as they
        are."""
        ...

    def take(self, rows: Tensor) -> "Samples":
        """Return some of the samples."""
        ...
