"""What an exported model says of itself, in every format: what it wants, what its outputs mean, where it comes from."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, field_validator
from torch import nn

from dispfl.errors import ConfigError
from dispfl.models.registry import ANY_SHAPE, Model
from dispfl.settings import Settings

LARGEST = 4096
"""Channels and pixels a side: what a card from elsewhere may ask for. A table has as many columns as it names."""
Side = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0)]


class Card(Settings):
    """The card of one model. The first four fields are what a user needs; the others may stay unknown."""

    classes: tuple[str, ...] = Field(min_length=1)
    """Their names, in the order of the outputs."""
    shape: tuple[Side, ...]
    """Channels, height and width of a picture; or how many columns a table has."""
    mean: tuple[float, ...]
    """The normalization of training, which ONNX and .pt2 files have inside: per channel, for pixels in [0, 1]; or per
    column, for numbers as they stand in the table."""
    std: tuple[Positive, ...]
    columns: tuple[str, ...] | None = None
    """A table's, in the order of the inputs; None for pictures."""
    label: str | None = None
    """The column that was learned, which a table may have and the model does not look at."""
    model: Model | None = None
    """The built-in network; None for another, which a safetensors file cannot hold."""
    data: str | None = None
    method: str | None = None
    seed: int | None = None
    rounds: int | None = None
    """The rounds that were finished."""
    peer: str | None = None
    accuracy: float | None = None
    """On the peer's own test data after that round; None if it was not scored then."""
    density: float | None = None
    """The share of weights that the peer keeps; the others are zeros."""
    weights_sha256: str | None = None
    """As in the run's `summary.json`."""
    dispfl: str | None = None
    """The version that wrote the file."""

    @field_validator("classes")
    @classmethod
    def _harmless(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        """Names are printed, and a file from elsewhere must not steer a terminal."""
        for name in names:
            if not name.isprintable():
                raise ValueError(f"must be printable, got {name!r}.")
        return names

    def model_post_init(self, context: object, /) -> None:
        """Refuse fields that do not fit each other."""
        if self.columns is None:
            self._check_picture()
        elif self.shape != (count := len(set(self.columns)),) or count < len(self.columns):
            raise ConfigError(f"shape must be [{count}], the number of different columns, got {list(self.shape)}.")
        what = "channels" if self.columns is None else "columns"
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) != self.shape[0]:
                raise ConfigError(f"{name} must have a number for each of {self.shape[0]} {what}, got {len(values)}.")

    def _check_picture(self) -> None:
        if len(self.shape) != 3:
            raise ConfigError(f"shape must be [channels, height, width], got {list(self.shape)}.")
        if max(self.shape) > LARGEST:
            raise ConfigError(f"shape must be at most {LARGEST} each way, got {list(self.shape)}.")
        if self.model is not None and self.model.name not in ANY_SHAPE and self.shape[1] != self.shape[2]:
            raise ConfigError(f"The built-in networks want square pictures, got shape {list(self.shape)}.")

    @property
    def input(self) -> Literal["pictures", "rows"]:
        """What the model takes; in an ONNX file its input is called so."""
        return "rows" if self.columns else "pictures"

    def network(self) -> nn.Module:
        """The built-in network. Its parameters have shapes and no memory until `load_state_dict(..., assign=True)`."""
        if self.model is None:
            raise ConfigError(
                "Its network is not a built-in one, and safetensors holds weights alone; export it as .onnx or .pt2."
            )
        with torch.device("meta"):
            return self.model.network(self.shape, len(self.classes))

    def to_strings(self) -> dict[str, str]:
        """The card as safetensors and ONNX can hold it: texts as they are, anything else as JSON."""
        values = self.model_dump(mode="json", exclude_none=True)
        return {key: value if isinstance(value, str) else _json(value) for key, value in values.items()}

    @classmethod
    def from_strings(cls, strings: Mapping[str, str]) -> "Card":
        """The card in a file's metadata; keys of others are left alone. ConfigError says what is wrong with it."""
        if "classes" not in strings:
            raise ConfigError("It has no card, so `dispfl export` did not write it.")
        values: dict[str, Any] = {}
        for key, field in cls.model_fields.items():
            if key in strings:
                plain = field.annotation == (str | None)
                values[key] = strings[key] if plain else _parsed(key, strings[key])
        return cls(**values)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _parsed(key: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise ConfigError(f"{key} must be JSON, got {text[:40]!r}.") from None
