"""`dispfl privacy`: what a privacy budget costs, before anything is trained."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from dispfl.cli.completion import complete_config_and_settings
from dispfl.errors import ConfigError

if TYPE_CHECKING:
    from dispfl.core.train import Train
    from dispfl.experiment import Experiment


def privacy(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONFIG.toml] [KEY=VALUE]...",
            help="A config file, then overrides.",
            autocompletion=complete_config_and_settings,
        ),
    ] = None,
    epsilon: Annotated[float | None, typer.Option(help="The budget: privacy.epsilon.")] = None,
    delta: Annotated[float | None, typer.Option(help="privacy.delta; default: 1e-5.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print how much noise a privacy budget needs, and how many rounds it lasts, without training.

    The guarantee covers each sample of a peer, against everybody else, in
    all that the peer ever publishes.

    Example: dispfl privacy --epsilon 4 --delta 1e-5 rounds=50 train.batch_size=16
    """
    from dispfl.cli.run import split_config
    from dispfl.config import compose, read_toml
    from dispfl.extras import require
    from dispfl.round.context import check_private_method

    require("privacy", "dispfl privacy")
    file, overrides = split_config(arguments or [])
    if epsilon is not None:
        overrides.append(f"privacy.epsilon={epsilon!r}")
    if delta is not None:
        overrides.append(f"privacy.delta={delta!r}")
    experiment = compose(read_toml(file) if file else {}, overrides)
    if not experiment.privacy.enabled:
        raise ConfigError("Give a budget, --epsilon 4, or the noise: privacy.noise_multiplier=1.")
    check_private_method(experiment.method)
    costs = budget_costs(experiment)
    if as_json:
        typer.echo(json.dumps(asdict(costs[0]), indent=2))
    else:
        _print_costs(experiment, costs)


@dataclass(frozen=True)
class BudgetCost:
    """What a privacy budget costs a peer."""

    samples: int
    sampling_rate: float
    steps_per_round: int
    noise_multiplier: float
    clip: float
    delta: float
    training_rounds: int
    """The rounds in which the peer trains; with schedule=async its own steps."""
    rounds: int
    """How many of them the budget lasts."""
    epsilon_first_round: float
    epsilon: float
    """What these rounds spend."""


def budget_costs(experiment: "Experiment") -> list[BudgetCost]:
    """Return what an experiment's budget costs peers that differ, the one that needs most first.

    They differ by the class of their device and, where nobody waits, by their numbers of steps.
    """
    if experiment.is_async and experiment.has_clock:
        costs = _async_costs(experiment)
    else:
        trains = [experiment.train]
        if experiment.classes:
            trains = [
                device.train.applied_to(experiment.train) for device in experiment.classes.values()
            ]
        samples = _samples(experiment)
        rounds = _training_rounds(experiment)
        costs = [_cost_of(experiment, train, samples, rounds) for train in trains]
    return sorted(costs, key=lambda cost: (cost.noise_multiplier, cost.epsilon), reverse=True)


def _async_costs(experiment: "Experiment") -> list[BudgetCost]:
    """Return the costs of peers of which each takes as many steps as its device can."""
    from dispfl.runs.async_clock import steps_in_run
    from dispfl.runs.prepare import prepare

    experiment.check_async_simulation()
    _, _, context = prepare(experiment)
    costs = {}
    for peer, steps in steps_in_run(context).items():
        workload = (context.train_of(peer), len(context.data.peers[peer].train), steps)
        if workload not in costs:
            costs[workload] = _cost_of(experiment, *workload)
    return list(costs.values())


def _cost_of(experiment: "Experiment", train: "Train", samples: int, rounds: int) -> BudgetCost:
    from dispfl.privacy.accountant import make_plan

    settings = experiment.privacy
    method = experiment.method.resolved(experiment.topology, experiment.peers)
    steps = method.private_steps(train, samples)
    training_rounds = rounds
    plan = make_plan(
        settings.epsilon,
        settings.delta,
        settings.noise_multiplier,
        samples,
        train.batch_size,
        steps,
        rounds,
    )
    if plan.max_steps is not None:
        rounds = min(rounds, plan.max_steps // steps)
    all_steps = rounds * steps
    return BudgetCost(
        samples=samples,
        sampling_rate=plan.rate,
        steps_per_round=steps,
        noise_multiplier=plan.noise_multiplier,
        clip=settings.clip,
        delta=settings.delta,
        training_rounds=training_rounds,
        rounds=rounds,
        epsilon_first_round=plan.spent(steps),
        epsilon=plan.spent(all_steps),
    )


def _training_rounds(experiment: "Experiment") -> int:
    """Return the most rounds that a peer trains in: a server may select it in some only."""
    method = experiment.method.resolved(experiment.topology, experiment.peers)
    return method.training_rounds(
        experiment.topology, experiment.seed, experiment.rounds, experiment.roster
    )


def _samples(experiment: "Experiment") -> int:
    """Return how many samples the peer with the fewest trains on: it spends most."""
    from dispfl.data.catalogue import DATASETS
    from dispfl.data.datasets import load_dataset
    from dispfl.runs.prepare import split_dataset

    if experiment.data.name in DATASETS and experiment.partition.sizes == "equal":
        return experiment.training_samples
    split = split_dataset(experiment, load_dataset(experiment.data, task=experiment.task))
    return min(map(len, split.train))


def _print_costs(experiment: "Experiment", costs: Sequence[BudgetCost]) -> None:
    cost = costs[0]
    period = "round"
    batches = "private steps in a round"
    if experiment.is_async:
        period = "step"
        batches = "private batches in a step"
    typer.echo(
        f"{experiment.method.name}, {cost.samples} samples a peer, batches of"
        f" {experiment.train.batch_size} on average, {cost.steps_per_round} {batches}"
    )
    deviation = cost.noise_multiplier * cost.clip
    lasts_for = f"{cost.rounds} of {cost.training_rounds} {period}s"
    if experiment.is_async and experiment.has_clock:
        fewest = costs[-1]
        lasts_for += (
            f" of the peer that needs most; the one that needs least takes {fewest.training_rounds}"
            f" steps in {experiment.rounds} rounds, with noise {fewest.noise_multiplier:.4g}"
        )
    elif cost.training_rounds != experiment.rounds:
        lasts_for += f": the server selects no peer more often in {experiment.rounds}"
    lines = {
        "noise multiplier": (
            f"{cost.noise_multiplier:.4g}   noise of standard deviation {deviation:.4g} on a sum of"
            f" gradients that are clipped to norm {cost.clip:g}"
        ),
        "lasts for": lasts_for,
        f"epsilon, first {period}": f"{cost.epsilon_first_round:.4g}",
        f"epsilon, {cost.rounds} {period}s": f"{cost.epsilon:.4g}   (delta {cost.delta:g})",
    }
    width = max(map(len, lines))
    for label, value in lines.items():
        typer.echo(f"{label:<{width}}  {value}")
