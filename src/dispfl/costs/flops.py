"""Floating-point operations as the paper counts them.

With masks of single weights they are counted, not saved: dense kernels do the work. With masks of
channels they are saved: they are the operations of the small network that the peer trains.

A convolution or a matrix product needs 2 operations for each multiplication, so 2 for each weight
and use; a weight that is added, multiplied elementwise or copied (a bias, a learned scale, an
embedding) needs 1 for each result. So each parameter has a cost per kept weight, and a sparse model
costs in proportion to what it keeps. Products of activations with each other, as in attention, cost
the same under every mask. Normalization, activations and pooling are free, as in the paper.

A training step counts as 3 forward passes: forward, the gradient of the inputs, and the gradient of
the weights, each as expensive as the other. A frozen weight has no gradient; and where no trained
weight comes before a frozen layer, its inputs need none. Where a method trains a part of the
weights (`only`), this holds for all layers, the trained ones too.
"""

import contextlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from dispfl.core.inputs import Inputs, call
from dispfl.core.layout import Layout

log = logging.getLogger("dispfl")

TRAINING = 3
"""Forward passes that forward and backward together count for, where all weights are trained."""


@dataclass(frozen=True)
class ForwardCost:
    """Operations of one forward pass on one sample, for each kept weight of each parameter."""

    per_weight: tuple[float, ...]
    """Whole numbers, or means over a parameter whose weights are not used equally often."""
    sizes: tuple[int, ...]
    fixed: int = 0
    """Operations of products without a trained weight, as in attention: no mask saves them."""
    fixed_gradients: tuple[tuple[int, frozenset[int]], ...] = ()
    """Operations of the gradients of their inputs, and which parameters come before each."""
    before: tuple[frozenset[int], ...] = ()
    """For each parameter, which parameters come before it: they need the gradient of its inputs."""
    uncounted: tuple[str, ...] = ()
    """Parts of the network that are not counted, apart from those that are free in the paper."""

    @property
    def fixed_backward(self) -> int:
        """Operations of the gradients of the inputs of products without a trained weight."""
        return sum(operations for operations, _ in self.fixed_gradients)

    def dense(self) -> int:
        """Return the operations with every weight kept."""
        return self.sparse(self.sizes)

    def sparse(self, kept: Sequence[float]) -> int:
        """Return the operations with this many weights kept in each parameter."""
        costs = zip(self.per_weight, kept, strict=True)
        return self.fixed + round(sum(cost * count for cost, count in costs))

    def training(
        self, kept: Sequence[float], samples: int, trained: Sequence[float] | None = None
    ) -> int:
        """Return the operations of training on some samples, with these kept weights.

        `trained` counts those of them that are trained in each parameter; by default all are.
        """
        if trained is not None:
            return samples * (self.sparse(kept) + self._backward(kept, trained))
        operations = self.sparse(kept) - self.fixed
        return samples * (TRAINING * operations + self.fixed + self.fixed_backward)

    def _backward(self, kept: Sequence[float], trained: Sequence[float]) -> int:
        """Return the operations of the gradients of some weights, and of inputs on the way."""
        trained_parameters = {index for index, count in enumerate(trained) if count}
        operations = 0.0
        for index, cost in enumerate(self.per_weight):
            operations += cost * trained[index]
            if self.before[index] & trained_parameters:
                operations += cost * kept[index]
        for input_operations, before in self.fixed_gradients:
            if before & trained_parameters:
                operations += input_operations
        return round(operations)

    @property
    def omission(self) -> str | None:
        """A sentence about what is not counted; None if everything is."""
        if not self.uncounted:
            return None
        return (
            f"FLOPs do not include {', '.join(self.uncounted)}: there is no formula for these"
            " operations."
        )

    def warn(self) -> None:
        """Log what is not counted."""
        if self.omission:
            log.warning(self.omission)


