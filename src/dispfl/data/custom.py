"""A user's own data, from files or from a function, divided into training and test data."""

import logging
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dispfl.core.rng import global_stream
from dispfl.data.batches import DatasetSamples, ResidentSamples, Scaling, labels_of, samples_from
from dispfl.data.datasets import CustomData
from dispfl.data.fetch import ProgressCallback
from dispfl.data.labelled import (
    CustomDataset,
    Groups,
    ImageDataset,
    InputFormat,
    LabelledDataset,
    Normalization,
)
from dispfl.data.readers import RawSamples, check_same_kind
from dispfl.data.readers.folder import read_folder
from dispfl.data.readers.table import read_arrays, read_table
from dispfl.data.rows import RowIds, are_test_rows, input_ids
from dispfl.errors import ConfigError, DataError
from dispfl.user_functions import call_factory, describe_error

log = logging.getLogger("dispfl.data")

DEFAULT_SIZE = 32
DEFAULT_TEST_SHARE = 0.2
HALF = 0.5
"""Mean and standard deviation that map pixels to [-1, 1]: the same at every site, whatever its
images."""
FACTORY = "data.factory"

_INTEGER = re.compile(r"-?\d+")
_INTEGER_TYPES = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_FEW_CLASSES = 20


def load_custom(
    settings: CustomData,
    *,
    site: str = "",
    seed: int = 0,
    folder: Path | None = None,
    inputs: InputFormat | None = None,
    progress: ProgressCallback | None = None,
) -> LabelledDataset:
    """Load a user's data, divided into training and test data.

    A row's own content decides whether it is test data (`dispfl.data.rows`); the seed and the
    site's name are for `data.factory`. Relative paths and modules are looked up in `data.dir`, by
    default in the site's folder or the working directory. `inputs` is the format of a model that is
    trained already: its classes and its scaling are used, not those of the data. `progress` is
    called while images are decoded.
    """
    home = data_folder(settings, folder)
    if inputs is not None and settings.classes is None:
        settings = settings.model_copy(update={"classes": inputs.classes})
    if settings.factory:
        data: LabelledDataset = load_from_factory(
            settings.factory, settings.classes, home, site=site, seed=seed
        )
    else:
        parts = _read_all(settings, home, progress)
        if len(parts) > 1:
            settings.refuse(["test_share"], f"{parts[0].path} contains test data")
            check_same_kind(*parts)
        data = _assemble(settings, parts, inputs)
    if inputs is not None:
        inputs.check(data, data_source(settings, folder))
    return data


def data_folder(settings: CustomData, folder: Path | None) -> Path:
    """Return the folder in which relative paths and modules are looked up."""
    return (folder or Path()).absolute() / Path(settings.dir or "").expanduser()


def data_source(settings: CustomData, folder: Path | None) -> str:
    """Return the path of the data, or the name of a function or of a data set of the hub."""
    if not settings.path:
        return settings.hub or settings.factory or ""
    return str(located(data_folder(settings, folder), settings.path))


def located(home: Path, name: str) -> Path:
    """Return the path that a setting names, without `..`."""
    path = home / Path(name).expanduser()
    return path.parent.resolve() / path.name if ".." in path.parts else path


def _read_all(
    settings: CustomData, home: Path, progress: ProgressCallback | None
) -> list[RawSamples]:
    """Read all samples, or the training data and the test data where they are separate."""
    if settings.hub:
        from dispfl.data.readers.hub import read_hub  # an extra, and slow to import

        size = settings.size or DEFAULT_SIZE
        colour = settings.colour is not False
        return read_hub(settings.hub, home, settings.label, settings.group, size, colour)

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
    return parts


