"""A user's own data: read from files or returned by a user's function, and divided into training
and test data."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dispfl.core.rng import global_stream, stream
from dispfl.data.batches import DatasetSamples, ResidentSamples, Scaling, labels_of, samples_from
from dispfl.data.datasets import CustomData, ImageDataset
from dispfl.data.fetch import ProgressCallback
from dispfl.data.readers import RawSamples, check_same_kind
from dispfl.data.readers.folder import read_folder
from dispfl.data.readers.table import read_arrays, read_table
from dispfl.errors import ConfigError, DataError
from dispfl.user_functions import call_factory, describe_error

DEFAULT_SIZE = 32
DEFAULT_TEST_SHARE = 0.2
HALF = 0.5
"""Mean and standard deviation that map pixels to [-1, 1]: the same at every site, whatever its
images."""
FACTORY = "data.factory"

_INTEGER = re.compile(r"-?\d+")
_INTEGER_TYPES = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_FEW_CLASSES = 20


@dataclass(frozen=True, eq=False)
class CustomDataset:
    """Samples from a table, from arrays or from a user's function. Images become an `ImageDataset`
    instead."""

    name: str
    train: ResidentSamples | DatasetSamples
    test: ResidentSamples | DatasetSamples
    listed: tuple[str, ...] | None = None
    """The classes if they are known; otherwise they are the numbers up to the largest label."""
    columns: tuple[str, ...] = ()
    """Table: the names of the inputs."""
    scaling: Scaling | None = None
    """How the inputs were standardized, if they were."""
    label: str | None = None
    """Table: the name of the label's column."""
    groups: tuple[Sequence[str], Sequence[str]] | None = None
    """With `data.group`: where each training sample and each test sample comes from."""

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
        """The labels of the training data; a Dataset is read completely for them."""
        return labels_of(self.train, self.listed, "training data")

    @cached_property
    def test_labels(self) -> Tensor:
        """The labels of the test data."""
        return labels_of(self.test, self.listed, "test data")

    def samples(
        self, *, augment: bool = False
    ) -> tuple[ResidentSamples | DatasetSamples, ResidentSamples | DatasetSamples]:
        """Training and test samples."""
        if augment:
            raise ConfigError(
                "data.augment crops images, and these data are not images; omit it.",
                key="data.augment",
            )
        return self.train, self.test


def load_custom(
    settings: CustomData,
    *,
    site: str = "",
    seed: int = 0,
    folder: Path | None = None,
    progress: ProgressCallback | None = None,
) -> ImageDataset | CustomDataset:
    """Load a user's data, divided into training and test data.

    The seed and the site's name determine which samples are test data. Relative paths and modules
    are looked up in `data.dir`, by default in the site's folder or the working directory.
    `progress` is called while images are decoded.
    """
    home = Path(settings.dir or folder or "").expanduser().absolute()
    if settings.factory:
        return load_from_factory(settings.factory, settings.classes, home, site=site, seed=seed)
    if settings.hub:
        from dispfl.data.readers.hub import read_hub  # an extra, and slow to import

        size, colour = settings.size or DEFAULT_SIZE, settings.colour is not False
        parts = read_hub(settings.hub, home, settings.label, settings.group, size, colour)
    else:
        assert settings.path is not None
        parts = _read(settings, home, settings.path, None, progress)
    if settings.test_path:
        if len(parts) > 1:
            raise ConfigError(
                f"{parts[0].path} contains test data; omit data.test_path.", key="data.test_path"
            )
        parts += _read(settings, home, settings.test_path, parts[0], progress)
        if len(parts) > 2:
            raise DataError(f"{parts[1].path} must contain test data alone: x and y.")
    if len(parts) > 1:
        settings.refuse(["test_share"], f"{parts[0].path} contains test data")
        check_same_kind(*parts)
    return _assemble(settings, parts, stream(seed, "test", site))


def _read(
    settings: CustomData,
    home: Path,
    name: str,
    like: RawSamples | None,
    progress: ProgressCallback | None,
) -> list[RawSamples]:
    """Read one file or folder; `like` is the training data if these are the test data."""
    path = home / Path(name).expanduser()
    key = "data.path" if like is None else "data.test_path"
    if not path.exists():
        hint = (
            ""
            if Path(name).expanduser().is_absolute()
            else "; data.dir sets another folder to look in"
        )
        raise DataError(f"{key} is {path}, which does not exist{hint}.")
    try:
        if path.is_dir():
            settings.refuse(
                ["label", "group"], f"{path} is a folder, whose sub-folders are the labels"
            )
            colour = settings.colour is not False
            return [read_folder(path, settings.size or DEFAULT_SIZE, colour, progress)]
        settings.refuse(["size", "colour"], f"{path} is not a folder of images")
        match path.suffix.lower():
            case ".csv":
                label = settings.label if like is None else like.label
                return [read_table(path, label, like.columns if like else (), settings.group)]
            case ".npz":
                settings.refuse(["label", "group"], f"{path} has its labels in y")
                return read_arrays(path)
    except OSError as problem:
        raise DataError(
            f"{problem.filename or path} cannot be read: {problem.strerror or problem}."
        ) from None
    raise ConfigError(
        f"{key} must be a .csv file, an .npz file or a folder of images, got {name!r}.", key=key
    )


