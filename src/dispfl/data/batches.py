"""Batches of samples in memory; images are normalized, cropped and flipped by whole batches."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, cast

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from torch import Tensor
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset, default_collate

from dispfl.core.inputs import Inputs, take_rows, tensors_of
from dispfl.core.rng import global_stream
from dispfl.core.samples import Samples
from dispfl.data.checks import check_finite
from dispfl.data.shift import FeatureShift
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
    shift: FeatureShift | None = None
    """How the images of this peer differ from those of others."""

    def __call__(self, images: Tensor, *, rng: torch.Generator | None = None) -> Tensor:
        if self.shift is not None:
            images = self.shift(images)
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
    positions = 2 * PADDING + 1
    top, left = torch.randint(positions, (2, n), generator=rng).numpy()

    # Each image at each position. Rows are contiguous, and NumPy copies them faster than torch.
    image, row, pixel, _ = padded.stride()
    shape = (n, positions, positions, height, width * channels)
    windows = as_strided(padded.numpy(), shape, (image, row, pixel, row, 1))
    return torch.from_numpy(windows[np.arange(n), top, left]).view(images.shape)


def random_flip(images: Tensor, rng: torch.Generator) -> Tensor:
    """Flip each of (N, H, W, C) images horizontally with probability one half."""
    chosen = (torch.rand(len(images), generator=rng) < 0.5).nonzero().squeeze(1)
    mirrored = images.index_select(0, chosen).flip(2)
    flipped = images.numpy().copy()
    flipped[chosen.numpy()] = mirrored.numpy()  # much faster than torch's index_copy
    return torch.from_numpy(flipped)


@dataclass(frozen=True, eq=False)
class Scaling:
    """Standardization of table columns: (x - mean) / std, in training and in inference."""

    mean: Tensor
    std: Tensor

    @classmethod
    def of(cls, inputs: Tensor) -> "Scaling":
        """The scaling that gives each column mean 0 and standard deviation 1.

        A constant column is unchanged.
        """
        std, mean = torch.std_mean(inputs.double(), dim=0, correction=0)
        constant = (inputs == inputs[0]).all(dim=0)
        return cls(mean.masked_fill(constant, 0).float(), std.masked_fill(constant, 1).float())

    @classmethod
    def identity(cls, columns: int) -> "Scaling":
        """The scaling that leaves every column unchanged."""
        return cls(torch.zeros(columns), torch.ones(columns))

    def __call__(self, inputs: Tensor) -> Tensor:
        return (inputs - self.mean) / self.std


@dataclass(frozen=True)
class ResidentSamples:
    """Samples held as tensors in memory; several peers may index the same tensors."""

    inputs: Inputs
    """A tensor, or a dict of tensors by the names of the network's arguments."""
    labels: Tensor
    index: Tensor | None = None
    """The rows that belong to this peer; None for all rows."""
    transform: ImageTransform | None = None

    def __len__(self) -> int:
        return len(self.labels if self.index is None else self.index)

    def batches(
        self, size: int, *, rng: torch.Generator | None = None
    ) -> Iterator[tuple[Inputs, Tensor]]:
        """Batches of (inputs, labels): shuffled and augmented with a generator, else in order."""
        for chunk in _chunks(len(self), size, rng):
            rows = self.rows(chunk)
            inputs = take_rows(self.inputs, rows)
            if self.transform is not None:
                inputs = self.transform(inputs, rng=rng)
            yield inputs, self.labels[rows]

    def take(self, rows: Tensor) -> "ResidentSamples":
        """A subset of the samples, backed by the same tensors."""
        return replace(self, index=self.rows(rows))

    def shifted(self, shift: FeatureShift) -> "ResidentSamples":
        """The same images, as one peer sees them."""
        assert self.transform is not None, "only images are shifted"
        return replace(self, transform=replace(self.transform, shift=shift))

    def rows(self, samples: Tensor) -> Tensor:
        """The rows of the tensors that contain these samples, which are counted from 0."""
        return samples if self.index is None else self.index[samples]


@dataclass(frozen=True)
class DatasetSamples:
    """Samples of a torch Dataset, fetched item by item, so that its own transforms are applied.

    Each batch is checked as it is read.
    """

    dataset: Dataset[tuple[Inputs, Tensor]]
    subject: str = "The data"
    """What errors call them: "Peer 3's training data"."""
    index: Tensor | None = None
    """The items that belong to this peer; None for all."""

    def __len__(self) -> int:
        return len(cast(Sized, self.dataset) if self.index is None else self.index)

    def batches(
        self, size: int, *, rng: torch.Generator | None = None
    ) -> Iterator[tuple[Inputs, Tensor]]:
        """Batches of (inputs, labels): shuffled if a generator is given, otherwise in order."""
        for chunk in _chunks(len(self), size, rng):
            rows = self.rows(chunk)
            inputs, labels = default_collate([self.dataset[row] for row in rows.tolist()])
            for what, values in (("input", inputs), ("label", labels)):
                for tensor in tensors_of(values):
                    if isinstance(tensor, Tensor):
                        check_finite(tensor, self.subject, what, rows)
            yield inputs, labels

    def take(self, rows: Tensor) -> "DatasetSamples":
        """A subset of the samples."""
        return replace(self, index=self.rows(rows))

    def rows(self, samples: Tensor) -> Tensor:
        """The items of the Dataset that are these samples, which are counted from 0."""
        return samples if self.index is None else self.index[samples]


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
                sample = _read_sample(samples, row)
                repeated = _read_sample(samples, row)
                unchanged = all(map(torch.equal, sample, repeated))
                _add(digest, sample if unchanged else sample[-1:])
        elif isinstance(samples, ResidentSamples):
            for chunk in torch.split(torch.arange(len(samples)), _DIGEST_ROWS):
                rows = samples.rows(chunk)
                tensors = [*tensors_of(samples.inputs), samples.labels]
                _add(digest, [tensor[rows] for tensor in tensors])
        else:
            for inputs, labels in samples.batches(_DIGEST_ROWS):
                _add(digest, [*tensors_of(inputs), labels])
    return digest.hexdigest()


