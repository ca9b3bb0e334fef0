"""NPZ: the arrays `x` and `y`, or `x_train`, `y_train`, `x_test` and `y_test`. Nothing is unpickled."""

import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dispfl.data.own.parts import Part
from dispfl.errors import DataError

WHOLE = ("x", "y")
DIVIDED = ("x_train", "y_train", "x_test", "y_test")


def read_arrays(path: Path) -> list[Part]:
    """Read the file: all samples, or training and test data where it tells them apart."""
    try:
        with path.open("rb") as file:
            archive = np.load(file, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise DataError(f"{path} holds one array without a name; save x and y with numpy.savez.")
            names = next((names for names in (DIVIDED, WHOLE) if set(names) <= set(archive.files)), None)
            if names is None:
                there = ", ".join(archive.files) or "nothing"
                raise DataError(f"{path} must hold x and y, or {', '.join(DIVIDED)}; it holds {there}.")
            arrays = {name: archive[name] for name in names}
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError) as problem:
        objects = "Object arrays" in str(problem)
        why = "holds Python objects, which can hide code; save plain numbers" if objects else f"is damaged: {problem}"
        raise DataError(f"{path} {why.rstrip('.')}.") from None
    return [_part(path, arrays, x, y) for x, y in zip(names[::2], names[1::2], strict=True)]


def _part(path: Path, arrays: dict[str, NDArray[Any]], x: str, y: str) -> Part:
    if not arrays[x].size:
        raise DataError(f"{x} in {path} is empty.")
    inputs, labels = _inputs(f"{x} in {path}", arrays[x]), _labels(f"{y} in {path}", arrays[y])
    if len(inputs) != len(labels):
        raise DataError(f"{path} has {len(inputs):,} samples in {x} but {len(labels):,} labels in {y}.")
    return Part(path, inputs, labels)


def _inputs(what: str, array: NDArray[Any]) -> Tensor:
    shape = list(array.shape)
    if array.dtype == np.uint8:
        if array.ndim not in (3, 4):
            wanted = "(N, H, W) or (N, H, W, C)"
            raise DataError(f"{what} has shape {shape}; uint8 means pictures, {wanted}. Save other numbers as float32.")
        pictures = array if array.ndim == 4 else array[..., np.newaxis]
        return torch.from_numpy(np.ascontiguousarray(pictures))
    if not np.issubdtype(array.dtype, np.floating):
        raise DataError(f"{what} must be uint8 pictures or floats, got {array.dtype}; use .astype('float32').")
    if array.ndim < 2:
        raise DataError(f"{what} has shape {shape}; it needs a row of numbers for each sample, (N, ...).")
    with np.errstate(over="ignore"):
        floats = np.ascontiguousarray(array, dtype=np.float32)
    finite = np.isfinite(floats).reshape(len(floats), -1).all(axis=1)
    if not finite.all():
        raise DataError(f"{what} has a value that is nan, infinite or too large in sample {int(finite.argmin())}.")
    return torch.from_numpy(floats)


def _labels(what: str, array: NDArray[Any]) -> list[str]:
    if array.ndim != 1:
        raise DataError(f"{what} has shape {list(array.shape)}; it needs one label for each sample, (N,).")
    match array.dtype.kind:
        case "b" | "i" | "u":
            return [str(int(label)) for label in array.tolist()]
        case "U":
            return [str(label) for label in array.tolist()]
    raise DataError(f"{what} must be whole numbers or texts, got {array.dtype}; use .astype('int64').")