@torch.enable_grad()
def forward_cost(module: nn.Module, layout: Layout, sample: Inputs) -> ForwardCost:
    """Run one sample (a batch of one) through the module and count its operations."""
    counter = _OperationCounter(module)
    training = module.training
    module.eval()
    try:
        with _without_fused_attention(), counter:
            call(module, sample)
    except Exception:
        with torch.no_grad():
            call(module, sample)  # an error of the network itself is raised here
        everything = (f"anything of {type(module).__name__}, which torch cannot count",)
        nothing: tuple[frozenset[int], ...] = (frozenset(),) * len(layout.sizes)
        return ForwardCost(
            (0,) * len(layout.sizes), layout.sizes, before=nothing, uncounted=everything
        )
    finally:
        module.train(training)

    fixed = counter.without_weight
    for name, operations in counter.operations.items():
        if name not in layout.by_name:  # a frozen parameter
            fixed += operations
    per_weight = []
    for name, size in zip(layout.names, layout.sizes, strict=True):
        per_weight.append(_quotient(counter.operations[name], size))
    uncounted = (*_uncounted_layers(module, layout, counter.operations), *sorted(counter.unknown))

    indices = {}
    for index, name in enumerate(layout.names):
        indices[id(module.get_parameter(name))] = index
    ancestry = _Ancestry(indices)
    fixed_gradients = []
    for operations, inputs in counter.input_gradients:
        fixed_gradients.append((operations, ancestry.of(inputs)))
    before = tuple(ancestry.of(counter.inputs[name]) for name in layout.names)
    return ForwardCost(
        tuple(per_weight), layout.sizes, fixed, tuple(fixed_gradients), before, uncounted
    )


class _OperationCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations on tensors in its context, by the parameter that they use."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}
        self.operations = dict.fromkeys(self._names.values(), 0)
        """The operations of each parameter."""
        self._frozen = {
            name for name, parameter in module.named_parameters() if not parameter.requires_grad
        }
        self.without_weight = 0
        """The operations of products of activations."""
        self.inputs: dict[str, list[Node]] = {name: [] for name in self._names.values()}
        """What computed the inputs of each parameter's operations."""
        self.input_gradients: list[tuple[int, list[Node]]] = []
        """The operations of the gradients of what frozen weights and such products multiply, and
        what computed it."""
        self.unknown: set[str] = set()
        """Operations with many multiplications and without a formula."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Do not wrap the method below for torch.compile.

        Importing that takes 70 MB and a second in every run.
        """
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        operator = func.overloadpacket
        name = operator.__name__
        if operator in flop_registry:
            operations = flop_registry[operator](*args, **kwargs, out_val=result)
            self._count_product(operations, _FACTORS.get(name, ()), args)
            self._count_bias(_SUMMAND.get(name), args, result)
        elif name in ("mv", "dot", "addmv"):
            factors = _FACTORS[name]
            self._count_product(2 * args[factors[0]].numel(), factors, args)
            self._count_bias(_SUMMAND.get(name), args, result)
        elif name == "mkldnn_rnn_layer":
            # Input, weights and biases: those of the input, then those of the state.
            positions = args[0].numel() // args[0].shape[-1]
            for place, per_weight in ((1, 2), (2, 2), (3, 1), (4, 1)):
                self._charge(args[place], per_weight * args[place].numel() * positions, args)
        elif name in _ELEMENTWISE or name in _LOOKUPS:
            for used in args[:2]:
                self._charge(used, result.numel(), args)
        elif name == "cat":
            for used in args[0]:
                self._charge(used, used.numel(), args[0])
        elif name.startswith("_embedding_bag"):
            self._charge(args[0], args[1].numel() * args[0].shape[1], args)
        elif name.startswith(_UNKNOWN):
            self.unknown.add(f"{name.removeprefix('_')} (an operation)")
        return result

    def _count_product(self, operations: int, factors: Sequence[int], args: Sequence[Any]) -> None:
        """Charge the first factor that is a weight; without one, no parameter has the costs."""
        for place in factors:
            if place < len(args) and self._charge(args[place], operations, args):
                return
        self.without_weight += operations
        for argument in args:
            if _needs_gradient(argument):
                self.input_gradients.append((operations, self._computed_by([argument])))

    def _count_bias(self, place: int | None, args: Sequence[Any], result: Tensor) -> None:
        if place is not None and place < len(args):
            self._charge(args[place], result.numel())

    def _charge(self, used: Any, operations: int, factors: Sequence[Any] = ()) -> bool:
        """Add operations to the parameter that is used, or viewed; return whether it is one.

        Where it is frozen, the gradient of the other factors costs as much again, if they have one.
        """
        name = self._parameter(used)
        if name is None:
            return False
        self.operations[name] += operations
        inputs = self._computed_by(factors)
        self.inputs[name] += inputs
        if name in self._frozen and any(map(_needs_gradient, factors)):
            self.input_gradients.append((operations, inputs))
        return True

    def _parameter(self, used: Any) -> str | None:
        """Return the name of the parameter that an argument is, or views; None: it is none."""
        if not isinstance(used, Tensor):
            return None
        return self._names.get(id(used)) or self._names.get(id(used._base))

    def _computed_by(self, arguments: Sequence[Any]) -> list[Node]:
        """Return the nodes of the autograd graph that computed activations among the arguments."""
        nodes = []
        for argument in arguments:
            if _needs_gradient(argument) and self._parameter(argument) is None:
                nodes.append(argument.grad_fn)
        return [node for node in nodes if node is not None]


