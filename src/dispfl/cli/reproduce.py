"""`dispfl reproduce`: run the paper's tables and figures, and compare the results with its own."""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from dispfl.cli.completion import complete_experiments
from dispfl.cli.grid import JobsOption, check_budget, split_commas
from dispfl.cli.run import FastOption
from dispfl.errors import ConfigError, DataError
from dispfl.terminal import SafeConsole, number_table, print_text

if TYPE_CHECKING:
    from rich.console import Console

    from dispfl.paper.experiments import PaperExperiment, PaperRun
    from dispfl.runs.grid import GridRun

LEGEND = (
    (
        "Runs that several experiments share run once. min: approximate, on two cores. FLOPs: all"
        " runs, dense kernels;"
    ),
    "at 1e11 per second (two cores) 1e15 take 3 hours and 1e18 four months, at 1e13 (a GPU) a day.",
    (
        "Run one: dispfl reproduce NAME. With --scale desktop or paper it first measures how many"
        " hours that takes here."
    ),
)


def reproduce(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME] [KEY=VALUE]...",
            autocompletion=complete_experiments,
            help=(
                "A table or figure, such as main or table-1, and overrides for all runs that have"
                " these keys."
            ),
        ),
    ] = None,
    scale: Annotated[
        Literal["laptop", "desktop", "paper"],
        typer.Option(
            help=(
                "Small, in minutes; the paper's federation with a small network, in hours; or the"
                " paper's."
            )
        ),
    ] = "laptop",
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for runs and results; default: runs/reproduce/SCALE."),
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Folder of the data sets' files.")] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Number of seeds; default: that of the experiment.")
    ] = None,
    only: Annotated[
        str,
        typer.Option(
            help="Only these methods, data sets, partitions, ...: dispfl,local,dirichlet."
        ),
    ] = "",
    budget: Annotated[
        Literal["rounds", "bytes", "flops", "seconds", "hours"],
        typer.Option(
            help=(
                "Also compare the same runs after equal traffic, computing, or hours of a fleet, as"
                " dispfl compare does."
            )
        ),
    ] = "rounds",
    jobs: JobsOption = 1,
    figure: Annotated[
        Literal["png", "pdf", "svg"],
        typer.Option("--format", help="Format of the figure, where there is one."),
    ] = "png",
    yes: Annotated[
        bool, typer.Option("--yes", help="Start, regardless of the estimated time.")
    ] = False,
    list_them: Annotated[bool, typer.Option("--list", help="List the experiments.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON; progress goes to stderr.")
    ] = False,
    fast: FastOption = False,
) -> None:
    """Run one of the paper's tables or figures, and print our numbers next to the paper's.

    Without a name it lists the experiments. Finished runs are skipped and
    interrupted ones are resumed, so the same command can be repeated; runs
    that several tables share run once. At the other scales it first
    estimates the hours on this machine, from measured training; at the
    paper's it starts only with --yes. With --fast, the first run decides
    for all; a repeated command keeps the choice.

    Example: dispfl reproduce sparsity
    Example: dispfl reproduce main --scale desktop --only cifar10,dirichlet --jobs 2
    """

    from dispfl.cli.run import data_dir_override
    from dispfl.paper.experiments import find_experiment, select_runs

    arguments = list(arguments or [])
    if list_them or not arguments:
        _print_list(as_json)
        return
    name, *overrides = arguments
    if "=" in name:
        raise ConfigError(
            f"Name the table or figure before {name}; dispfl reproduce --list has the names."
        )
    overrides += data_dir_override(data_dir)
    experiment = find_experiment(name, scale)
    out = out or Path("runs/reproduce") / scale
    selected = split_commas(only)
    if budget != "rounds" and experiment.about.figure == "masks":
        raise ConfigError(
            f"{name} compares masks, not scores: omit --budget {budget}.", key="--budget"
        )
    runs = select_runs(experiment.runs(out, seeds, overrides), selected)
    check_budget(budget, [run.cell.experiment for run in runs])
    caveat = _caveat(experiment, runs, selected)
    console = SafeConsole(stderr=as_json)
    if fast:
        runs = _with_fastest_format(runs, console)
    _run(experiment, [run.cell for run in runs], scale, yes, console, as_json, jobs)
    report = _report(experiment, runs, caveat, out, figure, budget, SafeConsole(quiet=as_json))
    if as_json:
        typer.echo(json.dumps({"name": experiment.name, "scale": scale, **report}, indent=2))


