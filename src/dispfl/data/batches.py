"""Batches from data that stays in memory: normalized, cropped and flipped as tensor operations, not one by one."""

from collections.abc import Iterator, Sized
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset, default_collate

from dispfl.errors import DataError

PADDING = 4


@dataclass(frozen=True)
class PictureTransform:
    """uint8 pictures to normalized floats in channels-last memory, which convolutions here like best."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    crop: bool = False
    """Pad by 4 and crop at random, when training."""
    flip: bool = False
    """Mirror half of the pictures, when training."""

    def __call__(self, pictures: Tensor, *, rng: torch.Generator | None = None) -> Tensor:
        if rng is not None and (self.crop or self.flip):
            pictures = self._augment(pictures, rng)
        mean, std = (torch.tensor(values).view(1, -1, 1, 1) for values in (self.mean, self.std))
        floats = pictures.to(torch.float32, memory_format=torch.channels_last)
        return floats.sub_(mean * 255).div_(std * 255)

    def _augment(self, pictures: Tensor, rng: torch.Generator) -> Tensor:
        """Crop and mirror by one gather: each picture has its own row and column indices into its padded self."""
        n, _, height, width = pictures.shape
        rows, columns = torch.arange(height).expand(n, -1), torch.arange(width).expand(n, -1)
        if self.flip:
            mirrored = torch.rand(n, 1, generator=rng) < 0.5
            columns = torch.where(mirrored, width - 1 - columns, columns)
        if self.crop:
            pictures = functional.pad(pictures, [PADDING] * 4)
            rows = rows + torch.randint(2 * PADDING + 1, (n, 1), generator=rng)
            columns = columns + torch.randint(2 * PADDING + 1, (n, 1), generator=rng)
        which = torch.arange(n)
        # The advanced indices stand around a slice, so the result is (n, height, width, channels): channels-last.
        gathered = pictures[which[:, None, None], :, rows[:, :, None], columns[:, None, :]]
        return gathered.permute(0, 3, 1, 2)


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
            inputs = self.inputs[where]
            yield (inputs if self.transform is None else self.transform(inputs, rng=rng)), self.labels[where]


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
