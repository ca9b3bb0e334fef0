"""`dispfl privacy`: what a privacy budget costs, before anything is trained."""

import json
from typing import TYPE_CHECKING, Annotated

import typer

from dispfl.errors import ConfigError

if TYPE_CHECKING:
    from dispfl.experiment import Experiment


def privacy(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONFIG.toml] [KEY=VALUE]...", help="A config file, then overrides."
        ),
    ] = None,
    epsilon: Annotated[float | None, typer.Option(help="The budget: privacy.epsilon.")] = None,
    delta: Annotated[float | None, typer.Option(help="privacy.delta; default: 1e-5.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print how much noise a privacy budget needs, and how many rounds it lasts, without training.

    The guarantee covers each sample of a peer, against everybody else, in
    all that the peer ever publishes. Epsilon is given twice: by Rényi
    differential privacy, which runs use, and by privacy loss
    distributions, which are tighter and take some seconds.

    Example: dispfl privacy --epsilon 4 --delta 1e-5 rounds=50 train.batch_size=16
    """
    from dispfl.cli.run import split_config
    from dispfl.config import compose, read_toml
    from dispfl.extras import require
    from dispfl.privacy.accountant import make_plan, tight_epsilon
    from dispfl.round.context import check_private_method
    from dispfl.topology import peer_names

    require("privacy", "dispfl privacy")
    file, overrides = split_config(arguments or [])
    config = read_toml(file) if file else {}
    stated = {"privacy.epsilon": epsilon, "privacy.delta": delta}
    overrides += [f"{key}={value!r}" for key, value in stated.items() if value is not None]
    experiment = compose(config, overrides)
    p, train = experiment.privacy, experiment.train
    if not p.enabled:
        raise ConfigError("Give a budget, --epsilon 4, or the noise: privacy.noise_multiplier=1.")
    check_private_method(experiment.method)
    samples, roster = _samples(experiment), peer_names(experiment.peers)
    method = experiment.method.resolved(experiment.topology, experiment.peers)
    steps = method.private_steps(train, samples)
    all_rounds = method.training_rounds(
        experiment.topology, experiment.seed, experiment.rounds, roster
    )
    plan = make_plan(
        p.epsilon, p.delta, p.noise_multiplier, samples, train.batch_size, steps, all_rounds
    )
    rounds = all_rounds if plan.max_steps is None else min(all_rounds, plan.max_steps // steps)
    found = {
        "samples": samples,
        "sampling_rate": plan.rate,
        "steps_per_round": steps,
        "noise_multiplier": plan.noise_multiplier,
        "clip": p.clip,
        "delta": p.delta,
        "rounds": rounds,
        "epsilon_first_round": plan.spent(steps),
        "epsilon": plan.spent(rounds * steps),
        "epsilon_tight": tight_epsilon(plan.rate, plan.noise_multiplier, rounds * steps, p.delta),
    }
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    batches = f"batches of {train.batch_size} on average"
    selected = (
        ""
        if all_rounds == experiment.rounds
        else f": the server selects no peer more often in {experiment.rounds}"
    )
    typer.echo(
        f"{experiment.method.name}, {samples} samples a peer, {batches}, {steps} private steps in a"
        " round"
    )
    lines = {
        "noise multiplier": (
            f"{plan.noise_multiplier:.4g}   noise of standard deviation"
            f" {plan.noise_multiplier * p.clip:.4g} on a sum of gradients that are clipped to norm"
            f" {p.clip:g}"
        ),
        "lasts for": f"{rounds} of {all_rounds} rounds{selected}",
        "epsilon, first round": f"{found['epsilon_first_round']:.4g}",
        f"epsilon, {rounds} rounds": (
            f"{found['epsilon']:.4g}   (delta {p.delta:g}; Rényi, which runs count)"
        ),
        "the same, tighter": f"{found['epsilon_tight']:.4g}   (privacy loss distributions)",
    }
    width = max(map(len, lines))
    for label, value in lines.items():
        typer.echo(f"{label:<{width}}  {value}")


def _samples(experiment: "Experiment") -> int:
    """Return how many samples a peer trains on: where they differ, the peer with the fewest, which
    spends most."""
    from dispfl.data.catalogue import DATASETS
    from dispfl.data.datasets import load_dataset

    if experiment.data.name in DATASETS and experiment.partition.sizes == "equal":
        return experiment.training_samples
    return min(map(len, experiment.split(load_dataset(experiment.data)).train))
