"""Weights as bytes (float32, float16, bfloat16, or int8 with a scale per layer), and compressed
blocks.

A compressed block is always shorter than the bytes that it stands for, so its length shows which of
the two it is.
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
_STEPS = 127
"""The largest int8 value of a weight; the scale is the layer's largest weight divided by it."""


def to_bytes(
    values: Tensor, kind: str, per_layer: Sequence[int], *, rng: torch.Generator
) -> tuple[Bytes, Bytes]:
    """Return the scales (none for floats) and the values, little-endian; values are clamped to the
    type's range."""
    if kind == "int8":
        scales, steps = _quantize(values, per_layer, rng)
        return _raw(scales), _raw(steps)
    if kind == "float32":
        return _raw(np.empty(0, np.float32)), _raw(values.numpy())
    largest = torch.finfo(FLOATS[kind]).max
    narrow = values.clamp(-largest, largest).to(FLOATS[kind])
    return _raw(np.empty(0, np.float32)), _raw(narrow.view(torch.int16).numpy())


def from_bytes(scales: Bytes, raw: Bytes, kind: str, per_layer: Sequence[int]) -> Tensor:
    """Return the values; refuse them if one is not finite."""
    if kind == "int8":
        scale = np.repeat(scales.view("<f4"), per_layer)
        with np.errstate(
            over="ignore", invalid="ignore"
        ):  # a scale that is too large is refused below
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
    """Round each weight up or down at random, without bias:

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


LENGTH = struct.Struct("<Q")
_LEVEL = 1
_thread_local = threading.local()  # zstandard's contexts are fast to reuse, by one thread at a time


def store(raw: Bytes, compress: bool) -> Bytes:
    """Return the bytes to send, compressed if that makes them shorter."""
    if not compress or not len(raw):
        return raw
    if not hasattr(_thread_local, "compressor"):
        _thread_local.compressor = zstandard.ZstdCompressor(level=_LEVEL)
    shorter = _thread_local.compressor.compress(raw.data)
    return np.frombuffer(shorter, np.uint8) if len(shorter) < len(raw) else raw


def restore(stored: Bytes, length: int, compressed: bool) -> Bytes:
    """Return the original bytes of a block, which must have this length; no more memory than that
    is allocated."""
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
    """Return values, plain or by byte planes: all first bytes, then all second bytes, ..., each
    after its length.

    The highest byte of trained weights, sign and exponent, takes few values and shrinks to about a
    third.
    """
    if not compress:
        return [raw]
    parts = []
    for plane in np.ascontiguousarray(raw.reshape(-1, itemsize).T):
        block = store(plane, compress)
        parts += [np.frombuffer(LENGTH.pack(len(block)), np.uint8), block]
    return parts


def restore_planes(stored: Bytes, count: int, itemsize: int, compressed: bool) -> Bytes:
    """Return the original bytes of values."""
    if not compressed:
        return restore(stored, count * itemsize, compressed)
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
    if len(stored):
        refuse(Refusal.LENGTH, f"{len(stored)} bytes follow the end of the message.")
    return np.ascontiguousarray(planes.T).reshape(-1)
