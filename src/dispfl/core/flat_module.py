"""The network of a worker: peers' flat vectors are loaded into it, trained, and read back."""

import copy
from collections.abc import Mapping, Sequence
from typing import Literal, get_args
from weakref import WeakSet

import torch
from torch import Tensor, nn

from dispfl.core.inputs import Inputs, forward, sample_count, with_each
from dispfl.core.layout import Layout
from dispfl.core.packed import Mask, PackedModel
from dispfl.errors import ConfigError

Precision = Literal["float32", "bf16"]
"""The precision of forward and backward passes; all else is float32, messages included."""
MemoryFormat = Literal["contiguous", "channels_last"]
"""The order in memory of the activations of image batches; weights stay row-major."""
Shapes = tuple[tuple[int, ...], ...]


def resolve_device(device: str) -> str:
    """Return a device that is available here; for "auto" the fastest: cuda, then mps, then cpu."""
    if device != "auto":
        check_device(device)
        return device
    available = [name for name, count in _devices().items() if count]
    return available[0]


def check_device(device: str) -> None:
    """Refuse a device that is not available here; `cuda:1` is the second of its name."""
    name, _, number = device.partition(":")
    count = _devices().get(name, 0)
    if not count or (number and not (number.isdecimal() and int(number) < count)):
        raise ConfigError(
            f"device is {device!r}, which this machine or this build of torch does not have; use"
            " cpu.",
            key="device",
        )


def _devices() -> dict[str, int]:
    """Return the number of devices by name, the fastest first."""
    cuda = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {"cuda": cuda, "mps": int(torch.backends.mps.is_available()), "cpu": 1}


_ALIVE: WeakSet[nn.Module] = WeakSet()
"""Modules whose parameters are views already: a second FlatModule would detach them."""


