"""Distances, similarities and their correlation, on numbers small enough to check by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from dispfl.paper import mask_similarity as similarity
from dispfl.paper.mask_similarity import (
    Correlation,
    RunMasks,
    correlate,
    cosine_similarities,
    hamming_distances,
    independent_distance,
    kept_by_layer,
    ranks,
    within_groups,
)


def packed(*masks: str) -> NDArray[np.uint8]:
    """Masks written as 0 and 1, the first weight first, as bits."""
    return np.stack([np.packbits([int(bit) for bit in mask], bitorder="little") for mask in masks])


def symmetric(*above: float) -> NDArray[np.float64]:
    """A matrix from its entries above the diagonal, row by row."""
    peers = round((1 + (1 + 8 * len(above)) ** 0.5) / 2)
    matrix = np.zeros((peers, peers))
    matrix[np.triu_indices(peers, 1)] = above
    return matrix + matrix.T


def test_masks_that_differ_in_three_positions_have_distance_three() -> None:
    """Against 1100: 1010 differs in the middle two, 0010 in the first three."""
    assert hamming_distances(packed("1100", "1010", "0010")).tolist() == [
        [0, 2, 3],
        [2, 0, 1],
        [3, 1, 0],
    ]


@given(st.integers(1, 700), st.integers(2, 5), st.integers(0, 2**32))
def test_distances_computed_in_blocks_equal_those_computed_bit_by_bit(
    size: int, peers: int, seed: int
) -> None:
    """Blocks of two words, so that 700 bits make six blocks, the last one partial."""
    masks = np.random.default_rng(seed).random((peers, size)) < 0.5
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(similarity, "BLOCK_WORDS", 2)
        distances = hamming_distances(np.packbits(masks, axis=1, bitorder="little"))
    assert np.array_equal(distances, (masks[:, None] != masks).sum(axis=2))


def test_cosine_of_label_counts_does_not_depend_on_the_number_of_samples() -> None:
    """(3, 4) has length 5, so its cosine with (6, 0) is 3/5; (6, 8) points the same way; (0, 2) has
    4/5 with it."""
    found = cosine_similarities(np.array([[3, 4], [6, 8], [6, 0], [0, 2]]))
    assert found[0].tolist() == [1, 1, 0.6, 0.8]
    assert found[2, 3] == 0
    assert np.array_equal(found, found.T)


def test_equal_values_share_the_mean_of_their_ranks() -> None:
    """In order 10, 20, 20, 30: the two 20s have ranks 2 and 3."""
    assert ranks(np.array([20.0, 10.0, 30.0, 20.0])).tolist() == [2.5, 1, 4, 2.5]


def test_rank_correlation_of_opposite_orders_is_minus_one() -> None:
    """Any decreasing function, such as 1/x, over the three pairs of three peers."""
    found = correlate(symmetric(1, 2, 4), symmetric(1, 1 / 2, 1 / 4))
    assert found
    assert found.spearman == pytest.approx(-1)
    assert found.pairs == 3


def test_rank_correlation_with_a_tie_by_hand() -> None:
    """Ranks 1, 2, 3 against 1.5, 1.5, 3: deviations (-1, 0, 1) and (-.5, -.5, 1), so 1.5 / sqrt(2 *
    1.5) = 0.866."""
    found = correlate(symmetric(1, 2, 3), symmetric(5, 5, 9))
    assert found
    assert found.spearman == pytest.approx(3**0.5 / 2)


def test_there_is_no_correlation_with_a_constant() -> None:
    assert correlate(symmetric(1, 2, 3), symmetric(0.5, 0.5, 0.5)) is None
    assert correlate(symmetric(0.5, 0.5, 0.5), symmetric(1, 2, 3)) is None


def test_one_pair_has_no_correlation() -> None:
    assert correlate(symmetric(0.3), symmetric(0.5)) is None


def test_three_peers_give_a_large_p_value() -> None:
    """Three pairs have six orders, all reached by shuffling three peers. Two of them correlate by 1
    or -1."""
    found = correlate(symmetric(1, 2, 3), symmetric(3, 2, 1), shuffles=3000)
    assert found
    assert found.p == pytest.approx(2 / 6, abs=0.05)


def test_sixteen_peers_in_two_groups_give_a_small_p_value() -> None:
    """Only 2 x 8! x 8! of 16! orders, 1 in 6,435, restore the groups, so no shuffle of 99 does: p
    is 1 / 100."""
    near = within_groups([8, 8]).astype(float)
    found = correlate(symmetric(*near), symmetric(*(1 - near)), shuffles=99)
    assert found
    assert found.spearman == pytest.approx(-1)
    assert found.p == 0.01


def test_pairs_within_groups_of_two_and_one() -> None:
    """Of the pairs 01, 02 and 12 only the first is within a group."""
    assert within_groups([2, 1]).tolist() == [True, False, False]


def test_layers_that_end_inside_a_byte_are_counted_separately() -> None:
    """Layers of 3, 7 and 2 weights: 101 | 1111000 | 01 keeps 2, 4 and 1."""
    assert kept_by_layer(packed("101111100001", "000000000011"), [3, 7, 2]).tolist() == [
        [2, 4, 1],
        [0, 0, 2],
    ]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(0, 2**32))
def test_kept_weights_by_layer_equal_those_of_the_unpacked_mask(
    sizes: list[int], seed: int
) -> None:
    mask = np.random.default_rng(seed).random(sum(sizes)) < 0.5
    starts = np.cumsum([0, *sizes[:-1]])
    expected = np.add.reduceat(mask, starts, dtype=int)
    assert kept_by_layer(np.packbits(mask, bitorder="little")[None], sizes).tolist() == [
        expected.tolist()
    ]


def test_expected_distance_of_independent_masks_by_hand() -> None:
    """A layer of 30 at density 1/2 and 1/2: 0.5. One of 10 at 0.2 and 1: 0.8. Together (30 x 0.5 +
    10 x 0.8) / 40."""
    assert independent_distance(np.array([[0.5, 0.2], [0.5, 1.0]]), [30, 10]) == pytest.approx(
        0.575
    )


@pytest.mark.parametrize(
    ("spearman", "p", "sentence"),
    [
        (
            -0.614,
            0.001,
            "Closer data, closer masks: rank correlation -0.61 over 1 pairs (p = 0.001 ",
        ),
        (0.4, 0.05, "Closer data, more distant masks: rank correlation 0.40 "),
        (-0.614, 0.051, "No clear relation between data and masks: rank correlation -0.61 "),
    ],
)
def test_the_sentence_claims_a_relation_only_if_shuffled_peers_rarely_show_it(
    spearman: float, p: float, sentence: str
) -> None:
    found = RunMasks(
        method="dispfl",
        rounds=3,
        planned=30,
        peers=("000", "001"),
        groups=(),
        densities=(0.5, 0.5),
        distances=symmetric(0.4),
        similarities=symmetric(0.9),
        correlation=Correlation(spearman, 1, p),
        between_groups=None,
        layers=(),
        independent=None,
        overlap=(),
    )
    assert found.title == "dispfl, 2 peers, after 3 of 30 rounds"
    assert found.sentence.startswith(sentence)
