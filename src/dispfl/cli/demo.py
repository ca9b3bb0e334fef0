"""`dispfl demo`: the paper's method beside training alone, in under a minute."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

METHODS = ("dispfl", "local")


def demo(
    out: Annotated[
        Path | None, typer.Option(help="Where to put the runs; by default a new folder under runs/.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Another seed gives another split, other weights and masks.")] = 0,
) -> None:
    """Train Dis-PFL and Local on the bundled pictures, print a table and draw the learning curves.

    Example: dispfl demo --seed 1
    """
    from dispfl.analysis.plots import learning_curve
    from dispfl.analysis.tables import print_results
    from dispfl.cli.run import first_free, start
    from dispfl.config import compose

    console = Console()
    out = out or first_free(Path("runs/demo"))
    try:
        done = [start(compose({}, [f"method={name}", f"seed={seed}"]), out / name, console) for name in METHODS]
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    learning_curve(done, out / "learning-curves.png")
    print_results(done, console)
    console.print(f"Learning curves: {out / 'learning-curves.png'}")
