"""Weights as bytes, in four types, and compressed blocks.

The types are float32, float16, bfloat16, and int8 with a scale per layer. A compressed block is
always shorter than the original, so its length shows which of the two it is.
"""

import struct
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import zstandard
from numpy.typing import NDArray
from torch import Tensor

from dispfl.wire.refusals import Refusal, refuse

Bytes = NDArray[np.uint8]
FLOATS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}
CODES = {"float32": 1, "float16": 2, "bfloat16": 3, "int8": 4}
"""The codes of the types in a message's header."""
LARGEST_INT8 = 127
"""The largest int8 value of a weight; the scale is the layer's largest weight divided by it."""
NO_SCALES = np.empty(0, np.uint8)


def scales_size(value_type: str, layers: int) -> int:
    """Return the bytes of a message's scales: a float32 per layer for int8, none for floats."""
    if value_type == "int8":
        return 4 * layers
    return 0


def to_bytes(
    values: Tensor, value_type: str, per_layer: Sequence[int], *, rng: torch.Generator
) -> tuple[Bytes, Bytes]:
    """Return the scales and the values, little-endian, clamped to the range of the type."""
    if value_type == "int8":
        scales, quantized = _quantize(values, per_layer, rng)
        return little_endian(scales), little_endian(quantized)
    if value_type == "float32":
        return NO_SCALES, little_endian(values.numpy())
    largest = torch.finfo(FLOATS[value_type]).max
    narrow = values.clamp(-largest, largest).to(FLOATS[value_type])
    return NO_SCALES, little_endian(narrow.view(torch.int16).numpy())


def from_bytes(scales: Bytes, raw: Bytes, value_type: str, per_layer: Sequence[int]) -> Tensor:
    """Return the values; refuse them if one is not finite."""
    if value_type == "int8":
        layer_scales = scales.view("<f4")
        if not np.isfinite(layer_scales).all():
            refuse(Refusal.NOT_FINITE, "The message has a scale that is not finite.")
        scale = np.repeat(layer_scales, per_layer)
        with np.errstate(over="ignore"):  # a product that is too large is refused below
            values = torch.from_numpy(np.multiply(scale, raw.view(np.int8), dtype=np.float32))
    elif value_type == "float32":
        values = torch.from_numpy(raw.view("<f4").astype(np.float32))
    else:
        narrow = torch.from_numpy(raw.view("<i2").astype(np.int16)).view(FLOATS[value_type])
        values = narrow.float()
    if not np.isfinite(values.numpy()).all():
        refuse(Refusal.NOT_FINITE, "The message has a value that is not finite.")
    return values.add_(0.0)  # never -0.0: a small negative number may have become one


def _quantize(
    values: Tensor, per_layer: Sequence[int], rng: torch.Generator
) -> tuple[NDArray[np.float32], NDArray[np.int8]]:
    """Return the scale of each layer, and the weights, rounded up or down at random without bias.

    q = floor(w / scale + u),  u uniform in [0, 1),  scale = max |w| of the layer / 127
    """
    counts = np.asarray(per_layer)
    w = values.numpy()
    scales = np.zeros(len(counts), np.float32)
    present = np.flatnonzero(counts)
    if len(present):
        starts = (np.cumsum(counts) - counts)[present]
        scales[present] = np.maximum.reduceat(np.abs(w), starts) / np.float32(LARGEST_INT8)

    divisors = np.where(scales > 0, scales, np.float32(1))
    q = w / np.repeat(divisors, counts)
    q += torch.rand(len(w), generator=rng).numpy()
    np.floor(q, out=q)
    return scales, np.clip(q, -LARGEST_INT8, LARGEST_INT8).astype(np.int8)


def little_endian(array: NDArray[Any]) -> Bytes:
    """Return the bytes of an array; no copy where they are as needed already."""
    return np.ascontiguousarray(array, array.dtype.newbyteorder("<")).view(np.uint8)


# compressed blocks

LENGTH = struct.Struct("<Q")
COMPRESSION_LEVEL = 1
_thread_local = threading.local()  # zstandard's contexts are fast to reuse, by one thread at a time


def store(raw: Bytes, compress: bool) -> Bytes:
    """Return the bytes to send, compressed if that makes them shorter."""
    if not compress or not len(raw):
        return raw
    if not hasattr(_thread_local, "compressor"):
        _thread_local.compressor = zstandard.ZstdCompressor(level=COMPRESSION_LEVEL)
    compressed = _thread_local.compressor.compress(raw.data)
    if len(compressed) >= len(raw):
        return raw
    return np.frombuffer(compressed, np.uint8)


def restore(stored: Bytes, length: int, compressed: bool) -> Bytes:
    """Return the original bytes of a block, which must have this length.

    No more memory than that is allocated.
    """
    if len(stored) == length:
        return stored
    if not compressed or len(stored) > length:
        refuse(
            Refusal.LENGTH,
            f"A block of the message has {len(stored)} bytes; the layout requires {length}.",
        )
    try:
        claimed = zstandard.frame_content_size(stored.data)
        if claimed != length:
            refuse(
                Refusal.COMPRESSION,
                f"A compressed block claims {claimed} bytes; the layout requires {length}.",
            )
        if not hasattr(_thread_local, "decompressor"):
            _thread_local.decompressor = zstandard.ZstdDecompressor()
        raw = _thread_local.decompressor.decompress(
            stored.data, max_output_size=length, allow_extra_data=False
        )
    except zstandard.ZstdError as problem:
        refuse(Refusal.COMPRESSION, f"A compressed block is damaged ({problem}).")
    if len(raw) != length:
        refuse(
            Refusal.COMPRESSION,
            f"A compressed block gives {len(raw)} bytes; the layout requires {length}.",
        )
    return np.frombuffer(raw, np.uint8)


def store_planes(raw: Bytes, itemsize: int, compress: bool) -> list[Bytes]:
    """Return the blocks to send for some values.

    With compression these are byte planes, each after its length: all first bytes, then all second
    bytes, and so on. The highest byte of trained weights, sign and exponent, takes few values and
    shrinks to about a third.
    """
    if not compress:
        return [raw]
    parts = []
    for plane in np.ascontiguousarray(raw.reshape(-1, itemsize).T):
        block = store(plane, compress)
        parts += [np.frombuffer(LENGTH.pack(len(block)), np.uint8), block]
    return parts


def restore_planes(
    stored: Bytes, count: int, itemsize: int, compressed: bool
) -> tuple[Bytes, Bytes]:
    """Return the original bytes of values, and what is stored after them."""
    if not compressed:
        length = count * itemsize
        return restore(stored[:length], length, compressed), stored[length:]
    planes = np.empty((itemsize, count), np.uint8)
    for plane in planes:
        if len(stored) < LENGTH.size:
            refuse(Refusal.LENGTH, f"The message ends {LENGTH.size - len(stored)} bytes too early.")
        (length,) = LENGTH.unpack(stored[: LENGTH.size].data)
        stored = stored[LENGTH.size :]
        if length > len(stored):
            refuse(
                Refusal.LENGTH,
                f"A block of {length} bytes is announced, but {len(stored)} are left.",
            )
        plane[:] = restore(stored[:length], count, compressed)
        stored = stored[length:]
    return np.ascontiguousarray(planes.T).reshape(-1), stored
