"""The accountant, against closed forms and published numbers."""

from math import erf, exp, log, sqrt

import pytest
from messages import refused

from dispfl.errors import ConfigError
from dispfl.privacy.accountant import (
    StepsTaken,
    make_plan,
    noise_for,
    spent_epsilon,
    steps_within,
    tight_epsilon,
)


def normal_cdf(x: float) -> float:
    return (1 + erf(x / sqrt(2))) / 2


@pytest.mark.parametrize(("noise", "steps"), [(1.0, 1), (2.0, 1), (4.0, 9)])
def test_without_sampling_the_tight_epsilon_is_that_of_the_analytic_gaussian_mechanism(
    noise: float, steps: int
) -> None:
    # Balle and Wang, 2018, Theorem 8, with sensitivity 1; k steps are one step with noise /
    # sqrt(k).
    sigma = noise / sqrt(steps)
    epsilon = tight_epsilon(1.0, noise, steps, 1e-5)
    delta = normal_cdf(1 / (2 * sigma) - epsilon * sigma) - exp(epsilon) * normal_cdf(
        -1 / (2 * sigma) - epsilon * sigma
    )
    assert delta == pytest.approx(1e-5, rel=0.02)


def test_without_sampling_renyi_divergence_is_alpha_over_two_sigma_squared() -> None:
    # Balle et al., 2020, Theorem 21: eps = rdp + log((a - 1) / a) - (log delta + log a) / (a - 1)
    by_hand = min(
        a / (2 * 2.0**2) + log((a - 1) / a) - (log(1e-5) + log(a)) / (a - 1) for a in range(2, 65)
    )
    assert spent_epsilon(1.0, 2.0, 1, 1e-5) == pytest.approx(by_hand, rel=1e-6)


def test_the_published_example_of_dp_sgd_is_not_exceeded() -> None:
    # Abadi et al., 2016, section 5: q = 0.01, sigma = 4, 10,000 steps, delta 1e-5 give epsilon 1.26
    # with the moments accountant, whose conversion from Rényi divergence is looser than today's.
    assert tight_epsilon(0.01, 4.0, 10_000, 1e-5) == pytest.approx(0.947, abs=0.01)
    assert 0.95 < spent_epsilon(0.01, 4.0, 10_000, 1e-5) < 1.26


def test_both_bounds_grow_with_steps_and_fall_with_noise_and_the_tight_one_is_smaller() -> None:
    assert spent_epsilon(0.1, 1.0, 10, 1e-5) < spent_epsilon(0.1, 1.0, 100, 1e-5)
    assert spent_epsilon(0.1, 2.0, 100, 1e-5) < spent_epsilon(0.1, 1.0, 100, 1e-5)
    assert spent_epsilon(0.05, 1.0, 100, 1e-5) < spent_epsilon(0.1, 1.0, 100, 1e-5)
    assert tight_epsilon(0.1, 1.0, 100, 1e-5) < spent_epsilon(0.1, 1.0, 100, 1e-5)
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
        spent_epsilon(1.0, 1.0, 1, 1e-5)
    )
    assert spent_epsilon(1.0, 1.0, 0, 1e-5, earlier) == spent_epsilon(1.0, 2.0, 2, 1e-5)
    epsilon = spent_epsilon(1.0, 2.0, 7, 1e-5)
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
