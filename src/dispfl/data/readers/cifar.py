"""CIFAR-10 and CIFAR-100, in the binary and in the python version.

The python version consists of pickles, and a pickle can call anything that it can name. The
unpickler here allows a few names, each replaced by a class that only stores plain numbers; so not
even numpy is called by the file. No other module of dispfl imports pickle.
"""

import math
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dispfl.data.readers import RawDataset, ReadSplit, check_labels, damaged, to_split
from dispfl.errors import DataError
from dispfl.files import open_regular

SHAPE = (3, 32, 32)
PIXELS = math.prod(SHAPE)


class _Layout(NamedTuple):
    """How the files of one of the two data sets are organized."""

    classes: int
    train_files: tuple[str, ...]
    test_files: tuple[str, ...]
    label_bytes: int
    """Binary version: the bytes before the pixels, the last of which is the label."""
    label_key: str
    """Python version."""


_CIFAR10 = _Layout(
    classes=10,
    train_files=("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5"),
    test_files=("test_batch",),
    label_bytes=1,
    label_key="labels",
)
_CIFAR100 = _Layout(
    classes=100,
    train_files=("train",),
    test_files=("test",),
    label_bytes=2,  # the coarse label, then the fine label
    label_key="fine_labels",
)

Batch = tuple[NDArray[np.uint8], NDArray[Any]]
"""Pixels and labels of one file."""


def read_cifar(folder: Path, classes: int) -> RawDataset:
    """Read CIFAR-10 (`classes=10`) or CIFAR-100; the binary version if both are there."""
    layout = _CIFAR100 if classes == 100 else _CIFAR10
    binary = folder / f"{layout.train_files[0]}.bin"
    read_split = _read_binary if binary.exists() else _read_python
    return RawDataset(
        train=read_split(folder, layout.train_files, layout),
        test=read_split(folder, layout.test_files, layout),
        classes=_class_names(folder) if layout is _CIFAR100 else (),
    )


def _join(paths: Sequence[Path], batches: Sequence[Batch], classes: int) -> ReadSplit:
    """Concatenate the files of a split, which have equal lengths: a shorter one is truncated."""
    longest = max(len(labels) for _, labels in batches)
    for path, (pixels, labels) in zip(paths, batches, strict=True):
        check_labels(path, labels, len(pixels), classes)
        if len(labels) < longest:
            raise damaged(
                path,
                f"is truncated: {len(labels):,} images, where the other files have {longest:,}",
            )
    all_pixels, all_labels = zip(*batches, strict=True)
    images = np.concatenate(all_pixels).reshape(-1, *SHAPE)
    return to_split(np.ascontiguousarray(images), np.concatenate(all_labels))


# The binary version: one record per image, with its label and its pixels.


def _read_binary(folder: Path, names: Sequence[str], layout: _Layout) -> ReadSplit:
    paths = [folder / f"{name}.bin" for name in names]
    batches = []
    for path in paths:
        records = _records(path, layout.label_bytes + PIXELS)
        labels = records[:, layout.label_bytes - 1]
        batches.append((records[:, layout.label_bytes :], labels))
    return _join(paths, batches, layout.classes)


def _records(path: Path, length: int) -> NDArray[np.uint8]:
    values = np.fromfile(path, dtype=np.uint8)
    if values.size % length:
        raise damaged(
            path, f"is truncated: {values.size:,} bytes are not a multiple of an image's {length:,}"
        )
    return values.reshape(-1, length)


# The python version: a pickled dict per file, written by Python 2.


def _read_python(folder: Path, names: Sequence[str], layout: _Layout) -> ReadSplit:
    paths = [folder / name for name in names]
    batches = [_batch(path, layout.label_key) for path in paths]
    return _join(paths, batches, layout.classes)


