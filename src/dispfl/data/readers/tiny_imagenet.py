"""Tiny-ImageNet-200: folders of JPEG files, decoded once into a file in the cache folder.

    tiny-imagenet-200/
      wnids.txt words.txt            the ids of the classes, and their names
      train/<class>/images/*.JPEG    500 images of each class
      val/images/*.JPEG              our test set (the original test set has no labels)
      val/val_annotations.txt        the class of each of its images

A folder with fewer classes is fine. Classes are numbered in the order of their ids, with or without
wnids.txt.
"""

import hashlib
import os
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError
from safetensors import SafetensorError
from torch import Tensor

from dispfl.data.fetch import ProgressCallback, cache_folder
from dispfl.data.readers import RawDataset, ReadSplit, damaged
from dispfl.data.readers.folder import in_threads
from dispfl.files import open_regular

SIDE = 64
_KEYS = {"train_inputs", "train_labels", "test_inputs", "test_labels"}

Labelled = list[tuple[str, int]]
"""Paths relative to the data set's folder, with their labels. Strings: a hundred thousand Path
objects are slow."""


def read_tiny_imagenet(folder: Path, progress: ProgressCallback | None = None) -> RawDataset:
    """Read the images from the cache; new or changed images are decoded into the cache first."""
    folder = folder.resolve()
    wnids = _classes(folder)
    train = _train_files(folder, wnids)
    files = train + _test_files(folder, wnids)
    cache = _cache_file(folder, files)
    tensors = _read_cache(cache)
    if tensors is None:
        images = _decode([f"{folder}/{name}" for name, _ in files], progress)
        labels = torch.tensor([label for _, label in files])
        tensors = {
            "train_inputs": images[: len(train)],
            "train_labels": labels[: len(train)],
            "test_inputs": images[len(train) :],
            "test_labels": labels[len(train) :],
        }
        _write_cache(tensors, cache)
    return RawDataset(
        ReadSplit(tensors["train_inputs"], tensors["train_labels"]),
        ReadSplit(tensors["test_inputs"], tensors["test_labels"]),
        _names(folder, wnids),
    )


def _classes(folder: Path) -> list[str]:
    train = folder / "train"
    listed = folder / "wnids.txt"
    if not listed.exists():
        class_folders = filter(Path.is_dir, train.iterdir())
        return sorted(class_folder.name for class_folder in class_folders)
    wnids = sorted(set(listed.read_text(encoding="utf-8").split()))
    for wnid in wnids:
        if not (train / wnid).is_dir():
            raise damaged(train / wnid, f"is missing, although {listed} lists it")
    return wnids


def _names(folder: Path, wnids: Sequence[str]) -> tuple[str, ...]:
    """The first name of each class, or its id where words.txt has none."""
    words = folder / "words.txt"
    names = {wnid: wnid for wnid in wnids}
    if words.exists():
        for line in words.read_text(encoding="utf-8").splitlines():
            wnid, tab, synonyms = line.partition("\t")
            if tab and wnid in names:
                names[wnid] = synonyms.split(",")[0].strip()
    return tuple(names.values())


def _train_files(folder: Path, wnids: Sequence[str]) -> Labelled:
    files: Labelled = []
    for label, wnid in enumerate(wnids):
        images = f"train/{wnid}/images"
        names = sorted(path.name for path in (folder / images).iterdir() if path.suffix == ".JPEG")
        if not names:
            raise damaged(folder / images, "contains no .JPEG files")
        files += [(f"{images}/{name}", label) for name in names]
    if not files:
        raise damaged(folder / "train", "contains no classes")
    return files


def _test_files(folder: Path, wnids: Sequence[str]) -> Labelled:
    annotations = folder / "val" / "val_annotations.txt"
    labels = {wnid: label for label, wnid in enumerate(wnids)}
    files: Labelled = []
    for number, line in enumerate(annotations.read_text(encoding="utf-8").splitlines(), start=1):
        image, wnid = (*line.split("\t"), "")[:2]
        if not image or "/" in image:
            raise damaged(annotations, f"names no image of its folder in line {number}")
        if wnid not in labels:
            raise damaged(
                annotations,
                f"names the class {wnid!r} in line {number}, which the training set lacks",
            )
        files.append((f"val/images/{image}", labels[wnid]))
    if not files:
        raise damaged(annotations, "names no images")
    return files


def _cache_file(folder: Path, files: Labelled) -> Path:
    """The path of the decoded copy.

    It depends on the folder and on every file's name, label, size and date.
    """
    lines = []
    for name, label in files:
        try:
            stat = os.stat(f"{folder}/{name}")  # noqa: PTH116 - several times as fast as Path.stat
        except FileNotFoundError:
            raise damaged(folder / name, "is missing") from None
        lines.append(f"{name}\0{label}\0{stat.st_size}\0{stat.st_mtime_ns}")
    place = _digest(str(folder))
    state = _digest("\n".join(lines))
    return cache_folder() / "decoded" / f"tiny-imagenet-{place}-{state}.safetensors"


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(errors="surrogateescape"), digest_size=8).hexdigest()


def _read_cache(cache: Path) -> dict[str, Tensor] | None:
    """Map the decoded copy into memory; None if it is missing or damaged."""
    try:
        tensors = safetensors.torch.load_file(cache)
    except (OSError, SafetensorError):
        return None
    return tensors if tensors.keys() == _KEYS else None


def _write_cache(tensors: dict[str, Tensor], cache: Path) -> None:
    """Write the decoded copy atomically, and delete older copies of the same folder."""
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".decoded-", dir=cache.parent) as scratch:
            written = Path(scratch) / cache.name
            safetensors.torch.save_file(tensors, written)
            written.replace(cache)
        for older in cache.parent.glob(f"{cache.name.rsplit('-', 1)[0]}-*.safetensors"):
            if older != cache:
                older.unlink(missing_ok=True)
    except (OSError, SafetensorError) as problem:
        warnings.warn(
            f"Cannot write the decoded images in {cache.parent} ({problem}), so the next run"
            " decodes them again. Set DISPFL_CACHE to another folder.",
            stacklevel=3,
        )


def _decode(paths: Sequence[str], progress: ProgressCallback | None) -> Tensor:
    """Decode all images as (N, 3, 64, 64)."""
    images = torch.empty((len(paths), 3, SIDE, SIDE), dtype=torch.uint8)
    target = images.numpy()

    def decode(number: int) -> None:
        target[number] = _pixels(paths[number])

    in_threads(len(paths), decode, progress)
    return images


def _pixels(path: str) -> NDArray[np.uint8]:
    """Decode one image, channels first. Some images are grey and are converted to RGB."""
    try:
        with open_regular(Path(path)) as file, Image.open(file, formats=("JPEG",)) as image:
            if image.size == (SIDE, SIDE):
                return np.asarray(image.convert("RGB")).transpose(2, 0, 1)
            width, height = image.size
    except UnidentifiedImageError:
        raise damaged(Path(path), "is not a JPEG") from None
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as problem:
        raise damaged(Path(path), f"cannot be decoded as a JPEG ({problem})") from None
    raise damaged(Path(path), f"has {width}x{height} pixels instead of {SIDE}x{SIDE}")
