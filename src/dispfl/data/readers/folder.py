"""Image files: a folder with one sub-folder of images for each class, and single images."""

import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from dispfl.data.fetch import ProgressCallback
from dispfl.data.readers import RawSamples, mask_labels
from dispfl.data.rows import content_id
from dispfl.errors import DataError
from dispfl.files import open_regular
from dispfl.terminal import printable

log = logging.getLogger("dispfl.data")

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
"""What is read as an image, by its content. Pillow knows more formats, and starts Ghostscript for
one of them."""
_BLOCK = 64
_NAMED = 3


class UnreadableImageError(Exception):
    """Why an image cannot be read, as a short phrase; `fix` says what to do about it, if known."""

    def __init__(self, why: str, fix: str = "") -> None:
        super().__init__(why)
        self.fix = fix


def decode_image(path: Path, mode: str) -> Image.Image:
    """Read an image in mode `L` or `RGB`, rotated by its EXIF data, with black for transparent."""
    try:
        with open_regular(path) as content, Image.open(content, formats=FORMATS) as file:
            file.load()
            upright = ImageOps.exif_transpose(file)
    except (Image.DecompressionBombWarning, Image.DecompressionBombError):
        raise UnreadableImageError("too large", "make it smaller first") from None
    except UnidentifiedImageError:
        raise UnreadableImageError("not an image", "use PNG or JPEG") from None
    except Exception as problem:  # Pillow raises many kinds of errors on a damaged image
        raise UnreadableImageError(str(problem) or type(problem).__name__) from None
    if upright.mode.startswith(("I", "F")):
        raise UnreadableImageError("more than 8 bits per channel", "save it with 8")
    if "A" in upright.getbands() or "transparency" in upright.info:
        black = Image.new("RGBA", upright.size, "black")  # like the padding of random crops
        upright = Image.alpha_composite(black, upright.convert("RGBA"))
    return upright.convert(mode)


def resize_image(image: Image.Image, width: int, height: int) -> Image.Image:
    """Resize an image without keeping its aspect ratio."""
    if image.size == (width, height):
        return image
    return image.resize((width, height), Image.Resampling.BILINEAR)


def read_folder(
    path: Path, size: int, colour: bool, progress: ProgressCallback | None = None
) -> RawSamples:
    """Read all images, in colour or grey, resized to a square.

    Unreadable files are skipped with a warning.
    """
    classes = _class_folders(path)
    files: list[Path] = []
    labels: list[str] = []
    for name in classes:
        class_files = _files(path / name)
        files += class_files
        labels += [name] * len(class_files)
    if not files:
        raise DataError(f"{path} has no images in its sub-folders.")

    images, file_ids, unreadable = _decode(files, size, "RGB" if colour else "L", progress)
    if len(unreadable) == len(files):
        raise DataError(
            f"None of the {len(files):,} files in {path} is a readable image; use PNG or JPEG."
        )
    if unreadable:
        _warn_of_unreadable(path, files, unreadable)
        readable = [number for number in range(len(files)) if number not in unreadable]
        images = images[readable]
        file_ids = file_ids[readable]
        labels = [labels[number] for number in readable]
    return RawSamples(
        path,
        torch.from_numpy(images),
        labels,
        folders=tuple(classes),
        file_ids=torch.from_numpy(file_ids),
    )


IMAGES = "images"
MASKS = "masks"


def read_masked_folder(
    path: Path, size: int, colour: bool, progress: ProgressCallback | None = None
) -> RawSamples:
    """Read the images of the folder `images` and their masks in `masks`, resized to a square.

    A mask has the name of its image, with any ending, and the class of each pixel as its value; 255
    is ignored.
    """
    masks = {file.stem: file for file in _files(path / MASKS)}
    files = _files(path / IMAGES)
    if not files:
        raise DataError(
            f"{path} has no folder {IMAGES} with images; a segmentation needs the folders {IMAGES}"
            f" and {MASKS}, with files of the same names."
        )
    for file in files:
        if file.stem not in masks:
            raise DataError(f"{file} has no mask: {path / MASKS / file.stem}.png is missing.")

    images, file_ids, unreadable = _decode(files, size, "RGB" if colour else "L", progress)
    if unreadable:
        number = min(unreadable)
        raise DataError(f"The image {files[number]} cannot be read: {unreadable[number]}.")
    pixels = np.stack([_read_mask(masks[file.stem], size) for file in files])
    return RawSamples(
        path, torch.from_numpy(images), mask_labels(pixels), file_ids=torch.from_numpy(file_ids)
    )