def _assemble(
    settings: CustomData, parts: list[RawSamples], rng: torch.Generator
) -> ImageDataset | CustomDataset:
    """Map labels to class numbers, and hold out test data where the files do not."""
    where = parts[0].path
    found = {label for part in parts for label in (*part.labels, *part.folders)}
    classes = settings.classes or class_names(found, sum(len(part.labels) for part in parts), where)
    labels = [class_numbers(part.labels, classes, part.path) for part in parts]
    inputs, groups = [part.inputs for part in parts], [part.groups for part in parts]
    if len(parts) == 1:
        kinds = _kinds(labels[0], groups[0])  # each group has test samples of its own
        rows = train_test_rows(kinds, settings.test_share or DEFAULT_TEST_SHARE, rng)
        if not len(rows[1]):
            raise DataError(
                f"{where} has no class with two samples, so none can be held out for testing; add"
                " some."
            )
        inputs, labels = [inputs[0][mine] for mine in rows], [labels[0][mine] for mine in rows]
        groups = [tuple(groups[0][k] for k in mine.tolist()) if groups[0] else () for mine in rows]
    sources = (groups[0], groups[1]) if groups[0] else None
    if inputs[0].dtype == torch.uint8:
        return _image_dataset(settings, inputs, labels, classes, sources)
    scaling = None
    if settings.standardize:
        if inputs[0].ndim != 2:
            shape = list(inputs[0].shape[1:])
            raise ConfigError(
                f"data.standardize applies to columns and images, but {where} has samples of shape"
                f" {shape}.",
                key="data.standardize",
            )
        scaling = Scaling.of(inputs[0])
        inputs = [scaling(part) for part in inputs]
    train, test = (ResidentSamples(x, y) for x, y in zip(inputs, labels, strict=True))
    return CustomDataset(
        settings.name, train, test, classes, parts[0].columns, scaling, parts[0].label, sources
    )


def _kinds(labels: Tensor, groups: Sequence[str]) -> Tensor:
    """Number the combinations of label and group."""
    if not groups:
        return labels
    numbers = {group: k for k, group in enumerate(sorted(set(groups)))}
    return labels * len(numbers) + torch.tensor([numbers[group] for group in groups])


def _image_dataset(
    settings: CustomData,
    inputs: list[Tensor],
    labels: list[Tensor],
    classes: tuple[str, ...],
    groups: tuple[Sequence[str], Sequence[str]] | None,
) -> ImageDataset:
    channels = inputs[0].shape[-1]
    mean, std = (HALF,) * channels, (HALF,) * channels
    if settings.standardize:
        mean, std = _channel_moments(inputs[0])
    train, test = (images.permute(0, 3, 1, 2) for images in inputs)
    return ImageDataset(
        settings.name, train, labels[0], test, labels[1], classes, mean, std, False, groups
    )


