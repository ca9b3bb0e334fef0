"""Readers, one module per file format; each returns all samples, checked, or raises a DataError."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dispfl.core.inputs import Inputs
from dispfl.core.metric import IGNORED_LABEL
from dispfl.errors import DataError


class ReadSplit(NamedTuple):
    """Images (uint8; N, C, H, W) and their labels (int64; N): a training or a test set."""

    inputs: Tensor
    labels: Tensor


class RawDataset(NamedTuple):
    """A data set of the catalogue as read. `classes` is empty where the files do not name them."""

    train: ReadSplit
    test: ReadSplit
    classes: tuple[str, ...] = ()


class RawSamples(NamedTuple):
    """A user's samples as read; labels of classes are texts, not yet class numbers."""

    path: Path
    inputs: Inputs
    """float32 (N, ...), images in uint8 (N, H, W, C), or the tokens of texts"""
    labels: list[str] | Tensor
    """Texts; numbers, float32 (N, targets); or masks, int16 (N, H, W)"""
    columns: tuple[str, ...] = ()
    """CSV: the names of the inputs."""
    label: str | None = None
    """CSV: the name of the label's column."""
    targets: tuple[str, ...] = ()
    """CSV: the names of the columns with numeric labels."""
    folders: tuple[str, ...] = ()
    """Folder: all classes, also those without images."""
    groups: tuple[str, ...] = ()
    """With `data.group`: the value of that column for each sample."""
    file_ids: Tensor | None = None
    """Texts and folders: the id of each text, or of each image by the content of its file
    (`dispfl.data.rows`), which stays the same when another version of Pillow decodes it to other
    pixels."""

    def __str__(self) -> str:
        if isinstance(self.inputs, dict):
            return f"texts as {', '.join(self.inputs)}"
        name = "images" if self.inputs.dtype == torch.uint8 else "inputs"
        return f"{name} of shape {list(self.inputs.shape[1:])}"


IGNORED_PIXEL = 255
"""The value of a pixel of a mask that counts for nothing, as in Pascal VOC and Cityscapes."""


def mask_labels(masks: NDArray[Any]) -> Tensor:
    """Return the class of each pixel, int16 (N, H, W); ignored pixels are as torch has them."""
    labels = masks.astype(np.int16)
    labels[masks == IGNORED_PIXEL] = IGNORED_LABEL
    return torch.from_numpy(labels)


def check_same_kind(train: RawSamples, test: RawSamples) -> None:
    """Refuse test data of another type or shape than the training data."""
    if str(train) != str(test):
        raise DataError(
            f"The test data in {test.path} are {test}, but the training data are {train}."
        )


def damaged(path: Path, reason: str) -> DataError:
    """The error for a damaged file of the catalogue."""
    return DataError(
        f"{path} {reason}. Replace it with an intact copy; `dispfl data get` downloads one."
    )


def check_labels(path: Path, labels: NDArray[Any], images: int, classes: int) -> None:
    """Refuse a file whose labels do not fit the number of images or the classes."""
    if len(labels) != images:
        raise damaged(path, f"has {len(labels):,} labels for {images:,} images")
    if images == 0:
        raise damaged(path, "contains no images")
    for label in (int(labels.min()), int(labels.max())):
        if not 0 <= label < classes:
            raise damaged(path, f"has label {label}, outside 0 to {classes - 1}")


def to_split(inputs: NDArray[np.uint8], labels: NDArray[Any]) -> ReadSplit:
    """Wrap arrays as tensors; the inputs share memory, the labels are converted to int64."""
    return ReadSplit(torch.from_numpy(inputs), torch.from_numpy(labels.astype(np.int64)))
