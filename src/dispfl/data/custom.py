"""A user's own data, from files or from a function, divided into training and test data."""

import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dispfl.core.inputs import Inputs, take_rows, tensors_of, with_each
from dispfl.core.rng import global_stream
from dispfl.core.samples import Samples
from dispfl.core.task import TargetUnit, TaskName
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
    output_names,
)
from dispfl.data.readers import RawSamples, check_same_kind
from dispfl.data.readers.folder import read_folder, read_masked_folder
from dispfl.data.readers.table import Texts, read_arrays, read_table, read_targets, read_texts
from dispfl.data.rows import RowIds, are_test_rows, input_ids
from dispfl.data.text import WORDS, tokenize
from dispfl.errors import ConfigError, DataError
from dispfl.user_functions import call_factory, describe_error

log = logging.getLogger("dispfl.data")

DEFAULT_SIZE = 32
DEFAULT_TOKENS = 64
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
    task: TaskName = "classification",
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
    _check_task(settings, task)
    has_classes = task in ("classification", "segmentation")
    if inputs is not None and settings.classes is None and has_classes:
        settings = settings.model_copy(update={"classes": inputs.classes})
    unit = inputs.unit if inputs else None
    if settings.factory:
        made = load_from_factory(
            settings.factory, settings.classes, home, task, site=site, seed=seed
        )
        if task == "regression":
            made = replace(made, unit=unit or _unit(settings, made.train_labels))
        data: LabelledDataset = made
    else:
        parts = _read_all(settings, task, home, progress)
        if len(parts) > 1:
            settings.refuse(["test_share"], f"{parts[0].path} contains test data")
            check_same_kind(*parts)
        data = _assemble(settings, task, parts, inputs)
    if inputs is not None:
        inputs.check(data, data_source(settings, folder))
    return data


def _check_task(settings: CustomData, task: TaskName) -> None:
    """Refuse keys that do not apply to the task."""
    if task != "regression":
        settings.refuse(["target_mean", "target_std"], f"task is {task}; only a regression has it")
    if isinstance(settings.label, tuple) and task in ("classification", "segmentation"):
        raise ConfigError(
            f"data.label names {len(settings.label)} columns, but task is {task}; name one, or set"
            " task=regression or task=multilabel.",
            key="data.label",
        )
    if task == "multilabel" and not settings.label and not settings.factory:
        is_table = settings.hub or (settings.path or "").lower().endswith(".csv")
        if is_table:
            raise ConfigError(
                "data.label is missing: name all columns with labels of 0 or 1, such as"
                ' data.label=["red","round"].',
                key="data.label",
            )


def _unit(settings: CustomData, labels: Tensor) -> TargetUnit:
    """Return the unit of the targets: the declared one, or that of the training data."""
    targets = labels.reshape(len(labels), -1)
    if settings.target_mean is not None and settings.target_std is not None:
        for key, numbers in (
            ("target_mean", settings.target_mean),
            ("target_std", settings.target_std),
        ):
            if len(numbers) != targets.shape[1]:
                raise ConfigError(
                    f"data.{key} has {len(numbers)} numbers for {targets.shape[1]} targets; give"
                    " one for each.",
                    key=f"data.{key}",
                )
        return TargetUnit(settings.target_mean, settings.target_std)
    scaling = Scaling.of(targets)
    return TargetUnit(tuple(scaling.mean.tolist()), tuple(scaling.std.tolist()))


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
    settings: CustomData, task: TaskName, home: Path, progress: ProgressCallback | None
) -> list[RawSamples]:
    """Read all samples, or the training data and the test data where they are separate."""
    if settings.hub:
        from dispfl.data.readers.hub import read_hub  # an extra, and slow to import

        if task == "segmentation":
            raise ConfigError(
                "task=segmentation needs data.path, a folder with images and masks, or"
                " data.factory.",
                key="task",
            )
        size = settings.size or DEFAULT_SIZE
        colour = settings.colour is not False
        texts = _texts(settings, home)
        names = _names(settings.label)
        return read_hub(settings.hub, home, names, task, settings.group, size, colour, texts)

    assert settings.path is not None
    parts = _read(settings, task, home, settings.path, None, progress)
    if settings.test_path:
        if len(parts) > 1:
            raise ConfigError(
                f"{parts[0].path} contains test data; omit data.test_path.", key="data.test_path"
            )
        parts += _read(settings, task, home, settings.test_path, parts[0], progress)
        if len(parts) > 2:
            raise DataError(f"{parts[1].path} must contain test data alone: x and y.")
    return parts


