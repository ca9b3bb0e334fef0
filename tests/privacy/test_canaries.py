"""The lower bound of epsilon: by hand, and against a mechanism whose epsilon is known."""

from math import comb, exp, log

import numpy as np
import pytest

from dispfl.privacy.audit.canaries import best_guesses, epsilon_bound, p_value, residuals


def test_the_probability_of_so_many_correct_guesses_by_hand() -> None:
    q = exp(1) / (1 + exp(1))
    tail = sum(comb(5, k) * q**k * (1 - q) ** (5 - k) for k in (4, 5))
    assert p_value(8, 5, 4, 1.0, 0.0) == pytest.approx(tail)
    # With delta: 2 * 8 * delta times the largest of P[W=3], P[2<=W<=3]/2, P[1<=W<=3]/3,
    # P[0<=W<=3]/4.
    pmf = [comb(5, k) * q**k * (1 - q) ** (5 - k) for k in range(4)]
    steepest = max(sum(pmf[4 - i :]) / i for i in range(1, 5))
    assert p_value(8, 5, 4, 1.0, 0.001) == pytest.approx(tail + 16 * 0.001 * steepest)


def test_all_of_r_guesses_right_gives_the_epsilon_at_which_that_has_probability_5_percent() -> None:
    q = 0.05 ** (1 / 100)  # q^100 = 0.05
    assert epsilon_bound(100, 100, 100, 0.0, 0.05) == pytest.approx(
        log(q / (1 - q)), abs=1e-3
    )  # 3.49


def test_guesses_as_good_as_a_coin_bound_nothing() -> None:
    assert epsilon_bound(100, 100, 55, 1e-5, 0.05) == 0.0
    assert epsilon_bound(100, 100, 0, 1e-5, 0.05) == 0.0


def test_a_larger_delta_gives_a_smaller_bound() -> None:
    bounds = [epsilon_bound(500, 500, 450, delta, 0.05) for delta in (0.0, 1e-5, 1e-3)]
    assert bounds == sorted(bounds, reverse=True)
    assert bounds[0] > bounds[-1]


@pytest.mark.parametrize("epsilon", [0.0, 1.0, 2.0])
def test_randomized_response_is_bounded_below_its_epsilon_and_near_it(epsilon: float) -> None:
    """Each coin is told truthfully with probability e^eps / (1 + e^eps): no (eps, 0)-private
    mechanism tells more."""
    rng = np.random.default_rng(0)
    bounds = []
    for _ in range(60):
        coins = rng.random(1000) < 0.5
        answers = coins ^ (rng.random(1000) < 1 / (1 + exp(epsilon)))
        scores = np.where(answers, 1.0, -1.0) + 0.1 * rng.random(1000)
        bounds.append(best_guesses(scores, coins, 0.0).epsilon)
    assert np.mean(np.array(bounds) > epsilon) <= 0.05
    assert np.median(bounds) > epsilon - 0.35


def test_residuals_are_what_a_line_through_the_scores_leaves() -> None:
    expected = np.array([0.0, 1.0, 2.0, 3.0])
    assert residuals(2 * expected + 5, expected) == pytest.approx([0, 0, 0, 0])
    assert residuals(np.array([1.0, 0.0, 0.0, 1.0]), expected) == pytest.approx(
        [0.5, -0.5, -0.5, 0.5]
    )  # no slope
    assert residuals(np.array([1.0, 2.0]), np.array([3.0, 3.0])) == pytest.approx([-0.5, 0.5])


def test_the_most_certain_guesses_count_where_the_others_are_blind() -> None:
    rng = np.random.default_rng(0)
    coins = rng.random(800) < 0.5
    coins[:100] = np.arange(100) % 2 == 0
    scores = rng.normal(size=800)
    scores[:100] += np.where(coins[:100], 9.0, -9.0)  # one canary in eight leaks entirely
    guesses = best_guesses(scores, coins, 1e-5)
    assert (guesses.canaries, guesses.guesses, guesses.correct) == (800, 100, 100)
    assert 3.0 < guesses.epsilon <= guesses.largest
