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
"""The shares of the canaries that are guessed, the most certain ones. The best share counts, at a
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
    """Guess that the canaries with the highest scores were trained on, and the lowest were not."""
    m = len(scores)
    order = np.argsort(-scores, kind="stable")
    error = (1 - CONFIDENCE) / len(SHARES)
    best = Guesses(m, 0, 0, 0.0, 0.0)
    largest = 0.0
    for share in SHARES:
        half = int(share * m / 2)
        if not half:
            continue
        r = 2 * half
        v = int(inside[order[:half]].sum() + (~inside[order[-half:]]).sum())
        epsilon = epsilon_bound(m, r, v, delta, error)
        largest = max(largest, epsilon_bound(m, r, r, delta, error))
        if best.guesses == 0 or epsilon > best.epsilon:
            best = Guesses(m, r, v, epsilon, largest)
    return replace(best, largest=largest)


def residuals(scores: Array, expected: Array) -> Array:
    """Return the scores less what a line through all of them predicts from the expected ones.

    Where canaries are learned by heart, scores hardly depend on what was expected; where little is
    learned, they follow it. The line is fitted without the coins, so residuals are valid scores.
    """
    x = expected - expected.mean()
    slope = (x * scores).sum() / max(float((x * x).sum()), 1e-12)
    return np.asarray(scores - scores.mean() - slope * x)


def epsilon_bound(m: int, guesses: int, correct: int, delta: float, error: float) -> float:
    """Return the largest epsilon under which so many correct guesses are this improbable.

    That is with a probability of at most `error`; 0 if there is none.
    """
    if p_value(m, guesses, correct, 0.0, delta) > error:
        return 0.0
    low = 0.0
    high = LARGEST_EPSILON
    while high - low > 1e-4:
        middle = (low + high) / 2
        if p_value(m, guesses, correct, middle, delta) > error:
            high = middle
        else:
            low = middle
    return low


def p_value(m: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """Return a bound of the probability of so many correct guesses about m coins.

    The main theorem of Steinke et al. on (epsilon, delta)-privacy, for r guesses, v of them right,
    and W ~ Binomial(r, e^epsilon / (1 + e^epsilon)):

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