def _batch(path: Path, label_key: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    content = _unpickle(path)
    match content.get("data"), content.get(label_key):
        case _PickledArray(array=array), list(labels):
            pass
        case _:
            raise damaged(path, f"is not a CIFAR batch: it lacks data or {label_key}")
    if array.dtype != np.uint8 or array.ndim != 2 or array.shape[1] != PIXELS:
        raise damaged(
            path, f"has data of {array.dtype}, shape {array.shape}, instead of uint8, (N, {PIXELS})"
        )
    for label in labels:
        if type(label) is not int or not 0 <= label < 256:
            raise damaged(path, f"has {label_key} that are not integers from 0 to 255")
    return array, np.array(labels, dtype=np.int64)


def _class_names(folder: Path) -> tuple[str, ...]:
    """CIFAR-100's class names, or numbers if no file has the names: training does not need them."""
    text = folder / "fine_label_names.txt"
    pickled = folder / "meta"
    names: list[str] = []
    if text.exists():
        names = text.read_text(encoding="utf-8", errors="replace").split()
    elif pickled.exists():
        listed = _unpickle(pickled).get("fine_label_names")
        if isinstance(listed, list):
            names = list(map(_text, listed))
    if len(names) != 100:
        names = list(map(str, range(100)))
    return tuple(names)


# The restricted unpickler.


def _unpickle(path: Path) -> dict[str, Any]:
    """Read the dict in a file; anything but a dict of plain data is refused."""
    try:
        with open_regular(path) as file:
            content = _PlainUnpickler(file, path).load()
    except (DataError, OSError):
        raise
    except Exception as problem:  # a damaged pickle can raise anything
        raise damaged(path, f"is truncated or not a CIFAR file ({problem})") from None
    if not isinstance(content, dict):
        raise damaged(
            path, f"is not a CIFAR file: it contains a {type(content).__name__} instead of a dict"
        )
    return {_text(key): value for key, value in content.items()}


def _text(value: object) -> str:
    return value.decode("latin1") if isinstance(value, bytes) else str(value)


class _StandIn:
    """Base class of what a pickle may name.

    BUILD calls `__setstate__`, so a pickle cannot set attributes.
    """

    __slots__ = ()

    def __setstate__(self, state: object) -> None:
        raise pickle.UnpicklingError("unexpected state")


class _Latin1(_StandIn):
    """`_codecs.encode(text, "latin1")`: how Python 3 writes bytes in old pickle protocols."""

    def __new__(cls, text: object, encoding: object) -> bytes:  # type: ignore[misc]
        if not isinstance(text, str) or encoding not in ("latin1", b"latin1"):
            raise pickle.UnpicklingError(f"text encoded as {encoding!r} instead of latin1")
        return text.encode("latin1")


class _PickledType(_StandIn):
    """`numpy.dtype(code, align, copy)`, for integers and floats only."""

    __slots__ = ("dtype",)

    def __init__(self, code: object, align: object, copy: object) -> None:
        if align or _text(code) not in ("u1", "i1", "i2", "i4", "i8", "f4", "f8"):
            raise pickle.UnpicklingError(
                f"an array of type {_text(code)!r}, which is not plain numbers"
            )
        self.dtype = np.dtype(_text(code))

    def __setstate__(self, state: object) -> None:
        # (version, byte order, subtype, field names, fields, item size, alignment, flags)
        match state:
            case (_, byte_order, None, None, None, _, _, flags) if not flags:
                pass
            case _:
                raise pickle.UnpicklingError("an array type with fields or objects")
        if _text(byte_order) not in ("|", "<", ">"):
            raise pickle.UnpicklingError(f"byte order {byte_order!r}")
        self.dtype = self.dtype.newbyteorder(_text(byte_order))  # type: ignore[arg-type]


class _PickledArray(_StandIn):
    """`numpy.ndarray`, and `_reconstruct(numpy.ndarray, (0,), b"b")`, which BUILD fills."""

    __slots__ = ("array",)

    def __init__(self, kind: object, shape: object, code: object) -> None:
        if kind is not _PickledArray:
            raise pickle.UnpicklingError("an array of another class")

    def __setstate__(self, state: object) -> None:
        match state:
            case (1, tuple(shape), _PickledType(dtype=dtype), fortran, bytes(raw)):
                if not all(type(size) is int and size >= 0 for size in shape):
                    raise pickle.UnpicklingError(f"an array of shape {shape}")
                order: Literal["F", "C"] = "F" if fortran else "C"
                self.array: NDArray[Any] = np.frombuffer(raw, dtype).reshape(shape, order=order)
            case _:
                raise pickle.UnpicklingError("an array whose state is not numbers")


_ALLOWED: Mapping[tuple[str, str], type[_StandIn]] = {
    ("numpy.core.multiarray", "_reconstruct"): _PickledArray,
    ("numpy._core.multiarray", "_reconstruct"): _PickledArray,
    ("numpy", "ndarray"): _PickledArray,
    ("numpy", "dtype"): _PickledType,
    ("_codecs", "encode"): _Latin1,
}


class _PlainUnpickler(pickle._Unpickler):
    """Builds arrays, lists, dicts, bytes, text and numbers, and nothing else.

    It extends pickle's Python implementation, because a dozen bytes can make the C implementation
    fill all memory (its memo is an array as long as the largest number in the file). A batch has
    few opcodes, so the cost is negligible.
    """

    def __init__(self, file: BinaryIO, path: Path) -> None:
        super().__init__(file, encoding="bytes")  # Python 2's strings stay bytes
        self.path = path

    def find_class(self, module: str, name: str) -> type[_StandIn]:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise DataError(
                f"{self.path} refers to {module}.{name}, which no data file needs; nothing was run,"
                " and the file was not read. Delete it and use the binary version of the data set."
            ) from None
