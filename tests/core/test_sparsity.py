"""Algorithm 2: prune the smallest, regrow by gradient; by hand, and against full sorts."""

from math import ceil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dispfl.core.layout import Layout
from dispfl.core.masks import kept_per_layer
from dispfl.core.sparsity import prune_and_regrow, prune_rate

ONE_LAYER = Layout.from_shapes({"weight": (6,)})
FOUR_OF_SIX = torch.tensor([True, True, True, True, False, False])


def evolved(weights: list[float], grad: list[float], rate: float) -> list[int]:
    """The positions that the next mask keeps of a layer of six, the first four being kept now."""
    return (
        prune_and_regrow(torch.tensor(weights), FOUR_OF_SIX, torch.tensor(grad), rate, ONE_LAYER)
        .nonzero()[:, 0]
        .tolist()
    )


def test_prune_rate_falls_from_alpha_0_through_half_of_it_to_nothing() -> None:
    assert prune_rate(0, 100, 0.5) == 0.5
    assert prune_rate(50, 100, 0.5) == pytest.approx(0.25)
    assert prune_rate(100, 100, 0.5) == pytest.approx(0, abs=1e-12)
    assert prune_rate(25, 100, 0.5) == pytest.approx(0.25 * (1 + 2**-0.5))


def test_the_two_smallest_of_four_are_pruned_and_the_two_largest_gradients_regrown() -> None:
    # Pruned: 0.1 at place 0 and -0.2 at place 3. Empty then: places 0, 3, 4, 5 with gradients 0, 1,
    # 5, -7.
    assert evolved([0.1, -0.5, 0.3, -0.2, 0, 0], [0, 9, 9, 1, 5, -7], 0.5) == [1, 2, 4, 5]


def test_a_weight_that_was_just_pruned_may_regrow() -> None:
    # As above, but place 0 has the largest gradient of the empty ones: it comes straight back.
    assert evolved([0.1, -0.5, 0.3, -0.2, 0, 0], [9, 0, 0, 1, 5, -7], 0.5) == [0, 1, 2, 5]


def test_ties_in_pruning_go_to_the_lower_index() -> None:
    assert evolved([0.5, -0.5, 0.5, 0.5, 0, 0], [0, 0, 0, 0, 2, 1], 0.25) == [1, 2, 3, 4]


def test_ties_in_regrowing_go_to_the_lower_index() -> None:
    assert evolved([0.1, 0.5, 0.5, 0.5, 0, 0], [0, 0, 0, 0, -3, 3], 0.25) == [1, 2, 3, 4]


def test_the_count_is_rounded_up_so_a_tiny_rate_still_replaces_one() -> None:
    assert evolved([0.1, 0.5, 0.5, 0.5, 0, 0], [0, 0, 0, 0, 1, 2], 0.001) == [1, 2, 3, 5]


def test_rate_0_changes_nothing_and_rate_1_selects_by_gradient_alone() -> None:
    grad = [0.0, 1, 2, 3, 4, 5]
    assert evolved([1, 1, 1, 1, 0, 0], grad, 0.0) == [0, 1, 2, 3]
    assert evolved([1, 1, 1, 1, 0, 0], grad, 1.0) == [2, 3, 4, 5]


def test_each_layer_is_searched_separately() -> None:
    layout = Layout.from_shapes({"first": (3,), "second": (3,)})
    mask = torch.tensor([True, False, False, True, False, False])
    weights = torch.tensor(
        [9.0, 0, 0, 0.1, 0, 0]
    )  # the second layer's weight is the smallest of all
    grad = torch.tensor([0.0, 1, 2, 0, 200, 100])  # and its gradients are the largest
    assert prune_and_regrow(weights, mask, grad, 1.0, layout).nonzero()[:, 0].tolist() == [2, 4]


def test_a_dense_layer_never_changes() -> None:
    mask = torch.ones(6, dtype=torch.bool)
    assert prune_and_regrow(torch.randn(6), mask, torch.randn(6), 0.5, ONE_LAYER).all()


def test_the_inputs_are_not_modified() -> None:
    weights, mask, grad = (
        torch.tensor([0.1, 2, 3, 4, 0, 0]),
        FOUR_OF_SIX.clone(),
        torch.tensor([0.0, 0, 0, 0, 1, 2]),
    )
    next_mask = prune_and_regrow(weights, mask, grad, 0.5, ONE_LAYER)
    assert weights.equal(torch.tensor([0.1, 2, 3, 4, 0, 0]))
    assert grad.equal(torch.tensor([0.0, 0, 0, 0, 1, 2]))
    assert mask.equal(FOUR_OF_SIX)
    assert not next_mask.equal(mask)


def by_full_sorts(
    weights: Tensor, mask: Tensor, grad: Tensor, rate: float, layout: Layout
) -> list[bool]:
    """Algorithm 2 with whole sorts over Python numbers."""
    result: list[bool] = []
    for where in layout.slices:
        w, m, g = weights[where].tolist(), mask[where].tolist(), grad[where].tolist()
        held = [i for i, kept in enumerate(m) if kept]
        count = ceil(rate * len(held))
        for i in sorted(held, key=lambda i: (abs(w[i]), i))[:count]:
            m[i] = False
        empty = [i for i, kept in enumerate(m) if not kept]
        for i in sorted(empty, key=lambda i: (-abs(g[i]), i))[:count]:
            m[i] = True
        result += m
    return result


@st.composite
def searches(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor, float, Layout]:
    """Layers, masks, and weights and gradients from few values, so that ties are common."""
    sizes = draw(st.lists(st.integers(1, 12), min_size=1, max_size=3))
    layout = Layout.from_shapes({str(number): (size,) for number, size in enumerate(sizes)})
    few = st.sampled_from([-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0])
    flat = st.lists(few, min_size=layout.size, max_size=layout.size)
    mask = torch.tensor(draw(st.lists(st.booleans(), min_size=layout.size, max_size=layout.size)))
    weights = torch.tensor(draw(flat)).where(mask, 0.0)
    return weights, mask, torch.tensor(draw(flat)), draw(st.floats(0, 1)), layout


@given(searches())
def test_full_sorts_agree(search: tuple[Tensor, Tensor, Tensor, float, Layout]) -> None:
    assert prune_and_regrow(*search).tolist() == by_full_sorts(*search)


@given(searches())
def test_a_layers_kept_count_never_changes(
    search: tuple[Tensor, Tensor, Tensor, float, Layout],
) -> None:
    _, mask, _, _, layout = search
    assert kept_per_layer(prune_and_regrow(*search), layout) == kept_per_layer(mask, layout)