def _with_fastest_format(runs: "Sequence[PaperRun]", console: "Console") -> "list[PaperRun]":
    """Choose one format for all runs, and say which."""
    from dispfl.runs.grid import with_fastest_format

    cells, sentence = with_fastest_format([run.cell for run in runs])
    print_text(console, sentence)
    return [replace(run, cell=cell) for run, cell in zip(runs, cells, strict=True)]


def _run(
    experiment: "PaperExperiment",
    cells: "Sequence[GridRun]",
    scale: str,
    yes: bool,
    console: "Console",
    as_json: bool,
    jobs: int,
) -> None:
    """Run the missing and interrupted runs.

    Except at laptop scale, the hours are printed first; the paper's scale needs --yes.
    """
    from dispfl.cli.grid import run_grid
    from dispfl.report.wording import plural
    from dispfl.runs.grid import RunState, check_grid

    cells = list({cell.path: cell for cell in cells}.values())
    check_grid(cells)
    waiting = [cell for cell in cells if cell.state is not RunState.DONE]
    done = len(cells) - len(waiting)
    print_text(console, f"{experiment.title} {plural(len(cells), 'run')}, {done} done.")
    problem = _missing_data(waiting)
    stops = scale == "paper" and not yes
    if problem and not stops:
        raise problem
    if waiting and scale != "laptop":
        _print_hours(waiting, console, as_json and stops)
        if stops:
            if problem:
                print_text(console, str(problem))
            raise ConfigError(
                "Nothing was started. To start anyway, repeat the command with --yes."
            )
    run_grid(cells, console, jobs=jobs)


def _missing_data(cells: "Sequence[GridRun]") -> DataError | None:
    """Return the error of a missing data set, before days are spent on the others."""
    from dispfl.data.datasets import locate

    locations = dict.fromkeys(
        (cell.experiment.data.name, cell.experiment.data.dir) for cell in cells
    )
    for name, folder in locations:
        try:
            locate(name, folder)
        except DataError as problem:
            return problem
    return None


def _caveat(
    experiment: "PaperExperiment", runs: "Sequence[PaperRun]", selected: Sequence[str]
) -> str:
    """Describe how the runs differ from the same experiment at the paper's scale."""
    from dispfl.paper.experiments import experiment_names, find_experiment, select_runs
    from dispfl.paper.workload import differences

    if experiment.name not in experiment_names("paper"):
        return "Not one of the paper's experiments."
    paper_runs = find_experiment(experiment.name, "paper").runs(Path())
    labels: set[str] = set()
    for run in paper_runs:
        labels.update(run.labels.values())
    paper_runs = select_runs(paper_runs, [label for label in selected if label in labels])
    return differences(
        [run.cell.experiment for run in runs], [run.cell.experiment for run in paper_runs]
    )


def _report(
    experiment: "PaperExperiment",
    runs: "Sequence[PaperRun]",
    caveat: str,
    out: Path,
    figure_format: str,
    budget: str,
    console: "Console",
) -> dict[str, Any]:
    from dispfl.costs.estimate import CostInputs, estimate
    from dispfl.paper.beside_paper import PaperReference, ReproducedRuns, write_report
    from dispfl.report.runs import Budget

    table = experiment.table
    references = {}
    for run in runs:
        key = tuple(run.cell.row.items())
        if key not in references:  # the other seeds share the reference
            mean_mb = None
            if table and table.comm == "mean":
                mean_mb = estimate(CostInputs.of(run.cell.experiment)).mean_mb
            references[key] = PaperReference(run.labels, run.printed, run.targets, mean_mb)
    results = ReproducedRuns(
        title=experiment.title,
        caveat=caveat,
        table=table,
        figure=experiment.about.figure,
        runs=[(run.cell.row, run.cell.path) for run in runs],
        references=list(references.values()),
        folder=out / experiment.name,
        figure_format=figure_format,
        budget=Budget(budget),
        against=experiment.about.against,
    )
    return write_report(results, console)


