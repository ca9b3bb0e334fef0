"""A data set in memory: training and test samples, and what a model has to know of them."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, Protocol

from torch import Tensor

from dispfl.core.samples import Samples
from dispfl.core.task import TargetUnit, TaskName
from dispfl.data.batches import (
    DatasetSamples,
    ImageTransform,
    ResidentSamples,
    Scaling,
    all_labels,
    labels_of,
)
from dispfl.data.rows import RowIds
from dispfl.errors import ConfigError, DataError

Groups = tuple[Sequence[str], Sequence[str]]
"""Where each training sample and each test sample comes from: a value of `data.group`."""


class Normalization(NamedTuple):
    """Inputs become (x - mean) / std.

    Per channel, for pixels in [0, 1]; or per column of a table.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]


Kind = Literal["table", "images", "texts", "arrays"]
"""What inputs are; `arrays` have neither columns nor pixels."""


class TensorFormat(NamedTuple):
    """The shape and the type of a tensor of one sample."""

    shape: tuple[int, ...]
    dtype: str
    """As torch names it: `float32`, `int64`."""


class LabelledDataset(Protocol):
    """What `load_dataset` returns, whatever the source of the data."""

    @property
    def name(self) -> str:
        """The name of the data set: of the catalogue, or `custom`."""

    @property
    def task(self) -> TaskName:
        """What is learned from them."""

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the outputs, in order: classes, or the targets of a regression."""

    @property
    def unit(self) -> TargetUnit | None:
        """Regression: the unit of the targets."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one input."""

    @property
    def train_labels(self) -> Tensor:
        """The labels of the training data.

        Classes are int64 (N), of pixels int16 (N, H, W); several labels uint8 (N, labels); numbers
        float32 (N, targets).
        """

    @property
    def test_labels(self) -> Tensor:
        """The labels of the test data."""

    @property
    def groups(self) -> Groups | None:
        """The groups of the samples; None without `data.group`."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Table: the names of the inputs; otherwise empty."""

    @property
    def label(self) -> str | None:
        """Table: the name of the label's column."""

    @property
    def kind(self) -> Kind:
        """What the inputs are."""

    @property
    def normalization(self) -> Normalization | None:
        """How the inputs were normalized; None if they were not."""

    @property
    def row_ids(self) -> RowIds | None:
        """The ids of the samples; None for the catalogue, and for a Dataset, slow to read."""

    def samples(self, *, augment: bool = False) -> tuple[Samples, Samples]:
        """Return training and test samples; `augment` crops and flips training images at random."""


@dataclass(frozen=True, eq=False)
class ImageDataset:
    """Images with labels. `mean` and `std` are per channel, for pixels scaled to [0, 1]."""

    name: str
    train_inputs: Tensor
    """uint8; N, C, H, W"""
    train_labels: Tensor
    test_inputs: Tensor
    test_labels: Tensor
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    flip: bool
    """Whether a flipped image still shows its class: true of photographs, not of digits."""
    groups: Groups | None = None
    row_ids: RowIds | None = None
    task: TaskName = "classification"
    unit: TargetUnit | None = None
    kind: Kind = "images"

    @property
    def shape(self) -> tuple[int, ...]:
        """Channels, height and width of an image."""
        return tuple(self.train_inputs.shape[1:])

    @property
    def columns(self) -> tuple[str, ...]:
        """Empty: images have no columns."""
        return ()

    @property
    def label(self) -> None:
        """None: the labels of images have no column."""
        return

    @property
    def normalization(self) -> Normalization:
        """Mean and standard deviation of each channel."""
        return Normalization(self.mean, self.std)

    def samples(self, *, augment: bool = False) -> tuple[ResidentSamples, ResidentSamples]:
        """Return training and test samples.

        `augment` crops training images at random, and flips them if `flip` allows it.
        """
        if augment and self.task == "segmentation":
            raise ConfigError(
                "data.augment crops images, but not their masks; omit it.", key="data.augment"
            )
        transform = ImageTransform(self.mean, self.std, crop=augment, flip=augment and self.flip)
        train = ResidentSamples(
            _channels_last(self.train_inputs), self.train_labels, transform=transform
        )
        test = ResidentSamples(
            _channels_last(self.test_inputs), self.test_labels, transform=transform
        )
        return train, test


def _channels_last(images: Tensor) -> Tensor:
    return images.permute(0, 2, 3, 1).contiguous()


