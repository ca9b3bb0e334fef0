"""Batches of samples that stay in memory; normalization, crops and flips are tensor operations on
whole batches."""

import hashlib
from collections.abc import Iterable, Iterator, Sized
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import cast

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from torch import Tensor
from torch.nn import functional
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate

from dispfl.core.rng import global_stream
from dispfl.core.samples import Samples
from dispfl.errors import DataError

PADDING = 4


@dataclass(frozen=True)
class ImageTransform:
    """Transform uint8 images (N, H, W, C) into normalized floats (N, C, H, W), row-major.

    Images are stored with their channels last, so that crops and flips copy whole rows of an image.
    Networks get them row-major: the small CNN's group norms and strided convolutions take 1.2 times
    as long on channels-last memory, ResNet-18 and VGG-11 as long.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    """Per channel, for pixels scaled to [0, 1]."""
    crop: bool = False
    """Pad by 4 and crop at random, in training."""
    flip: bool = False
    """Flip each image horizontally with probability one half, in training."""

    def __call__(self, images: Tensor, *, rng: torch.Generator | None = None) -> Tensor:
        if rng is not None and self.crop:
            images = random_crop(images, rng)
        if rng is not None and self.flip:
            images = random_flip(images, rng)
        n, height, width, channels = images.shape
        planes = images.permute(0, 3, 1, 2).flatten(1)  # one byte a pixel moves faster than a float
        floats = planes.to(torch.float32).view(n, channels, height, width)
        return floats.sub_(_per_plane(self.mean)).mul_(1 / _per_plane(self.std))


@lru_cache
def _per_plane(per_channel: tuple[float, ...]) -> Tensor:
    """Scale per-channel constants to pixels of 0 to 255."""
    return 255 * torch.tensor(per_channel).view(-1, 1, 1)


def random_crop(images: Tensor, rng: torch.Generator) -> Tensor:
    """Pad (N, H, W, C) images with black and crop each to its old size at a random position."""
    n, height, width, channels = images.shape
    padded = functional.pad(images, [0, 0, *[PADDING] * 4])
    top, left = torch.randint(2 * PADDING + 1, (2, n), generator=rng).numpy()
    image, row, pixel, _ = padded.stride()
    places = 2 * PADDING + 1
    windows = as_strided(  # each image at each position; rows are contiguous, and NumPy copies them faster than torch
        padded.numpy(), (n, places, places, height, width * channels), (image, row, pixel, row, 1)
    )
    return torch.from_numpy(windows[np.arange(n), top, left]).view(images.shape)


def random_flip(images: Tensor, rng: torch.Generator) -> Tensor:
    """Flip each of (N, H, W, C) images horizontally with probability one half."""
    chosen = (torch.rand(len(images), generator=rng) < 0.5).nonzero().squeeze(1)
    flipped = images.numpy().copy()
    flipped[chosen.numpy()] = (
        images.index_select(0, chosen).flip(2).numpy()
    )  # much faster than torch's index_copy
    return torch.from_numpy(flipped)


@dataclass(frozen=True, eq=False)
class Scaling:
    """Standardization of table columns: (x - mean) / std. Inference has to apply the same
    scaling."""

    mean: Tensor
    std: Tensor

    @classmethod
    def of(cls, inputs: Tensor) -> "Scaling":
        """The scaling that gives each column mean 0 and standard deviation 1; a constant column is
        unchanged."""
        std, mean = torch.std_mean(inputs.double(), dim=0, correction=0)
        constant = (inputs == inputs[0]).all(dim=0)
        mean, std = mean.masked_fill(constant, 0), std.masked_fill(constant, 1)
        return cls(mean.float(), std.float())

    @classmethod
    def identity(cls, columns: int) -> "Scaling":
        """The scaling that leaves every column unchanged."""
        return cls(torch.zeros(columns), torch.ones(columns))

    def __call__(self, inputs: Tensor) -> Tensor:
        return (inputs - self.mean) / self.std


@dataclass(frozen=True)
class ResidentSamples:
    """Samples held as tensors in memory; several peers may index the same tensors."""

    inputs: Tensor
    labels: Tensor
    index: Tensor | None = None
    """The rows that belong to this peer; None for all rows."""
    transform: ImageTransform | None = None

    def __len__(self) -> int:
        return len(self.labels if self.index is None else self.index)

    def batches(
        self, size: int, *, rng: torch.Generator | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches of (inputs, labels): shuffled and augmented if a generator is given, otherwise in
        order."""
        for rows in _chunks(len(self), size, rng):
            where = rows if self.index is None else self.index[rows]
            inputs = self.inputs.index_select(0, where)
            yield (
                (inputs if self.transform is None else self.transform(inputs, rng=rng)),
                self.labels[where],
            )

    def take(self, rows: Tensor) -> "ResidentSamples":
        """A subset of the samples, backed by the same tensors."""
        return replace(self, index=rows if self.index is None else self.index[rows])