def _names(label: str | tuple[str, ...] | None) -> tuple[str, ...]:
    if label is None:
        return ()
    return (label,) if isinstance(label, str) else label


def _read(
    settings: CustomData,
    task: TaskName,
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
            return [_read_images(settings, task, path, progress)]

        settings.refuse(["size", "colour"], f"{path} is not a folder of images")
        match path.suffix.lower():
            case ".csv":
                return [_read_csv(settings, task, path, train, _texts(settings, home))]
            case ".npz":
                settings.refuse(["label", "group", "text"], f"{path} has its labels in y")
                return read_arrays(path, task)
    except OSError as problem:
        reason = str(problem.strerror or problem)
        raise DataError(f"{problem.filename or path} cannot be read: {reason}.") from None
    raise ConfigError(
        f"{key} must be a .csv file, an .npz file or a folder of images, got {name!r}.", key=key
    )


def _read_images(
    settings: CustomData, task: TaskName, path: Path, progress: ProgressCallback | None
) -> RawSamples:
    size = settings.size or DEFAULT_SIZE
    colour = settings.colour is not False
    if task == "segmentation":
        settings.refuse(["label", "group"], f"{path} is a folder with images and masks")
        return read_masked_folder(path, size, colour, progress)
    if task != "classification":
        raise ConfigError(
            f"task is {task}, but a folder of images has classes or masks; give a CSV file, an NPZ"
            " file or data.factory.",
            key="task",
        )
    settings.refuse(["label", "group"], f"{path} is a folder, whose sub-folders are the labels")
    return read_folder(path, size, colour, progress)


def _texts(settings: CustomData, home: Path) -> Texts | None:
    """Return which column has texts, and how they become numbers; None without one."""
    if settings.text is None:
        return None
    tokenizer = settings.tokenizer or WORDS
    tokens = settings.tokens or DEFAULT_TOKENS
    return Texts(settings.text, lambda texts: tokenize(texts, tokenizer, tokens, home))


def _read_csv(
    settings: CustomData,
    task: TaskName,
    path: Path,
    train: RawSamples | None,
    texts: Texts | None,
) -> RawSamples:
    columns = () if train is None else train.columns
    if task == "segmentation":
        raise ConfigError(
            f"task is segmentation, but {path} is a table; give a folder with images and masks.",
            key="task",
        )
    if texts is not None:
        return read_texts(path, texts, _names(settings.label), task, settings.group)
    if task == "classification":
        label = settings.label if train is None else train.label
        assert not isinstance(label, tuple)
        return read_table(path, label, columns, settings.group)
    targets = _names(settings.label) if train is None else train.targets
    return read_targets(path, targets, columns, settings.group, binary=task == "multilabel")


class _NumberedSamples(NamedTuple):
    """Samples with numbers as labels; `groups` is empty without `data.group`."""

    inputs: Inputs
    labels: Tensor
    ids: Tensor
    groups: tuple[str, ...]

    def take(self, rows: Tensor) -> "_NumberedSamples":
        groups = self.groups
        if groups:
            groups = tuple(groups[row] for row in rows.tolist())
        inputs = take_rows(self.inputs, rows)
        return _NumberedSamples(inputs, self.labels[rows], self.ids[rows], groups)


def _assemble(
    settings: CustomData, task: TaskName, parts: list[RawSamples], inputs: InputFormat | None
) -> LabelledDataset:
    """Map labels to numbers, and hold out test data where the files do not."""
    source = parts[0].path
    classes = _outputs_of(settings, task, parts)
    numbered = []
    for samples in parts:
        ids = samples.file_ids
        if ids is None:
            ids = input_ids(samples.inputs)
        labels = _labels_of(samples, task, classes)
        numbered.append(_NumberedSamples(samples.inputs, labels, ids, samples.groups))

    if len(numbered) > 1:
        train, test = numbered
    else:
        test_share = settings.test_share or DEFAULT_TEST_SHARE
        train, test = _hold_out_test(numbered[0], test_share, source)
        if task == "classification":
            _warn_of_missing_classes(train, test, classes, source)
    unit = None
    if task == "regression":
        unit = inputs.unit if inputs else _unit(settings, train.labels)
    if settings.text is None and train.inputs.dtype == torch.uint8:
        normalization = inputs.normalization if inputs else None
        images = _image_dataset(settings, train, test, classes, normalization)
        return replace(images, task=task, unit=unit)
    scaling = _input_scaling(settings, train.inputs, inputs, source)
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
        task,
        unit,
        settings.text,
        (settings.tokenizer or WORDS) if settings.text else None,
    )


