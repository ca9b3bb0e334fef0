"""`dispfl report`: run directories as one HTML page."""

from pathlib import Path
from typing import Annotated

import typer


def report(
    directories: Annotated[
        list[Path],
        typer.Argument(metavar="DIR...", help="Run directories, or folders with runs in them, as compare makes."),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The file to write.")] = Path("report.html"),
) -> None:
    """Write one HTML page about runs: who is ahead, at what cost, for which peers.

    The page needs nothing beside itself: no network, no scripts.
    Runs that differ only in their seed are one row, with a mean and a band.

    Example: dispfl report runs/five -o five.html
    """
    from dispfl.analysis.report.page import write_report

    write_report(directories, out)
    typer.echo(f"Written: {out}")
