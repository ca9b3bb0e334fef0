"""Theorem 1 of the paper: how far training and test error can lie apart, through differential privacy.

With N samples, batches of tau, T steps, noise sigma, gradients of diameter D_g, and beta the share of the weights that
at least one peer keeps:

    epsilon~ = log(1 - tau/N + tau/N exp(x)),  x = s sqrt(log(1/delta) / 2) + s^2 / 2,  s = beta D_g / (tau sigma)
    epsilon' = epsilon~ (sqrt(2 T log(1/delta~)) + T tanh(epsilon~ / 2))
    P[|gap| < 9 epsilon'] > 1 - exp(-epsilon') delta' / epsilon' ln(2 / epsilon')
    where N >= 2 / epsilon'^2 ln(16 exp(epsilon') / delta')

for a loss in [0, 1]; delta' stands at `composed_log_delta`. How we read the theorem where it can be read in two ways:

- sigma is a standard deviation (the text says "variance", every formula has N(0, sigma^2 I)).
- delta is free: its definition in the appendix is solved by every delta in (0, 1). delta~ is free too.
- beta is squared in x, as the theorem has it; one line of the proof leaves the square out.
- delta' has (T epsilon~ - epsilon') in denominators, so it exists only where T epsilon~ exceeds epsilon'.
- Where ln(2 / epsilon') pushes the probability above 1 or below 0, we report 1 or 0, which is true as well.

`corrected` repairs three slips by which the printed theorem differs from its own proof (docs/deviations.md):

- The privacy loss of a step holds 2 <W', v>, so the first term of x is twice as large: 2 s sqrt(log(1/delta) / 2).
- The Chernoff bound in delta' has exp(+(epsilon' + T epsilon~) / 2); printed is a minus, and a delta' far too small.
- After sub-sampling a step's delta is tau delta / N; printed is delta, which is safe but larger.
"""

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from dispfl.errors import ConfigError


@dataclass(frozen=True)
class Premises:
    """What the theorem is told; every field is an option of `dispfl bound`, and refused in its name."""

    samples: float
    """N, training samples of a peer."""
    batch: float
    """tau."""
    steps: float
    """T, local steps in total."""
    noise: float
    """sigma, the standard deviation of the noise on every gradient (`train.noise`)."""
    diameter: float
    """D_g, the largest distance between the gradients of two samples at the same weights."""
    union_density: float
    """beta, the share of the weights that at least one peer keeps; not a peer's own density."""
    delta: float = 1e-10
    """The chance that a step's privacy loss exceeds its bound. Over all steps it adds up to about T times as much."""
    delta_tilde: float = 1e-5
    """The chance that the sum of all steps' losses exceeds epsilon'."""

    def __post_init__(self) -> None:
        for name in ("samples", "batch", "steps"):
            value = getattr(self, name)
            self._demand(name, value >= 1 and float(value).is_integer(), "a whole number of at least 1")
        fix = f"A step cannot take more than the peer has; lower it, or raise --samples (now {self.samples:g})."
        self._demand("batch", self.batch <= self.samples, "at most --samples", fix)
        for name, fix in (("noise", "The theorem is about steps with noise."), ("diameter", "")):
            self._demand(name, 0 < getattr(self, name) < math.inf, "above 0 and finite", fix)
        beta = self.union_density
        fix = f"For {beta:g}% of the weights write {beta / 100:g}." if 1 < beta <= 100 else ""
        self._demand("union_density", 0 <= beta <= 1, "in [0, 1]", fix)
        for name in ("delta", "delta_tilde"):
            self._demand(name, 0 < getattr(self, name) < 1, "in (0, 1)", "It is a small probability, such as 1e-5.")

    def _demand(self, name: str, fine: bool, wanted: str, fix: str = "") -> None:
        if not fine:
            said = f"{option(name)} must be {wanted}, got {getattr(self, name):.12g}."
            raise ConfigError(f"{said} {fix}".rstrip())


def option(field: str) -> str:
    """`--union-density` for `union_density`."""
    return f"--{field.replace('_', '-')}"


@dataclass(frozen=True)
class Bound:
    """What the theorem says; None is a number that does not exist, or that no floating point number can hold."""

    epsilon_step: float | None
    """epsilon~, the privacy of one step."""
    epsilon: float | None
    """epsilon', the privacy of all steps."""
    delta: float | None
    """delta', the chance that this privacy fails."""
    bound: float | None
    """9 epsilon': the gap between training and test error is smaller than this ..."""
    probability: float | None
    """... with at least this probability."""
    conditions_hold: bool
    """Whether the theorem says anything at all about these premises."""
    vacuous: bool
    """Whether it says nothing that is not known anyway: a gap below 1 or more, or with a probability of 0."""
    notes: tuple[str, ...] = ()
    """Why the conditions do not hold, and why the bound is vacuous, in sentences."""

    def as_json(self) -> dict[str, Any]:
        """The numbers, without the sentences."""
        values = asdict(self)
        del values["notes"]
        return values