@dataclass(frozen=True)
class DatasetSamples:
    """Samples of a torch Dataset, fetched item by item every time, so that its own transforms are
    applied."""

    dataset: Dataset[tuple[Tensor, Tensor]]

    def __len__(self) -> int:
        return len(cast(Sized, self.dataset))

    def batches(
        self, size: int, *, rng: torch.Generator | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches of (inputs, labels): shuffled if a generator is given, otherwise in order."""
        for rows in _chunks(len(self), size, rng):
            inputs, labels = default_collate([self.dataset[row] for row in rows.tolist()])
            yield inputs, labels

    def take(self, rows: Tensor) -> "DatasetSamples":
        """A subset of the samples."""
        return DatasetSamples(Subset(self.dataset, rows.tolist()))


def data_digest(parts: Iterable[Samples]) -> str:
    """Return the SHA-256 of samples: of all inputs and labels that are in memory.

    Of a Dataset, which may be slow to read: of their number, and of the first, the middle and the
    last sample. A sample that is another one each time it is read counts with its label alone.
    """
    digest = hashlib.sha256()
    for samples in parts:
        digest.update(f"{len(samples)} samples".encode())
        if isinstance(samples, DatasetSamples):
            for row in sorted({0, len(samples) // 2, len(samples) - 1}):
                one, again = (_read_one(samples, row) for _ in range(2))
                _add(digest, one if all(map(torch.equal, one, again)) else one[1:])
        elif isinstance(samples, ResidentSamples):
            for rows in torch.split(torch.arange(len(samples)), _DIGEST_ROWS):
                where = rows if samples.index is None else samples.index[rows]
                _add(digest, (samples.inputs[where], samples.labels[where]))
        else:
            for batch in samples.batches(_DIGEST_ROWS):
                _add(digest, batch)
    return digest.hexdigest()


_DIGEST_ROWS = 500


def _read_one(samples: DatasetSamples, row: int) -> tuple[Tensor, Tensor]:
    """Read one sample; what it draws from torch's global generator does not change later draws."""
    with global_stream(0, "digest"):
        return next(samples.take(torch.tensor([row])).batches(1))


def _add(digest: "hashlib._Hash", tensors: Iterable[Tensor]) -> None:
    for tensor in tensors:
        digest.update(f"{tensor.dtype} {list(tensor.shape[1:])}".encode())
        digest.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


DatasetLike = Dataset[tuple[Tensor, Tensor]] | tuple[Tensor, Tensor] | Samples
"""What a user may pass as one peer's training or test data."""


def samples_from(given: DatasetLike, whose: str) -> Samples:
    """Wrap a Dataset or a pair of tensors; `whose` names it in errors ("peer 3's training
    data")."""
    if isinstance(given, TensorDataset):
        given = cast(tuple[Tensor, Tensor], given.tensors)
    if isinstance(given, (tuple, list)):
        if len(given) != 2 or not all(isinstance(part, Tensor) for part in given):
            kinds = ", ".join(type(part).__name__ for part in given[:5])
            arrays = any(isinstance(part, np.ndarray) for part in given)
            fix = " Convert arrays with torch.from_numpy." if arrays else ""
            raise DataError(
                f"{whose} must be a Dataset or a pair (inputs, labels) of tensors, got"
                f" ({kinds}).{fix}"
            )
        inputs, labels = given
        if len(inputs) != len(labels):
            raise DataError(
                f"{whose} has {len(inputs)} inputs but {len(labels)} labels; give as many of each."
            )
        samples: Samples = ResidentSamples(inputs, labels)
    elif isinstance(given, (ResidentSamples, DatasetSamples)):
        samples = given
    elif (
        hasattr(given, "__getitem__")
        and hasattr(given, "__len__")
        and not isinstance(given, (Tensor, np.ndarray))
    ):
        samples = DatasetSamples(cast(Dataset[tuple[Tensor, Tensor]], given))
    else:
        raise DataError(
            f"{whose} must be a Dataset with a length or a pair (inputs, labels), got"
            f" {type(given).__name__}."
        )
    if not len(samples):
        raise DataError(f"{whose} is empty; every peer needs at least one sample.")
    return samples


def labels_of(
    samples: ResidentSamples | DatasetSamples, classes: tuple[str, ...] | None, which: str
) -> Tensor:
    """Return all labels; a label outside the classes is refused. `which` names the samples in
    errors."""
    if isinstance(samples, ResidentSamples):
        labels = samples.labels
    else:
        labels = torch.cat([labels for _, labels in samples.batches(500)])
    if (low := int(labels.min())) < 0:
        raise DataError(f"The {which} have the label {low}; labels count from 0.")
    if classes is not None and (high := int(labels.max())) >= len(classes):
        raise DataError(
            f"The {which} have the label {high}, but data.classes lists {len(classes)} classes,"
            " from 0."
        )
    return labels


def label_range(samples: Samples) -> tuple[int, int] | None:
    """Return the lowest and the highest label of samples in memory, if their labels are one whole
    number each."""
    if (
        not isinstance(samples, ResidentSamples)
        or samples.labels.ndim != 1
        or samples.labels.is_floating_point()
    ):
        return None
    labels = samples.labels if samples.index is None else samples.labels[samples.index]
    return int(labels.min()), int(labels.max())


def _chunks(count: int, size: int, rng: torch.Generator | None) -> list[Tensor]:
    """Row numbers of each batch. A last batch of one sample is merged with the previous one: batch
    norm needs two."""
    rows = torch.arange(count) if rng is None else torch.randperm(count, generator=rng)
    chunks = list(torch.split(rows, size))
    if size > 1 and len(chunks) > 1 and len(chunks[-1]) == 1:
        chunks[-2:] = [torch.cat(chunks[-2:])]
    return chunks
