"""`dispfl bound`: the paper's generalization bound, for given premises or those of a run."""

import json
from pathlib import Path
from typing import Annotated

import typer

from dispfl.errors import ConfigError, reading
from dispfl.terminal import SafeConsole

MISSING = {
    "noise": (
        "the run was trained without noise (train.noise_std = 0), and the theorem assumes noise in"
        " every step; give --noise SIGMA."
    ),
    "diameter": (
        "no run records it; give --diameter DG, the largest distance between the gradients of two"
        " samples."
    ),
}
"""Why a premise is missing that a run does not determine, and the fix."""


def bound(
    samples: Annotated[
        float | None, typer.Option(metavar="N", help="Training samples of a peer.")
    ] = None,
    batch: Annotated[float | None, typer.Option(metavar="TAU", help="Samples per step.")] = None,
    steps: Annotated[
        float | None, typer.Option(metavar="T", help="Total number of local steps.")
    ] = None,
    noise: Annotated[
        float | None,
        typer.Option(
            metavar="SIGMA",
            help="Standard deviation of the noise on every gradient (train.noise_std).",
        ),
    ] = None,
    diameter: Annotated[
        float | None,
        typer.Option(metavar="DG", help="Largest distance between the gradients of two samples."),
    ] = None,
    union_density: Annotated[
        float | None,
        typer.Option(
            metavar="BETA",
            help="Fraction of the weights that at least one peer keeps; not a peer's own density.",
        ),
    ] = None,
    delta: Annotated[
        float | None,
        typer.Option(
            help="Probability that a step's privacy loss exceeds its bound; default: 1e-10."
        ),
    ] = None,
    delta_tilde: Annotated[
        float | None, typer.Option(help="The same for all steps together; default: 1e-5.")
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help=(
                "Take N, TAU, T, BETA and, if it has noise, SIGMA from a run; options override it."
            ),
        ),
    ] = None,
    corrected: Annotated[
        bool,
        typer.Option(
            "--corrected", help="Fix three errors of the printed theorem (docs/deviations.md)."
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON; notes go to stderr.")
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Draw the bound against the union density, as .png, .pdf or .svg."
        ),
    ] = None,
) -> None:
    """Evaluate the paper's Theorem 1: a bound on the gap between training and test error.

    The gap is below the bound with the printed probability, for a loss in
    [0, 1]. Notes say when the theorem's conditions do not hold, and when
    the bound is vacuous because it allows any gap.

    Example: dispfl bound --samples 50000 --batch 50 --steps 1000 --noise 1 --diameter 4
    --union-density 0.9
    """

    from dispfl.extras import require
    from dispfl.paper.generalization_bound import (
        Premises,
        plot_bound,
        premises_of_run,
        print_bound,
        theorem_1,
    )

    if plot:
        require("report", "--plot")
    options = {
        "samples": samples,
        "batch": batch,
        "steps": steps,
        "noise": noise,
        "diameter": diameter,
        "union_density": union_density,
        "delta": delta,
        "delta_tilde": delta_tilde,
    }
    values: dict[str, float] = {}
    notes: list[str] = []
    if run:
        with reading(run):
            values, notes = premises_of_run(run)
    for name, value in options.items():
        if value is not None:
            values[name] = value
    _check_complete(values, run)
    premises = Premises(**values)
    result = theorem_1(premises, corrected)
    if plot:
        plot_bound(premises, plot, corrected)

    if as_json:
        typer.echo(json.dumps(result.as_json(), indent=2, allow_nan=False))
    else:
        print_bound(premises, result, corrected, SafeConsole())
    for note in (*notes, *result.notes):
        typer.echo(note, err=as_json)
    if plot:
        typer.echo(f"Figure: {plot}", err=as_json)


def _check_complete(values: dict[str, float], run: Path | None) -> None:
    """Reject a missing premise."""
    from dispfl.paper.generalization_bound import option

    for name in ("samples", "batch", "steps", "noise", "diameter", "union_density"):
        if name not in values:
            fix = "give it a value, or a run that has one (--run DIR)."
            if run is not None or name == "diameter":
                fix = MISSING[name]
            raise ConfigError(f"{option(name)} is missing: {fix}", key=option(name))
