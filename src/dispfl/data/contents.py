"""How many classes and images a folder has, compared with the complete data set.

Files are counted, not read, so that `dispfl data list` answers at once.
"""

import gzip
import math
import os
import struct
import zlib
from pathlib import Path
from typing import NamedTuple

from dispfl.data.catalogue import DataSpec
from dispfl.files import open_regular


class Contents(NamedTuple):
    """What a data set has: classes, training images and test images."""

    classes: int
    train: int
    test: int

    @classmethod
    def complete(cls, spec: DataSpec) -> "Contents":
        """Return what the complete data set has."""
        return cls(spec.classes, spec.train, spec.test)

    def difference(self, spec: DataSpec) -> str:
        """Return `12 of 200 classes, 600 of 10,000 test images`; nothing if it is complete."""
        names = ("classes", "training images", "test images")
        parts = []
        for count, expected, name in zip(self, self.complete(spec), names, strict=True):
            if count != expected:
                parts.append(f"{count:,} of {expected:,} {name}")
        return ", ".join(parts)


def count_contents(spec: DataSpec, folder: Path) -> Contents | None:
    """Count what a folder of a data set has; None where only reading all files would tell."""
    try:
        match spec.reader:
            case "idx":
                train = _idx_count(folder, "train-labels-idx1-ubyte")
                return Contents(spec.classes, train, _idx_count(folder, "t10k-labels-idx1-ubyte"))
            case "tiny-imagenet":
                return _tiny_imagenet(folder)
            case "cifar" if list(folder.glob("*.bin")):
                return _binary_cifar(spec, folder)
    except (OSError, EOFError, struct.error, zlib.error):  # the reader says what is wrong
        return None
    return None


def _idx_count(folder: Path, name: str) -> int:
    """Return the number of labels that the header of an idx file declares."""
    plain = folder / name
    if plain.exists():
        with open_regular(plain) as file:
            header = file.read(8)
    else:
        with open_regular(folder / f"{name}.gz") as packed, gzip.GzipFile(fileobj=packed) as file:
            header = file.read(8)
    return int(struct.unpack(">II", header)[1])


def _tiny_imagenet(folder: Path) -> Contents:
    classes = 0
    train = 0
    for entry in os.scandir(folder / "train"):
        if entry.is_dir():
            classes += 1
            with os.scandir(f"{entry.path}/images") as images:
                train += sum(image.name.endswith(".JPEG") for image in images)
    annotations = (folder / "val" / "val_annotations.txt").read_text(encoding="utf-8")
    return Contents(classes, train, len(annotations.splitlines()))


def _binary_cifar(spec: DataSpec, folder: Path) -> Contents:
    """Divide the sizes of the files by that of an image with its label, or its two labels."""
    record = math.prod(spec.shape) + (2 if spec.classes == 100 else 1)
    train = 0
    test = 0
    for file in folder.glob("*.bin"):
        images = file.stat().st_size // record
        if file.name.startswith("test"):
            test += images
        else:
            train += images
    return Contents(spec.classes, train, test)
