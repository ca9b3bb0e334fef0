"""The small dense network of a mask of units, built from the large one."""

import copy
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from dispfl.channels.units import Axis, is_cut_by_norm_group

if TYPE_CHECKING:
    from dispfl.channels.channel_mask import ChannelMask


def small_network(module: nn.Module, mask: "ChannelMask") -> nn.Module:
    """Return a copy of a network with the channels of the mask only.

    Its weights and sliced buffers are not set. Large tensors are never copied: the copy gets small
    ones in their place. Frozen parameters stay as they are.
    """
    layout = mask.layout
    memo: dict[int, Any] = {}
    shapes = dict(zip(layout.names, mask.small.shapes, strict=True))
    for name, parameter in module.named_parameters():
        if name in shapes:
            memo[id(parameter)] = nn.Parameter(parameter.new_zeros(shapes[name]))
    for name, channels in layout.buffer_axes.items():
        buffer = module.get_buffer(name)
        held_channels = len(mask.positions[channels])
        memo[id(buffer)] = buffer.new_zeros(held_channels, *buffer.shape[1:])
    small = copy.deepcopy(module, memo)
    axes = dict(zip(layout.names, layout.axes, strict=True))
    for (name, layer), small_layer in zip(module.named_modules(), small.modules(), strict=True):
        axis = axes.get(f"{name}.weight", (None,))[0]
        _set_sizes(layer, small_layer, None if axis is None else layout.axis_units[axis])
    return small


def _set_sizes(large: nn.Module, small: nn.Module, axis: Axis | None) -> None:
    """Set the sizes that a layer keeps beside its parameters; `axis` is its channels'."""
    weight = getattr(small, "weight", None)
    if not isinstance(weight, Tensor):
        return
    rows = len(weight) if weight.ndim else 1
    match small:
        case _ConvTransposeNd():
            small.in_channels, small.out_channels = weight.shape[:2]
        case _ConvNd():
            small.out_channels, small.in_channels = weight.shape[:2]
            if small.groups > 1 and small.groups == getattr(large, "out_channels", 0):  # depthwise
                small.in_channels = small.groups = rows
        case nn.Linear():
            small.out_features, small.in_features = weight.shape
        case nn.Embedding():
            small.embedding_dim = weight.shape[1]
        case nn.GroupNorm():
            small.num_channels = rows
            if axis is not None and is_cut_by_norm_group(axis, small.num_groups):
                small.num_groups = rows * small.num_groups // len(axis)
        case nn.LayerNorm() | nn.RMSNorm():
            small.normalized_shape = tuple(weight.shape)
        case _NormBase():
            small.num_features = rows
        case nn.PReLU():
            small.num_parameters = rows