def _outputs_of(settings: CustomData, task: TaskName, parts: list[RawSamples]) -> tuple[str, ...]:
    """Return the names of the outputs."""
    labels = parts[0].labels
    if parts[0].targets:
        if settings.classes not in (None, parts[0].targets):
            raise ConfigError(
                f"data.classes does not apply: the columns of data.label name the outputs of a"
                f" {task}. Omit it.",
                key="data.classes",
            )
        return parts[0].targets
    if isinstance(labels, list):
        return settings.classes or _classes_of(parts)
    if task == "segmentation":
        return settings.classes or _classes_of_masks(parts)
    names = settings.classes or output_names(labels)
    if len(names) != labels.shape[1]:
        raise ConfigError(
            f"data.classes has {len(names)} names, but {parts[0].path} has {labels.shape[1]}"
            " targets; name each.",
            key="data.classes",
        )
    return names


def _classes_of_masks(parts: list[RawSamples]) -> tuple[str, ...]:
    largest = 1
    for samples in parts:
        assert isinstance(samples.labels, Tensor)
        largest = max(largest, int(samples.labels.max()))
    return tuple(map(str, range(largest + 1)))


def _labels_of(samples: RawSamples, task: TaskName, classes: tuple[str, ...]) -> Tensor:
    """Return labels as numbers; refuse those of no class."""
    if isinstance(samples.labels, list):
        return class_numbers(samples.labels, classes, samples.path)
    if task == "segmentation":
        largest = samples.labels.flatten(1).amax(1)
        if largest.max() >= len(classes):
            sample = int(largest.argmax())
            raise DataError(
                f"{samples.path}: the mask of sample {sample} has the class {int(largest.max())},"
                f" but data.classes lists {len(classes)} classes, from 0."
            )
    return samples.labels


def _input_scaling(
    settings: CustomData, rows: Tensor, inputs: InputFormat | None, source: Path
) -> Scaling | None:
    """Return the scaling of the columns: that of a trained model, or of the training data."""
    if inputs is None:
        return _column_scaling(rows, source) if settings.standardize else None
    if inputs.normalization is None:
        return None
    return _scaling_of(inputs.normalization)


def _scaling_of(normalization: Normalization) -> Scaling:
    return Scaling(torch.tensor(normalization.mean), torch.tensor(normalization.std))


def _groups(train: _NumberedSamples, test: _NumberedSamples) -> Groups | None:
    return (train.groups, test.groups) if train.groups else None


def _classes_of(parts: list[RawSamples]) -> tuple[str, ...]:
    """The classes of samples whose config lists none."""
    labels: set[str] = set()
    count = 0
    for samples in parts:
        assert isinstance(samples.labels, list)
        labels.update(samples.labels, samples.folders)
        count += len(samples.labels)
    return class_names(labels, count, parts[0].path)


