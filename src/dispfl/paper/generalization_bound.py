"""Theorem 1 of the paper (`dispfl bound`): a bound on the generalization gap through privacy.

With N samples, batches of tau, T steps, noise sigma, gradients of diameter D_g, and beta the
fraction of the weights that at least one peer keeps:

    epsilon~ = log(1 - tau/N + tau/N exp(x))
    where x = s sqrt(log(1/delta) / 2) + s^2 / 2 and s = beta D_g / (tau sigma)
    epsilon' = epsilon~ (sqrt(2 T log(1/delta~)) + T tanh(epsilon~ / 2))
    P[|gap| < 9 epsilon'] > 1 - exp(-epsilon') delta' / epsilon' ln(2 / epsilon')
    where N >= 2 / epsilon'^2 ln(16 exp(epsilon') / delta')

for a loss in [0, 1]; delta' is defined at `composed_log_delta`. Our reading where the theorem is
ambiguous:

- sigma is a standard deviation (the text says "variance", every formula has N(0, sigma^2 I)).
- delta is free: its definition in the appendix is solved by every delta in (0, 1). delta~ is free
  too.
- beta is squared in x, as in the theorem; one line of the proof omits the square.
- delta' has (T epsilon~ - epsilon') in denominators, so it exists only where T epsilon~ exceeds
  epsilon'.
- Where ln(2 / epsilon') pushes the probability above 1 or below 0, we report 1 or 0, which is also
  true.

`corrected` makes three repairs; only the last is a difference between the theorem and its proof
(docs/deviations.md):

- The privacy loss of a step contains 2 <W', v>, so the first term of x is twice as large: 2 s
  sqrt(log(1/delta) / 2).
- The Chernoff bound in delta' has exp(+(epsilon' + T epsilon~) / 2); the printed minus makes delta'
  far too small.
- After sub-sampling, a step's delta is tau delta / N; the printed delta is valid but larger.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeGuard

from rich.console import Console

from dispfl.core.train import batch_count
from dispfl.errors import ConfigError, RunError
from dispfl.terminal import number_table, print_text

ENDINGS = (".png", ".pdf", ".svg")
DENSITIES = tuple(n / 200 for n in range(1, 201))
"""The union densities of the figure."""


@dataclass(frozen=True)
class Premises:
    """The inputs of the theorem; every field is an option of `dispfl bound`, named by errors."""

    samples: float
    """N, the training samples of a peer."""
    batch: float
    """tau."""
    steps: float
    """T, the total number of local steps."""
    noise: float
    """sigma, the standard deviation of the noise on every gradient (`train.noise_std`)."""
    diameter: float
    """D_g, the largest distance between the gradients of two samples at the same weights."""
    union_density: float
    """beta, the fraction of the weights that at least one peer keeps; not a peer's own density."""
    delta: float = 1e-10
    """The probability that a step's privacy loss exceeds its bound.

    Over all steps it sums to about T times as much.
    """
    delta_tilde: float = 1e-5
    """The probability that the sum of all steps' losses exceeds epsilon'."""

    def __post_init__(self) -> None:
        for name in ("samples", "batch", "steps"):
            value = getattr(self, name)
            is_count = value >= 1 and float(value).is_integer()
            self._require(name, is_count, "a whole number of at least 1")
        fix = (
            "A batch cannot exceed the samples of a peer; lower it, or raise --samples (now"
            f" {self.samples:g})."
        )
        self._require("batch", self.batch <= self.samples, "at most --samples", fix)
        for name, fix in (("noise", "The theorem assumes noise in every step."), ("diameter", "")):
            self._require(name, 0 < getattr(self, name) < math.inf, "above 0 and finite", fix)
        beta = self.union_density
        fix = ""
        if 1 < beta <= 100:
            fix = f"For {beta:g}% of the weights write {beta / 100:g}."
        self._require("union_density", 0 <= beta <= 1, "in [0, 1]", fix)
        fix = "It is a small probability, such as 1e-5."
        for name in ("delta", "delta_tilde"):
            self._require(name, 0 < getattr(self, name) < 1, "in (0, 1)", fix)

    def _require(self, name: str, valid: bool, requirement: str, fix: str = "") -> None:
        if not valid:
            problem = f"{option(name)} must be {requirement}, got {getattr(self, name):.12g}."
            raise ConfigError(f"{problem} {fix}".rstrip())


