"""A user's own network: a function that returns a new module, named in the config."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import field_validator
from torch import Tensor, nn

from dispfl.core.rng import forked_generators
from dispfl.data.own.factory import call, checked_name, describe
from dispfl.errors import ConfigError
from dispfl.models.registry import Model

KEY = "model.factory"


class OwnModel(Model):
    """The network that a function of the user's returns.

    Not a field of `Model`, so that only a config can name a function: what came from elsewhere, such as the card of an
    exported model, is read as `Model` and can make nobody import anything.
    """

    name: Literal["own"] = "own"
    factory: str
    """`module:function`, which returns a new `nn.Module` each time; given `classes` and `shape` if it takes them."""

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        return name

    @field_validator("factory")
    @classmethod
    def _names_a_function(cls, factory: str) -> str:
        return checked_name(factory)

    def network(self, shape: Sequence[int], classes: int, folder: Path | None = None) -> nn.Module:
        """A new network, imported from the folder, the working directory without one, or PYTHONPATH."""
        module = call(KEY, self.factory, _home(folder), classes=classes, shape=tuple(shape))
        if not isinstance(module, nn.Module):
            hint = f"write {module.__name__}()" if isinstance(module, type) else "return the network itself"
            raise ConfigError(f"{KEY} {self.factory} must return an nn.Module, got {_kind(module)}; {hint}.")
        # Built-in pictures lie channels-last in memory, where a network's `x.view(...)` would fail.
        module.register_forward_pre_hook(_row_major)
        return module

    def try_on(self, inputs: Tensor, classes: int, folder: Path | None = None) -> None:
        """See that a new network takes these inputs, a batch, and has an output for each class."""
        with forked_generators(), torch.no_grad():
            network = self.network(inputs.shape[1:], classes, folder).eval()
            shape = list(inputs.shape[1:])
            try:
                outputs = network(inputs)
            except Exception as problem:
                said = describe(problem, _home(folder))
                raise ConfigError(f"{KEY} {self.factory} fails on inputs of shape {shape}: {said}") from problem
        good = isinstance(outputs, Tensor) and outputs.ndim == 2 and len(outputs) == len(inputs)
        if not good or outputs.shape[1] < classes:
            got = f"shape {list(outputs.shape[1:])}" if isinstance(outputs, Tensor) else f"type {_kind(outputs)}"
            raise ConfigError(
                f"{KEY} {self.factory} must give {classes} numbers for each input, one a class; its output has {got}."
            )


def _home(folder: Path | None) -> Path:
    return (folder or Path()).expanduser().absolute()


def _row_major(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(x.contiguous() if isinstance(x, Tensor) else x for x in inputs)


def _kind(value: object) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