def _read(
    settings: CustomData,
    home: Path,
    name: str,
    train: RawSamples | None,
    progress: ProgressCallback | None,
) -> list[RawSamples]:
    """Read one file or folder; `train` is the training data if these are the test data."""
    path = located(home, name)
    key = "data.path" if train is None else "data.test_path"
    if not path.exists():
        hint = "; data.dir sets another folder to look in"
        if Path(name).expanduser().is_absolute():
            hint = ""
        raise DataError(f"{key} is {path}, which does not exist{hint}.")

    try:
        if path.is_dir():
            reason = f"{path} is a folder, whose sub-folders are the labels"
            settings.refuse(["label", "group"], reason)
            size = settings.size or DEFAULT_SIZE
            return [read_folder(path, size, settings.colour is not False, progress)]

        settings.refuse(["size", "colour"], f"{path} is not a folder of images")
        match path.suffix.lower():
            case ".csv":
                label = settings.label if train is None else train.label
                columns = () if train is None else train.columns
                return [read_table(path, label, columns, settings.group)]
            case ".npz":
                settings.refuse(["label", "group"], f"{path} has its labels in y")
                return read_arrays(path)
    except OSError as problem:
        reason = str(problem.strerror or problem)
        raise DataError(f"{problem.filename or path} cannot be read: {reason}.") from None
    raise ConfigError(
        f"{key} must be a .csv file, an .npz file or a folder of images, got {name!r}.", key=key
    )


class _NumberedSamples(NamedTuple):
    """Samples with class numbers as labels; `groups` is empty without `data.group`."""

    inputs: Tensor
    labels: Tensor
    ids: Tensor
    groups: tuple[str, ...]

    def take(self, rows: Tensor) -> "_NumberedSamples":
        groups = self.groups
        if groups:
            groups = tuple(groups[row] for row in rows.tolist())
        return _NumberedSamples(self.inputs[rows], self.labels[rows], self.ids[rows], groups)


def _assemble(
    settings: CustomData, parts: list[RawSamples], inputs: InputFormat | None
) -> LabelledDataset:
    """Map labels to class numbers, and hold out test data where the files do not."""
    source = parts[0].path
    classes = settings.classes or _classes_of(parts)
    numbered = []
    for samples in parts:
        labels = class_numbers(samples.labels, classes, samples.path)
        ids = samples.file_ids
        if ids is None:
            ids = input_ids(samples.inputs)
        numbered.append(_NumberedSamples(samples.inputs, labels, ids, samples.groups))

    if len(numbered) > 1:
        train, test = numbered
    else:
        test_share = settings.test_share or DEFAULT_TEST_SHARE
        train, test = _hold_out_test(numbered[0], test_share, classes, source)
    normalization = inputs.normalization if inputs else None
    if train.inputs.dtype == torch.uint8:
        return _image_dataset(settings, train, test, classes, normalization)

    scaling = None
    if normalization is not None:
        scaling = _scaling_of(normalization)
    elif inputs is None and settings.standardize:
        scaling = _column_scaling(train.inputs, source)
    if scaling is not None and train.inputs.shape[1:] == scaling.mean.shape:
        train = train._replace(inputs=scaling(train.inputs))
        test = test._replace(inputs=scaling(test.inputs))
    return CustomDataset(
        settings.name,
        ResidentSamples(train.inputs, train.labels),
        ResidentSamples(test.inputs, test.labels),
        classes,
        parts[0].columns,
        scaling,
        parts[0].label,
        _groups(train, test),
        RowIds(train.ids, test.ids),
    )


def _scaling_of(normalization: Normalization) -> Scaling:
    return Scaling(torch.tensor(normalization.mean), torch.tensor(normalization.std))


def _groups(train: _NumberedSamples, test: _NumberedSamples) -> Groups | None:
    return (train.groups, test.groups) if train.groups else None


def _classes_of(parts: list[RawSamples]) -> tuple[str, ...]:
    """The classes of samples whose config lists none."""
    labels: set[str] = set()
    count = 0
    for samples in parts:
        labels.update(samples.labels, samples.folders)
        count += len(samples.labels)
    return class_names(labels, count, parts[0].path)