def option(field: str) -> str:
    """Return `--union-density` for `union_density`."""
    return f"--{field.replace('_', '-')}"


@dataclass(frozen=True)
class GeneralizationBound:
    """The result of the theorem; None: does not exist, or exceeds the range of floats."""

    epsilon_step: float | None
    """epsilon~, the privacy of one step."""
    epsilon: float | None
    """epsilon', the privacy of all steps."""
    delta: float | None
    """delta', the probability that this privacy fails."""
    bound: float | None
    """9 epsilon': an upper bound on the gap between training and test error ..."""
    probability: float | None
    """... that holds with at least this probability."""
    conditions_hold: bool
    """Whether the theorem applies to these premises."""
    vacuous: bool
    """Whether the bound is trivial: 1 or more, or with probability 0."""
    notes: tuple[str, ...] = ()
    """Why the conditions do not hold, and why the bound is vacuous, in sentences."""

    def as_json(self) -> dict[str, Any]:
        """Return the numbers without the notes."""
        values = asdict(self)
        del values["notes"]
        return values


def theorem_1(premises: Premises, corrected: bool = False) -> GeneralizationBound:
    """Evaluate Theorem 1 as printed, or with its three errors corrected (see above)."""
    p = premises
    epsilon_step = step_epsilon(p, corrected)
    deviation = math.sqrt(-2 * p.steps * math.log(p.delta_tilde))
    ratio = deviation + p.steps * math.tanh(epsilon_step / 2)
    epsilon = epsilon_step * ratio
    delta = probability = needed = None
    if epsilon > 0 and ratio < p.steps:  # T epsilon~ > epsilon'
        log_delta = composed_log_delta(p, epsilon_step, ratio, corrected)
        delta = math.exp(log_delta)
        failure = _exp(log_delta - epsilon - math.log(epsilon)) * (math.log(2) - math.log(epsilon))
        probability = min(1.0, max(0.0, 1 - failure))
        needed = 2 / epsilon / epsilon * (math.log(16) + epsilon - log_delta)
    bound = GeneralizationBound(
        epsilon_step=_finite(epsilon_step),
        epsilon=_finite(epsilon),
        delta=delta,
        bound=_finite(9 * epsilon),
        probability=probability,
        conditions_hold=needed is not None and p.samples >= needed,
        vacuous=9 * epsilon >= 1 or probability == 0,
    )
    notes = [*_broken_conditions(p, bound, ratio, needed), *_why_vacuous(bound)]
    return replace(bound, notes=tuple(notes))


def step_epsilon(p: Premises, corrected: bool = False) -> float:
    """Return epsilon~: the privacy loss of one step on tau of N samples drawn at random."""
    s = p.union_density * p.diameter / p.batch / p.noise
    factor = 2 if corrected else 1
    x = factor * s * math.sqrt(-math.log(p.delta) / 2) + s * s / 2
    q = p.batch / p.samples
    if x < 700:  # exp does not overflow, and no digit of a small x is lost
        return math.log1p(q * math.expm1(x))
    return x + math.log(q)


def composed_log_delta(
    p: Premises, epsilon_step: float, ratio: float, corrected: bool = False
) -> float:
    """Return log delta', where `ratio` is epsilon' / epsilon~, below T.

    With e for epsilon~ and r for ratio / T:

    exp(-(e' + T e)/2) (1/(1+exp e) 2T e/(T e-e'))^T ((T e+e')/(T e-e'))^(-(e'+T e)/2e)
      = exp(-T [e (1 + r/2) + log cosh(e/2) + h(r)]),  2 h(r) = (1+r) log(1+r) + (1-r) log(1-r)

    plus 1 - (1-a)^k (1-b)^(T-k) and 1 - (1-b)^T, where a = d exp(e) / (1+exp e), b = d / (1+exp e),
    k = ceil of the ratio, d = delta. Corrected, the exponent is -T [h(r) + log cosh(e/2) - r e/2]:
    the Chernoff bound of T coin flips with odds exp(e) at deviation r.
    """
    e = epsilon_step
    T = p.steps
    r = ratio / T
    h = ((1 + r) * math.log1p(r) + (1 - r) * math.log1p(-r)) / 2
    log_cosh = e / 2 + math.log1p(math.exp(-e)) - math.log(2)
    if corrected:
        log_tail = -T * (h + log_cosh - r * e / 2)
        d = p.delta * p.batch / p.samples
    else:
        log_tail = -T * (h + log_cosh + e * (1 + r / 2))
        d = p.delta
    a = d / (1 + math.exp(-e))
    b = d / (1 + math.exp(e))
    k = math.ceil(ratio)
    some_steps = -math.expm1(k * math.log1p(-a) + (T - k) * math.log1p(-b))
    all_steps = -math.expm1(T * math.log1p(-b))
    failures = some_steps + all_steps
    log_failures = math.log(failures) if failures else -math.inf
    low, high = sorted((log_tail, log_failures))
    return high + math.log1p(math.exp(low - high))


