"""What every reader gives, and how training and test data are told apart."""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from dispfl.errors import DataError


class Part(NamedTuple):
    """Samples as they were read, of which the classes are not numbered yet."""

    path: Path
    inputs: Tensor
    """float32 (N, ...), or pictures in uint8 (N, H, W, C)"""
    labels: list[str]
    columns: tuple[str, ...] = ()
    """CSV: what the inputs are called."""
    label: str | None = None
    """CSV: what the label is called."""
    folders: tuple[str, ...] = ()
    """Folder: the classes, with and without pictures."""

    def __str__(self) -> str:
        kind = "pictures" if self.inputs.dtype == torch.uint8 else "inputs"
        return f"{kind} of shape {list(self.inputs.shape[1:])}"


def demand_alike(train: Part, test: Part) -> None:
    """Refuse test data that are not like the training data."""
    if str(train) != str(test):
        raise DataError(f"The test data in {test.path} are {test}, but the training data are {train}.")


def divide(labels: Tensor, share: float, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """The rows to train on and to test on: of each class its share is drawn for testing.

    The share is rounded, but at least one of two samples is tested on, and at least one is trained on: a class with a
    single sample is only trained on.
    """
    tested = torch.zeros(len(labels), dtype=torch.bool)
    for label in sorted(set(labels.tolist())):
        rows = (labels == label).nonzero().squeeze(1)
        count = min(max(1, round(share * len(rows))), len(rows) - 1)
        tested[rows[torch.randperm(len(rows), generator=rng)[:count]]] = True
    return (~tested).nonzero().squeeze(1), tested.nonzero().squeeze(1)