def _hold_out_test(
    samples: _NumberedSamples, test_share: float, classes: tuple[str, ...], source: Path
) -> tuple[_NumberedSamples, _NumberedSamples]:
    """Divide samples into training and test data, each by its own content."""
    is_test = are_test_rows(samples.ids, test_share)
    train = samples.take((~is_test).nonzero().squeeze(1))
    test = samples.take(is_test.nonzero().squeeze(1))
    for part, name, change in ((train, "training", "smaller"), (test, "test", "larger")):
        if not len(part.labels):
            raise DataError(
                f"None of the {len(samples.labels)} samples of {source} is a {name} sample: their"
                f" content decides, and equal ones go together. Add samples, give a {change}"
                " data.test_share, or name the test data in data.test_path."
            )

    untested = sorted(set(train.labels.tolist()) - set(test.labels.tolist()))
    untrained = sorted(set(test.labels.tolist()) - set(train.labels.tolist()))
    for numbers, name in ((untested, "test"), (untrained, "training")):
        if numbers:
            log.warning(
                "%s has no %s sample of the class %s; with more samples, or with data.test_path, it"
                " has some.",
                source,
                name,
                ", ".join(classes[number] for number in numbers[:_FEW_CLASSES]),
            )
    return train, test


def _column_scaling(inputs: Tensor, source: Path) -> Scaling:
    if inputs.ndim != 2:
        raise ConfigError(
            f"data.standardize applies to columns and images, but {source} has samples of shape"
            f" {list(inputs.shape[1:])}.",
            key="data.standardize",
        )
    return Scaling.of(inputs)


def _image_dataset(
    settings: CustomData,
    train: _NumberedSamples,
    test: _NumberedSamples,
    classes: tuple[str, ...],
    normalization: Normalization | None,
) -> ImageDataset:
    channels = train.inputs.shape[-1]
    mean = std = (HALF,) * channels
    if normalization is not None:
        mean, std = normalization
    elif settings.standardize:
        mean, std = _channel_moments(train.inputs)
    return ImageDataset(
        name=settings.name,
        train_inputs=train.inputs.permute(0, 3, 1, 2),
        train_labels=train.labels,
        test_inputs=test.inputs.permute(0, 3, 1, 2),
        test_labels=test.labels,
        classes=classes,
        mean=mean,
        std=std,
        flip=False,
        groups=_groups(train, test),
        row_ids=RowIds(train.ids, test.ids),
    )