def _channel_moments(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel, for pixels in [0, 1]; HALF for a channel with a
    single value."""
    values = torch.arange(256, dtype=torch.float64) / 255
    means, stds = [], []
    for channel in images.unbind(-1):
        counts = torch.bincount(channel.flatten(), minlength=256).double()
        varied, shares = (counts > 0).sum() > 1, counts / counts.sum()
        mean = float((shares * values).sum())
        means.append(mean if varied else HALF)
        stds.append(float((shares * (values - mean) ** 2).sum().sqrt()) if varied else HALF)
    return tuple(means), tuple(stds)


def train_test_rows(
    labels: Tensor, test_share: float, rng: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Draw each class's share of test rows; return the training rows and the test rows.

    The share is rounded, with at least one test sample and one training sample per class. A class
    with a single sample has no test sample.
    """
    tested = torch.zeros(len(labels), dtype=torch.bool)
    for label in sorted(set(labels.tolist())):
        rows = (labels == label).nonzero().squeeze(1)
        count = min(max(1, round(test_share * len(rows))), len(rows) - 1)
        tested[rows[torch.randperm(len(rows), generator=rng)[:count]]] = True
    return (~tested).nonzero().squeeze(1), tested.nonzero().squeeze(1)


def class_names(found: Iterable[str], samples: int, where: Path) -> tuple[str, ...]:
    """The classes of labels that no config lists: sorted, numerically where all are integers."""
    names = set(found)
    if len(names) > (_FEW_CLASSES if _are_measurements(names) else max(_FEW_CLASSES, samples // 2)):
        raise DataError(
            f"{where} has {len(names):,} different labels for {samples:,} samples; a label must be"
            " a class."
        )
    if unprintable := sorted(name for name in names if not name.isprintable()):
        raise DataError(
            f"{where} has the label {unprintable[0]!r}, which cannot be printed; rename the class."
        )
    if len(names) == 1:
        raise DataError(
            f"{where} has one class only, {names.pop()}; list all of the federation's in"
            " data.classes."
        )
    if all(_INTEGER.fullmatch(name) for name in names):
        return tuple(sorted(names, key=lambda name: (int(name), name)))
    return tuple(sorted(names))


def _are_measurements(names: Iterable[str]) -> bool:
    """Whether all names are numbers and some have a fraction: values for regression, not
    classes."""
    try:
        return not all(float(name).is_integer() for name in names)
    except ValueError:
        return False


def class_numbers(labels: Sequence[str], classes: tuple[str, ...], where: Path) -> Tensor:
    """The index of each label among the classes.

    A label is the name of a class, or its index from 0 if no class has a number as its name.
    """
    place = {name: k for k, name in enumerate(classes)}
    if not any(_INTEGER.fullmatch(name) for name in classes):
        place |= {str(k): k for k in range(len(classes))}
    try:
        return torch.tensor([place[label] for label in labels], dtype=torch.int64)
    except KeyError as unknown:
        known = ", ".join(classes[:_FEW_CLASSES]) + (", ..." if len(classes) > _FEW_CLASSES else "")
        raise DataError(
            f"{where} has the label {unknown.args[0]}, which data.classes does not list: {known}."
        ) from None


def load_from_factory(
    factory: str, classes: tuple[str, ...] | None, folder: Path, *, site: str = "", seed: int = 0
) -> CustomDataset:
    """Call the user's function and check what it returns: Datasets or tensors, as `Federation`
    takes them."""
    with global_stream(seed, "data", site):  # its draws from torch's generator are reproducible
        made = call_factory(FACTORY, factory, folder, **({"site": site} if site else {}))
    if (
        not isinstance(made, (tuple, list))
        or len(made) != 2
        or any(isinstance(part, Tensor) for part in made)
    ):
        if isinstance(made, (tuple, list)):
            got = f"({', '.join(type(part).__name__ for part in made)})"
        else:
            got = type(made).__name__
        raise DataError(
            f"{FACTORY} {factory} must return (training data, test data), each a Dataset or a pair"
            f" (inputs, labels) of tensors; it returned {got}."
        )
    train, test = (
        _checked_samples(factory, part, f"{which} data", classes, folder)
        for part, which in zip(made, ("training", "test"), strict=True)
    )
    return CustomDataset("custom", train, test, listed=classes)


def _checked_samples(
    factory: str, given: Any, which: str, classes: tuple[str, ...] | None, folder: Path
) -> ResidentSamples | DatasetSamples:
    whose = f"The {which} of {FACTORY} {factory}"
    samples = samples_from(given, whose)
    try:
        inputs, labels = next(samples.batches(1))
    except Exception as problem:  # a Dataset runs the user's code, which can raise anything
        raise DataError(
            f"{whose} cannot return a sample: {describe_error(problem, folder)}"
        ) from problem
    if not isinstance(inputs, Tensor) or not isinstance(labels, Tensor):
        got = f"({type(inputs).__name__}, {type(labels).__name__})"
        raise DataError(
            f"{whose} must be samples of (input, label), both numbers; batched, they are {got}."
        )
    if labels.ndim != 1 or labels.dtype not in _INTEGER_TYPES:
        got = f"{labels.dtype} of shape {list(labels.shape[1:])}"
        raise DataError(f"{whose} must have one integer as the label of a sample, got {got}.")
    if isinstance(samples, ResidentSamples):
        resident = ResidentSamples(_as_float32(samples.inputs), samples.labels.long())
        labels_of(
            resident, classes, which
        )  # a Dataset's labels are checked when they are needed: that is slow
        return resident
    if _as_float32(inputs).dtype != inputs.dtype:
        raise DataError(f"{whose} have inputs of type {inputs.dtype}; return them as float32.")
    if labels.dtype != torch.int64:
        raise DataError(f"{whose} have labels of type {labels.dtype}; return them as int(label).")
    assert isinstance(samples, DatasetSamples)
    return samples


def _as_float32(inputs: Tensor) -> Tensor:
    """Convert floats to float32; integers, which may be indices into a vocabulary, stay as they
    are."""
    return inputs.float() if inputs.is_floating_point() else inputs
