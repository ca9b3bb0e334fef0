"""The modified gossip average, against numbers by hand and a loop over single coordinates."""

from math import nan

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dispfl.core.averaging import average_of, gossip_average, masked_mean
from dispfl.core.chunks import chunk_slices
from dispfl.core.packed import PackedModel

ALL = torch.ones(1, dtype=torch.bool)


def one(weight: float, held: bool = True) -> tuple[Tensor, Tensor]:
    """A model of one weight, and its mask."""
    return torch.tensor([weight]), torch.tensor([held])


def test_weight_held_by_two_of_three_peers_is_divided_by_two() -> None:
    weights, masks = zip(one(3.0), one(0.0, held=False), one(5.0), strict=True)
    assert gossip_average(weights, masks, ALL).tolist() == [4.0]


def test_weight_held_by_one_peer_is_adopted_unchanged() -> None:
    weights, masks = zip(one(0.0, held=False), one(0.7), strict=True)
    assert gossip_average(weights, masks, ALL).equal(torch.tensor([0.7]))


def test_weight_held_by_nobody_becomes_zero_and_not_nan() -> None:
    weights, masks = zip(one(0.0, held=False), one(0.0, held=False), strict=True)
    average = gossip_average(weights, masks, ALL)
    assert average.tolist() == [0.0]
    assert not average.signbit().any()


def test_a_weight_that_is_held_but_zero_counts_as_a_holder() -> None:
    weights, masks = zip(one(0.0), one(3.0), strict=True)
    assert gossip_average(weights, masks, ALL).tolist() == [1.5]


def test_outside_our_own_mask_is_exactly_plus_zero_even_for_a_negative_or_nan_average() -> None:
    weights = [torch.tensor([-1.0, nan, 2.0])]
    average = gossip_average(
        weights, [torch.ones(3, dtype=torch.bool)], torch.tensor([False, False, True])
    )
    assert average.view(torch.int32).tolist() == [0, 0, torch.tensor(2.0).view(torch.int32).item()]


def test_the_inputs_are_not_modified() -> None:
    weights = [torch.tensor([1.0, 0.0]), torch.tensor([3.0, 4.0])]
    masks = [torch.tensor([True, False]), torch.tensor([True, True])]
    m_k = torch.tensor([False, True])
    gossip_average(weights, masks, m_k)
    assert [w.tolist() for w in weights] == [[1.0, 0.0], [3.0, 4.0]]
    assert [m.tolist() for m in masks] == [[True, False], [True, True]]
    assert m_k.tolist() == [False, True]


def test_full_masks_give_the_plain_mean_bit_for_bit() -> None:
    weights = list(torch.randn(3, 1000, generator=torch.Generator().manual_seed(0)))
    full = torch.ones(1000, dtype=torch.bool)
    plain = (weights[0] + weights[1] + weights[2]) / 3
    assert gossip_average(weights, [full] * 3, full).equal(plain)


def packed(*models: tuple[Tensor, Tensor]) -> list[PackedModel]:
    """Models as peers receive from them."""
    return [PackedModel.pack(weights, mask) for weights, mask in models]


def test_packed_models_give_the_same_average() -> None:
    models = packed(one(1.0), one(0.0, held=False), one(4.0))
    assert average_of(iter(models), ALL).tolist() == [2.5]


def test_averaging_in_chunks_equals_averaging_whole_vectors_bit_for_bit() -> None:
    size = (
        2 * next(chunk_slices(10**9)).stop + 13
    )  # two whole chunk_slices and a short one that ends within a byte
    rng = torch.Generator().manual_seed(0)
    masks = [torch.rand(size, generator=rng) < density for density in (0.5, 0.1, 0.9)]
    masks.append(torch.ones(size, dtype=torch.bool))
    weights = [torch.randn(size, generator=rng).where(mask, 0.0) for mask in masks]
    m_k = torch.rand(size, generator=rng) < 0.5
    total, holders = torch.zeros(size), torch.zeros(size)
    for w_j, m_j in zip(weights, masks, strict=True):
        total, holders = total + w_j, holders + m_j
    expected = torch.where(m_k, total / holders, 0.0)
    average = average_of(packed(*zip(weights, masks, strict=True)), m_k)
    assert average.view(torch.int32).equal(expected.view(torch.int32))


def test_more_than_255_holders_are_counted() -> None:
    assert average_of(packed(*[one(3.0)] * 300), ALL).tolist() == [3.0]
    two = (torch.tensor([3.0, 0.0]), torch.tensor([True, False]))
    assert average_of(packed(*[two] * 256), torch.tensor([True, True])).tolist() == [3.0, 0.0]


def test_the_average_of_holders_takes_the_fallback_where_nobody_holds_a_weight() -> None:
    models = [
        (torch.tensor([2.0, 5.0, 0.0, 0.0]), torch.tensor([True, True, False, True])),
        (torch.tensor([4.0, 0.0, 0.0, 0.0]), torch.tensor([True, False, False, True])),
    ]
    fallback = torch.full((4,), 9.0)
    assert masked_mean(packed(*models), fallback).tolist() == [
        3.0,
        5.0,
        9.0,
        0.0,
    ]  # a held zero is a value
    assert fallback.tolist() == [9.0] * 4
    assert models[0][0].tolist() == [2.0, 5.0, 0.0, 0.0]


def test_the_average_of_no_holders_at_all_is_the_fallback() -> None:
    assert masked_mean([], torch.tensor([1.0, -2.0])).tolist() == [1.0, -2.0]


def test_with_full_masks_the_average_of_holders_is_the_gossip_average_bit_for_bit() -> None:
    weights = list(torch.randn(3, 1000, generator=torch.Generator().manual_seed(0)))
    full = torch.ones(1000, dtype=torch.bool)
    models = packed(*((w, full) for w in weights))
    assert masked_mean(models, torch.full((1000,), nan)).equal(
        gossip_average(weights, [full] * 3, full)
    )


def by_the_book(peers: list[list[tuple[float, bool]]], m_k: list[bool]) -> list[float]:
    """Algorithm 1, line 7, coordinate by coordinate, in float32."""
    result = []
    for i, ours in enumerate(m_k):
        total, holders = np.float32(0), 0
        for model in peers:
            weight, held = model[i]
            if held:
                total, holders = total + np.float32(weight), holders + 1
        result.append(float(total / np.float32(holders)) if ours and holders else 0.0)
    return result


@given(st.data(), st.integers(1, 5), st.integers(1, 8))
def test_a_loop_over_single_coordinates_agrees_exactly(
    data: st.DataObject, peers: int, size: int
) -> None:
    coordinate = st.tuples(st.floats(-100, 100, width=32), st.booleans())
    models = [data.draw(st.lists(coordinate, min_size=size, max_size=size)) for _ in range(peers)]
    m_k = data.draw(st.lists(st.booleans(), min_size=size, max_size=size))
    weights = [
        torch.tensor([weight if held else 0.0 for weight, held in model]) for model in models
    ]
    masks = [torch.tensor([held for _, held in model]) for model in models]
    assert gossip_average(weights, masks, torch.tensor(m_k)).tolist() == by_the_book(models, m_k)