def _hold_out_test(
    samples: _NumberedSamples, test_share: float, source: Path
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
    return train, test


def _warn_of_missing_classes(
    train: _NumberedSamples, test: _NumberedSamples, classes: tuple[str, ...], source: Path
) -> None:
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
            " a class. To learn numbers, set task=regression."
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
    factory: str,
    classes: tuple[str, ...] | None,
    folder: Path,
    task: TaskName = "classification",
    *,
    site: str = "",
    seed: int = 0,
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
    train = _checked_samples(factory, returned[0], "training data", classes, folder, task)
    test = _checked_samples(factory, returned[1], "test data", classes, folder, task)
    row_ids = None
    if isinstance(train, ResidentSamples) and isinstance(test, ResidentSamples):
        row_ids = RowIds(_ids(train.inputs), _ids(test.inputs))
    return CustomDataset("custom", train, test, classes, row_ids=row_ids, task=task)


def _ids(inputs: Inputs) -> Tensor:
    """Return the ids of inputs; of several tensors, those of all their values."""
    tensors = tensors_of(inputs)
    if len(tensors) == 1:
        return input_ids(tensors[0])
    ids = torch.stack([input_ids(tensor.reshape(len(tensor), -1)) for tensor in tensors], 1)
    return input_ids(ids)


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
    factory: str,
    data: Any,
    which: str,
    classes: tuple[str, ...] | None,
    folder: Path,
    task: TaskName,
) -> ResidentSamples | DatasetSamples:
    """Wrap what a user's function returns; `which` is "training data" or "test data"."""
    subject = f"The {which} of {FACTORY} {factory}"
    samples = samples_from(data, subject)
    try:
        inputs, labels = next(samples.batches(1))
    except Exception as problem:  # a Dataset runs the user's code, which can raise anything
        reason = describe_error(problem, folder)
        raise DataError(f"{subject} cannot return a sample: {reason}") from problem
    if not all(isinstance(tensor, Tensor) for tensor in (*tensors_of(inputs), labels)):
        types = f"({type(inputs).__name__}, {type(labels).__name__})"
        raise DataError(
            f"{subject} must be samples of (input, label), both numbers; batched, they are {types}."
        )
    if task != "classification":
        return _checked_for_task(samples, labels, subject, task)
    if labels.ndim != 1 or labels.dtype not in _INTEGER_TYPES:
        label_type = f"{labels.dtype} of shape {list(labels.shape[1:])}"
        raise DataError(
            f"{subject} must have one integer as the label of a sample, got"
            f" {label_type}.{_label_hint(labels)}"
        )

    if isinstance(samples, ResidentSamples):
        resident = ResidentSamples(with_each(samples.inputs, _as_float32), samples.labels.long())
        # A Dataset's labels are checked when they are needed, because reading them is slow.
        labels_of(resident, classes, which)
        return resident
    for tensor in tensors_of(inputs):
        if _as_float32(tensor).dtype != tensor.dtype:
            raise DataError(
                f"{subject} have inputs of type {tensor.dtype}; return them as float32."
            )
    if labels.dtype != torch.int64:
        raise DataError(f"{subject} have labels of type {labels.dtype}; return them as int(label).")
    assert isinstance(samples, DatasetSamples)
    return samples


LABEL_TYPES = {
    "regression": "numbers of type float32, one or several for each sample",
    "multilabel": "a 0 or 1 for each of its labels",
    "segmentation": "an integer for each pixel",
}
"""What the labels of a sample must be, by task."""


def _checked_for_task(
    samples: Samples, labels: Tensor, subject: str, task: TaskName
) -> ResidentSamples | DatasetSamples:
    """Refuse labels that are not those of a task other than classification."""
    match task:
        case "regression":
            fits = labels.is_floating_point() and labels.ndim <= 2
        case "multilabel":
            fits = labels.ndim == 2
        case _:
            fits = labels.ndim == 3 and labels.dtype in _INTEGER_TYPES
    if not fits:
        raise DataError(
            f"{subject} must have {LABEL_TYPES[task]}, because task is {task}; got {labels.dtype}"
            f" of shape {list(labels.shape[1:])}."
        )
    if isinstance(samples, ResidentSamples):
        own_labels = _as_float32(samples.labels)
        if task == "multilabel":
            own_labels = own_labels.to(torch.uint8)
        return ResidentSamples(with_each(samples.inputs, _as_float32), own_labels)
    assert isinstance(samples, DatasetSamples)
    return samples


def _label_hint(labels: Tensor) -> str:
    """Return what to do about labels that are no classes."""
    if labels.ndim == 2 and bool(((labels == 0) | (labels == 1)).all()):
        if bool((labels.sum(1) == 1).all()):
            return " Of one-hot labels, return labels.argmax(1)."
        return " Of several labels for each sample, set task=multilabel."
    if labels.is_floating_point():
        return " To learn numbers, set task=regression."
    return ""


def _as_float32(inputs: Tensor) -> Tensor:
    """Convert floats to float32; integers, which may be indices into a vocabulary, are kept."""
    return inputs.float() if inputs.is_floating_point() else inputs
