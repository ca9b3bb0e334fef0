"""Masks and what they keep."""

from math import inf, nan

import pytest
import torch

from dispfl.core.layout import Layout
from dispfl.core.masks import hamming, keep_, kept_count, kept_per_layer, mask_bits, random_mask
from dispfl.core.rng import stream

LAYOUT = Layout.from_shapes({"weight": (10, 10), "bias": (7,), "scale": ()})
DENSITIES = {"weight": 0.255, "bias": 0.5, "scale": 0.1}


def test_a_random_mask_keeps_the_integer_part_of_density_times_size_and_at_least_one_a_layer() -> (
    None
):
    mask = random_mask(LAYOUT, DENSITIES, rng=stream(0, "mask"))
    assert kept_per_layer(mask, LAYOUT) == [25, 3, 1]  # 25.5, 3.5 and 0.1


@pytest.mark.parametrize(
    ("size", "density", "kept"),
    [
        (100, 0.29, 29),
        (7, 0.5, 3),
        (7, 1.0, 7),
        (1000, 0.0001, 1),
        (1, 0.5, 1),
        (5, 0.2, 1),
        (10, 0.999, 9),
    ],
)
def test_kept_counts(size: int, density: float, kept: int) -> None:
    assert (
        kept_count(size, density) == kept
    )  # 0.29 * 100 is 28.999... in floating point, and still 29


def test_the_same_stream_gives_the_same_mask_and_another_peers_stream_a_different_one() -> None:
    first = random_mask(LAYOUT, DENSITIES, rng=stream(0, "mask", "000"))
    assert random_mask(LAYOUT, DENSITIES, rng=stream(0, "mask", "000")).equal(first)
    assert not random_mask(LAYOUT, DENSITIES, rng=stream(0, "mask", "001")).equal(first)


def test_density_1_keeps_everything() -> None:
    assert random_mask(LAYOUT, dict.fromkeys(LAYOUT.names, 1.0), rng=stream(0, "mask")).all()


def test_every_position_is_kept_about_equally_often() -> None:
    layout = Layout.from_shapes({"weight": (10,)})
    masks = [random_mask(layout, {"weight": 0.3}, rng=stream(0, "mask", i)) for i in range(1000)]
    often = torch.stack(masks).float().mean(0)
    assert often.sum() == pytest.approx(3)
    assert (often - 0.3).abs().max() < 0.06  # four standard deviations of a share of 1000


def test_hamming_counts_the_positions_that_differ() -> None:
    assert hamming(torch.tensor([True, True, False]), torch.tensor([True, False, True])) == 2


def test_keep_sets_everything_outside_the_mask_to_plus_zero_even_nan_inf_and_minus_zero() -> None:
    values = torch.tensor([1.5, nan, inf, -0.0, -2.0, -0.0])
    mask = torch.tensor([True, False, False, False, True, True])
    kept = keep_(values, mask_bits(mask))
    assert kept is values
    assert kept.tolist() == [1.5, 0, 0, 0, -2.0, 0]
    assert kept.signbit().tolist() == [False, False, False, False, True, True]
