"""How dense each layer is, given how dense the whole model may be."""

from collections.abc import Mapping, Sequence
from math import prod


def erk_densities(shapes: Mapping[str, Sequence[int]], density: float) -> dict[str, float]:
    """Erdos-Renyi-Kernel densities: large layers sparser, small layers denser, the whole at `density`.

    The paper, section "Algorithm": masks are initialized by ERK. A layer's density is proportional to its

        raw = sum(shape) / prod(shape)

    with one factor eps for all layers, so that the kept weights add up: sum(eps * raw * size) = density * total.
    A layer that would exceed 1 becomes dense, leaves the sum, and eps is solved again for the rest. Deviation 1:
    all parameters take part, biases and norms included (docs/deviations.md).
    """
    sizes = {name: prod(shape) for name, shape in shapes.items()}
    raw = {name: sum(shape) / size if (size := sizes[name]) and shape else 1.0 for name, shape in shapes.items()}
    dense: set[str] = set()
    while True:
        budget = density * sum(sizes.values()) - sum(sizes[name] for name in dense)
        share = sum(raw[name] * sizes[name] for name in shapes if name not in dense)
        eps = budget / share if share else 0.0
        found = {name: 1.0 if name in dense else eps * raw[name] for name in shapes}
        over = {name for name, value in found.items() if value > 1.0}
        if not over:
            return found
        dense |= over


def uniform_densities(shapes: Mapping[str, Sequence[int]], density: float) -> dict[str, float]:
    """The same density for every layer."""
    return dict.fromkeys(shapes, density)
