"""What an exported model says of itself, in every format: what it wants, what its outputs mean, where it comes from."""

import json
from collections.abc import Mapping
from typing import Annotated, Any

import torch
from pydantic import Field, field_validator
from torch import nn

from dispfl.errors import ConfigError
from dispfl.models.registry import Model
from dispfl.settings import Settings

Side = Annotated[int, Field(ge=1, le=4096)]
Positive = Annotated[float, Field(gt=0)]


class Card(Settings):
    """The card of one model. The first four fields are what a user needs; the others may stay unknown."""

    classes: tuple[str, ...] = Field(min_length=1)
    """Their names, in the order of the outputs."""
    shape: tuple[Side, Side, Side]
    """Channels, height and width of a picture."""
    mean: tuple[float, ...]
    """Per channel, for pixels in [0, 1]: the normalization of training, which ONNX and .pt2 files have inside."""
    std: tuple[Positive, ...]
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
        channels, height, width = self.shape
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) != channels:
                raise ConfigError(f"{name} must have a number for each of {channels} channels, got {len(values)}.")
        if self.model is not None and height != width:
            raise ConfigError(f"The built-in networks want square pictures, got shape {list(self.shape)}.")

    def network(self) -> nn.Module:
        """The built-in network. Its parameters have shapes and no memory until `load_state_dict(..., assign=True)`."""
        if self.model is None:
            raise ConfigError(
                "Its network is not a built-in one, and safetensors holds weights alone; export it as .onnx or .pt2."
            )
        channels, size, _ = self.shape
        with torch.device("meta"):
            return self.model.build(channels, len(self.classes), size)

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
