"""The training or test data of a peer, as training and evaluation see them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dispfl.core.inputs import Inputs


class Samples(Protocol):
    """One peer's training or test data, as batches of (inputs, labels).

    Inputs are a tensor, or a dict of tensors.
    """

    def __len__(self) -> int: ...

    def batches(
        self, size: int, *, rng: torch.Generator | None = None
    ) -> Iterator[tuple[Inputs, Tensor]]:
        """Yield all samples: shuffled and augmented if there is a generator, else as they are."""
        ...

    def take(self, rows: Tensor) -> "Samples":
        """Return some of the samples."""
        ...


@dataclass(frozen=True)
class PeerData:
    """One peer's training and test data, and its validation data if it has any."""

    train: Samples
    test: Samples
    validation: Samples | None = None
    """For choices, such as when to stop; neither trained on nor tested with."""

    @property
    def parts(self) -> tuple[Samples, ...]:
        """All of its data."""
        if self.validation is None:
            return self.train, self.test
        return self.train, self.test, self.validation
