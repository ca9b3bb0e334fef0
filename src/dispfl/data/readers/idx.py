"""idx, the format of MNIST and Fashion-MNIST: a magic number, the sizes, then the bytes; plain or gzipped."""

import gzip
import struct
import zlib
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from dispfl.data.readers import Reading, Split, check_labels, damaged, to_split

SIDE = 28
_CHUNK = 1 << 20
# The third byte says "unsigned bytes", the fourth how many sizes follow.
_PICTURES, _LABELS = 0x0803, 0x0801


def read_idx(folder: Path, classes: int) -> Reading:
    """Read the four files of a data set in MNIST's layout."""
    return Reading(train=_read_split(folder, "train", classes), test=_read_split(folder, "t10k", classes))


def _read_split(folder: Path, prefix: str, classes: int) -> Split:
    pictures_file = _find(folder, f"{prefix}-images-idx3-ubyte")
    labels_file = _find(folder, f"{prefix}-labels-idx1-ubyte")
    pictures, labels = _read_bytes(pictures_file, _PICTURES), _read_bytes(labels_file, _LABELS)
    if pictures.shape[1:] != (SIDE, SIDE):
        height, width = pictures.shape[1:]
        raise damaged(pictures_file, f"has pictures of {height}x{width} pixels instead of {SIDE}x{SIDE}")
    check_labels(labels_file, labels, len(pictures), classes)
    return to_split(pictures[:, np.newaxis], labels)


def _find(folder: Path, name: str) -> Path:
    """The plain file, which is quicker to read, or the gzipped one."""
    plain = folder / name
    return plain if plain.exists() else folder / f"{name}.gz"


def _read_bytes(path: Path, magic: int) -> NDArray[np.uint8]:
    try:
        with path.open("rb") as file:
            return _parse(path, cast(BinaryIO, gzip.GzipFile(fileobj=file)) if path.suffix == ".gz" else file, magic)
    except (EOFError, gzip.BadGzipFile, zlib.error) as problem:
        raise damaged(path, f"is truncated or not a gzip file ({problem})") from None


def _parse(path: Path, stream: BinaryIO, magic: int) -> NDArray[np.uint8]:
    rank = magic & 0xFF
    header = stream.read(4 + 4 * rank)
    if len(header) < 4 + 4 * rank:
        raise damaged(path, "is truncated: it ends within its header")
    found, *sizes = struct.unpack(f">{1 + rank}I", header)
    if found != magic:
        raise damaged(path, f"is not the idx file it should be: magic number {found:#06x} instead of {magic:#06x}")
    try:
        values = np.empty(sizes, dtype=np.uint8)
    except (MemoryError, ValueError):  # sizes that no memory holds are not those of a data set
        raise damaged(path, f"claims impossible sizes {sizes}") from None
    got = _fill(stream, values)
    if got < values.size:
        raise damaged(path, f"is truncated: {got:,} of {values.size:,} bytes")
    if stream.read(1):
        raise damaged(path, f"has more than the {values.size:,} bytes that its header announces")
    return values


def _fill(stream: BinaryIO, values: NDArray[np.uint8]) -> int:
    """Read piece by piece into memory that is only claimed as it fills, and return the number of bytes."""
    flat = values.reshape(-1)
    got = 0
    while got < len(flat) and (piece := stream.read(min(_CHUNK, len(flat) - got))):
        flat[got : got + len(piece)] = np.frombuffer(piece, dtype=np.uint8)
        got += len(piece)
    return got
