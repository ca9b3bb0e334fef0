"""The accountant, against closed forms and published numbers."""

from math import erf, exp, log, sqrt

import pytest
from messages import refused

from dispfl.errors import ConfigError
from dispfl.privacy.accountant import (
    StepsTaken,
    loss_epsilon,
    make_plan,
    noise_for,
    renyi_epsilon,
    spent_epsilon,
    steps_within,
)


def normal_cdf(x: float) -> float:
    return (1 + erf(x / sqrt(2))) / 2


@pytest.mark.parametrize(("noise", "steps"), [(1.0, 1), (2.0, 1), (4.0, 9), (60.0, 4000)])
def test_without_sampling_epsilon_is_barely_above_that_of_the_analytic_gaussian_mechanism(
    noise: float, steps: int
) -> None:
    # Balle and Wang, 2018, Theorem 8, with sensitivity 1; k steps are one step with noise /
    # sqrt(k).
    sigma = noise / sqrt(steps)
    epsilon = spent_epsilon(1.0, noise, steps, 1e-5)
    delta = normal_cdf(1 / (2 * sigma) - epsilon * sigma) - exp(epsilon) * normal_cdf(
        -1 / (2 * sigma) - epsilon * sigma
    )
    assert 0.97e-5 < delta < 1e-5  # an upper bound: the true delta of this epsilon is smaller


@pytest.mark.parametrize(("rate", "noise"), [(0.2, 0.8), (0.05, 0.6), (0.5, 1.5)])
def test_epsilon_of_one_sampled_step_is_barely_above_its_exact_value(
    rate: float, noise: float
) -> None:
    """P = (1 - q) N(0, s^2) + q N(1, s^2) and Q = N(0, s^2). The loss log(P/Q) grows with x and is
    epsilon at x = s^2 log((e^epsilon - 1 + q) / q) + 1/2. So delta is P(x > .) - e^epsilon Q(x > .)
    for a sample that is there; for one that is missing it is smaller."""
    epsilon = spent_epsilon(rate, noise, 1, 1e-5)
    x = noise**2 * log((exp(epsilon) - 1 + rate) / rate) + 0.5
    blank = normal_cdf(-x / noise)
    present = (1 - rate) * blank + rate * normal_cdf((1 - x) / noise)
    delta = present - exp(epsilon) * blank
    assert 0.97e-5 < delta < 1e-5


def test_without_sampling_renyi_divergence_is_alpha_over_two_sigma_squared() -> None:
    # Balle et al., 2020, Theorem 21: eps = rdp + log((a - 1) / a) - (log delta + log a) / (a - 1)
    by_hand = min(
        a / (2 * 2.0**2) + log((a - 1) / a) - (log(1e-5) + log(a)) / (a - 1) for a in range(2, 65)
    )
    steps = (StepsTaken(1.0, 2.0, 1),)
    assert renyi_epsilon(steps, 1e-5) == pytest.approx(by_hand, rel=1e-6)


def test_the_published_example_of_dp_sgd_is_not_exceeded() -> None:
    # Abadi et al., 2016, section 5: q = 0.01, sigma = 4, 10,000 steps, delta 1e-5 give epsilon 1.26
    # with the moments accountant, whose conversion from Rényi divergence is looser than today's.
    steps = (StepsTaken(0.01, 4.0, 10_000),)
    assert spent_epsilon(0.01, 4.0, 10_000, 1e-5) == pytest.approx(0.947, abs=0.01)
    assert 0.95 < renyi_epsilon(steps, 1e-5) < 1.26


def test_a_finer_distribution_lowers_epsilon_by_less_than_a_hundredth() -> None:
    """A site with 160 samples, batches of 32, 20 rounds of 26 steps: 4.00 by Rényi divergences."""
    steps = (StepsTaken(0.2, 5.387, 520),)
    fine = loss_epsilon(steps, 1e-5, interval=1e-4)
    assert fine <= loss_epsilon(steps, 1e-5) < fine + 0.01
    assert loss_epsilon(steps, 1e-5) == pytest.approx(3.69, abs=0.01)
    assert renyi_epsilon(steps, 1e-5) == pytest.approx(4.0, abs=0.01)


@pytest.mark.parametrize(
    ("noise", "steps", "delta"), [(0.02, 10, 1e-5), (50.0, 200_000, 1e-5), (2.0, 10, 1e-13)]
)
def test_where_distributions_are_long_or_rounded_renyi_divergences_count(
    noise: float, steps: int, delta: float
) -> None:
    expected = renyi_epsilon((StepsTaken(0.1, noise, steps),), delta)
    assert spent_epsilon(0.1, noise, steps, delta) == expected


def test_epsilon_grows_with_steps_and_rate_and_falls_with_noise() -> None:
    assert spent_epsilon(0.1, 1.0, 10, 1e-5) < spent_epsilon(0.1, 1.0, 100, 1e-5)
    assert spent_epsilon(0.1, 2.0, 100, 1e-5) < spent_epsilon(0.1, 1.0, 100, 1e-5)
    assert spent_epsilon(0.05, 1.0, 100, 1e-5) < spent_epsilon(0.1, 1.0, 100, 1e-5)
    assert spent_epsilon(0.1, 1.0, 0, 1e-5) == 0


def test_the_solved_noise_lasts_for_exactly_the_planned_steps() -> None:
    noise = noise_for(1 / 3, 80, 4.0, 1e-5)
    assert (
        spent_epsilon(1 / 3, noise, 80, 1e-5) <= 4.0 < spent_epsilon(1 / 3, 0.995 * noise, 80, 1e-5)
    )
    assert 80 <= steps_within(1 / 3, noise, 4.0, 1e-5) <= 81


def test_a_plan_says_how_many_steps_a_budget_allows() -> None:
    plan = make_plan(4.0, 1e-5, 2.0, 96, 32, 15, 100)
    assert plan.max_steps is not None
    assert plan.rate == pytest.approx(1 / 3)
    assert plan.spent(plan.max_steps) <= 4.0 < plan.spent(plan.max_steps + 1)
    assert make_plan(None, 1e-5, 2.0, 96, 32, 15, 100).max_steps is None


def test_the_divergences_of_steps_with_different_noise_add_up() -> None:
    # Without sampling a step's divergence of order a is a / (2 sigma^2): two steps with noise 2 and
    # one with noise sqrt(2) are one step with noise 1, since 2 / 8 + 1 / 4 = 1 / 2.
    earlier = (StepsTaken(1.0, 2.0, 2),)
    assert spent_epsilon(1.0, sqrt(2), 1, 1e-5, earlier) == pytest.approx(
        spent_epsilon(1.0, 1.0, 1, 1e-5), rel=1e-3
    )
    assert spent_epsilon(1.0, 1.0, 0, 1e-5, earlier) == spent_epsilon(1.0, 2.0, 2, 1e-5)
    epsilon = 1.0001 * spent_epsilon(1.0, 2.0, 7, 1e-5)
    assert steps_within(1.0, 2.0, epsilon, 1e-5, (StepsTaken(1.0, 2.0, 4),)) == 3


def test_a_batch_as_large_as_the_data_is_no_sampling() -> None:
    assert make_plan(None, 1e-5, 2.0, 20, 128, 5, 10).rate == 1.0


def test_a_budget_that_does_not_last_a_round_and_a_delta_that_promises_nothing_are_refused() -> (
    None
):
    with refused(ConfigError, key="privacy.epsilon"):
        make_plan(0.5, 1e-5, 0.5, 96, 32, 15, 10)
    with refused(ConfigError, key="privacy.delta"):
        make_plan(4.0, 0.1, None, 96, 32, 15, 10)
