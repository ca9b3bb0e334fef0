"""A site's own data in memory, where they are not pictures."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from dispfl.data.batches import DatasetSamples, ResidentSamples
from dispfl.errors import ConfigError, DataError


@dataclass(frozen=True, eq=False)
class Scaling:
    """How columns were standardized: (x - mean) / std. Whoever uses the model has to do the same."""

    mean: Tensor
    std: Tensor

    @classmethod
    def of(cls, inputs: Tensor) -> "Scaling":
        """The scaling that gives each column mean 0 and deviation 1; a constant column stays as it is."""
        std, mean = torch.std_mean(inputs.double(), dim=0, correction=0)
        constant = (inputs == inputs[0]).all(dim=0)
        mean, std = mean.masked_fill(constant, 0), std.masked_fill(constant, 1)
        return cls(mean.float(), std.float())

    @classmethod
    def none(cls, columns: int) -> "Scaling":
        """The scaling that leaves every column as it is."""
        return cls(torch.zeros(columns), torch.ones(columns))

    def __call__(self, inputs: Tensor) -> Tensor:
        return (inputs - self.mean) / self.std


@dataclass(frozen=True, eq=False)
class OwnSamples:
    """Tables, arrays, and whatever a site's own function returns."""

    name: str
    train: ResidentSamples | DatasetSamples
    test: ResidentSamples | DatasetSamples
    listed: tuple[str, ...] | None = None
    """The classes, where they are known; else they are the numbers up to the largest label."""
    columns: tuple[str, ...] = ()
    """What the inputs are called, in a table."""
    scaling: Scaling | None = None
    """How the inputs were standardized, if they were."""
    label: str | None = None
    """What the label is called, in a table."""

    @cached_property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, in the order of the outputs."""
        if self.listed is not None:
            return self.listed
        largest = max(int(labels.max()) for labels in (self.train_labels, self.test_labels))
        return tuple(str(k) for k in range(largest + 1))

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The shape of one input."""
        inputs, _ = next(self.train.batches(1))
        return tuple(inputs.shape[1:])

    @cached_property
    def train_labels(self) -> Tensor:
        """Every label; a Dataset has to be read through for them."""
        return labels_of(self.train, self.listed, "training data")

    @cached_property
    def test_labels(self) -> Tensor:
        """Every label of the test data."""
        return labels_of(self.test, self.listed, "test data")

    def samples(
        self, *, augment: bool = False
    ) -> tuple[ResidentSamples | DatasetSamples, ResidentSamples | DatasetSamples]:
        """Training and test data as batches."""
        if augment:
            raise ConfigError("data.augment crops pictures, which these data are not; leave it away.")
        return self.train, self.test


def labels_of(samples: ResidentSamples | DatasetSamples, listed: tuple[str, ...] | None, whose: str) -> Tensor:
    """Every label, each of which must have a class."""
    if isinstance(samples, ResidentSamples):
        labels = samples.labels
    else:
        labels = torch.cat([labels for _, labels in samples.batches(500)])
    if (low := int(labels.min())) < 0:
        raise DataError(f"The {whose} have the label {low}; labels count from 0.")
    if listed is not None and (high := int(labels.max())) >= len(listed):
        raise DataError(f"The {whose} have the label {high}, but data.classes lists {len(listed)} classes, from 0.")
    return labels
