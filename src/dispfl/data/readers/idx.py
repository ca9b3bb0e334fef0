"""idx, the format of MNIST and Fashion-MNIST, and the bundled sample of Fashion-MNIST.

An idx file is a magic number, the sizes and the bytes, plain or gzipped. The sample is an NPZ file
of 6,000 images (see bundled/README.md).
"""

import gzip
import struct
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from dispfl.data.readers import RawDataset, ReadSplit, check_labels, damaged, to_split
from dispfl.errors import DataError
from dispfl.files import open_regular

BUNDLED = Path(__file__).parent.parent / "bundled" / "fashion-sample.npz"
BUNDLED_CLASSES = 10

SIDE = 28
_CHUNK = 1 << 20
# Magic numbers. The third byte means "unsigned bytes"; the fourth is the number of sizes.
_IMAGES = 0x0803
_LABELS = 0x0801


def read_idx(folder: Path, classes: int) -> RawDataset:
    """Read the four files of a data set in MNIST's layout."""
    return RawDataset(
        train=_read_split(folder, "train", classes), test=_read_split(folder, "t10k", classes)
    )


def _read_split(folder: Path, prefix: str, classes: int) -> ReadSplit:
    images_file = _find(folder, f"{prefix}-images-idx3-ubyte")
    labels_file = _find(folder, f"{prefix}-labels-idx1-ubyte")
    images = _read_bytes(images_file, _IMAGES)
    labels = _read_bytes(labels_file, _LABELS)
    if images.shape[1:] != (SIDE, SIDE):
        height, width = images.shape[1:]
        raise damaged(
            images_file, f"has images of {height}x{width} pixels instead of {SIDE}x{SIDE}"
        )
    check_labels(labels_file, labels, len(images), classes)
    return to_split(images[:, np.newaxis], labels)


def _find(folder: Path, name: str) -> Path:
    """The plain file, which is faster to read, or the gzipped one."""
    plain = folder / name
    return plain if plain.exists() else folder / f"{name}.gz"


def _read_bytes(path: Path, magic: int) -> NDArray[np.uint8]:
    try:
        with open_regular(path) as file:
            if path.suffix != ".gz":
                return _parse(path, file, magic)
            return _parse(path, cast(BinaryIO, gzip.GzipFile(fileobj=file)), magic)
    except (EOFError, gzip.BadGzipFile, zlib.error) as problem:
        raise damaged(path, f"is truncated or not a gzip file ({problem})") from None


def _parse(path: Path, stream: BinaryIO, magic: int) -> NDArray[np.uint8]:
    rank = magic & 0xFF
    header = stream.read(4 + 4 * rank)
    if len(header) < 4 + 4 * rank:
        raise damaged(path, "is truncated: it ends in its header")
    number, *sizes = struct.unpack(f">{1 + rank}I", header)
    if number != magic:
        reason = f"magic number {number:#06x} instead of {magic:#06x}"
        raise damaged(path, f"is not the expected idx file: {reason}")
    try:
        values = np.empty(sizes, dtype=np.uint8)
    except (MemoryError, ValueError):  # no data set has sizes that exceed the memory
        raise damaged(path, f"has impossible sizes {sizes}") from None
    count = _fill(stream, values)
    if count < values.size:
        raise damaged(path, f"is truncated: {count:,} of {values.size:,} bytes")
    if stream.read(1):
        raise damaged(path, f"has more than the {values.size:,} bytes that its header declares")
    return values


def _fill(stream: BinaryIO, values: NDArray[np.uint8]) -> int:
    """Read in pieces, so that memory is only used as it fills, and return the number of bytes."""
    flat = values.reshape(-1)
    count = 0
    while count < len(flat):
        piece = stream.read(min(_CHUNK, len(flat) - count))
        if not piece:
            break
        flat[count : count + len(piece)] = np.frombuffer(piece, dtype=np.uint8)
        count += len(piece)
    return count


def read_bundled(classes: int, path: Path = BUNDLED) -> RawDataset:
    """Read the bundled sample.

    With more than its ten classes, each is divided by the direction of its images.
    """
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            return RawDataset(
                train=_bundled_split(path, arrays, "train", classes),
                test=_bundled_split(path, arrays, "test", classes),
            )
    except (OSError, KeyError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as problem:
        raise DataError(
            f"The bundled sample {path} is missing or damaged ({problem}). Install dispfl again."
        ) from None


def _bundled_split(
    path: Path, arrays: Mapping[str, NDArray[np.uint8]], name: str, classes: int
) -> ReadSplit:
    inputs = arrays[f"{name}_inputs"]
    labels = arrays[f"{name}_labels"]
    check_labels(path, labels, len(inputs), BUNDLED_CLASSES)
    inputs, labels = _turned(inputs, labels, classes // BUNDLED_CLASSES)
    return to_split(inputs[:, np.newaxis], labels)


def _turned(
    inputs: NDArray[np.uint8], labels: NDArray[np.uint8], directions: int
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Turn the images of each class to 1, 2 or 4 directions, which become classes of their own."""
    turned = inputs.copy()
    turned_labels = labels * np.uint8(directions)
    for label in range(BUNDLED_CLASSES):
        class_rows = np.flatnonzero(labels == label)
        for direction in range(1, directions):
            rows = class_rows[direction::directions]
            quarters = 4 // directions * direction
            turned[rows] = np.rot90(inputs[rows], quarters, axes=(1, 2))
            turned_labels[rows] += np.uint8(direction)
    return turned, turned_labels
