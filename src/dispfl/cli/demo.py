"""`dispfl demo`: the paper's method beside training alone, with a server, and with plain gossip."""

from pathlib import Path
from typing import Annotated

import typer

METHODS = ("dispfl", "local", "fedavg", "dpsgd")


def demo(
    out: Annotated[
        Path | None, typer.Option(help="Where to put the runs; by default a new folder under runs/.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Another seed gives another split, other weights and masks.")] = 0,
) -> None:
    """Train Dis-PFL, Local, FedAvg and D-PSGD on the bundled pictures, print a table and draw the learning curves.

    Example: dispfl demo --seed 1
    """
    from rich.console import Console

    from dispfl.analysis.plots import learning_curve
    from dispfl.analysis.report.page import write_report
    from dispfl.analysis.tables import print_results
    from dispfl.cli.run import first_free, see_through
    from dispfl.config import compose
    from dispfl.launch import Launch

    console = Console()
    out = out or first_free(Path("runs/demo"))
    done = [out / name for name in METHODS]
    for path in done:
        see_through(Launch.begin(compose({}, [f"method={path.name}", f"seed={seed}"]), path), console)
    learning_curve(done, out / "learning-curves.png")
    print_results(done, console)
    write_report(done, out / "report.html")
    files = f"Learning curves: {out / 'learning-curves.png'}. Everything on one page: {out / 'report.html'}"
    console.print(files, soft_wrap=True, highlight=False, markup=False)
