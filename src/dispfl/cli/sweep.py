"""`dispfl sweep`: one setting, or several, at many values."""

from typing import Annotated

import typer

from dispfl.cli.compare import Config, DataDir, Equal, Options, Out, Seeds, Targets, Track, see_grid_through


def sweep(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE,VALUE,... [KEY=VALUE]...", help="What to vary, and what to set for all."),
    ] = None,
    config: Config = None,
    seeds: Seeds = 1,
    out: Out = None,
    data_dir: DataDir = None,
    targets: Targets = "",
    budget: Equal = "rounds",
    track: Track = None,
) -> None:
    """Train with every value of a setting, and print one table.

    A key with several values is swept; several such keys give every
    combination. A value that is itself a list stands in brackets:
    method.density=[0.2,0.4],[0.5] sweeps over two lists, and
    method.density=[0.2,0.4] is one list for all.
    Runs go to OUT/<key>=<value>/seed-<n>; the rest is as in dispfl compare.

    Example: dispfl sweep method.density=0.2,0.4,0.6,0.8 rounds=10 --seeds 3
    """
    from dispfl.grid import sweep_grid

    asked = Options(config, seeds, out, data_dir, targets, budget, track)
    see_grid_through("sweep", sweep_grid, list(words or []), asked)