def theorem_1(premises: Premises, corrected: bool = False) -> Bound:
    """Evaluate Theorem 1 as it is printed, or with its three slips repaired (see the top of this file)."""
    p = premises
    epsilon_step = step_epsilon(p, corrected)
    ratio = math.sqrt(-2 * p.steps * math.log(p.delta_tilde)) + p.steps * math.tanh(epsilon_step / 2)
    epsilon = epsilon_step * ratio
    log_delta = probability = needed = None
    if epsilon > 0 and ratio < p.steps:  # T epsilon~ > epsilon'
        log_delta = composed_log_delta(p, epsilon_step, ratio, corrected)
        failure = _exp(log_delta - epsilon - math.log(epsilon)) * (math.log(2) - math.log(epsilon))
        probability = min(1.0, max(0.0, 1 - failure))
        needed = 2 / epsilon / epsilon * (math.log(16) + epsilon - log_delta)
    found = Bound(
        epsilon_step=_finite(epsilon_step),
        epsilon=_finite(epsilon),
        delta=None if log_delta is None else math.exp(log_delta),
        bound=_finite(9 * epsilon),
        probability=probability,
        conditions_hold=needed is not None and p.samples >= needed,
        vacuous=9 * epsilon >= 1 or probability == 0,
    )
    return replace(found, notes=(*_broken_conditions(p, found, ratio, needed), *_emptiness(found)))


def step_epsilon(p: Premises, corrected: bool = False) -> float:
    """epsilon~: what one step reveals of one sample, when it sees tau of N at random."""
    s = p.union_density * p.diameter / p.batch / p.noise
    x = (2 if corrected else 1) * s * math.sqrt(-math.log(p.delta) / 2) + s * s / 2
    q = p.batch / p.samples
    if x < 700:  # exp still fits, and for a small x no digit of it is lost
        return math.log1p(q * math.expm1(x))
    return x + math.log(q)


def composed_log_delta(p: Premises, epsilon_step: float, ratio: float, corrected: bool = False) -> float:
    """log delta', where `ratio` is epsilon' / epsilon~, below T. With e for epsilon~ and r for ratio / T:

    exp(-(e' + T e)/2) (1/(1+exp e) 2T e/(T e-e'))^T ((T e+e')/(T e-e'))^(-(e'+T e)/2e)
      = exp(-T [e (1 + r/2) + log cosh(e/2) + h(r)]),  2 h(r) = (1+r) log(1+r) + (1-r) log(1-r)

    and to it are added 1 - (1-a)^k (1-b)^(T-k) and 1 - (1-b)^T, a = d exp(e) / (1+exp e), b = d / (1+exp e), k = ceil
    of the ratio, d = delta. Corrected, the exponent is -T [h(r) + log cosh(e/2) - r e/2]: what T coins that fall with
    odds exp(e) have against a deviation r.
    """
    e, T, r = epsilon_step, p.steps, ratio / p.steps
    h = ((1 + r) * math.log1p(r) + (1 - r) * math.log1p(-r)) / 2
    log_cosh = e / 2 + math.log1p(math.exp(-e)) - math.log(2)
    log_tail = -T * (h + log_cosh + (-r * e / 2 if corrected else e * (1 + r / 2)))
    d = p.delta * p.batch / p.samples if corrected else p.delta
    a, b, k = d / (1 + math.exp(-e)), d / (1 + math.exp(e)), math.ceil(ratio)
    slips = -math.expm1(k * math.log1p(-a) + (T - k) * math.log1p(-b)) - math.expm1(T * math.log1p(-b))
    log_slips = math.log(slips) if slips else -math.inf
    low, high = sorted((log_tail, log_slips))
    return high + math.log1p(math.exp(low - high))


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _broken_conditions(p: Premises, found: Bound, ratio: float, needed: float | None) -> list[str]:
    start = "The theorem's conditions do not hold:"
    if found.epsilon == 0:
        return [f"{start} epsilon' is 0, no sample can be told from the result, and delta' does not exist."]
    if needed is None:
        expected = p.steps * math.tanh((found.epsilon_step or math.inf) / 2)  # of the ratio; the rest is for bad luck
        fix = "More --noise" if expected > ratio / 2 else "More --steps or a larger --delta-tilde"
        why = f"delta' exists only where epsilon' / epsilon~ ({ratio:.6g}) is below the number of steps ({p.steps:g})"
        return [f"{start} {why}. {fix} would help."]
    if p.samples < needed:
        asked = f"{math.ceil(needed):,}" if needed < 1e15 else f"{min(needed, 1e300):.3g}"
        return [f"{start} a bound this small asks for {asked} samples or more, and a peer has {p.samples:,.0f}."]
    return []


def _emptiness(found: Bound) -> list[str]:
    if found.bound is None or found.bound >= 1:
        size = "more than can be computed" if found.bound is None else f"{found.bound:.4g}"
        return [f"The bound is vacuous: it allows a gap of {size}, and a gap between errors cannot exceed 1."]
    if found.probability == 0:
        return ["The bound is vacuous: the probability with which it holds may be 0."]
    return []
