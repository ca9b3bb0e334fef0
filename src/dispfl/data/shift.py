"""Feature shift: each peer sees the same kind of images in a way of its own, as through its camera.

A peer's training, validation and test images are changed alike, by a draw from the seed and the
peer's name. Bytes become bytes, so that results do not depend on the machine.
"""

import itertools
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from dispfl.core.rng import stream_seed
from dispfl.errors import ConfigError

ShiftName = Literal["none", "rotate", "colour", "blur"]
TURNS = 4
WIDTHS = (1, 3, 5, 7)
"""Pixels that a blurred one is the mean of, in each direction."""


@dataclass(frozen=True)
class FeatureShift:
    """How the images of one peer differ."""

    name: ShiftName
    choice: int
    """Which of the shifts of that name, counted from 0."""

    @classmethod
    def of(cls, name: ShiftName, seed: int, peer: str) -> "FeatureShift":
        """Return the shift that a peer draws."""
        return cls(name, stream_seed(seed, "shift", peer))

    def __call__(self, images: Tensor) -> Tensor:
        """Return shifted bytes of images (N, H, W, C)."""
        match self.name:
            case "rotate":
                return _rotated(images, self.choice % TURNS)
            case "colour":
                return _recoloured(images, self.choice)
            case "blur":
                return _blurred(images, WIDTHS[self.choice % len(WIDTHS)])
        return images

    def text(self) -> str:
        """`turned by 90°`, `blurred over 5 pixels`, `colours 2-0-1, negative`."""
        match self.name:
            case "rotate":
                return f"turned by {90 * (self.choice % TURNS)}°"
            case "colour":
                order, negative = _colours(self.choice, channels=3)
                colours = f"colours {'-'.join(map(str, order))}"
                return f"{colours}, negative" if negative else colours
            case "blur":
                width = WIDTHS[self.choice % len(WIDTHS)]
                return "sharp" if width == 1 else f"blurred over {width} pixels"
        return "unchanged"


def check_shift(name: ShiftName, inputs: object, task: str) -> None:
    """Refuse a shift of what are no images (N, H, W, C), and one that masks would follow."""
    if name == "none":
        return
    if not isinstance(inputs, Tensor) or inputs.dtype != torch.uint8 or inputs.ndim != 4:
        raise ConfigError(
            f"partition.shift={name} changes images, but these data are none; omit it.",
            key="partition.shift",
        )
    if name == "rotate" and task == "segmentation":
        raise ConfigError(
            "partition.shift=rotate turns images, but not their masks; use colour or blur.",
            key="partition.shift",
        )
    height, width = inputs.shape[1:3]
    if name == "rotate" and height != width:
        raise ConfigError(
            f"partition.shift=rotate needs square images, got {height}x{width}; resize them.",
            key="partition.shift",
        )


def _rotated(images: Tensor, turns: int) -> Tensor:
    return images.rot90(turns, (1, 2)).contiguous()


def _colours(choice: int, channels: int) -> tuple[tuple[int, ...], bool]:
    """Return the order of the channels, and whether the image is a negative."""
    orders = list(itertools.permutations(range(min(channels, 3))))
    order = orders[choice // 2 % len(orders)]
    return (*order, *range(3, channels)), bool(choice % 2)


def _recoloured(images: Tensor, choice: int) -> Tensor:
    order, negative = _colours(choice, images.shape[3])
    shifted = images[..., list(order)]
    return 255 - shifted if negative else shifted


def _blurred(images: Tensor, width: int) -> Tensor:
    """Return the rounded means over squares; beyond the edge, its pixels are repeated."""
    if width == 1:
        return images
    margin = width // 2
    planes = functional.pad(images.permute(0, 3, 1, 2).float(), [margin] * 4, mode="replicate")
    means = functional.avg_pool2d(planes, width, stride=1)
    return means.round().to(torch.uint8).permute(0, 2, 3, 1).contiguous()