@dataclass(frozen=True, eq=False)
class CustomDataset:
    """Samples from a table, from arrays or from a user's function; images are an `ImageDataset`."""

    name: str
    train: ResidentSamples | DatasetSamples
    test: ResidentSamples | DatasetSamples
    listed_classes: tuple[str, ...] | None = None
    """The classes if they are known; otherwise they are the numbers up to the largest label."""
    columns: tuple[str, ...] = ()
    scaling: Scaling | None = None
    """How the inputs were standardized, if they were."""
    label: str | None = None
    groups: Groups | None = None
    row_ids: RowIds | None = None
    task: TaskName = "classification"
    unit: TargetUnit | None = None
    text: str | None = None
    """Texts: the name of their column."""
    tokenizer: str | None = None

    @property
    def kind(self) -> Kind:
        """A table if its columns have names."""
        if self.text is not None:
            return "texts"
        return "table" if self.columns else "arrays"

    @cached_property
    def classes(self) -> tuple[str, ...]:
        """The names of the outputs, in order."""
        if self.listed_classes is not None:
            return self.listed_classes
        if self.task in ("regression", "multilabel"):
            return output_names(self.train_labels)
        largest = max(int(self.train_labels.max()), int(self.test_labels.max()))
        return tuple(str(label) for label in range(largest + 1))

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The shape of one input; of several tensors, that of the first."""
        return next(iter(self.tensors.values())).shape

    @cached_property
    def tensors(self) -> dict[str, TensorFormat]:
        """The tensors of one input, by the names of the network's arguments; one is `inputs`."""
        inputs, _ = next(self.train.batches(1))
        named = inputs if isinstance(inputs, Mapping) else {"inputs": inputs}
        formats = {}
        for name, tensor in named.items():
            dtype = str(tensor.dtype).removeprefix("torch.")
            formats[name] = TensorFormat(tuple(tensor.shape[1:]), dtype)
        return formats

    @cached_property
    def train_labels(self) -> Tensor:
        """The labels of the training data; a Dataset is read completely for them."""
        return self._labels(self.train, "training data")

    @cached_property
    def test_labels(self) -> Tensor:
        """The labels of the test data."""
        return self._labels(self.test, "test data")

    def _labels(self, samples: ResidentSamples | DatasetSamples, which: str) -> Tensor:
        if self.task == "classification":
            return labels_of(samples, self.listed_classes, which)
        return all_labels(samples)

    @property
    def normalization(self) -> Normalization | None:
        """Mean and standard deviation by which the columns were scaled."""
        scaling = self.scaling
        if scaling is None:
            if not self.columns:
                return None
            scaling = Scaling.identity(len(self.columns))
        return Normalization(tuple(scaling.mean.tolist()), tuple(scaling.std.tolist()))

    def samples(
        self, *, augment: bool = False
    ) -> tuple[ResidentSamples | DatasetSamples, ResidentSamples | DatasetSamples]:
        """Return training and test samples; `augment` is refused."""
        if augment:
            raise ConfigError(
                "data.augment crops images, and these data are not images; omit it.",
                key="data.augment",
            )
        return self.train, self.test


@dataclass(frozen=True)
class InputFormat:
    """What the inputs and outputs of a model mean. It belongs to the weights, and is saved with
    them: data that are read later are read in this format, whatever their own mean is."""

    kind: Kind
    classes: tuple[str, ...]
    """The class names, in the order of the outputs."""
    shape: tuple[int, ...]
    """The shape of one input."""
    columns: tuple[str, ...] = ()
    label: str | None = None
    """Table: the name of the label's column."""
    normalization: Normalization | None = None
    task: TaskName = "classification"
    unit: TargetUnit | None = None
    """Regression: the unit of the outputs."""
    text: str | None = None
    """Texts: the name of their column."""
    tokenizer: str | None = None
    tensors: Mapping[str, TensorFormat] = field(default_factory=dict)
    """Texts and arrays: the tensors of one input."""

    @classmethod
    def of(cls, data: LabelledDataset) -> "InputFormat":
        """Return the format of data."""
        known = cls(
            data.kind,
            data.classes,
            data.shape,
            data.columns,
            data.label,
            data.normalization,
            data.task,
            data.unit,
        )
        if isinstance(data, CustomDataset) and data.kind in ("texts", "arrays"):
            return replace(known, text=data.text, tokenizer=data.tokenizer, tensors=data.tensors)
        return known

    def check(self, data: LabelledDataset, source: str) -> None:
        """Refuse data that the model cannot use."""
        present = InputFormat.of(data)
        for name in ("task", "kind", "columns", "classes", "shape", "tokenizer"):
            expected = getattr(self, name)
            value = getattr(present, name)
            if value != expected:
                raise DataError(
                    f"{source} has the {name} {_as_text(value)}, but the model was trained with"
                    f" {_as_text(expected)}. Restore the data, or start a new run with them."
                )

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON can hold it, with all digits."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "InputFormat":
        """Read what `to_json` returned."""
        normalization = content["normalization"]
        if normalization is not None:
            mean, std = normalization
            normalization = Normalization(tuple(mean), tuple(std))
        unit = content.get("unit")
        if unit is not None:
            unit = TargetUnit(tuple(unit["mean"]), tuple(unit["std"]))
        return cls(
            content["kind"],
            tuple(content["classes"]),
            tuple(content["shape"]),
            tuple(content["columns"]),
            content["label"],
            normalization,
            content.get("task", "classification"),
            unit,
            content.get("text"),
            content.get("tokenizer"),
            _formats(content.get("tensors", {})),
        )


def _formats(content: Mapping[str, Any]) -> dict[str, TensorFormat]:
    return {name: TensorFormat(tuple(shape), dtype) for name, (shape, dtype) in content.items()}


def output_names(labels: Tensor) -> tuple[str, ...]:
    """Return names for outputs without any: `y`, or `y0`, `y1`, ..."""
    if labels.ndim == 1 or labels.shape[1] == 1:
        return ("y",)
    return tuple(f"y{number}" for number in range(labels.shape[1]))


def _as_text(value: str | tuple[str | int, ...] | None) -> str:
    if value is None:
        return "(none)"
    if isinstance(value, str):
        return value
    return ", ".join(map(str, value)) or "(none)"
