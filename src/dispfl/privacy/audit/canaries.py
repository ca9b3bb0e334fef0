"""Canaries: a lower bound of epsilon from one training run (Steinke, Nasr and Jagielski 2023).

Each of m canaries is put into the training data, or not, by a fair coin. Whoever sees the models
guesses the coins, of as many canaries as they dare. If training is (epsilon, delta)-differentially
private, few guesses can be right; if more are, it is not, and epsilon must be larger.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from math import exp, lgamma, log

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

CONFIDENCE = 0.95
SHARES = (1.0, 0.5, 0.25, 0.125)
"""The shares of the canaries that are guessed: of each the most certain ones. The best counts, at a
quarter of the error probability (Bonferroni)."""
LARGEST_EPSILON = 30.0


@dataclass(frozen=True)
class Guesses:
    """The result of guessing canaries."""

    canaries: int
    guesses: int
    correct: int
    epsilon: float
    """Training is not (epsilon', delta)-private for any smaller epsilon', with 95 % confidence."""
    largest: float
    """The same if all guesses were right: more cannot be shown with so many canaries."""


def best_guesses(scores: Array, inside: NDArray[np.bool_], delta: float) -> Guesses:
    """Guess that canaries with the highest scores were trained on, and those with the lowest were
    not."""
    m, order = len(scores), np.argsort(-scores, kind="stable")
    error = (1 - CONFIDENCE) / len(SHARES)
    results = []
    for share in SHARES:
        if not (half := int(share * m / 2)):
            continue
        right = int(inside[order[:half]].sum() + (~inside[order[-half:]]).sum())
        bound, largest = (epsilon_bound(m, 2 * half, v, delta, error) for v in (right, 2 * half))
        results.append(Guesses(m, 2 * half, right, bound, largest))
    best = max(results, key=lambda one: one.epsilon, default=Guesses(m, 0, 0, 0.0, 0.0))
    return replace(best, largest=max((one.largest for one in results), default=0.0))


def residuals(scores: Array, expected: Array) -> Array:
    """Return the scores less what a line through all of them predicts from the expected ones.

    Where canaries are learned by heart, scores hardly depend on what was expected; where little is
    learned, they follow it. The line is fitted without the coins, so guesses by these residuals are
    guesses as any others.
    """
    x = expected - expected.mean()
    slope = (x * scores).sum() / max(float((x * x).sum()), 1e-12)
    return np.asarray(scores - scores.mean() - slope * x)


def epsilon_bound(m: int, guesses: int, correct: int, delta: float, error: float) -> float:
    """Return the largest epsilon for which so many correct guesses have at most this probability; 0
    if none has."""
    if p_value(m, guesses, correct, 0.0, delta) > error:
        return 0.0
    low, high = 0.0, LARGEST_EPSILON
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (
            (low, middle) if p_value(m, guesses, correct, middle, delta) > error else (middle, high)
        )
    return low


def p_value(m: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """Return a bound of the probability of so many correct guesses about m coins, under (epsilon,
    delta)-privacy.

    The main theorem of Steinke et al. for r guesses, v of them right, and W ~ Binomial(r, e^epsilon
    / (1 + e^epsilon)):

        P <= P[W >= v] + 2 m delta max_{i = 1..v} P[v > W >= v - i] / i
    """
    p = _binomial(guesses, 1 / (1 + exp(-epsilon)))
    below = np.cumsum(p[:correct][::-1])  # P[v > W >= v - i] for i = 1, 2, ...
    steepest = float((below / np.arange(1, correct + 1)).max()) if correct else 0.0
    return min(1.0, float(p[correct:].sum()) + 2 * m * delta * steepest)


def _binomial(n: int, q: float) -> Array:
    """Return the probabilities of 0, 1, ..., n successes."""
    k = np.arange(n + 1)
    return np.asarray(np.exp(_log_choices(n) + k * log(q) + (n - k) * log(1 - q)))


@lru_cache(maxsize=64)
def _log_choices(n: int) -> Array:
    """Return the logarithms of the binomial coefficients."""
    factorials = np.array([lgamma(k + 1) for k in range(n + 1)])
    return np.asarray(factorials[n] - factorials - factorials[::-1])
