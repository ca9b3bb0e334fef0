"""`dispfl reproduce`: the paper's tables and figures, run here, beside the paper's numbers."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from dispfl.errors import ConfigError, DataError

if TYPE_CHECKING:
    from rich.console import Console

    from dispfl.grid import Cell
    from dispfl.reproduce.experiments import PaperExperiment
    from dispfl.reproduce.placing import PlacedRun


def reproduce(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME] [KEY=VALUE]...",
            help="A table or figure, such as main or table-1, and settings for all runs that have them.",
        ),
    ] = None,
    scale: Annotated[
        Literal["laptop", "paper"], typer.Option(help="In small, in minutes; or as in the paper, which takes weeks.")
    ] = "laptop",
    out: Annotated[
        Path | None, typer.Option(help="Where runs and results go; by default runs/reproduce/SCALE.")
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Where the data sets' files are.")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="How many seeds, instead of the experiment's own.")] = None,
    only: Annotated[
        str, typer.Option(help="Only these methods, data sets, partitions, ...: dispfl,local,dirichlet.")
    ] = "",
    yes: Annotated[bool, typer.Option("--yes", help="Start, however long it takes.")] = False,
    list_them: Annotated[bool, typer.Option("--list", help="List what there is.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; progress goes to stderr.")] = False,
) -> None:
    """Run one of the paper's tables or figures, and print our numbers beside the paper's.

    Without a name it lists them. Runs that are finished are skipped and those
    that were cut are gone on with, so the same command may be given again;
    what several tables share is run once. At the paper's scale it first says
    how long it takes on this machine, from a measured batch, and starts only
    with --yes.

    Example: dispfl reproduce sparsity
    """
    from rich.console import Console

    from dispfl.cli.reproduce_costs import print_list
    from dispfl.cli.run import data_dir_words
    from dispfl.reproduce.experiments import find
    from dispfl.reproduce.placing import chosen

    words = list(words or [])
    if list_them or not words:
        print_list(as_json)
        return
    name, settings = words[0], words[1:]
    if "=" in name:
        raise ConfigError(f"Name the table or figure before {name}; dispfl reproduce --list has the names.")
    settings += data_dir_words(data_dir)
    experiment, out = find(name, scale), out or Path("runs/reproduce") / scale
    picked = [word.strip() for word in only.split(",") if word.strip()]
    runs = chosen(experiment.runs(out, seeds, settings), picked)
    caveat = _caveat(experiment, runs, picked)
    _run(experiment, [run.cell for run in runs], scale == "paper", yes, Console(stderr=as_json), as_json)
    found = _report(experiment, runs, caveat, out, Console(quiet=as_json))
    if as_json:
        typer.echo(json.dumps({"name": experiment.name, "scale": scale, **found}, indent=2))


def _run(
    experiment: "PaperExperiment", cells: "Sequence[Cell]", long: bool, yes: bool, console: "Console", as_json: bool
) -> None:
    """Run what is missing, after a look at the clock where it is long."""
    from dispfl.cli.compare import run_grid
    from dispfl.cli.reproduce_costs import print_hours
    from dispfl.grid import State, check

    cells = list({cell.path: cell for cell in cells}.values())
    check(cells)
    waiting = [cell for cell in cells if cell.state is not State.DONE]
    count = f"{len(cells)} run{'s' if len(cells) > 1 else ''}"
    said = f"{experiment.title} {count}, {len(cells) - len(waiting)} done."
    console.print(said, soft_wrap=True, highlight=False, markup=False)
    problem = _missing_data(waiting)
    if problem and (yes or not long):
        raise problem
    if waiting and long:
        print_hours(waiting, console, as_json and not yes)
        if not yes:
            if problem:
                console.print(str(problem), soft_wrap=True, highlight=False, markup=False)
            raise ConfigError("Nothing was started. To start it all the same, give the same command with --yes.")
    run_grid(cells, console)


def _missing_data(cells: "Sequence[Cell]") -> DataError | None:
    """What to do about a data set that is not here, before days are spent on the others."""
    from dispfl.data.datasets import locate

    for data in dict.fromkeys((cell.experiment.data.name, cell.experiment.data.dir) for cell in cells):
        try:
            locate(*data)
        except DataError as problem:
            return problem
    return None


def _caveat(experiment: "PaperExperiment", runs: "Sequence[PlacedRun]", picked: Sequence[str]) -> str:
    """In what the runs are not those of the paper, as its own scale has them."""
    from dispfl.reproduce.differences import difference
    from dispfl.reproduce.experiments import find, names
    from dispfl.reproduce.placing import chosen

    if experiment.name not in names("paper"):
        return "Not the paper's experiment but one of your own."
    theirs = find(experiment.name, "paper").runs(Path())
    known = {word for run in theirs for word in run.place.values()}
    theirs = chosen(theirs, [word for word in picked if word in known])
    return difference((run.cell.experiment for run in runs), (run.cell.experiment for run in theirs))


def _report(
    experiment: "PaperExperiment", runs: "Sequence[PlacedRun]", caveat: str, out: Path, console: "Console"
) -> dict[str, Any]:
    from dispfl.analysis.paper_columns import Place
    from dispfl.analysis.paper_report import Results, report
    from dispfl.costs.estimate import estimate
    from dispfl.reproduce.work import plan_of

    table = experiment.table
    places = {}
    for run in runs:
        key = tuple(run.cell.row.items())
        if key not in places:  # the other seeds are of the same place
            mean = estimate(plan_of(run.cell.experiment)).mean_mb if table and table.comm == "mean" else None
            places[key] = Place(run.place, run.printed, run.targets, mean)
    paths = [(run.cell.row, run.cell.path) for run in runs]
    folder = out / experiment.name
    return report(
        Results(experiment.title, caveat, table, experiment.about.figure, paths, list(places.values()), folder), console
    )
