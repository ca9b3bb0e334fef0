"""`dispfl masks`: the masks of a run's peers, compared with each other and with their data."""

import json
from pathlib import Path
from typing import Annotated

import typer

from dispfl.cli.completion import complete_runs
from dispfl.errors import ConfigError, reading
from dispfl.terminal import SafeConsole, print_text

FORMATS = (".png", ".pdf", ".svg")


def masks(
    directory: Annotated[
        Path,
        typer.Argument(
            metavar="DIR",
            help="A run directory, finished or not.",
            autocompletion=complete_runs,
        ),
    ],
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print everything, with the matrices, as JSON; draw a figure only with --out.",
        ),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            help="The figure: .png, .pdf or .svg; default: masks.png in the run directory."
        ),
    ] = None,
) -> None:
    """Compare the peers' masks with each other and with their data.

    For each pair of peers: the Hamming distance between their masks and the
    cosine similarity of their label distributions, as two heat maps, with
    the rank correlation of the two over all pairs.

    Example: dispfl masks runs/dispfl-fashion-sample
    """
    if out is not None and out.suffix not in FORMATS:
        raise ConfigError(
            f"--out must end in {', '.join(FORMATS[:-1])} or {FORMATS[-1]}, got {out}.", key="--out"
        )

    from dispfl.extras import can_draw, require
    from dispfl.paper.mask_similarity import compare_masks, print_masks

    if out is not None:
        require("report", "--out")
    with reading(directory):
        compared = compare_masks(directory)
    console = SafeConsole()
    if as_json:
        typer.echo(json.dumps(compared.to_json(), allow_nan=False))
    else:
        print_masks(compared, console)

    figure = out
    if figure is None and not as_json and can_draw():
        figure = directory / "masks.png"
    if figure is not None:
        from dispfl.paper.figures import draw_masks

        draw_masks(compared, figure)  # after the numbers are printed: a disk may refuse
        if not as_json:
            print_text(console, f"Written: {figure}")
