"""`dispfl masks`: whether peers with similar data have learnt similar masks."""

import json
from pathlib import Path
from typing import Annotated

import typer

from dispfl.errors import ConfigError

PICTURES = (".png", ".pdf", ".svg")


def masks(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A run directory, finished or not.")],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print everything, matrices too, as JSON; a picture only with --out.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="The picture: .png, .pdf or .svg; by default masks.png in the run directory.")
    ] = None,
) -> None:
    """Compare the peers' masks with each other and with their data.

    For each pair of peers: the Hamming distance between their masks and the
    cosine similarity of their label distributions, as two heat maps, with
    the rank correlation of the two over all pairs.

    Example: dispfl masks runs/dispfl-fashion-sample
    """
    if out is not None and out.suffix not in PICTURES:
        raise ConfigError(f"--out must end in {', '.join(PICTURES[:-1])} or {PICTURES[-1]}, got {out}.")
    from dispfl.analysis.run_masks import masks_of_run

    found = masks_of_run(directory)
    picture = out if as_json else out or directory / "masks.png"
    if picture is not None:
        from dispfl.analysis.heatmaps import draw_masks

        draw_masks(found, picture)
    if as_json:
        typer.echo(json.dumps(found.to_json(), allow_nan=False))
        return
    from rich.console import Console

    from dispfl.analysis.mask_tables import print_masks

    console = Console()
    print_masks(found, console)
    console.print(f"Written: {picture}", soft_wrap=True, highlight=False, markup=False)
