"""A picture file as a model wants it: its channels, its size, pixels in [0, 1]."""

import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

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


def read_picture(path: Path, shape: tuple[int, int, int]) -> Picture:
    """Read a PNG, JPEG or whatever Pillow knows: upright, grey or coloured as wanted, stretched to the wanted size."""
    channels, height, width = shape
    if channels not in MODES:
        raise DataError(f"The model wants pictures of {channels} channels; picture files have 1 or 3.")
    picture = _open(path, MODES[channels])
    before = picture.size
    if before != (width, height):
        picture = picture.resize((width, height), Image.Resampling.BILINEAR)
    pixels = np.asarray(picture, np.float32).reshape(height, width, channels).transpose(2, 0, 1) / 255
    return Picture(torch.from_numpy(np.ascontiguousarray(pixels)), None if before == (width, height) else before)


def _open(path: Path, mode: str) -> Image.Image:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path) as file:
                file.load()
                upright = ImageOps.exif_transpose(file)
    except FileNotFoundError:
        raise DataError(f"The picture {path} does not exist.") from None
    except (Image.DecompressionBombWarning, Image.DecompressionBombError):
        raise DataError(f"The picture {path} is too large to be read; make it smaller first.") from None
    except UnidentifiedImageError:
        raise DataError(f"{path} is not a picture that can be read; PNG and JPEG can.") from None
    except IsADirectoryError:
        raise DataError(f"{path} is a folder; give the pictures in it.") from None
    except Exception as problem:  # a damaged picture can fail in any way there is
        raise DataError(f"The picture {path} cannot be read: {problem}.") from None
    if upright.mode.startswith(("I", "F")):
        raise DataError(f"The picture {path} has more than 8 bits a channel; save it with 8.")
    if "A" in upright.getbands() or "transparency" in upright.info:  # what cannot be seen is black, as beyond an edge
        upright = Image.alpha_composite(Image.new("RGBA", upright.size, "black"), upright.convert("RGBA"))
    return upright.convert(mode)
