"""`dispfl show`: a run directory's result again."""

import json
from pathlib import Path
from typing import Annotated

import typer


def show(
    directories: Annotated[list[Path], typer.Argument(metavar="DIR...", help="One run directory or more.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the summaries as JSON.")] = False,
) -> None:
    """Print the result table of one run or several, finished or not.

    Example: dispfl show runs/dispfl-fashion-sample
    """
    from rich.console import Console

    from dispfl.analysis.tables import overview, print_results

    if as_json:
        found = [overview(path) for path in directories]
        typer.echo(json.dumps(found if len(found) > 1 else found[0], indent=2))
    else:
        print_results(directories, Console())
