"""A picture file as a model wants it: its channels, its size, pixels in [0, 1]."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from dispfl.data.own.pictures import UnreadableError, read_upright, stretched
from dispfl.errors import DataError

MODES = {1: "L", 3: "RGB"}
"""Pillow's name for grey and for colour."""


@dataclass(frozen=True)
class Picture:
    """A picture that was read."""

    pixels: Tensor
    """float32 (C, H, W) in [0, 1]"""
    resized_from: tuple[int, int] | None
    """Its width and height before, if these were not what the model wants."""


def read_picture(path: Path, shape: Sequence[int]) -> Picture:
    """Read a PNG, JPEG or whatever Pillow knows: upright, grey or coloured as wanted, stretched to the wanted size."""
    channels, height, width = shape
    if channels not in MODES:
        raise DataError(f"The model wants pictures of {channels} channels; picture files have 1 or 3.")
    picture = _open(path, MODES[channels])
    before = picture.size
    picture = stretched(picture, width, height)
    pixels = np.asarray(picture, np.float32).reshape(height, width, channels).transpose(2, 0, 1) / 255
    return Picture(torch.from_numpy(np.ascontiguousarray(pixels)), None if before == (width, height) else before)


def _open(path: Path, mode: str) -> Image.Image:
    if not path.exists():
        raise DataError(f"The picture {path} does not exist.")
    if path.is_dir():
        raise DataError(f"{path} is a folder; give the pictures in it.")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            return read_upright(path, mode)
    except UnreadableError as problem:
        fix = f"; {problem.fix}" if problem.fix else ""
        raise DataError(f"The picture {path} cannot be read: {problem}{fix}.") from None