class _Ancestry:
    """Finds the parameters that an activation depends on, in the autograd graph."""

    def __init__(self, indices: Mapping[int, int]) -> None:
        self._indices = indices
        """The place of each parameter in the layout, by its id."""
        self._parameters: dict[Node, set[int]] = {}

    def of(self, nodes: Iterable[Node]) -> frozenset[int]:
        """Return the parameters that any of these nodes depends on."""
        return frozenset().union(*map(self._of_node, nodes))

    def _of_node(self, root: Node) -> set[int]:
        """Visit the nodes that a node depends on first, without recursion: graphs are deep."""
        pending = [root]
        while pending:
            node = pending[-1]
            inputs = [function for function, _ in node.next_functions if function is not None]
            unvisited = [function for function in inputs if function not in self._parameters]
            if unvisited:
                pending += unvisited
                continue
            pending.pop()
            parameters: set[int] = set()
            leaf = id(getattr(node, "variable", None))
            if leaf in self._indices:
                parameters.add(self._indices[leaf])
            self._parameters[node] = parameters.union(*map(self._parameters.__getitem__, inputs))
        return self._parameters[root]


def _needs_gradient(argument: Any) -> bool:
    return isinstance(argument, Tensor) and argument.requires_grad


_FACTORS = {
    "mv": (0, 1),
    "dot": (0, 1),
    "addmv": (1, 2),
    "mm": (0, 1),
    "bmm": (0, 1),
    "addmm": (1, 2),
    "baddbmm": (1, 2),
    "convolution": (1,),
    "_convolution": (1,),
}
"""The arguments of products that may be weights."""
_SUMMAND = {"addmv": 0, "addmm": 0, "baddbmm": 0, "convolution": 2, "_convolution": 2}
"""The argument that may be a bias."""
_ELEMENTWISE = {"add", "add_", "sub", "sub_", "rsub", "mul", "mul_", "div", "div_", "_prelu_kernel"}
_LOOKUPS = {"embedding", "index", "index_select", "gather"}
_UNKNOWN = ("_trilinear", "_fft", "fft", "_linalg", "linalg", "_cdist", "grid_sampler")
"""How the names of operations begin that multiply much, but have no formula here."""
_FREE = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, nn.LocalResponseNorm)


@contextlib.contextmanager
def _without_fused_attention() -> Iterator[None]:
    """Compute attention as separate matrix products, which can be counted."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def _uncounted_layers(module: nn.Module, layout: Layout, operations: dict[str, int]) -> list[str]:
    """Return the layers with trained parameters that cost nothing, as `head (Bilinear)`.

    Norms are free.
    """
    uncounted = []
    for name in layout.names:
        path, _, parameter = name.rpartition(".")
        layer = module.get_submodule(path)
        if not operations[name] and not isinstance(layer, _FREE):
            uncounted.append(f"{path or parameter} ({type(layer).__name__})")
    return list(dict.fromkeys(uncounted))


def _quotient(operations: int, size: int) -> float:
    """Return the operations per weight: an int if it is a whole number, because sums are exact."""
    if operations % size == 0:
        return operations // size
    return operations / size
