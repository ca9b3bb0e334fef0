"""Tiny-ImageNet-200: folders of JPEGs, decoded once into a file of the cache folder.

    tiny-imagenet-200/
      wnids.txt words.txt            the classes, and what they are called
      train/<class>/images/*.JPEG    500 pictures of each class
      val/val_annotations.txt        the class of each picture of
      val/images/*.JPEG              which are our test set (the original test set has no labels)

A folder with fewer classes is fine. Classes are numbered in the order of their ids, with or without wnids.txt.
"""

import hashlib
import os
import tempfile
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from numpy.typing import NDArray
from PIL import Image
from safetensors import SafetensorError
from torch import Tensor

from dispfl.data.fetch import Progress, cache_folder
from dispfl.data.readers import Reading, Split, damaged

SIDE = 64
_BLOCK = 256
_KEYS = ("train_inputs", "train_labels", "test_inputs", "test_labels")

Labelled = list[tuple[str, int]]
"""Pictures as paths below the data set's folder, with their labels. Text: a hundred thousand Paths are slow."""


def read_tiny_imagenet(folder: Path, progress: Progress | None = None) -> Reading:
    """Read the pictures from the cache, after decoding them into it if they are new or changed."""
    folder = folder.resolve()
    wnids = _classes(folder)
    train, test = _train_files(folder, wnids), _test_files(folder, wnids)
    kept = _cache_file(folder, train + test)
    tensors = _load(kept)
    if tensors is None:
        pictures = _decode([f"{folder}/{name}" for name, _ in train + test], progress)
        labels = torch.tensor([label for _, label in train + test])
        count = len(train)
        values = (pictures[:count], labels[:count], pictures[count:], labels[count:])
        tensors = dict(zip(_KEYS, values, strict=True))
        _keep(tensors, kept)
    train_inputs, train_labels, test_inputs, test_labels = (tensors[key] for key in _KEYS)
    return Reading(Split(train_inputs, train_labels), Split(test_inputs, test_labels), _names(folder, wnids))


def _classes(folder: Path) -> list[str]:
    listed = folder / "wnids.txt"
    if not listed.exists():
        return sorted(entry.name for entry in (folder / "train").iterdir() if entry.is_dir())
    wnids = sorted(set(listed.read_text(encoding="utf-8").split()))
    for wnid in wnids:
        if not (folder / "train" / wnid).is_dir():
            raise damaged(folder / "train" / wnid, f"is missing, although {listed} lists it")
    return wnids


def _names(folder: Path, wnids: Sequence[str]) -> tuple[str, ...]:
    """The first word for each class, or its id where words.txt is silent."""
    words = folder / "words.txt"
    lines = words.read_text(encoding="utf-8").splitlines() if words.exists() else []
    glosses = dict(line.split("\t", 1) for line in lines if "\t" in line)
    return tuple(glosses.get(wnid, wnid).split(",")[0].strip() for wnid in wnids)


def _train_files(folder: Path, wnids: Sequence[str]) -> Labelled:
    files: Labelled = []
    for label, wnid in enumerate(wnids):
        images = f"train/{wnid}/images"
        found = sorted(path.name for path in (folder / images).iterdir() if path.suffix == ".JPEG")
        if not found:
            raise damaged(folder / images, "holds no .JPEG files")
        files += [(f"{images}/{name}", label) for name in found]
    if not files:
        raise damaged(folder / "train", "holds no classes")
    return files


def _test_files(folder: Path, wnids: Sequence[str]) -> Labelled:
    annotations = folder / "val" / "val_annotations.txt"
    labels = {wnid: label for label, wnid in enumerate(wnids)}
    files: Labelled = []
    for number, line in enumerate(annotations.read_text(encoding="utf-8").splitlines(), start=1):
        picture, wnid = (*line.split("\t"), "")[:2]
        if not picture or "/" in picture:
            raise damaged(annotations, f"names no picture of its folder in line {number}")
        if wnid not in labels:
            raise damaged(annotations, f"names the class {wnid!r} in line {number}, which the training set lacks")
        files.append((f"val/images/{picture}", labels[wnid]))
    if not files:
        raise damaged(annotations, "names no pictures")
    return files


def _cache_file(folder: Path, files: Labelled) -> Path:
    """The name of the decoded copy: another folder, file list, label, size or date gives another name."""
    lines = []
    for name, label in files:
        try:
            stat = os.stat(f"{folder}/{name}")  # noqa: PTH116 - several times as quick as Path.stat
        except FileNotFoundError:
            raise damaged(folder / name, "is missing") from None
        lines.append(f"{name}\0{label}\0{stat.st_size}\0{stat.st_mtime_ns}")
    place, state = _digest(str(folder)), _digest("\n".join(lines))
    return cache_folder() / "decoded" / f"tiny-imagenet-{place}-{state}.safetensors"


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(errors="surrogateescape"), digest_size=8).hexdigest()


def _load(kept: Path) -> dict[str, Tensor] | None:
    """The decoded copy, mapped into memory; None if there is none or it is broken, since we can decode again."""
    try:
        tensors = safetensors.torch.load_file(kept)
    except (OSError, SafetensorError):
        return None
    return tensors if set(tensors) == set(_KEYS) else None


def _keep(tensors: dict[str, Tensor], kept: Path) -> None:
    """Write the decoded copy in one step, and drop older ones of the same folder."""
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".decoded-", dir=kept.parent) as scratch:
            written = Path(scratch) / kept.name
            safetensors.torch.save_file(tensors, written)
            written.replace(kept)
        for older in kept.parent.glob(f"{kept.name.rsplit('-', 1)[0]}-*.safetensors"):
            if older != kept:
                older.unlink(missing_ok=True)
    except (OSError, SafetensorError) as problem:
        reason = f"Cannot keep the decoded pictures in {kept.parent} ({problem}), so the next run decodes them again."
        warnings.warn(f"{reason} Choose another folder with DISPFL_CACHE.", stacklevel=3)


def _decode(paths: Sequence[str], progress: Progress | None) -> Tensor:
    """Decode all pictures on a few threads; Pillow lets go of the interpreter lock while it decodes."""
    pictures = torch.empty((len(paths), 3, SIDE, SIDE), dtype=torch.uint8)
    target = pictures.numpy()

    def decode_block(start: int) -> int:
        for place, path in enumerate(paths[start : start + _BLOCK], start):
            target[place] = _pixels(path)
        return min(start + _BLOCK, len(paths))

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        try:
            for done in pool.map(decode_block, range(0, len(paths), _BLOCK)):
                if progress:
                    progress(done, len(paths))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return pictures


def _pixels(path: str) -> NDArray[np.uint8]:
    """One picture, channels first. Some of the set are grey and become RGB."""
    try:
        with Image.open(path, formats=("JPEG",)) as picture:
            if picture.size == (SIDE, SIDE):
                return np.asarray(picture.convert("RGB")).transpose(2, 0, 1)
            width, height = picture.size
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as problem:
        raise damaged(Path(path), f"cannot be decoded as a JPEG ({problem})") from None
    raise damaged(Path(path), f"has {width}x{height} pixels instead of {SIDE}x{SIDE}")
