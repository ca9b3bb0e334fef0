"""Readers, one module per file format. Each takes a folder and gives all its pictures, checked, or a DataError."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dispfl.errors import DataError


class Split(NamedTuple):
    """Pictures (uint8; N, C, H, W) and their labels (int64; N)."""

    inputs: Tensor
    labels: Tensor


class Reading(NamedTuple):
    """What a reader found. `classes` is empty where the files do not name them."""

    train: Split
    test: Split
    classes: tuple[str, ...] = ()


def damaged(path: Path, reason: str) -> DataError:
    """The sentence for a file that is not what it should be."""
    return DataError(f"{path} {reason}. Replace it with an intact copy; `dispfl data get` fetches one.")


def check_labels(path: Path, labels: NDArray[Any], pictures: int, classes: int) -> None:
    """Refuse a file with no labels, with more or fewer than pictures, or with one that no class has."""
    if len(labels) != pictures:
        raise damaged(path, f"has {len(labels):,} labels for {pictures:,} pictures")
    if pictures == 0:
        raise damaged(path, "holds no pictures")
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= classes:
        raise damaged(path, f"has label {low if low < 0 else high}, outside 0 to {classes - 1}")


def to_split(inputs: NDArray[np.uint8], labels: NDArray[Any]) -> Split:
    """Tensors over the same memory; only the labels are widened."""
    return Split(torch.from_numpy(inputs), torch.from_numpy(labels.astype(np.int64)))
