"""What private training spends: the epsilon of Poisson-sampled Gaussian steps.

The accountants are those of `dp-accounting`. Two data sets are neighbours if they have equally many
samples and one sample of one of them is blank in the other: its gradients are zero (zero-out
adjacency, whose loss is that of a sample more or less at the same sampling rate). Every step of a
peer is one Gaussian mechanism on a Poisson sample of its data; steps compose, whatever the model
and the mask were before each of them, because these depend on the data through earlier steps only.

Two upper bounds are computed, and the smaller one counts: by Rényi differential privacy (Mironov et
al., 2019) of whole orders, and by privacy loss distributions (Koskela et al., 2020; Doroshenko et
al., 2022), discretized so that they never lose less than the mechanism.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from math import sqrt
from typing import TYPE_CHECKING

from dispfl.errors import ConfigError

if TYPE_CHECKING:
    from dp_accounting import PrivacyAccountant

ORDERS = (*range(2, 65), 80, 96, 128, 192, 256, 512, 1024)
LOSS_INTERVAL = 1e-3
"""The distance of two losses of a discretized distribution, up to 1,000 steps: a finer one lowers
epsilon by less than a hundredth, and takes longer."""
LARGEST_LOSS = 50.0
"""No distribution is computed for a larger epsilon, which promises nothing: it would be long."""
MOST_STEPS = 100_000
"""Nor for more steps, which takes seconds."""
SMALLEST_DELTA = 1e-10
"""Nor for a smaller delta, which rounding in the Fourier transform could hide."""
LARGEST_NOISE = 1e4
TOLERANCE = 1e-3
"""Relative precision of the solved noise; it is rounded up."""


@dataclass(frozen=True)
class StepsTaken:
    """Private steps of a peer with the same sampling rate and noise multiplier."""

    rate: float
    noise_multiplier: float
    steps: int


@dataclass(frozen=True)
class PrivateHistory:
    """The rounds of private training that a real site has begun, and the steps they spent."""

    rounds: int = 0
    taken: tuple[StepsTaken, ...] = ()


@dataclass(frozen=True)
class PrivacyPlan:
    """The private training of a peer with some number of samples."""

    rate: float
    """The probability q with which a sample is in a batch."""
    steps_per_round: int
    noise_multiplier: float
    delta: float
    epsilon: float | None
    """The budget."""
    max_steps: int | None
    """Steps that the budget allows; None without a budget."""
    earlier: tuple[StepsTaken, ...] = ()
    """Steps with another sampling rate or noise, before a site's settings or data were changed."""

    def spent(self, steps: int) -> float:
        """Return the epsilon of this many steps, after the earlier ones."""
        return spent_epsilon(self.rate, self.noise_multiplier, steps, self.delta, self.earlier)

    def steps_in(self, history: PrivateHistory) -> int:
        """Return the steps that were taken as this plan takes them."""
        return sum(taken.steps for taken in history.taken if self._is_planned(taken))

    def after(self, history: PrivateHistory) -> "PrivacyPlan":
        """Return the plan with what is left of its budget after steps taken otherwise."""
        earlier = tuple(taken for taken in history.taken if not self._is_planned(taken))
        if not earlier:
            return self
        if self.epsilon is None:
            return replace(self, earlier=earlier)
        max_steps = steps_within(
            self.rate, self.noise_multiplier, self.epsilon, self.delta, earlier
        )
        return replace(self, earlier=earlier, max_steps=max_steps)

    def begin_round(self, history: PrivateHistory) -> PrivateHistory | None:
        """Return the history with one more round of this plan; None if the budget is too small."""
        plan = self.after(history)
        steps = self.steps_in(history) + self.steps_per_round
        if plan.max_steps is not None and steps > plan.max_steps:
            return None
        planned = StepsTaken(self.rate, self.noise_multiplier, steps)
        return PrivateHistory(history.rounds + 1, (*plan.earlier, planned))

    def _is_planned(self, taken: StepsTaken) -> bool:
        return (taken.rate, taken.noise_multiplier) == (self.rate, self.noise_multiplier)


@lru_cache(maxsize=1024)
def make_plan(
    epsilon: float | None,
    delta: float,
    noise: float | None,
    samples: int,
    batch: int,
    steps: int,
    rounds: int,
) -> PrivacyPlan:
    """Return the plan of a peer that takes this many steps in a round.

    A budget that does not last for one round is refused, and so is a delta that promises nothing.
    """
    if delta * samples >= 1:
        raise ConfigError(
            f"privacy.delta must be below one over the number of a peer's samples, {1 / samples:g}"
            f" for {samples}, got {delta:g}. With a larger one a whole sample may be published.",
            key="privacy.delta",
        )
    rate = min(1.0, batch / samples)
    if noise is None:
        assert epsilon is not None
        noise = noise_for(rate, steps * rounds, epsilon, delta)
    if epsilon is None:
        return PrivacyPlan(rate, steps, noise, delta, epsilon=None, max_steps=None)
    max_steps = steps_within(rate, noise, epsilon, delta)
    if max_steps < steps:
        raise ConfigError(
            f"privacy.epsilon={epsilon:g} does not last for one round of {steps} steps with"
            f" privacy.noise_multiplier={noise:g}, which spends"
            f" {spent_epsilon(rate, noise, steps, delta):.3g}. Use a larger epsilon or noise"
            " multiplier, fewer train.epochs, or a smaller train.batch_size.",
            key="privacy.epsilon",
        )
    return PrivacyPlan(rate, steps, noise, delta, epsilon, max_steps)


