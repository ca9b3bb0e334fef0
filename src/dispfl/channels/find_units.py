"""Finding the units of a network: which channels can be left out together with what.

The couplings come from torch-pruning's dependency graph, which follows channels through residual
sums, flattening, concatenation and normalization. Every group of units is then tried out: with some
of them left out, the small network must compute the same outputs as the large one whose left-out
units are masked.
"""

import copy
import gc
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from dispfl.channels.channel_mask import ChannelLayout, ChannelMask
from dispfl.channels.units import FIXED, Axis, AxisIndex, Flags, UnitGroup, is_cut_by_norm_group
from dispfl.core.allocator import trim_heap
from dispfl.core.layout import Layout
from dispfl.errors import ConfigError

NORMS_OF_ALL = (nn.LayerNorm, nn.RMSNorm)
"""Layers that normalize over all channels."""
TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3}
"""By how much outputs may differ, relative to the largest."""


@dataclass
class _Candidate:
    """A group of coupled channels, before it is tried out."""

    root: str
    channels: int
    layers: list[str]
    """The layers that compute these channels."""
    places: list[tuple[str, int, NDArray[np.int64], NDArray[np.int64]]] = field(
        default_factory=list
    )
    """Tensor, dimension, positions in it, and the channel of each."""
    norm_groups: set[int] = field(default_factory=set)
    problem: str = ""
    """Why it cannot be cut."""

    @property
    def group(self) -> UnitGroup:
        """The group of units: whole norm groups, or equally many channels of each.

        Whichever gives more widths.
        """
        if not self.norm_groups:
            return UnitGroup(self.root, self.channels, 1)
        fewest = min(self.norm_groups)
        most = max(self.norm_groups)
        if fewest > self.channels // most:
            return UnitGroup(self.root, fewest, self.channels // fewest)
        return UnitGroup(self.root, self.channels, 1, most)


def find_units(module: nn.Module, example: Tensor, keep: Sequence[str] = ()) -> ChannelLayout:
    """Return the layout of a network with its units.

    `keep` names layers whose outputs are never left out. `example` is a batch of inputs. Inputs and
    outputs of the network always stay whole; so do layers whose couplings cannot be found, such as
    recurrent ones; the layout names the latter.
    """
    module, example = _working_copy(module, example)
    trainable = Layout.of(module)
    _disturb(module)
    protected = _protected(module, keep)
    candidates = []
    for candidate in _candidates(module, example, trainable):
        if not candidate.problem and not protected & set(candidate.layers):
            candidates.append(candidate)
    groups = _verified(module, example, trainable, candidates)
    if not groups:
        raise ConfigError(
            "method.structure is channels, but this network has no channels that can be left out. "
            "Use structure=weights.",
            key="method.structure",
        )
    layout = _layout(module, trainable, groups)
    del module
    gc.collect()  # the graph refers to itself
    trim_heap()
    return layout


def _disturb(module: nn.Module) -> None:
    """Add noise to all weights and statistics: their first values could hide a wrong coupling."""
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            if tensor.is_floating_point():
                tensor.add_(0.1 * torch.rand(tensor.shape, generator=rng, dtype=tensor.dtype))
    for parameter in module.parameters():
        parameter.requires_grad_(True)


def _working_copy(module: nn.Module, example: Tensor) -> tuple[nn.Module, Tensor]:
    """Return a copy of a network and inputs that it takes, in float64.

    In float32 where its forward needs that.
    """
    for dtype in TOLERANCES:
        try:
            working_copy = copy.deepcopy(module).cpu().eval().to(dtype)
            inputs = example.cpu()
            if inputs.is_floating_point():
                inputs = inputs.to(dtype)
            with torch.no_grad():
                working_copy(inputs)
            return working_copy, inputs
        except Exception as problem:  # of the user's own code
            failed = problem
    raise _not_traceable(failed)


def _not_traceable(problem: Exception) -> ConfigError:
    reason = f"{type(problem).__name__}: {' '.join(str(problem).split())[:200]}"
    return ConfigError(
        f"method.structure is channels, but the network cannot be traced ({reason}). Use"
        " structure=weights.",
        key="method.structure",
    )


def _protected(module: nn.Module, keep: Sequence[str]) -> set[str]:
    """Return the layers that the user's names protect, and all layers inside them."""
    names = [name for name, _ in module.named_modules() if name]
    for name in keep:
        if name not in names:
            close = get_close_matches(name, names, 1)
            hint = f"its layers are {', '.join(names[:12])}."
            if close:
                hint = f"did you mean {close[0]}?"
            raise ConfigError(
                f"method.keep names {name!r}, which this network does not have; {hint}",
                key="method.keep",
            )
    inside = tuple(f"{layer}." for layer in keep)
    protected = set(keep)
    protected.update(name for name in names if name.startswith(inside))
    return protected


def _candidates(module: nn.Module, example: Tensor, layout: Layout) -> Iterator[_Candidate]:
    """Yield every group of coupled channels, in the order of the layers that compute them."""
    graph = _dependency_graph(module, example)
    names = {layer: name for name, layer in module.named_modules()}
    parameters = {id(parameter): name for name, parameter in module.named_parameters()}
    can_be_cut = _unshared_tensors(module, layout)
    visited: set[str] = set()
    for name, layer in module.named_modules():
        if name in visited or layer not in graph.module2node:
            continue
        if not isinstance(layer, (_ConvNd, nn.Linear, nn.Embedding)):
            continue
        pruner = graph.get_pruner_of_module(layer)
        channels = pruner.get_out_channels(layer)
        every_channel = list(range(channels))
        try:
            coupled = list(graph.get_pruning_group(layer, pruner.prune_out_channels, every_channel))
        except Exception:  # it cannot follow the channels, for example into a recurrent layer
            continue

        candidate = _Candidate(name, channels, [])
        for item in coupled:
            node = item.dep.target
            is_output = graph.is_out_channel_pruning_fn(item.dep.handler)
            positions = np.array(item.idxs, np.int64)
            roots = np.array(item.root_idxs, np.int64)
            if is_output and node.module in names:
                candidate.layers.append(names[node.module])
            for tensor, dim in _tensors_of(candidate, node, is_output, names, parameters):
                candidate.places.append((tensor, dim, positions, roots))
                if tensor not in can_be_cut:
                    candidate.problem = f"{tensor} is frozen, or used by several layers"
        visited.update(candidate.layers)
        if _is_consumed(module, candidate):
            yield candidate


def _is_consumed(module: nn.Module, candidate: _Candidate) -> bool:
    """Whether a layer takes these channels as inputs: otherwise they are outputs of the network."""
    places = candidate.places
    return any(dim != _output_dim(module, tensor) for tensor, dim, _, _ in places)


def _dependency_graph(module: nn.Module, example: Tensor) -> Any:
    """Return torch-pruning's graph of couplings; refuse a network that it cannot trace."""
    import torch_pruning  # type: ignore[import-untyped]  # slow to import

    try:
        with warnings.catch_warnings(), torch.enable_grad():
            warnings.simplefilter("ignore")
            graph: Any = torch_pruning.DependencyGraph()
            graph.build_dependency(module, example_inputs=(example,), verbose=False)
    except Exception as problem:
        raise _not_traceable(problem) from problem
    return graph


def _unshared_tensors(module: nn.Module, layout: Layout) -> set[str]:
    """Return the buffers, and the trainable parameters that one layer alone uses."""
    uses: Counter[int] = Counter()
    for layer in module.modules():
        uses.update(map(id, layer.parameters(recurse=False)))
    names = set(dict(module.named_buffers()))
    for name, parameter in module.named_parameters():
        if name in layout.by_name and uses[id(parameter)] == 1:
            names.add(name)
    return names


def _tensors_of(
    candidate: _Candidate,
    node: Any,
    is_output: bool,
    names: dict[Any, str],
    parameters: dict[int, str],
) -> list[tuple[str, int]]:
    """Return the tensors of a layer that have these channels, with the dimension.

    The candidate notes why a layer cannot be cut.
    """
    target = node.module
    if isinstance(target, nn.Parameter):
        if id(target) not in parameters:
            return []
        return [(parameters[id(target)], node.pruning_dim)]
    if not isinstance(target, nn.Module) or target not in names:
        return []  # an operation without parameters
    name = names[target]
    tensors = list(dict(target.named_parameters(recurse=False)))
    match target:
        case _ConvNd() if target.groups == 1:
            output = int(isinstance(target, _ConvTransposeNd))
            places = [("weight", output), ("bias", 0)] if is_output else [("weight", 1 - output)]
        case _ConvNd() if target.groups == target.out_channels == target.in_channels:
            places = [("weight", 0), ("bias", 0)]
        case nn.Linear():
            places = [("weight", 0), ("bias", 0)] if is_output else [("weight", 1)]
        case nn.Embedding():
            places = [("weight", 1)]
        case nn.GroupNorm() if target.affine:
            candidate.norm_groups.add(target.num_groups)
            places = [("weight", 0), ("bias", 0)]
        case nn.LayerNorm() | nn.RMSNorm() if (
            target.elementwise_affine and len(target.normalized_shape) == 1
        ):
            candidate.norm_groups.add(1)
            places = [("weight", 0), ("bias", 0)]
        case _NormBase():
            places = [("weight", 0), ("bias", 0)]
            for key, buffer in target.named_buffers(recurse=False):
                if buffer.ndim == 1:
                    places.append((key, 0))
                    tensors.append(key)
        case nn.PReLU() if target.num_parameters > 1:
            places = [("weight", 0)]
        case nn.PReLU():
            places = []  # one slope for all channels
        case _ if not tensors and not list(target.children()):
            places = []  # an activation or a pooling layer
        case _:
            candidate.problem = f"{type(target).__name__} {name} cannot be cut"
            places = []
    return [(f"{name}.{key}", dim) for key, dim in places if key in tensors]


def _output_dim(module: nn.Module, tensor: str) -> int:
    """Return the dimension of a tensor that belongs to the channels which its layer computes."""
    owner = module.get_submodule(tensor.rpartition(".")[0])
    is_weight = tensor.endswith("weight")
    return int(is_weight and isinstance(owner, (_ConvTransposeNd, nn.Embedding)))


def _layout(module: nn.Module, layout: Layout, candidates: Sequence[_Candidate]) -> ChannelLayout:
    """Return the layout with these groups of units."""
    arrays: dict[tuple[str, int], NDArray[np.int64]] = {}
    first_unit = 0
    for candidate in candidates:
        group = candidate.group
        for tensor, dim, positions, channels in candidate.places:
            if tensor in layout.by_name:
                size = layout.by_name[tensor][dim]
            else:
                size = 1 + int(positions.max())
            array = arrays.setdefault((tensor, dim), np.full(size, FIXED))
            array[positions] = first_unit + channels // group.channels
        first_unit += group.units

    distinct_axes: dict[Axis, AxisIndex] = {}
    index = {}
    buffer_axes = {}
    for (tensor, dim), array in arrays.items():
        axis = distinct_axes.setdefault(tuple(array.tolist()), len(distinct_axes))
        index[tensor, dim] = axis
        if tensor not in layout.by_name:
            buffer_axes[tensor] = axis
    parameter_axes = []
    for name, shape in layout.by_name.items():
        parameter_axes.append(tuple(index.get((name, dim)) for dim in range(len(shape))))
    return ChannelLayout(
        layout.names,
        layout.shapes,
        tuple(candidate.group for candidate in candidates),
        tuple(distinct_axes),
        tuple(parameter_axes),
        tuple(_output_dim(module, name) for name in layout.names),
        buffer_axes,
    )


def _verified(
    module: nn.Module, example: Tensor, layout: Layout, candidates: Sequence[_Candidate]
) -> Sequence[_Candidate]:
    """Return the groups that can be left out."""
    try:  # all at once, which saves trying each
        if _is_same_function(module, example, _layout(module, layout, candidates)):
            return candidates
    except Exception:  # raised again, and named, when each is tried
        pass
    verified = []
    for candidate in candidates:
        if _can_be_cut(module, example, layout, candidate):
            verified.append(candidate)
    return verified


def _can_be_cut(module: nn.Module, example: Tensor, layout: Layout, candidate: _Candidate) -> bool:
    """Whether a group can be left out alone.

    A network that has the sizes of its features written into it is refused.
    """
    try:
        return _is_same_function(module, example, _layout(module, layout, [candidate]))
    except Exception as problem:
        if isinstance(module.get_submodule(candidate.root), _ConvNd):
            reason = " ".join(str(problem).split())[:200]
            raise ConfigError(
                f"method.structure is channels, but the network's forward fails with fewer"
                f" channels of {candidate.root} ({reason}). Write no sizes into it: x.flatten(1)"
                " instead of x.view(-1, 1600). Or protect the layer:"
                f' method.keep=["{candidate.root}"].',
                key="method.structure",
            ) from problem
        return False


@torch.no_grad()
def _is_same_function(module: nn.Module, example: Tensor, layout: ChannelLayout) -> bool:
    """Whether the small network computes what the masked large one does.

    About half of all units are left out.
    """
    mask = layout.mask(_about_half(layout))
    small = mask.small_network(module)
    for name, axes in zip(layout.names, layout.axes, strict=True):
        weights = module.get_parameter(name).numpy()
        for dim, axis in enumerate(axes):
            if axis is not None:
                weights = weights.take(mask.positions[axis], dim)
        small.get_parameter(name).copy_(torch.from_numpy(weights))
    for name, axis in layout.buffer_axes.items():
        positions = torch.from_numpy(mask.positions[axis])
        small.get_buffer(name).copy_(module.get_buffer(name)[positions])
    with masked(module, mask) as large:
        expected = large(example)
    outputs = small(example)
    if not isinstance(expected, Tensor) or outputs.shape != expected.shape:
        return False
    tolerance = TOLERANCES.get(outputs.dtype, 0.0) * max(1.0, float(expected.abs().max()))
    return bool((outputs - expected).abs().max() <= tolerance)


def _about_half(layout: ChannelLayout) -> Flags:
    flags = np.zeros(layout.units, np.bool_)
    rng = np.random.default_rng(0)
    for group, where in zip(layout.groups, layout.group_slices, strict=True):
        for stratum in flags[where].reshape(group.strata, -1):
            half = -(-len(stratum) // 2)
            stratum[rng.permutation(len(stratum))[:half]] = True
    return flags


@contextmanager
def masked(module: nn.Module, mask: ChannelMask) -> Iterator[nn.Module]:
    """The large network with the left-out units masked, which computes what the small one does.

    Their weights are zero. A normalization over channels of which some are left out takes its
    statistics over the others, as the small network's does (docs/deviations.md).
    """
    layout = mask.layout
    flags = dict(zip(layout.names, layout.views(torch.from_numpy(mask.flags())), strict=True))
    saved = {name: module.get_parameter(name).detach().clone() for name in layout.names}
    hooks = []
    for name, layer in module.named_modules():
        axis = layout.channel_axis(name)
        if axis is None or not isinstance(layer, (nn.GroupNorm, *NORMS_OF_ALL)):
            continue
        units = layout.axis_units[axis]
        if isinstance(layer, nn.GroupNorm) and is_cut_by_norm_group(units, layer.num_groups):
            continue
        channels = torch.from_numpy(mask.positions[axis])
        hooks.append(layer.register_forward_hook(_normalize_kept(channels)))
    try:
        with torch.no_grad():
            for name, keep in flags.items():
                module.get_parameter(name).mul_(keep)
        yield module
    finally:
        for hook in hooks:
            hook.remove()
        with torch.no_grad():
            for name, weights in saved.items():
                module.get_parameter(name).copy_(weights)


def _normalize_kept(channels: Tensor) -> Callable[[nn.Module, tuple[Tensor], Tensor], Tensor]:
    """Return a forward hook that normalizes these channels only; the others are zero."""

    def normalize(layer: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        (x,) = inputs
        dim = 1 if isinstance(layer, nn.GroupNorm) else -1
        x = x.index_select(dim, channels)
        size = [len(channels)]
        weight = layer.weight[channels]  # type: ignore[index]
        if isinstance(layer, nn.GroupNorm):
            bias = layer.bias[channels]
            normalized = functional.group_norm(x, layer.num_groups, weight, bias, layer.eps)
        elif isinstance(layer, nn.LayerNorm):
            bias = None if layer.bias is None else layer.bias[channels]
            normalized = functional.layer_norm(x, size, weight, bias, layer.eps)
        else:
            assert isinstance(layer, nn.RMSNorm)
            normalized = functional.rms_norm(x, size, weight, layer.eps)
        return torch.zeros_like(output).index_copy(dim, channels, normalized)

    return normalize