_DIGEST_ROWS = 500


def _read_sample(samples: DatasetSamples, row: int) -> list[Tensor]:
    """Read one sample, the label last.

    Its draws from torch's global generator do not change later draws.
    """
    with global_stream(0, "digest"):
        inputs, labels = next(samples.take(torch.tensor([row])).batches(1))
    return [*tensors_of(inputs), labels]


def _add(digest: "hashlib._Hash", tensors: Iterable[Tensor]) -> None:
    for tensor in tensors:
        digest.update(f"{tensor.dtype} {list(tensor.shape[1:])}".encode())
        digest.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


DatasetLike = Dataset[tuple[Inputs, Tensor]] | tuple[Inputs, Tensor] | Samples
"""What a user may pass as one peer's training or test data."""


def samples_from(data: DatasetLike, subject: str) -> Samples:
    """Wrap a Dataset or a pair of tensors; errors call it `subject`: "Peer 3's training data"."""
    if isinstance(data, TensorDataset):
        data = cast(tuple[Tensor, Tensor], data.tensors)
    if isinstance(data, (tuple, list)):
        samples: Samples = _samples_from_pair(data, subject)
    elif isinstance(data, ResidentSamples):
        samples = data
    elif isinstance(data, DatasetSamples):
        samples = replace(data, subject=subject)
    elif _is_dataset(data):
        samples = DatasetSamples(cast(Dataset[tuple[Inputs, Tensor]], data), subject)
    else:
        raise DataError(
            f"{subject} must be a Dataset with a length or a pair (inputs, labels), got"
            f" {type(data).__name__}."
        )
    if not len(samples):
        raise DataError(f"{subject} is empty; every peer needs at least one sample.")
    if isinstance(samples, ResidentSamples):
        _check_resident(samples, subject)
    return samples


def _check_resident(samples: ResidentSamples, subject: str) -> None:
    for what, values in (("input", samples.inputs), ("label", samples.labels)):
        for tensor in tensors_of(values):
            if samples.index is not None and tensor.is_floating_point():
                tensor = tensor[samples.index]
            check_finite(tensor, subject, what)


def _samples_from_pair(pair: Sequence[Any], subject: str) -> ResidentSamples:
    types = [type(values) for values in pair]
    values = pair
    if len(pair) == 2 and isinstance(pair[0], Mapping) and pair[0]:
        values = [*pair[0].values(), pair[1]]
    if len(pair) != 2 or not all(isinstance(tensor, Tensor) for tensor in values):
        names = ", ".join(kind.__name__ for kind in types[:5])
        fix = " Convert arrays with torch.from_numpy." if np.ndarray in types else ""
        raise DataError(
            f"{subject} must be a Dataset or a pair (inputs, labels) of tensors, got"
            f" ({names}).{fix}"
        )
    inputs, labels = pair
    if isinstance(inputs, Mapping):
        inputs = dict(inputs)
    for tensor in tensors_of(inputs):
        if len(tensor) != len(labels):
            raise DataError(
                f"{subject} has {len(tensor)} inputs but {len(labels)} labels; give as many of"
                " each."
            )
    return ResidentSamples(inputs, labels)


def _is_dataset(data: object) -> bool:
    if isinstance(data, (Tensor, np.ndarray)):
        return False
    return hasattr(data, "__getitem__") and hasattr(data, "__len__")


def labels_of(
    samples: ResidentSamples | DatasetSamples, classes: tuple[str, ...] | None, which: str
) -> Tensor:
    """Return all labels; a label outside the classes is refused.

    `which` names the samples in errors.
    """
    labels = all_labels(samples)
    lowest = int(labels.min())
    highest = int(labels.max())
    if lowest < 0:
        raise DataError(f"The {which} have the label {lowest}; labels count from 0.")
    if classes is not None and highest >= len(classes):
        raise DataError(
            f"The {which} have the label {highest}, but data.classes lists {len(classes)} classes,"
            " from 0."
        )
    return labels


def all_labels(samples: ResidentSamples | DatasetSamples) -> Tensor:
    """Return all labels; a Dataset is read completely for them."""
    if isinstance(samples, ResidentSamples):
        return samples.labels
    return torch.cat([labels for _, labels in samples.batches(500)])


def label_range(samples: Samples) -> tuple[int, int] | None:
    """Return the lowest and the highest label of samples in memory.

    None if they are not in memory, or if their labels are not one whole number each.
    """
    if not isinstance(samples, ResidentSamples):
        return None
    labels = samples.labels
    if labels.ndim != 1 or labels.is_floating_point():
        return None
    if samples.index is not None:
        labels = labels[samples.index]
    return int(labels.min()), int(labels.max())


def _chunks(count: int, size: int, rng: torch.Generator | None) -> list[Tensor]:
    """The samples of each batch, counted from 0.

    A last batch of one sample is merged with the previous one: batch norm needs two.
    """
    order = torch.arange(count) if rng is None else torch.randperm(count, generator=rng)
    chunks = list(torch.split(order, size))
    if size > 1 and len(chunks) > 1 and len(chunks[-1]) == 1:
        chunks[-2:] = [torch.cat(chunks[-2:])]
    return chunks