class FlatModule:
    """A module whose trainable parameters and gradients are views into two flat vectors.

    So loading a peer is one copy, and an SGD step, masking and averaging are a few vector
    operations. Both vectors are on the device; a peer's state never is: `load` copies it in, `read`
    and `read_buffers` copy it out.
    """

    def __init__(
        self,
        module: nn.Module,
        device: str = "cpu",
        precision: Precision = "float32",
        memory_format: MemoryFormat = "contiguous",
    ) -> None:
        if precision not in get_args(Precision):
            raise ConfigError(
                f"precision must be float32 or bf16, got {precision!r}.", key="precision"
            )
        if memory_format not in get_args(MemoryFormat):
            raise ConfigError(
                f"memory_format must be contiguous or channels_last, got {memory_format!r}.",
                key="memory_format",
            )
        if module in _ALIVE:
            raise ConfigError(
                "The model function returned the same module twice; it must build a new one each"
                " time."
            )
        _check_parameters(module)
        _ALIVE.add(module)
        self.mask: Mask | None = None
        """Of a small network: the channels that it has.

        A peer's buffers are those of the whole network.
        """
        self._small: dict[Shapes, FlatModule] = {}
        self._buffers: Mapping[str, Tensor] = {}
        self.uncharged = 0
        """Samples that a method passed forward in a loop of its own, not yet charged."""
        self.module = module.to(device)
        self.device = torch.device(device)
        self.precision = precision
        self.memory_format = memory_format
        self.layout = Layout.of(module)
        self.buffer_names = [name for name, _ in module.named_buffers()]
        parameters = _trainable(module)  # those on the device
        self.weights = torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
        self.grad = torch.zeros_like(self.weights)
        weight_views = self.layout.views(self.weights)
        grad_views = self.layout.views(self.grad)
        for parameter, weights, grad in zip(parameters, weight_views, grad_views, strict=True):
            parameter.data = weights
            parameter.grad = grad

    def for_mask(self, mask: Mask) -> "FlatModule":
        """Return the network of a model under this mask: this one, or the mask's small network.

        There is one small network for each number of channels; peers with as many share its memory.
        The result counts its own `uncharged` samples.
        """
        network = copy.copy(self)
        if mask.small is not None:
            network = copy.copy(self._small_network(mask, mask.small.shapes))
            network.mask = mask
        network.uncharged = 0
        network.train_only(None)
        return network

    def train_only(self, parameters: Sequence[bool] | None) -> None:
        """Compute the gradients of these parameters only, given a flag for each; None: of all."""
        if parameters is None:
            parameters = [True] * len(self.layout.names)
        for name, is_trained in zip(self.layout.names, parameters, strict=True):
            self.module.get_parameter(name).requires_grad_(is_trained)

    def _small_network(self, mask: Mask, shapes: Shapes) -> "FlatModule":
        if shapes not in self._small:
            module = mask.small_network(self.module)
            self._small[shapes] = FlatModule(
                module, str(self.device), self.precision, self.memory_format
            )
        return self._small[shapes]

    def discard_weights(self) -> None:
        """Free the memory of weights and gradients; the network then only serves `for_mask`."""
        for parameter in self.module.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.new_empty(0)
                parameter.grad = None
        self.weights = self.grad = torch.empty(0)

    def __call__(self, inputs: Inputs) -> Tensor:
        """Return the module's outputs."""
        if torch.is_grad_enabled():
            self.uncharged += sample_count(inputs)
        inputs = with_each(inputs, self.to_device)
        if self.memory_format == "channels_last":
            return self._channels_last_outputs(inputs)
        return self._outputs(inputs)

    def _outputs(self, inputs: Inputs) -> Tensor:
        """Return the module's outputs for inputs on the device, as float32."""
        if self.precision == "float32":
            return forward(self.module, inputs)
        # Threads share autocast's cache of rounded weights and empty it for each other. Then two
        # uses of a tied weight would share a rounded copy, and add their gradients in bf16, or not,
        # depending on timing.
        with torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False):
            outputs = forward(self.module, inputs)
        return outputs.float()  # so loss and metric compute in float32

    def _channels_last_outputs(self, inputs: Inputs) -> Tensor:
        """Return the module's outputs, computed on images whose channels are last in memory.

        Layers keep the order of their inputs, and convolutions convert their weights to it, so
        that the flat vector stays row-major. Outputs are row-major, for losses that use `view`.
        """
        try:
            outputs = self._outputs(with_each(inputs, _channels_last))
        except RuntimeError as problem:
            if "view size is not compatible" not in str(problem):
                raise
            raise ConfigError(
                f"memory_format is channels_last, but the network {type(self.module).__name__}"
                " calls `view` on activations, which works in row-major order only; use `reshape`"
                " or `flatten` there, or memory_format=contiguous.",
                key="memory_format",
            ) from problem
        return outputs.contiguous()

    def to_device(self, host: Tensor) -> Tensor:
        """Move a tensor to the device."""
        if self.device.type == "cuda" and host.device.type == "cpu":
            # Through pinned memory: the host does not wait for the device.
            return host.pin_memory().to(self.device, non_blocking=True)
        return host.to(self.device)

    def load(self, weights: Tensor, buffers: Mapping[str, Tensor]) -> None:
        """Load a peer's weights and buffers (running means and the like) into the module."""
        self.weights.copy_(weights)
        self._buffers = buffers
        for name in self.buffer_names:
            buffer = buffers[name]
            positions = self._buffer_positions(name)
            if positions is not None:
                buffer = buffer[positions]
            self.module.get_buffer(name).copy_(buffer)

    def read(self) -> Tensor:
        """Return a copy of the module's weights on the host."""
        return self.weights.to("cpu", copy=True)

    def read_buffers(self) -> dict[str, Tensor]:
        """Return a copy of the module's buffers on the host, row-major as files require."""
        buffers = {}
        for name in self.buffer_names:
            buffer = self.module.get_buffer(name)
            buffer = buffer.to("cpu", copy=True, memory_format=torch.contiguous_format)
            positions = self._buffer_positions(name)
            if positions is not None:
                buffer = self._buffers[name].index_copy(0, positions, buffer)
            buffers[name] = buffer
        return buffers

    def _buffer_positions(self, buffer: str) -> Tensor | None:
        """Return which entries of a peer's buffer a small network has; None: all."""
        if self.mask is None:
            return None
        return self.mask.buffer_positions(buffer)


def _channels_last(inputs: Tensor) -> Tensor:
    """Return a batch of images with the channels last in memory; other inputs as they are.

    A copy, because torch takes images of one channel for row-major unless their strides say
    otherwise.
    """
    if inputs.dim() != 4:
        return inputs
    return inputs.clone(memory_format=torch.channels_last)


def _trainable(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def _check_parameters(module: nn.Module) -> None:
    """Refuse a module without parameters to train, or with unsuitable ones."""
    if any(map(nn.parameter.is_lazy, module.parameters())):
        raise ConfigError(
            "The model has lazy parameters; give their sizes, or run one batch through it first."
        )
    parameters = _trainable(module)
    if not sum(parameter.numel() for parameter in parameters):
        raise ConfigError(
            "The model has no trainable parameters: at least one must have requires_grad=True."
        )
    types = {str(parameter.dtype) for parameter in parameters}
    wrong_types = types - {"torch.float32"}
    if wrong_types:
        raise ConfigError(
            f"The model's parameters must be float32, got {', '.join(sorted(wrong_types))}: call"
            " .float() on it."
        )


def loaded_network(
    module: nn.Module, model: PackedModel, buffers: Mapping[str, Tensor]
) -> nn.Module:
    """Return the network that computes a peer's model, ready to use.

    It is the given one, or the small one of its channels.
    """
    network = FlatModule(module).for_mask(model.mask)
    network.load(model.flat(), buffers)
    for parameter in network.module.parameters():
        parameter.grad = None
    return network.module.eval()
