"""A batch of inputs: a tensor, or tensors by the names of the network's arguments.

Texts are such a dict, `{"input_ids": ..., "attention_mask": ...}`; every tensor has a row for each
sample.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call

from dispfl.errors import ConfigError

Inputs: TypeAlias = Any
"""A tensor, or a dict of tensors."""


def tensors_of(inputs: Inputs) -> list[Tensor]:
    """Return all tensors of inputs."""
    return list(inputs.values()) if isinstance(inputs, Mapping) else [inputs]


def sample_count(inputs: Inputs) -> int:
    """Return the number of samples."""
    return len(tensors_of(inputs)[0])


def with_each(inputs: Inputs, function: Callable[[Tensor], Tensor]) -> Inputs:
    """Return inputs with each tensor replaced by a function of it."""
    if isinstance(inputs, Mapping):
        return {name: function(tensor) for name, tensor in inputs.items()}
    return function(inputs)


def take_rows(inputs: Inputs, rows: Tensor | slice) -> Inputs:
    """Return the inputs of some samples."""
    if isinstance(rows, slice):
        return with_each(inputs, lambda tensor: tensor[rows])
    return with_each(inputs, lambda tensor: tensor.index_select(0, rows))


def stacked(batches: Sequence[Inputs]) -> Inputs:
    """Return inputs with a new first dimension, one entry for each batch."""
    first = batches[0]
    if isinstance(first, Mapping):
        return {name: torch.stack([batch[name] for batch in batches]) for name in first}
    return torch.stack(list(batches))


def call(module: nn.Module, inputs: Inputs) -> Any:
    """Return what a module returns for inputs, or for inputs by name."""
    if isinstance(inputs, Mapping):
        _check_arguments(module, inputs)
        return module(**inputs)
    return module(inputs)


def forward(module: nn.Module, inputs: Inputs) -> Tensor:
    """Return the outputs of a module: its result, or the `logits` of a result that has them."""
    return outputs_of(call(module, inputs), module)


def forward_with(module: nn.Module, weights: Mapping[str, Tensor], inputs: Inputs) -> Tensor:
    """Return the outputs of a module with other weights, by name."""
    if isinstance(inputs, Mapping):
        return outputs_of(functional_call(module, dict(weights), (), dict(inputs)), module)
    return outputs_of(functional_call(module, dict(weights), (inputs,)), module)


def outputs_of(result: Any, module: nn.Module) -> Tensor:
    """Return the tensor of outputs in what a module returned; refuse a result without one."""
    if isinstance(result, Tensor):
        return result
    logits = getattr(result, "logits", None)
    if logits is None and isinstance(result, Mapping):
        logits = result.get("logits")
    if isinstance(logits, Tensor):
        return logits

    name = type(module).__name__
    if isinstance(result, (tuple, list)):
        types = ", ".join(type(value).__name__ for value in result)
        raise ConfigError(
            f"The model {name} returns a {type(result).__name__} of ({types}), but a tensor of"
            " outputs is needed: return one of them, such as outputs[0].",
            key="model",
        )
    has = ""
    if isinstance(result, Mapping):
        has = f" with {', '.join(map(str, result))}"
    raise ConfigError(
        f"The model {name} returns a {type(result).__name__}{has}, but a tensor of outputs, or a"
        " result with .logits, is needed: use a model with a head for the task, or return the"
        " tensor itself.",
        key="model",
    )


def _check_arguments(module: nn.Module, inputs: Mapping[str, Tensor]) -> None:
    """Refuse inputs by name that a module has no arguments for."""
    code = getattr(type(module).forward, "__code__", None)
    if code is None or code.co_flags & 0x08:  # **kwargs
        return
    arguments = code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]
    for name in inputs:
        if name not in arguments:
            raise ConfigError(
                f"The inputs are {', '.join(inputs)}, by name, but {type(module).__name__}.forward"
                f" has no argument {name}; it has {', '.join(arguments) or 'none'}. Rename it, or"
                " give inputs as one tensor.",
                key="model",
            )