def _channel_moments(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel, for pixels in [0, 1].

    A channel with a single value has HALF for both.
    """
    values = torch.arange(256, dtype=torch.float64) / 255
    means = []
    stds = []
    for channel in images.unbind(-1):
        counts = torch.bincount(channel.flatten(), minlength=256).double()
        shares = counts / counts.sum()
        mean = float((shares * values).sum())
        std = float((shares * (values - mean) ** 2).sum().sqrt())
        constant = (counts > 0).sum() == 1
        means.append(HALF if constant else mean)
        stds.append(HALF if constant else std)
    return tuple(means), tuple(stds)


def class_names(labels: Iterable[str], samples: int, source: Path) -> tuple[str, ...]:
    """The classes of labels that no config lists: sorted, numerically where all are integers."""
    names = set(labels)
    limit = _FEW_CLASSES
    if not _are_measurements(names):
        limit = max(_FEW_CLASSES, samples // 2)
    if len(names) > limit:
        raise DataError(
            f"{source} has {len(names):,} different labels for {samples:,} samples; a label must be"
            " a class."
        )
    for name in sorted(names):
        if not name.isprintable():
            raise DataError(
                f"{source} has the label {name!r}, which cannot be printed; rename the class."
            )
    if len(names) == 1:
        raise DataError(
            f"{source} has one class only, {names.pop()}; list all of the federation's in"
            " data.classes."
        )
    if all(map(_INTEGER.fullmatch, names)):
        return tuple(sorted(names, key=lambda name: (int(name), name)))
    return tuple(sorted(names))


def _are_measurements(names: Iterable[str]) -> bool:
    """Whether names are numbers, some with a fraction: values for regression, not classes."""
    try:
        return not all(float(name).is_integer() for name in names)
    except ValueError:
        return False


def class_numbers(labels: Sequence[str], classes: tuple[str, ...], source: Path) -> Tensor:
    """The index of each label among the classes.

    A label is the name of a class, or its index from 0 if no class has a number as its name.
    """
    numbers = {name: number for number, name in enumerate(classes)}
    if not any(map(_INTEGER.fullmatch, classes)):
        for number in range(len(classes)):
            numbers[str(number)] = number
    try:
        return torch.tensor([numbers[label] for label in labels], dtype=torch.int64)
    except KeyError as unknown:
        listed = ", ".join(classes[:_FEW_CLASSES])
        if len(classes) > _FEW_CLASSES:
            listed += ", ..."
        raise DataError(
            f"{source} has the label {unknown.args[0]}, which data.classes does not list: {listed}."
        ) from None


def load_from_factory(
    factory: str, classes: tuple[str, ...] | None, folder: Path, *, site: str = "", seed: int = 0
) -> CustomDataset:
    """Call the user's function and check the Datasets or tensors that it returns."""
    arguments = {"site": site} if site else {}
    with global_stream(seed, "data", site):  # its draws from torch's generator are reproducible
        returned = call_factory(FACTORY, factory, folder, **arguments)
    if not _is_pair_of_data(returned):
        raise DataError(
            f"{FACTORY} {factory} must return (training data, test data), each a Dataset or a pair"
            f" (inputs, labels) of tensors; it returned {_type_names(returned)}."
        )
    train = _checked_samples(factory, returned[0], "training data", classes, folder)
    test = _checked_samples(factory, returned[1], "test data", classes, folder)
    row_ids = None
    if isinstance(train, ResidentSamples) and isinstance(test, ResidentSamples):
        row_ids = RowIds(input_ids(train.inputs), input_ids(test.inputs))
    return CustomDataset("custom", train, test, classes, row_ids=row_ids)


def _is_pair_of_data(returned: Any) -> bool:
    """Whether these may be training and test data, and not the inputs and labels of one of them."""
    if not isinstance(returned, (tuple, list)) or len(returned) != 2:
        return False
    train, test = returned
    return not isinstance(train, Tensor) and not isinstance(test, Tensor)


def _type_names(returned: Any) -> str:
    if not isinstance(returned, (tuple, list)):
        return type(returned).__name__
    names = ", ".join(type(value).__name__ for value in returned)
    return f"({names})"


def _checked_samples(
    factory: str, data: Any, which: str, classes: tuple[str, ...] | None, folder: Path
) -> ResidentSamples | DatasetSamples:
    """Wrap what a user's function returns; `which` is "training data" or "test data"."""
    subject = f"The {which} of {FACTORY} {factory}"
    samples = samples_from(data, subject)
    try:
        inputs, labels = next(samples.batches(1))
    except Exception as problem:  # a Dataset runs the user's code, which can raise anything
        reason = describe_error(problem, folder)
        raise DataError(f"{subject} cannot return a sample: {reason}") from problem
    if not isinstance(inputs, Tensor) or not isinstance(labels, Tensor):
        types = f"({type(inputs).__name__}, {type(labels).__name__})"
        raise DataError(
            f"{subject} must be samples of (input, label), both numbers; batched, they are {types}."
        )
    if labels.ndim != 1 or labels.dtype not in _INTEGER_TYPES:
        label_type = f"{labels.dtype} of shape {list(labels.shape[1:])}"
        raise DataError(
            f"{subject} must have one integer as the label of a sample, got {label_type}."
        )

    if isinstance(samples, ResidentSamples):
        resident = ResidentSamples(_as_float32(samples.inputs), samples.labels.long())
        # A Dataset's labels are checked when they are needed, because reading them is slow.
        labels_of(resident, classes, which)
        return resident
    if _as_float32(inputs).dtype != inputs.dtype:
        raise DataError(f"{subject} have inputs of type {inputs.dtype}; return them as float32.")
    if labels.dtype != torch.int64:
        raise DataError(f"{subject} have labels of type {labels.dtype}; return them as int(label).")
    assert isinstance(samples, DatasetSamples)
    return samples


def _as_float32(inputs: Tensor) -> Tensor:
    """Convert floats to float32; integers, which may be indices into a vocabulary, are kept."""
    return inputs.float() if inputs.is_floating_point() else inputs