def _print_list(as_json: bool) -> None:
    """Print the experiments, one sentence each, and their costs at every scale."""

    from dispfl.paper.experiments import SCALES, experiment_names

    names: set[str] = set()
    for scale in SCALES:
        names.update(experiment_names(scale))
    entries = list(map(_list_entry, names))
    entries.sort(key=lambda entry: (*_order(entry["shows"]), entry["name"]))
    if as_json:
        typer.echo(json.dumps(entries, indent=2))
        return
    console = SafeConsole()
    for entry in entries:
        costs = [f"{scale} {_cost(entry[scale])}" for scale in SCALES if scale in entry]
        line = f"[bold]{entry['name']:<26}[/]{entry['shows'] or '':<10}[dim]{' · '.join(costs)}[/]"
        console.print(line, highlight=False, soft_wrap=True)
        print_text(console, f"    {entry['title']}")
    console.print()
    for sentence in LEGEND:
        print_text(console, sentence, "dim")


def _list_entry(name: str) -> dict[str, Any]:
    """Return what an experiment is, and its costs at every scale that it has."""
    from dispfl.paper.experiments import SCALES, experiment_names, find_experiment

    entry: dict[str, Any] = {"name": name}
    costs = {}
    for scale in SCALES:
        if name in experiment_names(scale):
            experiment = find_experiment(name, scale)
            entry.setdefault("shows", experiment.about.shows)
            entry.setdefault("title", experiment.about.title)
            costs[scale] = _costs(experiment)
    return entry | costs


def _costs(experiment: "PaperExperiment") -> dict[str, Any]:
    about = experiment.about
    distinct = {run.cell.path for run in experiment.runs(Path(), seeds=1)}
    return {"runs": about.seeds * len(distinct), "minutes": about.minutes, "flops": about.flops}


def _cost(costs: dict[str, Any]) -> str:
    """Return `45 runs, 11 min`, or FLOPs at the paper's scale."""
    from dispfl.report.wording import plural

    runs = plural(costs["runs"], "run")
    if costs["minutes"]:
        return f"{runs}, {costs['minutes']:g} min"
    return f"{runs}, {costs['flops']:.0e} FLOPs".replace("e+", "e")


def _order(shows: str | None) -> tuple[int, int]:
    """Sort tables by number, then figures, then what the paper has neither for."""
    kind, _, number = (shows or "").partition(" ")
    return ("Table", "Figure", "").index(kind), int(number or 0)


def _print_hours(cells: "Sequence[GridRun]", console: "Console", as_json: bool) -> None:
    """Measure training of each kind and print the estimated hours by method."""
    from dispfl.paper.workload import remaining_hours

    with console.status("Measuring how long training takes ..."):
        by_method = remaining_hours(cells)
    total = sum(remaining.hours for remaining in by_method)
    if as_json:
        methods = [asdict(remaining) for remaining in by_method]
        typer.echo(json.dumps({"hours": total, "methods": methods}, indent=2))
        return
    table = number_table("method", "runs", "hours per run", "hours")
    for remaining in by_method:
        per_run = _number(remaining.hours / remaining.runs)
        table.add_row(remaining.method, str(remaining.runs), per_run, _number(remaining.hours))
    table.add_section()
    table.add_row("all", str(len(cells)), "", _number(total))
    console.print("", table, "", sep="\n")

    experiment = cells[0].experiment
    machine = f"device {experiment.device}"
    if experiment.device == "cpu":
        machine = f"{experiment.workers} workers"
    print_text(
        console,
        f"About {_number(total)} hours, or {_number(total / 24)} days, on this machine ({machine}),"
        " from training measured under its present load.",
    )


def _number(value: float) -> str:
    """Round to two digits: an estimate is not more precise."""
    return f"{float(f'{value:.2g}'):,.0f}" if value >= 10 else f"{value:.2g}"
