"""The sample that ships with the package: 6,000 pictures of Fashion-MNIST (see bundled/README.md)."""

import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dispfl.data.readers import Reading, Split, check_labels, to_split
from dispfl.errors import DataError

BUNDLED = Path(__file__).parent.parent / "bundled" / "fashion-sample.npz"


def read_bundled(classes: int, path: Path = BUNDLED) -> Reading:
    """Read the bundled sample."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            return Reading(train=_split(path, arrays, "train", classes), test=_split(path, arrays, "test", classes))
    except (OSError, KeyError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as problem:
        raise DataError(f"The bundled sample {path} is missing or damaged ({problem}). Install dispfl again.") from None


def _split(path: Path, arrays: Mapping[str, NDArray[np.uint8]], name: str, classes: int) -> Split:
    inputs, labels = arrays[f"{name}_inputs"], arrays[f"{name}_labels"]
    check_labels(path, labels, len(inputs), classes)
    return to_split(inputs[:, np.newaxis], labels)
