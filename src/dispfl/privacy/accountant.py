"""What private training spends: the epsilon of Poisson-sampled Gaussian steps.

The accountants are those of `dp-accounting`. Two data sets are neighbours if one has one sample
more. Every step of a peer is one Gaussian mechanism on a Poisson sample of its data; steps compose,
whatever the model and the mask were before each of them, because these depend on the data through
earlier steps only. `spent_epsilon` uses Rényi differential privacy (Mironov et al., 2019) of whole
orders, which is quick; `tight_epsilon` computes privacy loss distributions, which is slower and
tighter.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from dispfl.errors import ConfigError

if TYPE_CHECKING:
    from dp_accounting import DpEvent

ORDERS = (*range(2, 65), 80, 96, 128, 192, 256, 512, 1024)
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
    """Return the epsilon of steps with this sampling rate and noise, and of earlier steps.

    By Rényi differential privacy: divergences of the same order add up, whatever the rate and the
    noise of a step.
    """
    from dp_accounting.rdp import RdpAccountant  # slow to import

    accountant = RdpAccountant(ORDERS)
    all_steps = [*earlier, StepsTaken(rate, noise, steps)]
    if not any(taken.steps for taken in all_steps):
        return 0.0
    for taken in all_steps:
        if taken.steps:
            accountant.compose(_event(taken.rate, taken.noise_multiplier, taken.steps))
    return float(accountant.get_epsilon(delta))


def tight_epsilon(rate: float, noise: float, steps: int, delta: float) -> float:
    """Return the epsilon of steps by privacy loss distributions.

    An upper bound as well, and smaller; it takes seconds.
    """
    from dp_accounting.pld import PLDAccountant

    if not steps:
        return 0.0
    accountant = PLDAccountant().compose(_event(rate, noise, steps))
    return float(accountant.get_epsilon(delta))


def _event(rate: float, noise: float, steps: int) -> "DpEvent":
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent

    return SelfComposedDpEvent(PoissonSampledDpEvent(rate, GaussianDpEvent(noise)), steps)


@lru_cache(maxsize=256)
def noise_for(rate: float, steps: int, epsilon: float, delta: float) -> float:
    """Return the smallest noise multiplier, rounded up, that keeps the steps within epsilon."""
    low = 0.0
    high = 1.0
    while spent_epsilon(rate, high, steps, delta) > epsilon:
        low = high
        high *= 2
        if high > LARGEST_NOISE:
            raise ConfigError(
                f"privacy.epsilon={epsilon:g} cannot be reached with {steps} steps, whatever the"
                " noise. Use more.",
                key="privacy.epsilon",
            )
    while high - low > TOLERANCE * high:
        middle = (low + high) / 2
        if spent_epsilon(rate, middle, steps, delta) > epsilon:
            low = middle
        else:
            high = middle
    return high


@lru_cache(maxsize=256)
def steps_within(
    rate: float, noise: float, epsilon: float, delta: float, earlier: tuple[StepsTaken, ...] = ()
) -> int:
    """Return how many steps stay within epsilon, after the earlier ones."""
    high = 1
    while spent_epsilon(rate, noise, high, delta, earlier) <= epsilon and high < 1 << 30:
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        if spent_epsilon(rate, noise, middle, delta, earlier) <= epsilon:
            low = middle
        else:
            high = middle
    return low
