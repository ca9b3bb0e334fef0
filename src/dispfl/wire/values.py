"""Weights as bytes: float32, float16, bfloat16, or int8 with a scale for each layer."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dispfl.wire.refusals import Refusal, refuse

Bytes = NDArray[np.uint8]
FLOATS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}
CODES = {"float32": 1, "float16": 2, "bfloat16": 3, "int8": 4}
"""How the header names each kind."""
_STEPS = 127
"""The largest int8 that stands for a weight; the scale is the layer's largest weight over this."""


def to_bytes(values: Tensor, kind: str, per_layer: Sequence[int], *, rng: torch.Generator) -> tuple[Bytes, Bytes]:
    """The scales (none for floats) and the values, little-endian. What a float type cannot hold becomes its largest."""
    if kind == "int8":
        scales, steps = _quantize(values, per_layer, rng)
        return _raw(scales), _raw(steps)
    if kind == "float32":
        return _raw(np.empty(0, np.float32)), _raw(values.numpy())
    largest = torch.finfo(FLOATS[kind]).max
    narrow = values.clamp(-largest, largest).to(FLOATS[kind])
    return _raw(np.empty(0, np.float32)), _raw(narrow.view(torch.int16).numpy())


def from_bytes(scales: Bytes, raw: Bytes, kind: str, per_layer: Sequence[int]) -> Tensor:
    """The values again; refused where one is not finite."""
    if kind == "int8":
        scale = np.repeat(scales.view("<f4"), per_layer)
        with np.errstate(over="ignore", invalid="ignore"):  # a scale that is too large is refused below
            values = torch.from_numpy(np.multiply(scale, raw.view(np.int8), dtype=np.float32))
        if not np.isfinite(scales.view("<f4")).all():
            refuse(Refusal.NOT_FINITE, "The message has a scale that is not finite.")
    elif kind == "float32":
        values = torch.from_numpy(raw.view("<f4").astype(np.float32))
    else:
        values = torch.from_numpy(raw.view("<i2").astype(np.int16)).view(FLOATS[kind]).float()
    if not np.isfinite(values.numpy()).all():
        refuse(Refusal.NOT_FINITE, "The message has a value that is not finite.")
    return values.add_(0.0)  # never -0.0: a small negative number may have become one


def _quantize(
    values: Tensor, per_layer: Sequence[int], rng: torch.Generator
) -> tuple[NDArray[np.float32], NDArray[np.int8]]:
    """Round each weight up or down at random, so that what arrives is right on average:

    q = floor(w / scale + u),  u uniform in [0, 1),  scale = max |w| of the layer / 127
    """
    counts = np.asarray(per_layer)
    w = values.numpy()
    scales = np.zeros(len(counts), np.float32)
    present = np.flatnonzero(counts)
    if len(present):
        starts = (np.cumsum(counts) - counts)[present]
        scales[present] = np.maximum.reduceat(np.abs(w), starts) / np.float32(_STEPS)
    divisors = np.where(scales > 0, scales, np.float32(1))
    steps = w / np.repeat(divisors, counts)
    steps += torch.rand(len(w), generator=rng).numpy()
    return scales, np.clip(np.floor(steps, out=steps), -_STEPS, _STEPS).astype(np.int8)


def _raw(array: NDArray[Any]) -> Bytes:
    little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    return little.view(np.uint8)
