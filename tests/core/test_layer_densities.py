"""Erdos-Renyi-Kernel densities, solved by hand and counted on ResNet-18."""

from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dispfl.core.layout import Layout
from dispfl.core.masks import kept_count
from dispfl.core.sparsity import erk_densities, uniform_densities
from dispfl.models.networks import ResNet18


def test_a_4_by_6_and_a_2_by_2_layer_at_half_density_keep_10_of_24_and_all_of_4() -> None:
    # raw: (4 + 6) / 24 and (2 + 2) / 4. eps * (10 + 4) = 0.5 * 28, so eps = 1.
    found = erk_densities({"large": (4, 6), "small": (2, 2)}, 0.5)
    assert found == pytest.approx({"large": 10 / 24, "small": 1.0})


def test_a_layer_that_would_exceed_1_becomes_dense_and_the_rest_is_solved_again() -> None:
    # raw: 0.2 and 1. First eps = 51 / (20 + 2) = 2.3, too much for the bias. Then eps = (51 - 2) /
    # 20 = 2.45.
    found = erk_densities({"weight": (10, 10), "bias": (2,)}, 0.5)
    assert found == pytest.approx({"weight": 0.49, "bias": 1.0})


def test_solving_again_may_push_another_layer_over_1() -> None:
    # eps = 37.24 / (20 + 2 + 6) = 1.33: the bias is over, `small` at 0.9975 is not yet.
    # eps = 35.24 / 26 = 1.355: `small` is over too. eps = 27.24 / 20 = 1.362 for the last.
    shapes = {"large": (10, 10), "bias": (2,), "small": (2, 4)}
    found = erk_densities(shapes, 37.24 / 110)
    assert found == pytest.approx({"large": 0.2724, "bias": 1.0, "small": 1.0})


def test_a_scalar_parameter_counts_as_a_layer_of_one() -> None:
    assert erk_densities({"weight": (10, 10), "scale": ()}, 0.5)["scale"] == 1.0


shapes_strategy = st.lists(
    st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=6
)


@given(shapes_strategy, st.floats(0.01, 1))
def test_densities_are_in_0_to_1_and_keep_the_requested_share_overall(
    shapes: list[list[int]], density: float
) -> None:
    named = {str(number): shape for number, shape in enumerate(shapes)}
    found = erk_densities(named, density)
    assert all(0 < value <= 1 for value in found.values())
    kept = sum(found[name] * prod(shape) for name, shape in named.items())
    assert kept == pytest.approx(density * sum(map(prod, shapes)))


@given(shapes_strategy)
def test_density_1_keeps_every_weight(shapes: list[list[int]]) -> None:
    named = {str(number): shape for number, shape in enumerate(shapes)}
    for name, value in erk_densities(named, 1.0).items():
        assert kept_count(prod(named[name]), value) == prod(named[name])


def test_uniform_gives_every_layer_the_same() -> None:
    assert uniform_densities({"a": (3,), "b": (5, 5)}, 0.3) == {"a": 0.3, "b": 0.3}


def test_resnet18_at_half_density_costs_the_busiest_of_ten_neighbours_the_papers_223_mb() -> None:
    with torch.device("meta"):
        layout = Layout.of(ResNet18(3, 10))
    densities = erk_densities(dict(zip(layout.names, layout.shapes, strict=True)), 0.5)
    kept = {
        name: kept_count(size, densities[name])
        for name, size in zip(layout.names, layout.sizes, strict=True)
    }
    assert 10 * 4 * sum(kept.values()) / 1e6 == pytest.approx(223.48, rel=5e-4)
    assert 10 * 4 * layout.size / 1e6 == pytest.approx(446.96, abs=0.005)
    flat = [
        name for name, shape in zip(layout.names, layout.shapes, strict=True) if len(shape) == 1
    ]
    assert all(densities[name] == 1.0 for name in flat)  # norms and biases come out dense