def _exp(x: float) -> float:
    if x >= 700:
        return math.inf
    return math.exp(x)


def _finite(value: float) -> float | None:
    if not math.isfinite(value):
        return None
    return value


def _broken_conditions(
    p: Premises, bound: GeneralizationBound, ratio: float, needed: float | None
) -> Iterator[str]:
    start = "The theorem's conditions do not hold:"
    if bound.epsilon == 0:
        yield f"{start} epsilon' is 0, the result reveals no sample, and delta' does not exist."
    elif needed is None:
        expected = p.steps * math.tanh((bound.epsilon_step or math.inf) / 2)  # part of the ratio
        fix = "More --steps or a larger --delta-tilde"
        if expected > ratio / 2:
            fix = "More --noise"
        yield (
            f"{start} delta' exists only where epsilon' / epsilon~ ({ratio:.6g}) is below the"
            f" number of steps ({p.steps:g}). {fix} would help."
        )
    elif p.samples < needed:
        count = f"{min(needed, 1e300):.3g}"
        if needed < 1e15:
            count = f"{math.ceil(needed):,}"
        yield (
            f"{start} a bound this small needs {count} samples or more, and a peer has"
            f" {p.samples:,.0f}."
        )


def _why_vacuous(bound: GeneralizationBound) -> Iterator[str]:
    if bound.bound is None or bound.bound >= 1:
        size = "more than can be computed"
        if bound.bound is not None:
            size = f"{bound.bound:.4g}"
        yield (
            f"The bound is vacuous: it allows a gap of {size}, and a gap between errors cannot"
            " exceed 1."
        )
    elif bound.probability == 0:
        yield "The bound is vacuous: the probability with which it holds may be 0."


def premises_of_run(path: Path) -> tuple[dict[str, float], list[str]]:
    """Return the premises that a run determines, by name, and notes about them.

    Where peers have different numbers of samples, N is the smallest and T follows from the largest,
    so that the bound is not too small. An interrupted run counts up to its newest checkpoint.
    """
    # Imports torch, which the rest of this module does not need.
    from dispfl.runs.directory import final_states, label_counts, read_config, saved_rounds

    config = read_config(path)
    rounds = saved_rounds(path)
    counts = label_counts(path)
    for key in ("peers", "rounds", "train", "method"):
        _require_key(path, config, key)
    if counts is None:
        _require_key(path, config, "samples")
        samples = config["samples"]
    else:
        samples = counts.sum(1).tolist()

    states = list(final_states(path).values())[: config["peers"]]  # the server is last
    union = states[0].model.mask.unpack()
    for state in states[1:]:
        union |= state.model.mask.unpack()

    train = config["train"]
    batches = max(batch_count(size, train["batch_size"]) for size in samples)
    steps_per_round = train.get("steps") or train["epochs"] * batches
    premises = {
        "samples": min(samples),
        "batch": min(samples) if batches == 1 else min(train["batch_size"], *samples),
        "steps": rounds * steps_per_round,
        "union_density": int(union.sum()) / union.numel(),
    }
    if train.get("noise_std"):
        premises["noise"] = train["noise_std"]
    return premises, list(_notes_on_run(path, config, rounds))


def _require_key(path: Path, config: Mapping[str, Any], key: str) -> None:
    if key not in config:
        raise RunError(
            f"{path / 'config.toml'} has no {key!r}, a key that every run writes; restore it."
        )


