"""Which network the peers train: a built-in one by name, or the result of a user's function."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar, Literal

import torch
from pydantic import Field, field_validator
from torch import Tensor, nn

from dispfl.core.inputs import Inputs, forward, sample_count, tensors_of
from dispfl.core.rng import forked_generators
from dispfl.core.task import TaskName
from dispfl.errors import ConfigError
from dispfl.models.networks import MLP, VGG11, ResNet18, SmallCNN, TextNet, UNet
from dispfl.settings import Settings, check_known
from dispfl.user_functions import call_factory, checked_name, describe_error

MODELS: dict[str, Callable[[Sequence[int], int], nn.Module]] = {
    "cnn": lambda shape, classes: SmallCNN(shape[0], classes, shape[1]),
    "mlp": lambda shape, classes: MLP(math.prod(shape), classes),
    "text": lambda shape, classes: TextNet(classes),
    "unet": lambda shape, classes: UNet(shape[0], classes),
    "resnet18": lambda shape, classes: ResNet18(shape[0], classes),
    "vgg11": lambda shape, classes: VGG11(shape[0], classes),
}
"""The built-in networks by name, built from the shape of an input and the number of classes."""

FOR_PIXELS = {"unet"}
"""Networks with outputs for each pixel, for a segmentation."""

ANY_SHAPE = {"mlp", "text"}
"""Networks for inputs of any shape; the others need square images (channels, size, size)."""

SMALLEST = {"vgg11": 32}
"""The smallest image size, for networks with many pooling layers."""

FACTORY = "model.factory"


class Model(Settings):
    """Settings of a built-in network; `CustomModel` describes a user's own."""

    table: ClassVar[str] = "model"
    name: str = "cnn"
    init: Literal["torch", "kaiming"] = "torch"
    """How convolutions start: as torch does, or Kaiming-normal with fan-out, as the authors' VGG-11
    (deviation 13)."""

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        return check_known(name, MODELS)

    def build(self, channels: int, classes: int, size: int) -> nn.Module:
        """Return a new network for square images of this size."""
        return self.network((channels, size, size), classes)

    def network(self, shape: Sequence[int], classes: int, folder: Path | None = None) -> nn.Module:
        """Return a new network for inputs of this shape.

        A custom network is imported from the folder.
        """
        if self.name not in ANY_SHAPE:
            self._check_square_images(shape)
        network = MODELS[self.name](shape, classes)
        if self.init == "kaiming":
            for module in network.modules():
                if isinstance(module, nn.Conv2d):
                    nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        return network

    def check_task(self, task: TaskName) -> None:
        """Refuse a built-in network whose outputs are not those of a task."""
        if (self.name in FOR_PIXELS) == (task == "segmentation"):
            return
        pixels = " or ".join(sorted(FOR_PIXELS))
        if task == "segmentation":
            outputs = f"has outputs for a whole image; use {pixels}"
        else:
            outputs = "has outputs for each pixel; use another"
        raise ConfigError(
            f"task is {task}, but model.name {self.name} {outputs}, or your own network with"
            " model.factory.",
            key="model",
        )

    def _check_square_images(self, shape: Sequence[int]) -> None:
        if len(shape) != 3 or shape[1] != shape[2]:
            raise ConfigError(
                f"model.name {self.name} needs square images, got inputs of shape {list(shape)}. "
                "Use mlp, or your own network with model.factory.",
                key="model",
            )
        if self.name in FOR_PIXELS and shape[1] % 4:
            raise ConfigError(
                f"model.name {self.name} needs images whose size is a multiple of 4, got"
                f" {shape[1]}x{shape[2]}; set data.size.",
                key="model",
            )
        if shape[1] < SMALLEST.get(self.name, 1):
            smallest = SMALLEST[self.name]
            raise ConfigError(
                f"model.name {self.name} needs images of at least {smallest}x{smallest}, got"
                f" {shape[1]}x{shape[2]}. Use cnn or resnet18.",
                key="model",
            )


class CustomModel(Model):
    """Settings of a user's own network: a function that returns it.

    `factory` is not a field of `Model`, so only a config can name a function: untrusted input, such
    as the card of an exported model, is read as `Model` and cannot import anything.
    """

    name: Literal["custom"] = "custom"
    init: Literal["torch"] = Field(default="torch", exclude=True)
    """The function itself decides how its network starts."""
    factory: str
    """`module:function`, which returns a new `nn.Module`; it may have the parameters `classes` and
    `shape`."""

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        return name

    @field_validator("factory")
    @classmethod
    def _names_a_function(cls, factory: str) -> str:
        return checked_name(factory)

    def network(self, shape: Sequence[int], classes: int, folder: Path | None = None) -> nn.Module:
        """Return a new network, imported from the folder or PYTHONPATH.

        The folder is the working directory by default.
        """
        home = _home(folder)
        module = call_factory(FACTORY, self.factory, home, classes=classes, shape=tuple(shape))
        if not isinstance(module, nn.Module):
            hint = "return the network itself"
            if isinstance(module, type):
                hint = f"write {module.__name__}()"
            raise ConfigError(
                f"{FACTORY} {self.factory} must return an nn.Module, got {_type_of(module)};"
                f" {hint}.",
                key=FACTORY,
            )
        return module

    def check_task(self, task: TaskName) -> None:
        """Accept any task: `check_network` tries the network."""

    def check_network(
        self,
        inputs: Inputs,
        classes: int,
        folder: Path | None = None,
        task: TaskName = "classification",
    ) -> None:
        """Check that a new network accepts these inputs and has the outputs of the task."""
        with forked_generators(), torch.no_grad():
            shape = tuple(tensors_of(inputs)[0].shape[1:])
            network = self.network(shape, classes, folder).eval()
            try:
                outputs = forward(network, inputs)
            except ConfigError:
                raise
            except Exception as problem:
                reason = describe_error(problem, _home(folder))
                raise ConfigError(
                    f"{FACTORY} {self.factory} fails on inputs of shape {list(shape)}: {reason}",
                    key=FACTORY,
                ) from problem
        if _fits_task(outputs, sample_count(inputs), classes, task):
            return
        wanted = f"{classes} numbers for each input, one per class"
        if task == "segmentation":
            wanted = f"{classes} numbers for each pixel, (batch, {classes}, height, width)"
        elif task != "classification":
            wanted = f"{classes} numbers for each input, one per column of the labels"
        raise ConfigError(
            f"{FACTORY} {self.factory} must return {wanted}; its output has shape"
            f" {list(outputs.shape[1:])}.",
            key=FACTORY,
        )


def _fits_task(outputs: Tensor, samples: int, classes: int, task: TaskName) -> bool:
    """Whether outputs have the shape that a task needs."""
    if not outputs.ndim or len(outputs) != samples:
        return False
    match task:
        case "classification":
            return outputs.ndim == 2 and outputs.shape[1] >= classes
        case "segmentation":
            return outputs.ndim == 4 and outputs.shape[1] >= classes
        case _:
            return outputs.shape[1:] == (classes,) or (classes == 1 and outputs.ndim == 1)


def _home(folder: Path | None) -> Path:
    return (folder or Path()).expanduser().absolute()


def _type_of(value: object) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return type(value).__name__
