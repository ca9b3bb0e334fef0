"""Batches from data that stays in memory: normalized, cropped and flipped as tensor operations, not one by one."""

from collections.abc import Iterator, Sized
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import cast

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from torch import Tensor
from torch.nn import functional
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate

from dispfl.errors import DataError

PADDING = 4


@dataclass(frozen=True)
class PictureTransform:
    """From uint8 pictures (N, H, W, C) to normalized floats (N, C, H, W) in channels-last memory.

    Pictures lie with their channels last from the start: convolutions here are faster so, and crops, mirrors and
    normalization then work on whole rows of a picture instead of single pixels.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    """Per channel, for pixels scaled to [0, 1]."""
    crop: bool = False
    """Pad by 4 and crop at random, when training."""
    flip: bool = False
    """Mirror half of the pictures, when training."""

    def __call__(self, pictures: Tensor, *, rng: torch.Generator | None = None) -> Tensor:
        if rng is not None and self.crop:
            pictures = random_crop(pictures, rng)
        if rng is not None and self.flip:
            pictures = random_flip(pictures, rng)
        n, height, width, _ = pictures.shape
        floats = pictures.to(torch.float32)
        rows = floats.view(n, height, -1)  # mean and std repeated along a row: long vectors instead of C numbers
        rows.sub_(_along_a_row(self.mean, width)).mul_(1 / _along_a_row(self.std, width))
        return floats.permute(0, 3, 1, 2)


@lru_cache
def _along_a_row(per_channel: tuple[float, ...], width: int) -> Tensor:
    """Constants of the channels, for pixels of 0 to 255, once for each pixel of a row."""
    return 255 * torch.tensor(per_channel).repeat(width)


def random_crop(pictures: Tensor, rng: torch.Generator) -> Tensor:
    """Pad (N, H, W, C) pictures with black and cut each out again at a random place."""
    n, height, width, channels = pictures.shape
    padded = functional.pad(pictures, [0, 0, *[PADDING] * 4])
    top, left = torch.randint(2 * PADDING + 1, (2, n), generator=rng).numpy()
    picture, row, pixel, _ = padded.stride()
    places = 2 * PADDING + 1
    windows = as_strided(  # of each picture, at each place: rows in one piece, which NumPy copies faster than torch
        padded.numpy(), (n, places, places, height, width * channels), (picture, row, pixel, row, 1)
    )
    return torch.from_numpy(windows[np.arange(n), top, left]).view(pictures.shape)


def random_flip(pictures: Tensor, rng: torch.Generator) -> Tensor:
    """Mirror each of (N, H, W, C) pictures with probability one half."""
    chosen = (torch.rand(len(pictures), generator=rng) < 0.5).nonzero().squeeze(1)
    flipped = pictures.numpy().copy()
    flipped[chosen.numpy()] = pictures.index_select(0, chosen).flip(2).numpy()  # much faster than torch's index_copy
    return torch.from_numpy(flipped)


@dataclass(frozen=True)
class ResidentSamples:
    """Samples that are tensors in memory; many peers may index the same tensors."""

    inputs: Tensor
    labels: Tensor
    index: Tensor | None = None
    """Which rows are this peer's; all, if None."""
    transform: PictureTransform | None = None

    def __len__(self) -> int:
        return len(self.labels if self.index is None else self.index)

    def batches(self, size: int, *, rng: torch.Generator | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches of (inputs, labels): shuffled and augmented with a generator, plain and in order without."""
        for rows in _chunks(len(self), size, rng):
            where = rows if self.index is None else self.index[rows]
            inputs = self.inputs.index_select(0, where)
            yield (inputs if self.transform is None else self.transform(inputs, rng=rng)), self.labels[where]

    def take(self, rows: Tensor) -> "ResidentSamples":
        """Some of the samples, of the same tensors."""
        return replace(self, index=rows if self.index is None else self.index[rows])


@dataclass(frozen=True)
class DatasetSamples:
    """A torch Dataset, fetched item by item each time, so that its own transforms act as they were written."""

    dataset: Dataset[tuple[Tensor, Tensor]]

    def __len__(self) -> int:
        return len(cast(Sized, self.dataset))

    def batches(self, size: int, *, rng: torch.Generator | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches of (inputs, labels): shuffled with a generator, in order without."""
        for rows in _chunks(len(self), size, rng):
            inputs, labels = default_collate([self.dataset[row] for row in rows.tolist()])
            yield inputs, labels

    def take(self, rows: Tensor) -> "DatasetSamples":
        """Some of the samples."""
        return DatasetSamples(Subset(self.dataset, rows.tolist()))


Given = Dataset[tuple[Tensor, Tensor]] | tuple[Tensor, Tensor]
"""What a user may hand over as one peer's training or test data."""


def samples_from(given: Given, whose: str) -> ResidentSamples | DatasetSamples:
    """Wrap what a user handed over; `whose` names it in errors ("peer 3's training data")."""
    if isinstance(given, TensorDataset):
        given = cast(tuple[Tensor, Tensor], given.tensors)
    if isinstance(given, (tuple, list)):
        if len(given) != 2 or not all(isinstance(part, Tensor) for part in given):
            raise DataError(f"{whose} must be a Dataset or a pair (inputs, labels) of tensors.")
        inputs, labels = given
        if len(inputs) != len(labels):
            raise DataError(f"{whose} has {len(inputs)} inputs but {len(labels)} labels; give as many of each.")
        samples: ResidentSamples | DatasetSamples = ResidentSamples(inputs, labels)
    elif hasattr(given, "__getitem__") and hasattr(given, "__len__"):
        samples = DatasetSamples(given)
    else:
        raise DataError(
            f"{whose} must be a Dataset with a length or a pair (inputs, labels), got {type(given).__name__}."
        )
    if not len(samples):
        raise DataError(f"{whose} is empty; every peer needs at least one sample.")
    return samples


def _chunks(count: int, size: int, rng: torch.Generator | None) -> list[Tensor]:
    """Row numbers batch by batch. A last batch of one sample joins the one before: batch norm cannot learn from one."""
    rows = torch.arange(count) if rng is None else torch.randperm(count, generator=rng)
    chunks = list(torch.split(rows, size))
    if size > 1 and len(chunks) > 1 and len(chunks[-1]) == 1:
        chunks[-2:] = [torch.cat(chunks[-2:])]
    return chunks
