"""Paired differences with bootstrap intervals, on numbers that can be checked by hand."""

from math import sqrt

import pytest

from dispfl.core.metric import Measure
from dispfl.report.differences import Difference, Verdict, paired_difference

HIGHER, LOWER = Measure("accuracy", higher_is_better=True), Measure("mse", higher_is_better=False)


def difference(*by_seed: list[float]) -> Difference:
    """The difference of a row with these scores to one whose scores are all 0."""
    found = paired_difference(
        dict(enumerate(by_seed)), {seed: [0.0] * len(own) for seed, own in enumerate(by_seed)}
    )
    assert found is not None
    return found


def test_a_constant_difference_is_its_own_interval_and_its_sign_is_read_with_the_direction() -> (
    None
):
    found = difference([0.25] * 6)
    assert (found.mean, found.interval, found.peers, found.seeds) == (0.25, (0.25, 0.25), 6, 1)
    assert found.verdict(HIGHER) is Verdict.AHEAD
    assert found.verdict(LOWER) is Verdict.BEHIND
    assert found.text(HIGHER) == "+0.250 [+0.250, +0.250]"


def test_differences_around_zero_are_level() -> None:
    """Half of the peers gain 0.1, half lose it: resampled means are symmetric around 0."""
    found = difference([0.1, -0.1] * 8)
    low, high = found.interval or (0, 0)
    assert found.mean == pytest.approx(0)
    assert low == pytest.approx(-high)
    assert found.verdict(HIGHER) is found.verdict(LOWER) is Verdict.LEVEL


def test_the_interval_of_many_peers_is_that_of_the_normal_distribution() -> None:
    """A hundred peers at 0 and a hundred at 1: mean 0.5, standard error 0.5 / sqrt(200), 1.96 of it
    to either side."""
    low, high = difference([0.0, 1.0] * 100).interval or (0, 0)
    assert (high - low) / 2 == pytest.approx(1.96 * 0.5 / sqrt(200), rel=0.05)
    assert (high + low) / 2 == pytest.approx(0.5, abs=0.01)


def test_seeds_are_resampled_before_their_peers() -> None:
    """Two seeds, +0.1 for all peers of one and -0.05 of the other: a quarter of resamples draws the
    first twice.

    Twenty peers as if they were independent would give an interval of 0.025 +- 0.033.
    """
    found = difference([0.1] * 10, [-0.05] * 10)
    assert found.mean == pytest.approx(0.025)
    assert found.interval == pytest.approx((-0.05, 0.1))
    assert (found.peers, found.seeds) == (20, 2)


def test_a_seed_with_more_peers_weighs_as_much_as_the_others() -> None:
    assert difference([1.0], [0.0] * 9).mean == 0.5


def test_only_peers_and_seeds_that_both_have_are_paired() -> None:
    found = paired_difference({0: [0.9, None, 0.7], 1: [0.1]}, {0: [0.5, 0.5, None], 2: [0.1]})
    assert found == Difference(0.9 - 0.5, None, 1, 1)
    assert paired_difference({0: [0.5]}, {1: [0.5]}) is None


def test_fewer_than_six_pairs_are_not_tested() -> None:
    """Five equal signs happen to equal methods in 2 x (1/2)^5 = 6 % of cases, six in 3 %."""
    assert difference([0.1] * 5).verdict(HIGHER) is Verdict.UNTESTED
    assert difference([0.1] * 5).text(HIGHER) == "+0.100"
    assert difference([0.1] * 6).verdict(HIGHER) is Verdict.AHEAD


def test_the_same_scores_give_the_same_interval() -> None:
    scores = [k / 7 for k in range(12)]
    assert difference(scores) == difference(scores)
