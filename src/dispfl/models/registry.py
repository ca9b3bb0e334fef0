"""The built-in models by name, and how a config asks for one."""

from collections.abc import Callable
from typing import ClassVar

from pydantic import field_validator
from torch import nn

from dispfl.errors import ConfigError
from dispfl.models.cnn import SmallCNN
from dispfl.models.resnet18 import ResNet18
from dispfl.models.vgg11 import VGG11
from dispfl.settings import Settings, nearest

MODELS: dict[str, Callable[[int, int, int], nn.Module]] = {
    "cnn": SmallCNN,
    "resnet18": lambda channels, classes, size: ResNet18(channels, classes),
    "vgg11": lambda channels, classes, size: VGG11(channels, classes),
}

SMALLEST = {"vgg11": 32}
"""Sides of the smallest pictures, where a network halves them until nothing is left."""


class Model(Settings):
    """Which network the peers share."""

    table: ClassVar[str] = "model"
    name: str = "cnn"

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        return nearest(name, MODELS)

    def build(self, channels: int, classes: int, size: int) -> nn.Module:
        """A new network for square pictures of this size."""
        if size < SMALLEST.get(self.name, 1):
            wanted, got = (f"{side}x{side}" for side in (SMALLEST[self.name], size))
            raise ConfigError(
                f"model.name {self.name} needs pictures of at least {wanted}, got {got}. Use cnn or resnet18."
            )
        return MODELS[self.name](channels, classes, size)
