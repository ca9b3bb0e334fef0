"""`dispfl bound`: what the paper's Theorem 1 says about a federation."""

import json
from pathlib import Path
from typing import Annotated

import typer

from dispfl.errors import ConfigError

MISSING = {
    "noise": "the run was trained without noise (train.noise = 0), and the theorem is about steps with noise; "
    "give --noise SIGMA.",
    "diameter": "no run tells it; give --diameter DG, the largest distance between the gradients of two samples.",
}
"""Why a premise is missing that a run does not tell."""


def bound(
    samples: Annotated[float | None, typer.Option(metavar="N", help="Training samples of a peer.")] = None,
    batch: Annotated[float | None, typer.Option(metavar="TAU", help="Samples in a step.")] = None,
    steps: Annotated[float | None, typer.Option(metavar="T", help="Local steps in total.")] = None,
    noise: Annotated[
        float | None,
        typer.Option(metavar="SIGMA", help="Standard deviation of the noise on every gradient (train.noise)."),
    ] = None,
    diameter: Annotated[
        float | None,
        typer.Option(metavar="DG", help="Largest distance between the gradients of two samples."),
    ] = None,
    union_density: Annotated[
        float | None,
        typer.Option(
            metavar="BETA", help="Share of the weights that at least one peer keeps; not a peer's own density."
        ),
    ] = None,
    delta: Annotated[
        float | None,
        typer.Option(help="The chance that a step reveals more than it should; 1e-10 unless given."),
    ] = None,
    delta_tilde: Annotated[
        float | None, typer.Option(help="The same for all steps together; 1e-5 unless given.")
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Take N, TAU, T, BETA and, if it has noise, SIGMA from a run. Options given win."
        ),
    ] = None,
    corrected: Annotated[
        bool, typer.Option("--corrected", help="Repair three slips of the printed theorem (docs/deviations.md).")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; notes go to stderr.")] = False,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw the bound against the union density, as .png, .pdf or .svg."),
    ] = None,
) -> None:
    """Evaluate the paper's Theorem 1: how far training and test error can lie apart.

    The gap is below the bound with the probability printed, for a loss in
    [0, 1]. It also says when the theorem's conditions do not hold, and when
    the bound is vacuous, because it allows any gap.

    Example: dispfl bound --samples 50000 --batch 50 --steps 1000 --noise 1 --diameter 4 --union-density 0.9
    """
    from rich.console import Console

    from dispfl.analysis.bound import Premises, theorem_1
    from dispfl.analysis.bound_report import plot_bound, premises_of_run, print_bound

    given = {
        "samples": samples,
        "batch": batch,
        "steps": steps,
        "noise": noise,
        "diameter": diameter,
        "union_density": union_density,
        "delta": delta,
        "delta_tilde": delta_tilde,
    }
    told, notes = premises_of_run(run) if run else ({}, [])
    premises = Premises(**_complete(told | {name: value for name, value in given.items() if value is not None}, run))
    found = theorem_1(premises, corrected)
    if plot:
        plot_bound(premises, plot, corrected)
    notes += found.notes
    if as_json:
        typer.echo(json.dumps(found.as_json(), indent=2, allow_nan=False))
    else:
        print_bound(premises, found, corrected, Console())
    for note in notes:
        typer.echo(note, err=as_json)
    if plot:
        typer.echo(f"Picture: {plot}", err=as_json)


def _complete(told: dict[str, float], run: Path | None) -> dict[str, float]:
    from dispfl.analysis.bound import option

    for name in ("samples", "batch", "steps", "noise", "diameter", "union_density"):
        if name not in told:
            no_run_helps = run is not None or name == "diameter"
            fix = MISSING[name] if no_run_helps else "give it a value, or a run that has one (--run DIR)."
            raise ConfigError(f"{option(name)} is missing: {fix}")
    return told
