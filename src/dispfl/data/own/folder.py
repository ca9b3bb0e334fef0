"""A folder with a sub-folder of pictures for each class."""

import logging
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from dispfl.data.fetch import Progress
from dispfl.data.own.parts import Part
from dispfl.data.own.pictures import UnreadableError, read_upright, stretched
from dispfl.errors import DataError

log = logging.getLogger("dispfl.data")

_BLOCK = 64
_NAMED = 3


def read_folder(path: Path, size: int, colour: bool, progress: Progress | None = None) -> Part:
    """Read all pictures, grey or coloured and stretched to a square; files that are none are left out and named."""
    classes = sorted(entry.name for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if not classes:
        raise DataError(f"{path} has no sub-folders; put the pictures of each class into one that bears its name.")
    if set(classes) <= {"train", "test", "val", "valid", "validation"}:
        raise DataError(f"{path} has the folders {' and '.join(classes)}: name them as data.path and data.test_path.")
    files = [(file, name) for name in classes for file in _files(path / name)]
    if not files:
        raise DataError(f"{path} has no pictures in its sub-folders.")
    pictures, unreadable = _decode([file for file, _ in files], size, "RGB" if colour else "L", progress)
    if len(unreadable) == len(files):
        raise DataError(f"None of {len(files):,} files in {path} is a picture that can be read; PNG and JPEG can.")
    if unreadable:
        named = ", ".join(f"{files[i][0].relative_to(path)} ({why})" for i, why in sorted(unreadable.items())[:_NAMED])
        more = ", ..." if len(unreadable) > _NAMED else ""
        counts = f"{len(unreadable):,} of {len(files):,}"
        log.warning("%s files in %s cannot be read, so they are left out: %s%s.", counts, path, named, more)
    kept = [i for i in range(len(files)) if i not in unreadable]
    inputs = torch.from_numpy(pictures if not unreadable else pictures[kept])
    return Part(path, inputs, [files[i][1] for i in kept], folders=tuple(classes))


def _files(folder: Path) -> list[Path]:
    """All files below a folder, sorted; hidden ones and those in hidden folders are none of ours."""
    found = []
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(place, name) for name in names if not name.startswith(".")]
    return sorted(found)


def _decode(
    files: Sequence[Path], size: int, mode: str, progress: Progress | None
) -> tuple[NDArray[np.uint8], dict[int, str]]:
    """All pictures as (N, size, size, C), and which could not be read, and why; on threads, as Pillow allows it."""
    pictures = np.zeros((len(files), size, size, len(mode)), np.uint8)
    unreadable: dict[int, str] = {}

    def decode_block(start: int) -> int:
        for place, file in enumerate(files[start : start + _BLOCK], start):
            try:
                picture = read_upright(file, mode)
            except UnreadableError as problem:
                unreadable[place] = str(problem)
                continue
            pictures[place] = np.asarray(stretched(picture, size, size)).reshape(size, size, len(mode))
        return min(start + _BLOCK, len(files))

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        try:
            for done in pool.map(decode_block, range(0, len(files), _BLOCK)):
                if progress:
                    progress(done, len(files))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return pictures, unreadable
