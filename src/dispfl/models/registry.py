"""The built-in models by name, and how a config asks for one."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

from pydantic import field_validator
from torch import nn

from dispfl.errors import ConfigError
from dispfl.models.cnn import SmallCNN
from dispfl.models.mlp import MLP
from dispfl.models.resnet18 import ResNet18
from dispfl.models.vgg11 import VGG11
from dispfl.settings import Settings, nearest

MODELS: dict[str, Callable[[Sequence[int], int], nn.Module]] = {
    "cnn": lambda shape, classes: SmallCNN(shape[0], classes, shape[1]),
    "mlp": lambda shape, classes: MLP(math.prod(shape), classes),
    "resnet18": lambda shape, classes: ResNet18(shape[0], classes),
    "vgg11": lambda shape, classes: VGG11(shape[0], classes),
}
"""From the shape of an input and the number of classes to a network."""

ANY_SHAPE = {"mlp"}
"""Networks that take anything; the others take square pictures (channels, size, size)."""

SMALLEST = {"vgg11": 32}
"""Sides of the smallest pictures, where a network halves them until nothing is left."""


class Model(Settings):
    """Which network the peers share. A user's own is described by `dispfl.models.own`."""

    table: ClassVar[str] = "model"
    name: str = "cnn"

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        return nearest(name, MODELS)

    def build(self, channels: int, classes: int, size: int) -> nn.Module:
        """A new network for square pictures of this size."""
        return self.network((channels, size, size), classes)

    def network(self, shape: Sequence[int], classes: int, folder: Path | None = None) -> nn.Module:
        """A new network for inputs of this shape. A site's own is imported from the site's folder."""
        if self.name not in ANY_SHAPE:
            self._demand_square_pictures(shape)
        return MODELS[self.name](shape, classes)

    def _demand_square_pictures(self, shape: Sequence[int]) -> None:
        if len(shape) != 3 or shape[1] != shape[2]:
            raise ConfigError(
                f"model.name {self.name} needs square pictures, got inputs of shape {list(shape)}. "
                "Use mlp, or a network of your own with model.factory."
            )
        if shape[1] < SMALLEST.get(self.name, 1):
            wanted, got = (f"{side}x{side}" for side in (SMALLEST[self.name], shape[1]))
            raise ConfigError(
                f"model.name {self.name} needs pictures of at least {wanted}, got {got}. Use cnn or resnet18."
            )
