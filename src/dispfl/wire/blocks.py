"""A run of bytes as it is stored in a message: as it is, or compressed where that makes it shorter.

A compressed block is always shorter than what it stands for, so its length alone says which of the two it is.
"""

import struct
import threading

import numpy as np
import zstandard

from dispfl.wire.refusals import Refusal, refuse
from dispfl.wire.values import Bytes

LENGTH = struct.Struct("<Q")
_LEVEL = 1
_of_this_thread = threading.local()  # zstandard's contexts are quick to use again, and for one thread at a time


def store(raw: Bytes, compress: bool) -> Bytes:
    """The bytes to send for these."""
    if not compress or not len(raw):
        return raw
    if not hasattr(_of_this_thread, "compressor"):
        _of_this_thread.compressor = zstandard.ZstdCompressor(level=_LEVEL)
    shorter = _of_this_thread.compressor.compress(raw.data)
    return np.frombuffer(shorter, np.uint8) if len(shorter) < len(raw) else raw


def restore(stored: Bytes, length: int, compressed: bool) -> Bytes:
    """The bytes that these stand for, which must be so many; no more memory than that is ever taken."""
    if len(stored) == length:
        return stored
    if not compressed or len(stored) > length:
        refuse(Refusal.LENGTH, f"A block of the message has {len(stored)} bytes; the layout says {length}.")
    try:
        claimed = zstandard.frame_content_size(stored.data)
        if claimed != length:
            refuse(Refusal.COMPRESSION, f"A compressed block claims {claimed} bytes; the layout says {length}.")
        if not hasattr(_of_this_thread, "decompressor"):
            _of_this_thread.decompressor = zstandard.ZstdDecompressor()
        raw = _of_this_thread.decompressor.decompress(stored.data, max_output_size=length, allow_extra_data=False)
    except zstandard.ZstdError as problem:
        refuse(Refusal.COMPRESSION, f"A compressed block is damaged ({problem}).")
    if len(raw) != length:
        refuse(Refusal.COMPRESSION, f"A compressed block gives {len(raw)} bytes; the layout says {length}.")
    return np.frombuffer(raw, np.uint8)


def store_planes(raw: Bytes, itemsize: int, compress: bool) -> list[Bytes]:
    """Values, plain or plane by plane: all first bytes, then all second bytes, ..., each after its length.

    The highest byte of trained weights, sign and exponent, takes few values and shrinks to about a third.
    """
    if not compress:
        return [raw]
    parts = []
    for plane in np.ascontiguousarray(raw.reshape(-1, itemsize).T):
        block = store(plane, compress)
        parts += [np.frombuffer(LENGTH.pack(len(block)), np.uint8), block]
    return parts


def restore_planes(stored: Bytes, count: int, itemsize: int, compressed: bool) -> Bytes:
    """The values' bytes again."""
    if not compressed:
        return restore(stored, count * itemsize, compressed)
    planes = np.empty((itemsize, count), np.uint8)
    for plane in planes:
        if len(stored) < LENGTH.size:
            refuse(Refusal.LENGTH, f"The message ends {LENGTH.size - len(stored)} bytes too early.")
        (length,) = LENGTH.unpack(stored[: LENGTH.size].data)
        stored = stored[LENGTH.size :]
        if length > len(stored):
            refuse(Refusal.LENGTH, f"A block of {length} bytes is announced, but {len(stored)} are left.")
        plane[:] = restore(stored[:length], count, compressed)
        stored = stored[length:]
    if len(stored):
        refuse(Refusal.LENGTH, f"{len(stored)} bytes follow the end of the message.")
    return np.ascontiguousarray(planes.T).reshape(-1)