@lru_cache(maxsize=4096)
def spent_epsilon(
    rate: float, noise: float, steps: int, delta: float, earlier: tuple[StepsTaken, ...] = ()
) -> float:
    """Return the epsilon of steps with this sampling rate and noise, and of earlier steps."""
    all_steps = (*earlier, StepsTaken(rate, noise, steps))
    epsilon = renyi_epsilon(all_steps, delta)
    number = sum(taken.steps for taken in all_steps)
    if not number or epsilon > LARGEST_LOSS or number > MOST_STEPS or delta < SMALLEST_DELTA:
        return epsilon
    # The error of a distribution grows with the steps and with the square of its interval.
    interval = LOSS_INTERVAL / sqrt(max(1.0, number / 1000))
    return min(epsilon, loss_epsilon(all_steps, delta, interval))


@lru_cache(maxsize=4096)
def renyi_epsilon(all_steps: tuple[StepsTaken, ...], delta: float) -> float:
    """Return the epsilon of steps by Rényi differential privacy.

    Divergences of the same order add up, whatever the rate and the noise of a step.
    """
    from dp_accounting.rdp import RdpAccountant  # slow to import

    return _composed(RdpAccountant(ORDERS), all_steps, delta)


def loss_epsilon(
    all_steps: tuple[StepsTaken, ...], delta: float, interval: float = LOSS_INTERVAL
) -> float:
    """Return the epsilon of steps by the distribution of their privacy loss, discretized upwards.

    The distribution of several steps is the convolution of theirs.
    """
    from dp_accounting.pld import PLDAccountant

    accountant = PLDAccountant(value_discretization_interval=interval)
    return _composed(accountant, all_steps, delta)


def _composed(
    accountant: "PrivacyAccountant", all_steps: tuple[StepsTaken, ...], delta: float
) -> float:
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent

    number = 0
    for taken in all_steps:
        if taken.steps:
            step = PoissonSampledDpEvent(taken.rate, GaussianDpEvent(taken.noise_multiplier))
            accountant.compose(step, taken.steps)
            number += taken.steps
    return float(accountant.get_epsilon(delta)) if number else 0.0


@lru_cache(maxsize=256)
def noise_for(rate: float, steps: int, epsilon: float, delta: float) -> float:
    """Return the smallest noise multiplier, rounded up, that keeps the steps within epsilon."""

    def renyi_fits(noise: float) -> bool:
        return renyi_epsilon((StepsTaken(rate, noise, steps),), delta) <= epsilon

    low = 0.0
    high = 1.0
    while not renyi_fits(high):
        low = high
        high *= 2
        if high > LARGEST_NOISE:
            raise ConfigError(
                f"privacy.epsilon={epsilon:g} cannot be reached with {steps} steps, whatever the"
                " noise. Use more.",
                key="privacy.epsilon",
            )
    high = _least(renyi_fits, low, high)
    # The tighter bound, which takes longer, needs no less than half of that noise.
    return _least(lambda noise: spent_epsilon(rate, noise, steps, delta) <= epsilon, high / 2, high)


def _least(fits: Callable[[float], bool], low: float, high: float) -> float:
    """Return the least number between the two that fits, rounded up; the high one does."""
    while high - low > TOLERANCE * high:
        middle = (low + high) / 2
        if fits(middle):
            high = middle
        else:
            low = middle
    return high


@lru_cache(maxsize=256)
def steps_within(
    rate: float, noise: float, epsilon: float, delta: float, earlier: tuple[StepsTaken, ...] = ()
) -> int:
    """Return how many steps stay within epsilon, after the earlier ones."""

    def renyi_fits(steps: int) -> bool:
        return renyi_epsilon((*earlier, StepsTaken(rate, noise, steps)), delta) <= epsilon

    def fits(steps: int) -> bool:
        return spent_epsilon(rate, noise, steps, delta, earlier) <= epsilon

    # The tighter bound, which takes longer, allows at least as many.
    return _most(fits, _most(renyi_fits, 0))


def _most(fits: Callable[[int], bool], low: int) -> int:
    """Return the largest number that fits, at least the low one."""
    distance = 1
    while distance < 1 << 30 and fits(low + distance):
        distance *= 2
    high = low + distance
    low += distance // 2
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low