def _notes_on_run(path: Path, config: Mapping[str, Any], rounds: int) -> Iterator[str]:
    method = config["method"]
    if method.get("structure") == "channels":
        yield "The masks are of channels; the union density is that of the weights that they keep."
    if rounds < config["rounds"]:
        yield (
            f"{path} has finished {rounds} of {config['rounds']} rounds; the steps are those of the"
            " finished ones."
        )
    if method["name"] != "dispfl":
        yield (
            f"The theorem is about Dis-PFL; the number of steps of {method['name']} may differ from"
            " rounds x epochs x batches."
        )


def print_bound(
    premises: Premises, bound: GeneralizationBound, corrected: bool, console: Console
) -> None:
    """Print the numbers of the theorem and its premises."""
    p = premises
    version = "corrected" if corrected else "as printed"
    table = number_table(f"Theorem 1, {version}", "", "value", names=2)
    for name, meaning, value in (
        ("epsilon~", "privacy loss of one step", bound.epsilon_step),
        ("epsilon'", "privacy loss of all steps", bound.epsilon),
        ("delta'", "probability that the loss is larger", bound.delta),
        ("bound", "the gap is below 9 epsilon' ...", bound.bound),
        ("probability", "... with at least this probability", bound.probability),
    ):
        table.add_row(name, meaning, "–" if value is None else f"{value:.6g}")
    console.print("", table, "", sep="\n")
    print_text(
        console,
        f"N = {p.samples:.12g}, batch = {p.batch:.12g}, T = {p.steps:.12g}, sigma = {p.noise:g},"
        f" D_g = {p.diameter:g}, union density = {p.union_density:.6g}, delta = {p.delta:g}, delta~"
        f" = {p.delta_tilde:g}",
        "dim",
    )
    if not corrected:
        note = "--corrected fixes three errors of the printed theorem (docs/deviations.md)."
        print_text(console, note, "dim")


def plot_bound(premises: Premises, to: Path, corrected: bool = False) -> None:
    """Draw the bound against the union density, with the given premises marked."""
    from matplotlib.figure import Figure  # slow to import

    from dispfl.report.plots import save_figure

    if to.suffix.lower() not in ENDINGS:
        raise ConfigError(
            f"--plot must end in {', '.join(ENDINGS)}, got {to.name!r}.", key="--plot"
        )
    curves = _bounds_by_density(premises, corrected)
    if not curves:
        raise ConfigError(
            "--plot has nothing to draw: at no density is the bound between 1e-200 and 1e200.",
            key="--plot",
        )

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    for conditions_hold, label, style in (
        (True, "conditions hold", "-"),
        (False, "conditions do not hold", ":"),
    ):
        if conditions_hold in curves:
            axes.plot(DENSITIES, curves[conditions_hold], style, color="C0", label=label)
    marked = theorem_1(premises, corrected).bound
    if _drawable(marked):
        label = f"here: {marked:.3g}"
        axes.plot(premises.union_density, marked, "o", color="C1", label=label, zorder=3)
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, 0.5), max(high, 2))
    label = "vacuous: a gap cannot exceed 1"
    axes.axhspan(1, axes.get_ylim()[1], color="grey", alpha=0.15, linewidth=0, label=label)
    axes.set(
        xlim=(0, 1),
        xlabel="union density β: fraction of the weights that at least one peer keeps",
        ylabel="bound on the generalization gap, 9ε′",
    )
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=3, fontsize="small", frameon=False)
    save_figure(figure, to)


def _bounds_by_density(premises: Premises, corrected: bool) -> dict[bool, list[float]]:
    """Return the bounds where the theorem's conditions hold, and where not, each if there are any.

    Both have an entry for every density, NaN where there is nothing to draw.
    """
    curves: dict[bool, list[float]] = {}
    for index, beta in enumerate(DENSITIES):
        bound = theorem_1(replace(premises, union_density=beta), corrected)
        if _drawable(bound.bound):
            nothing = [math.nan] * len(DENSITIES)
            curves.setdefault(bound.conditions_hold, nothing)[index] = bound.bound
    return curves


def _drawable(bound: float | None) -> TypeGuard[float]:
    return bound is not None and 1e-200 < bound < 1e200
