"""The card of an exported model, stored in every format: its inputs, its classes, its origin."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, field_validator
from torch import Tensor, nn

from dispfl.core.task import TaskName
from dispfl.data.labelled import TensorFormat
from dispfl.errors import ConfigError
from dispfl.models.settings import ANY_SHAPE, Model
from dispfl.settings import Settings

LARGEST = 4096
"""The largest number of channels, and of pixels per side, that a card may declare."""
Side = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0)]
Structure = Literal["weights", "channels"]
DTYPES = ("float32", "int64", "int32", "int16", "uint8", "bool")
LARGEST_TENSOR = 1_000_000


class Card(Settings):
    """The card of one model; the first four fields are needed to use it, the others optional."""

    classes: tuple[str, ...] = Field(min_length=1)
    """Their names, or those of targets, in the order of the outputs."""
    shape: tuple[Side, ...]
    """Channels, height and width of an image; or the number of columns of a table."""
    mean: tuple[float, ...]
    """The normalization used in training, which is part of ONNX and .pt2 files: per channel, for
    pixels in [0, 1]; or per column, for the numbers of the table."""
    std: tuple[Positive, ...]
    columns: tuple[str, ...] | None = None
    """Column names of a table, in the order of the inputs; None for images."""
    tensors: dict[str, TensorFormat] | None = None
    """Texts and arrays: the tensors of one input, by the names of the network's arguments; `inputs`
    alone is its only argument. They are used as they are, without mean and std."""
    text: str | None = None
    """The column of a table with texts."""
    tokenizer: str | None = None
    """How texts become tokens: `words`, or a tokenizer of Hugging Face `transformers`."""
    task: TaskName = "classification"
    """What the outputs are: probabilities of one class, of independent labels, or of the class of
    each pixel; or the targets of a regression."""
    target_mean: tuple[float, ...] | None = None
    """Regression: the unit of the outputs, which is part of ONNX and .pt2 files."""
    target_std: tuple[Positive, ...] | None = None
    label: str | None = None
    """The label's column in the training data; a table for prediction may contain it, and it is
    ignored."""
    model: Model | None = None
    """The built-in network; None for any other, which cannot be saved as safetensors."""
    data: str | None = None
    method: str | None = None
    seed: int | None = None
    rounds: int | None = None
    """The number of complete rounds."""
    peer: str | None = None
    metric: str | None = None
    """What the score measures."""
    score: float | None = None
    """On the peer's test data after the last of these rounds; None if it was not evaluated then."""
    density: float | None = None
    """The share of weights that the peer keeps."""
    structure: Structure | None = None
    """What the peer leaves out: single weights, which are zeros in the file, or channels, which the
    file's network does not have."""
    parameters: int | None = None
    """The number of weights that the peer keeps, of `whole_parameters`."""
    whole_parameters: int | None = None
    weights_sha256: str | None = None
    """As in the run's `summary.json`."""
    dispfl: str | None = None
    """The version that wrote the file."""

    @field_validator("classes")
    @classmethod
    def _printable(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        """Names are printed, and an untrusted file must not send escape codes to the terminal."""
        for name in names:
            if not name.isprintable():
                raise ValueError(f"must be printable, got {name!r}.")
        return names

    def model_post_init(self, context: object, /) -> None:
        """Refuse inconsistent fields."""
        if self.task == "regression":
            self._check_targets()
        if self.tensors is not None:
            self._check_tensors(self.tensors)
            return
        if self.columns is None:
            self._check_image()
        else:
            self._check_table(self.columns)
        unit = "channels" if self.columns is None else "columns"
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) != self.shape[0]:
                raise ConfigError(
                    f"{name} must have a number for each of {self.shape[0]} {unit}, got"
                    f" {len(values)}.",
                    key=name,
                )

    def _check_tensors(self, tensors: Mapping[str, TensorFormat]) -> None:
        for name, tensor in tensors.items():
            if not name.isidentifier() or tensor.dtype not in DTYPES:
                raise ConfigError(
                    f"tensors must have names of arguments and a type of {', '.join(DTYPES)}, got"
                    f" {name!r} of {tensor.dtype[:20]!r}.",
                    key="tensors",
                )
            if any(not 1 <= side <= LARGEST_TENSOR for side in tensor.shape):
                raise ConfigError(
                    f"tensors must have sides of 1 to {LARGEST_TENSOR}, got {list(tensor.shape)}.",
                    key="tensors",
                )

    def _check_targets(self) -> None:
        for name, values in (("target_mean", self.target_mean), ("target_std", self.target_std)):
            if values is None or len(values) != len(self.classes):
                raise ConfigError(
                    f"{name} must have a number for each of {len(self.classes)} targets, got"
                    f" {values}.",
                    key=name,
                )

    def _check_table(self, columns: tuple[str, ...]) -> None:
        count = len(set(columns))
        if self.shape != (count,) or count < len(columns):
            raise ConfigError(
                f"shape must be [{count}], the number of different columns, got"
                f" {list(self.shape)}.",
                key="shape",
            )

    def _check_image(self) -> None:
        if len(self.shape) != 3:
            raise ConfigError(
                f"shape must be [channels, height, width], got {list(self.shape)}.", key="shape"
            )
        if max(self.shape) > LARGEST:
            raise ConfigError(
                f"shape must be at most {LARGEST} in each dimension, got {list(self.shape)}.",
                key="shape",
            )
        needs_square = self.model is not None and self.model.name not in ANY_SHAPE
        if needs_square and self.shape[1] != self.shape[2]:
            raise ConfigError(
                f"The built-in networks need square images, got shape {list(self.shape)}.",
                key="shape",
            )

    @property
    def input(self) -> Literal["images", "rows", "texts", "arrays"]:
        """The kind of input."""
        if self.tensors is not None:
            return "arrays" if self.text is None else "texts"
        return "rows" if self.columns else "images"

    @property
    def input_names(self) -> list[str]:
        """The names of the inputs in an ONNX file."""
        return [self.input] if self.tensors is None else list(self.tensors)

    def example(self, samples: int, rng: torch.Generator) -> list[Tensor]:
        """Return random inputs: realistic rows, pixels in [0, 1], or small whole numbers."""
        if self.tensors is not None:
            examples = []
            for tensor in self.tensors.values():
                shape = (samples, *tensor.shape)
                if tensor.dtype.startswith("float"):
                    examples.append(torch.randn(shape, generator=rng))
                else:
                    ones = torch.randint(0, 2, shape, generator=rng)
                    ones[:, :1] = 1  # a mask without a single token has no mean
                    examples.append(ones.to(getattr(torch, tensor.dtype)))
            return examples
        if self.columns:  # columns can have any scale
            standard = torch.randn(samples, *self.shape, generator=rng)
            return [standard * torch.tensor(self.std) + torch.tensor(self.mean)]
        return [torch.rand(samples, *self.shape, generator=rng)]

    @property
    def label_columns(self) -> tuple[str, ...]:
        """The columns of a table that may be there, and are ignored."""
        if self.task != "classification":
            return self.classes
        return () if self.label is None else (self.label,)

    @property
    def output(self) -> Literal["probabilities", "values"]:
        """What the outputs are, which is also their name in an ONNX file."""
        return "values" if self.task == "regression" else "probabilities"

    def network(self) -> nn.Module:
        """Build the network on the meta device, for `load_state_dict(..., assign=True)`."""
        if self.model is None:
            raise ConfigError(
                "Its network is not a built-in one, and safetensors contains weights only; export"
                " it as .onnx or .pt2."
            )
        with torch.device("meta"):
            return self.model.network(self.shape, len(self.classes))

    def to_strings(self) -> dict[str, str]:
        """The card as metadata of a file: strings as they are, anything else as JSON."""
        strings = {}
        for key, value in self.model_dump(mode="json", exclude_none=True).items():
            strings[key] = value if isinstance(value, str) else _json(value)
        return strings

    @classmethod
    def from_strings(cls, strings: Mapping[str, str]) -> "Card":
        """Read the card from a file's metadata; unknown keys are ignored."""
        if "classes" not in strings:
            raise ConfigError("It has no card, so `dispfl export` did not write it.")
        values: dict[str, Any] = {}
        for key, field in cls.model_fields.items():
            if key in strings:
                plain = field.annotation in (str | None, Structure | None, TaskName)
                values[key] = strings[key] if plain else _parsed(key, strings[key])
        return cls(**values)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _parsed(key: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise ConfigError(f"{key} must be JSON, got {text[:40]!r}.", key=key) from None
