"""Named tensors beside a model as bytes: those that the method declares, sorted by name.

They follow the values of a model or an answer, each as it is, or with zstd in compressed byte
planes. Their types are never narrowed.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from dispfl.core.tensors import TensorSpec
from dispfl.errors import MessageError
from dispfl.wire.refusals import Refusal, refuse
from dispfl.wire.values import LENGTH, Bytes, little_endian, restore_planes, store_planes


def store_tensors(
    tensors: Mapping[str, Tensor], specs: Mapping[str, TensorSpec], compress: bool
) -> list[Bytes]:
    """Return the blocks to send for the declared tensors."""
    parts: list[Bytes] = []
    for name in sorted(specs):
        raw = little_endian(tensors[name].detach().reshape(-1).numpy())
        parts += store_planes(raw, specs[name].itemsize, compress)
    return parts


def restore_tensors(
    stored: Bytes, specs: Mapping[str, TensorSpec], compressed: bool
) -> dict[str, Tensor]:
    """Return the declared tensors, which are all that is stored; refuse anything else by name."""
    tensors = {}
    for name in sorted(specs):
        spec = specs[name]
        try:
            raw, stored = restore_planes(stored, spec.size, spec.itemsize, compressed)
        except MessageError as problem:
            refuse(Refusal.TENSOR, f"The tensor {name} is malformed: {problem}")
        values = raw.view(np.dtype(spec.dtype).newbyteorder("<")).astype(spec.dtype)
        if not np.isfinite(values).all():
            refuse(Refusal.TENSOR, f"The tensor {name} has a value that is not finite.")
        tensors[name] = torch.from_numpy(values).reshape(spec.shape)
    if len(stored):
        refuse(Refusal.LENGTH, f"{len(stored)} bytes follow the end of the message.")
    return tensors


def max_tensor_bytes(specs: Mapping[str, TensorSpec]) -> int:
    """Return the most bytes that the declared tensors may take in a message."""
    lengths = sum(LENGTH.size * spec.itemsize for spec in specs.values())
    return lengths + sum(spec.bytes for spec in specs.values())
