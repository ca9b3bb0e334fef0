"""Named tensors that a method sends beside a model, as it declares them.

A method declares their shapes and types (`Method.tensors`), and adds them to the models that it
sends: `model.with_tensors(push_sum=weight)`. What it sends is checked against the declaration, so a
message needs no names or shapes, and has the length that both ends expect.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal, get_args

import torch
from torch import Tensor

from dispfl.errors import ConfigError

TensorType = Literal["float32", "uint8", "int8", "int16", "int32", "int64"]
TYPES: Mapping[str, torch.dtype] = {name: getattr(torch, name) for name in get_args(TensorType)}


@dataclass(frozen=True)
class TensorSpec:
    """Shape and type of a tensor beside the model; by default one number."""

    shape: tuple[int, ...] = ()
    dtype: TensorType = "float32"
    """`float32` is never rounded, whatever `wire.values` says; integers are sent as they are."""

    def __post_init__(self) -> None:
        if self.dtype not in TYPES:
            raise ConfigError(
                f"TensorSpec(dtype={self.dtype!r}): a tensor beside the model is float32 or of"
                " integers (uint8, int8, int16, int32, int64)."
            )
        sizes = self.shape if isinstance(self.shape, Iterable) else (self.shape,)
        if any(not isinstance(size, int) or size < 0 for size in sizes):
            raise ConfigError(
                f"TensorSpec(shape={self.shape!r}): a shape is a tuple of whole numbers."
            )
        object.__setattr__(self, "shape", tuple(sizes))

    @property
    def size(self) -> int:
        """The number of values."""
        return prod(self.shape)

    @property
    def itemsize(self) -> int:
        """The bytes of a value."""
        return TYPES[self.dtype].itemsize

    @property
    def bytes(self) -> int:
        """The bytes of all values."""
        return self.size * self.itemsize

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"

    def difference(self, tensor: Tensor) -> str | None:
        """Say in words what a tensor is instead of this; None if it fits."""
        if tensor.shape != self.shape:
            return f"has shape {list(tensor.shape)}; declared is {list(self.shape)}"
        if tensor.dtype != TYPES[self.dtype]:
            return f"is {str(tensor.dtype).removeprefix('torch.')}; declared is {self.dtype}"
        if not tensor.isfinite().all():
            return "is infinite or nan"
        return None


def total_bytes(specs: Mapping[str, TensorSpec]) -> int:
    """Return the bytes of all declared tensors."""
    return sum(spec.bytes for spec in specs.values())