def _read_mask(path: Path, size: int) -> NDArray[np.uint8]:
    """Read the class of each pixel: the value of a grey image, or the index of a palette."""
    try:
        with open_regular(path) as content, Image.open(content, formats=FORMATS) as mask:
            mask.load()
            if mask.mode not in ("1", "L", "P"):
                raise DataError(
                    f"The mask {path} has the colours {mask.mode}; save the class of each pixel as"
                    " its grey value, with 8 bits."
                )
            single = mask.convert("L") if mask.mode == "1" else mask
            nearest = single.resize((size, size), Image.Resampling.NEAREST)
            values: NDArray[np.uint8] = np.asarray(nearest)
            return values // 255 if mask.mode == "1" else values
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as problem:
        raise DataError(f"The mask {path} cannot be read: {problem}.") from None


def _class_folders(path: Path) -> list[str]:
    """The names of the classes: those of the sub-folders, without hidden ones."""
    folders = filter(Path.is_dir, path.iterdir())
    classes = sorted(folder.name for folder in folders if not folder.name.startswith("."))
    if not classes:
        raise DataError(
            f"{path} has no sub-folders; put the images of each class into a sub-folder named"
            " after it."
        )
    if set(classes) <= {"train", "test", "val", "valid", "validation"}:
        raise DataError(
            f"{path} has the folders {' and '.join(classes)}: name them as data.path and"
            " data.test_path."
        )
    return classes


def _warn_of_unreadable(path: Path, files: list[Path], unreadable: dict[int, str]) -> None:
    examples = []
    for number in sorted(unreadable)[:_NAMED]:
        name = files[number].relative_to(path)
        examples.append(printable(f"{name} ({unreadable[number]})"))
    if len(unreadable) > _NAMED:
        examples.append("...")
    log.warning(
        "%s files in %s cannot be read and are skipped: %s.",
        f"{len(unreadable):,} of {len(files):,}",
        path,
        ", ".join(examples),
    )


def _files(folder: Path) -> list[Path]:
    """All files below a folder, sorted, without hidden files and folders."""
    files: list[Path] = []
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        files += [Path(place, name) for name in names if not name.startswith(".")]
    return sorted(files)


def _decode(
    files: Sequence[Path], size: int, mode: str, progress: ProgressCallback | None
) -> tuple[NDArray[np.uint8], NDArray[np.int64], dict[int, str]]:
    """Decode all images as (N, size, size, C); also return the ids of their files, and which are
    unreadable, and why."""
    images = np.zeros((len(files), size, size, len(mode)), np.uint8)
    file_ids = np.zeros(len(files), np.int64)
    unreadable: dict[int, str] = {}

    def decode(number: int) -> None:
        try:
            image = decode_image(files[number], mode)
        except UnreadableImageError as problem:
            unreadable[number] = str(problem)
        else:
            pixels = np.asarray(resize_image(image, size, size))
            images[number] = pixels.reshape(size, size, len(mode))
            file_ids[number] = content_id(files[number].read_bytes())

    in_threads(len(files), decode, progress)
    return images, file_ids, unreadable


def in_threads(
    count: int, decode: Callable[[int], None], progress: ProgressCallback | None
) -> None:
    """Decode images number 0 to count - 1 in threads.

    Pillow releases the interpreter lock while it decodes.
    """

    def decode_block(start: int) -> int:
        end = min(start + _BLOCK, count)
        for number in range(start, end):
            decode(number)
        return end

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        try:
            for done in pool.map(decode_block, range(0, count, _BLOCK)):
                if progress:
                    progress(done, count)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
