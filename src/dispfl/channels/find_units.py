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
from dispfl.channels.units import FIXED, Flags, UnitGroup, is_cut_by_norm_group
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
        """The group of units: whole norm groups, or equally many channels of each, whichever gives
        more widths."""
        if not self.norm_groups:
            return UnitGroup(self.root, self.channels, 1)
        fewest, most = min(self.norm_groups), max(self.norm_groups)
        if fewest > self.channels // most:
            return UnitGroup(self.root, fewest, self.channels // fewest)
        return UnitGroup(self.root, self.channels, 1, most)


def find_units(module: nn.Module, example: Tensor, keep: Sequence[str] = ()) -> ChannelLayout:
    """Return the layout of a network with its units; `keep` names layers whose outputs are never
    left out.

    `example` is a batch of inputs. Inputs and outputs of the network always stay whole; so do
    layers whose couplings cannot be found, such as recurrent ones; the layout names the latter.
    """
    module, example = _working_copy(module, example)
    trainable = Layout.of(module)
    _disturb(module)
    kept = _protected(module, keep)
    candidates = [
        each for each in _candidates(module, example, trainable) if not kept & set(each.layers)
    ]
    good = [each for each in candidates if not each.problem]
    if not _all_can_be_cut(module, example, trainable, good):
        good = [each for each in good if _can_be_cut(module, example, trainable, each)]
    if not good:
        raise ConfigError(
            "method.structure is channels, but this network has no channels that can be left out. "
            "Use structure=weights.",
            key="method.structure",
        )
    found = _layout(module, trainable, good)
    del module
    gc.collect()  # the graph refers to itself
    trim_heap()
    return found


def _disturb(module: nn.Module) -> None:
    """Add noise to all weights and statistics: zeros and ones, as layers start with, could hide a
    wrong coupling."""
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            if tensor.is_floating_point():
                tensor.add_(0.1 * torch.rand(tensor.shape, generator=rng, dtype=tensor.dtype))
    for parameter in module.parameters():
        parameter.requires_grad_(True)


def _working_copy(module: nn.Module, example: Tensor) -> tuple[nn.Module, Tensor]:
    """Return a copy of a network and inputs that it takes: in float64, or in float32 where its
    forward needs that."""
    for dtype in TOLERANCES:
        try:
            tried = copy.deepcopy(module).cpu().eval().to(dtype)
            inputs = example.cpu().to(dtype) if example.is_floating_point() else example.cpu()
            with torch.no_grad():
                tried(inputs)
            return tried, inputs
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
    """Return the layers that the user's names protect: the layers themselves and all inside
    them."""
    names = [name for name, _ in module.named_modules() if name]
    for name in keep:
        if name not in names:
            close = get_close_matches(name, names, 1)
            hint = (
                f"did you mean {close[0]}?" if close else f"its layers are {', '.join(names[:12])}."
            )
            raise ConfigError(
                f"method.keep names {name!r}, which this network does not have; {hint}",
                key="method.keep",
            )
    return {
        name
        for name in names
        if any(name == given or name.startswith(f"{given}.") for given in keep)
    }


def _candidates(module: nn.Module, example: Tensor, layout: Layout) -> Iterator[_Candidate]:
    """Yield every group of coupled channels, in the order of the layers that compute them."""
    import torch_pruning  # type: ignore[import-untyped]  # slow to import

    try:
        with warnings.catch_warnings(), torch.enable_grad():
            warnings.simplefilter("ignore")
            graph: Any = torch_pruning.DependencyGraph()
            graph.build_dependency(module, example_inputs=(example,), verbose=False)
    except Exception as problem:
        raise _not_traceable(problem) from problem
    names = {layer: name for name, layer in module.named_modules()}
    parameters = {id(parameter): name for name, parameter in module.named_parameters()}
    uses = Counter(
        id(parameter) for layer in module.modules() for parameter in layer.parameters(recurse=False)
    )
    own = {
        name
        for name, parameter in module.named_parameters()
        if name in layout.by_name and uses[id(parameter)] == 1
    }
    can_be_cut = own | {name for name, _ in module.named_buffers()}
    seen: set[str] = set()
    for name, layer in module.named_modules():
        if (
            name in seen
            or layer not in graph.module2node
            or not isinstance(layer, (_ConvNd, nn.Linear, nn.Embedding))
        ):
            continue
        pruner = graph.get_pruner_of_module(layer)
        channels = pruner.get_out_channels(layer)
        found = _Candidate(name, channels, [])
        try:
            coupled = list(
                graph.get_pruning_group(layer, pruner.prune_out_channels, list(range(channels)))
            )
        except (
            Exception
        ):  # torch-pruning cannot follow the channels, for example into a recurrent layer
            continue
        for item in coupled:
            target = item.dep.target.module
            is_output = graph.is_out_channel_pruning_fn(item.dep.handler)
            positions, roots = np.array(item.idxs, np.int64), np.array(item.root_idxs, np.int64)
            if is_output and target in names:
                found.layers.append(names[target])
            for tensor, dim in _tensors_of(
                found, target, is_output, names, parameters, item.dep.target
            ):
                found.places.append((tensor, dim, positions, roots))
                if tensor not in can_be_cut:
                    found.problem = f"{tensor} is frozen, or used by several layers"
        seen.update(found.layers)
        consumed = any(dim != _output_dim(module, tensor) for tensor, dim, _, _ in found.places)
        if consumed:  # otherwise it is an output of the network
            yield found


def _tensors_of(
    found: _Candidate,
    target: Any,
    is_output: bool,
    names: dict[Any, str],
    parameters: dict[int, str],
    node: Any,
) -> list[tuple[str, int]]:
    """Return the tensors of a layer that have these channels, with the dimension; note why a layer
    cannot be cut."""
    if isinstance(target, nn.Parameter):
        return [(parameters[id(target)], node.pruning_dim)] if id(target) in parameters else []
    if not isinstance(target, nn.Module) or target not in names:
        return []  # an operation without parameters
    name = names[target]
    own = [key for key, _ in target.named_parameters(recurse=False)]
    match target:
        case _ConvNd() if target.groups == 1:
            output = 1 if isinstance(target, _ConvTransposeNd) else 0
            places = [("weight", output), ("bias", 0)] if is_output else [("weight", 1 - output)]
        case _ConvNd() if target.groups == target.out_channels == target.in_channels:
            places = [("weight", 0), ("bias", 0)]
        case nn.Linear():
            places = [("weight", 0), ("bias", 0)] if is_output else [("weight", 1)]
        case nn.Embedding():
            places = [("weight", 1)]
        case nn.GroupNorm() if target.affine:
            found.norm_groups.add(target.num_groups)
            places = [("weight", 0), ("bias", 0)]
        case nn.LayerNorm() | nn.RMSNorm() if (
            target.elementwise_affine and len(target.normalized_shape) == 1
        ):
            found.norm_groups.add(1)
            places = [("weight", 0), ("bias", 0)]
        case _NormBase():
            buffers = [
                key for key, buffer in target.named_buffers(recurse=False) if buffer.ndim == 1
            ]
            places = [("weight", 0), ("bias", 0), *((key, 0) for key in buffers)]
            own += buffers
        case nn.PReLU():
            places = [("weight", 0)] if target.num_parameters > 1 else []
        case _ if not own and not list(target.children()):
            places = []  # an activation or a pooling layer
        case _:
            found.problem = f"{type(target).__name__} {name} cannot be cut"
            places = []
    return [(f"{name}.{key}", dim) for key, dim in places if key in own]


def _output_dim(module: nn.Module, tensor: str) -> int:
    """Return the dimension of a tensor that belongs to the channels which its layer computes."""
    owner = module.get_submodule(tensor.rpartition(".")[0])
    is_weight = tensor.endswith("weight")
    return int(is_weight and isinstance(owner, (_ConvTransposeNd, nn.Embedding)))


def _layout(module: nn.Module, layout: Layout, candidates: Sequence[_Candidate]) -> ChannelLayout:
    """Return the layout with these groups of units."""
    axes: dict[tuple[str, int], NDArray[np.int64]] = {}
    first = 0
    for each in candidates:
        group = each.group
        for tensor, dim, positions, channels in each.places:
            size = (
                layout.by_name[tensor][dim]
                if tensor in layout.by_name
                else 1 + int(positions.max())
            )
            axis = axes.setdefault((tensor, dim), np.full(size, FIXED))
            axis[positions] = first + channels // group.channels
        first += group.units
    found = {place: tuple(axis.tolist()) for place, axis in axes.items()}
    distinct = tuple(dict.fromkeys(found.values()))
    index = {place: distinct.index(axis) for place, axis in found.items()}
    of_parameters = tuple(
        tuple(index.get((name, dim)) for dim in range(len(shape)))
        for name, shape in zip(layout.names, layout.shapes, strict=True)
    )
    of_buffers = {name: axis for (name, _), axis in index.items() if name not in layout.by_name}
    return ChannelLayout(
        layout.names,
        layout.shapes,
        tuple(each.group for each in candidates),
        distinct,
        of_parameters,
        tuple(_output_dim(module, name) for name in layout.names),
        of_buffers,
    )


def _all_can_be_cut(
    module: nn.Module, example: Tensor, layout: Layout, candidates: Sequence[_Candidate]
) -> bool:
    """Whether all groups can be left out at once, which saves trying each."""
    try:
        return _is_same_function(module, example, _layout(module, layout, candidates))
    except Exception:  # found again, and named, when each is tried
        return False


def _can_be_cut(module: nn.Module, example: Tensor, layout: Layout, candidate: _Candidate) -> bool:
    """Whether a group can be left out alone; refuse a network that has the sizes of its features
    written into it."""
    try:
        return _is_same_function(module, example, _layout(module, layout, [candidate]))
    except Exception as problem:
        if isinstance(module.get_submodule(candidate.root), _ConvNd):
            reason = " ".join(str(problem).split())[:200]
            raise ConfigError(
                f"method.structure is channels, but the network's forward fails with fewer"
                f" channels of "
                f"{candidate.root} ({reason}). Write no sizes into it: x.flatten(1) instead of"
                " x.view(-1, 1600). Or "
                f'protect the layer: method.keep=["{candidate.root}"].',
                key="method.structure",
            ) from problem
        return False


@torch.no_grad()
def _is_same_function(module: nn.Module, example: Tensor, layout: ChannelLayout) -> bool:
    """Whether the small network computes what the masked large one does, with about half of all
    units left out."""
    mask = layout.mask(_about_half(layout))
    small = mask.small_network(module)
    for name, axes in zip(layout.names, layout.axes, strict=True):
        held = [slice(None) if axis is None else mask.positions[axis] for axis in axes]
        part = module.get_parameter(name).numpy()
        for dim, where in enumerate(held):
            part = part[(slice(None),) * dim + (where,)]
        small.get_parameter(name).copy_(torch.from_numpy(part))
    for name, axis in layout.buffer_axes.items():
        small.get_buffer(name).copy_(
            module.get_buffer(name)[torch.from_numpy(mask.positions[axis])]
        )
    with masked(module, mask) as large:
        expected = large(example)
    found = small(example)
    if not isinstance(expected, Tensor) or found.shape != expected.shape:
        return False
    tolerance = TOLERANCES.get(found.dtype, 0.0) * max(1.0, float(expected.abs().max()))
    return bool((found - expected).abs().max() <= tolerance)


def _about_half(layout: ChannelLayout) -> Flags:
    flags, rng = np.zeros(layout.units, np.bool_), np.random.default_rng(0)
    for group, where in zip(layout.groups, layout.group_slices, strict=True):
        for stratum in flags[where].reshape(group.strata, -1):
            stratum[rng.permutation(len(stratum))[: -(-len(stratum) // 2)]] = True
    return flags


@contextmanager
def masked(module: nn.Module, mask: ChannelMask) -> Iterator[nn.Module]:
    """The large network with the left-out units masked: the function that the small network
    computes too.

    Their weights are zero. A normalization over channels of which some are left out takes its
    statistics over the others, as the small network's does (docs/deviations.md).
    """
    layout = mask.layout
    axes = dict(zip(layout.names, layout.axes, strict=True))
    flags = dict(zip(layout.names, layout.views(torch.from_numpy(mask.flags())), strict=True))
    saved = {name: module.get_parameter(name).detach().clone() for name in layout.names}
    hooks = []
    for name, layer in module.named_modules():
        axis = axes.get(f"{name}.weight", (None,))[0]
        if axis is None or not isinstance(layer, (nn.GroupNorm, *NORMS_OF_ALL)):
            continue
        if isinstance(layer, nn.GroupNorm) and is_cut_by_norm_group(
            layout.axis_units[axis], layer.num_groups
        ):
            continue
        hooks.append(
            layer.register_forward_hook(_normalize_kept(torch.from_numpy(mask.positions[axis])))
        )
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


def _normalize_kept(held: Tensor) -> Callable[[nn.Module, tuple[Tensor], Tensor], Tensor]:
    """Return a forward hook that normalizes the held channels only; the others are zero."""

    def normalize(layer: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        (x,) = inputs
        if isinstance(layer, nn.GroupNorm):
            part = functional.group_norm(
                x[:, held], layer.num_groups, layer.weight[held], layer.bias[held], layer.eps
            )
            return torch.zeros_like(output).index_copy(1, held, part)
        x, size = x[..., held], [len(held)]
        if isinstance(layer, nn.LayerNorm):
            bias = None if layer.bias is None else layer.bias[held]
            part = functional.layer_norm(x, size, layer.weight[held], bias, layer.eps)
        else:
            assert isinstance(layer, nn.RMSNorm)
            part = functional.rms_norm(x, size, layer.weight[held], layer.eps)
        return torch.zeros_like(output).index_copy(-1, held, part)

    return normalize
