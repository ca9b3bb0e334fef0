"""`dispfl compare` and `dispfl sweep`: grids of runs on the same splits and initial weights."""

import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from dispfl.cli.completion import complete_rows, complete_settings
from dispfl.cli.run import FastOption, TrackOption
from dispfl.errors import ConfigError
from dispfl.terminal import SafeConsole, print_text

if TYPE_CHECKING:
    from rich.console import Console

    from dispfl.experiment import Experiment
    from dispfl.report.tables import Table
    from dispfl.runs.grid import GridRun

ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        "-c",
        help="A config file. Its method table applies to the method that it names.",
    ),
]
SeedsOption = Annotated[
    int, typer.Option(min=1, help="Number of seeds, counted up from the config's.")
]
OutOption = Annotated[
    Path | None,
    typer.Option(
        help="Folder for the runs; default: a new one under runs/. Existing runs are resumed."
    ),
]
DataDirOption = Annotated[Path | None, typer.Option(help="Folder with the data set's files.")]
TargetsOption = Annotated[
    str, typer.Option(help="Count the rounds, and simulated hours, to these scores: 0.6,0.7,0.8.")
]
BudgetOption = Annotated[
    Literal["rounds", "bytes", "flops", "seconds", "hours"],
    typer.Option(
        "--budget",
        help=(
            "What is held equal: rounds, the busiest node's bytes, the training FLOPs of all peers,"
            " the seconds that a peer computes, or the simulated hours of a fleet. Except with"
            " rounds, scores are those reached within the smallest total of the runs that spend"
            " any; nothing is retrained."
        ),
    ),
]
JobsOption = Annotated[
    int,
    typer.Option(
        "--jobs",
        "-j",
        min=1,
        help="Processes, each with a run of its own; they divide the workers.",
    ),
]
FormatOption = Annotated[
    Literal["png", "pdf", "svg"],
    typer.Option("--format", help="Format of the figure with the learning curves."),
]


AgainstOption = Annotated[
    str | None,
    typer.Option(
        "--against",
        metavar="ROW",
        help=(
            "The row that the others are compared with, peer by peer: a method, a variant, a label,"
            " or in a sweep KEY=VALUE. Default: dispfl, or the first row."
        ),
    ),
]
ColumnsOption = Annotated[
    str,
    typer.Option(
        "--columns",
        metavar="NAME,...",
        help=(
            "The table's columns: score, std, against, difference, busiest, wire, flops, flops-all,"
            " seconds, hours, time, rounds-to-0.6, hours-to-0.6, or the name of another metric."
        ),
    ),
]
PercentOption = Annotated[
    bool, typer.Option("--percent", help="Print scores in percent instead of fractions.")
]


@dataclass(frozen=True)
class TableOptions:
    """How the runs of a grid are compared and shown."""

    targets: str
    budget: str
    figure: str
    against: str | None
    columns: Sequence[str]
    percent: bool


@dataclass(frozen=True)
class GridOptions:
    """The options that `compare` and `sweep` share."""

    config: Path | None
    seeds: int
    out: Path | None
    data_dir: Path | None
    track: str | None
    jobs: int
    fast: bool
    view: TableOptions


def compare(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="METHOD[@KEY=VALUE,...]... [KEY=VALUE]...",
            autocompletion=complete_rows,
            help="Methods, variants of methods, and overrides for all that have the key.",
        ),
    ] = None,
    config: ConfigOption = None,
    seeds: SeedsOption = 1,
    out: OutOption = None,
    data_dir: DataDirOption = None,
    targets: TargetsOption = "",
    budget: BudgetOption = "rounds",
    track: TrackOption = None,
    jobs: JobsOption = 1,
    figure: FormatOption = "png",
    against: AgainstOption = None,
    columns: ColumnsOption = "",
    percent: PercentOption = False,
    fast: FastOption = False,
) -> None:
    """Train several methods on the same splits, initial weights and test data, and print one table.

    A method may be compared with variants of itself: a variant is the method,
    an @, and the settings in which it differs. label=TEXT among them is the
    name of its row.
    Runs are written to OUT/<method>/seed-<n>. Finished runs are skipped and
    interrupted ones are resumed, so the same command can be repeated with
    more methods, more seeds, other targets or another budget, with more
    rounds where no schedule depends on their number, and by several
    processes on the same folder at the same time.
    Methods that differ only in how the same models are evaluated, such as
    fedavg and fedavg-ft, are trained once.
    With --fast, the first method decides for all; a repeated command keeps
    the choice.
    The table is also written as Markdown, LaTeX, CSV and JSON, together with
    a plot of the learning curves and an HTML report.

    Example: dispfl compare dispfl local rounds=10 --seeds 3 --targets 0.6,0.7
    Example: dispfl compare dispfl dispfl@method.structure=channels
    Example: dispfl compare dispfl@label=ours fedavg --against fedavg --percent
    """
    from dispfl.runs.grid import methods_grid

    view = TableOptions(targets, budget, figure, against, split_commas(columns), percent)
    options = GridOptions(config, seeds, out, data_dir, track, jobs, fast, view)
    run_and_compare("compare", methods_grid, list(arguments or []), options)


def sweep(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE,VALUE,... [KEY=VALUE]...",
            autocompletion=complete_settings,
            help="Keys to vary, and overrides for all runs.",
        ),
    ] = None,
    config: ConfigOption = None,
    seeds: SeedsOption = 1,
    out: OutOption = None,
    data_dir: DataDirOption = None,
    targets: TargetsOption = "",
    budget: BudgetOption = "rounds",
    track: TrackOption = None,
    jobs: JobsOption = 1,
    figure: FormatOption = "png",
    against: AgainstOption = None,
    columns: ColumnsOption = "",
    percent: PercentOption = False,
    fast: FastOption = False,
) -> None:
    """Train with every value of a setting, and print one table.

    A key with several values is swept; several such keys give every
    combination. A value that is itself a list is written in brackets:
    method.density=[0.2,0.4],[0.5] sweeps over two lists, and
    method.density=[0.2,0.4] is one list for all runs. A value may be followed
    by the label of its row: method.density=0.2@label=sparse,0.8.
    Runs are written to OUT/<key>=<value>/seed-<n>; everything else is as in
    dispfl compare.

    Example: dispfl sweep method.density=0.2,0.4,0.6,0.8 rounds=10 --seeds 3
    """
    from dispfl.runs.grid import sweep_grid

    view = TableOptions(targets, budget, figure, against, split_commas(columns), percent)
    options = GridOptions(config, seeds, out, data_dir, track, jobs, fast, view)
    run_and_compare("sweep", sweep_grid, list(arguments or []), options)


def run_and_compare(
    command: str,
    grid: "Callable[[Sequence[str], Mapping[str, Any], int, Path], list[GridRun]]",
    arguments: list[str],
    options: GridOptions,
) -> None:
    """Build a grid of runs, run the unfinished ones, then print and write the comparison."""

    from dispfl.cli.run import data_dir_override, output_folder
    from dispfl.config import read_toml
    from dispfl.core.metric import SHARES
    from dispfl.report.result_tables import check_columns
    from dispfl.runs.directory import check_learned
    from dispfl.runs.grid import check_grid, reference_names, save_labels, with_fastest_format
    from dispfl.runs.tracking import check_tracker

    check_tracker(options.track)
    arguments += data_dir_override(options.data_dir)
    config = read_toml(options.config) if options.config else {}
    console = SafeConsole()
    with output_folder(options.out, Path("runs") / command) as out:
        cells = grid(arguments, config, options.seeds, out)
        metrics: set[str] = set()
        for cell in cells:
            metrics.update(cell.experiment.metric)
        targets = parse_targets(options.view.targets, shares=metrics <= SHARES)
        against: Mapping[str, str] | None = None
        if options.view.against is not None:
            against = reference_names(cells, options.view.against)
        check_columns(options.view.columns, metrics, targets)
        check_budget(options.view.budget, [cell.experiment for cell in cells])
        if options.fast:
            cells, sentence = with_fastest_format(cells)
            print_text(console, sentence)
        check_grid(cells)
        save_labels(cells, out)
        print_text(console, _count_states(cells))
        resume_options = [] if options.out else ["--out", str(out)]
        run_grid(cells, console, options.track, resume_options, options.jobs)
        _write_comparison(cells, out, targets, options.view, against, console)
        for cell in cells:
            check_learned(cell.path)


def run_grid(
    cells: "Sequence[GridRun]",
    console: "Console",
    track: str | None = None,
    resume_options: Sequence[str] = (),
    jobs: int = 1,
) -> None:
    """Run the unfinished runs of a grid with a progress bar.

    Ctrl-C prints how to resume: the same command followed by `resume_options`.
    """
    from dispfl.cli.progress import show_grid_progress
    from dispfl.cli.run import warn_about_protection
    from dispfl.runs.grid import RunState, run_missing
    from dispfl.runs.jobs import run_in_processes

    warn_about_protection(cell.experiment for cell in cells if cell.state is not RunState.DONE)
    try:
        with show_grid_progress(cells, console) as display:
            if jobs > 1:
                run_in_processes(cells, jobs, display, track)
            else:
                run_missing(cells, display, track)
    except KeyboardInterrupt:
        command = shlex.join(["dispfl", *sys.argv[1:], *resume_options])
        message = f"\nStopped; all finished rounds are saved. Resume with: {command}"
        print_text(console, message)
        raise typer.Exit(130) from None


def check_budget(budget: str, experiments: "Iterable[Experiment]") -> None:
    """Refuse a comparison by simulated hours before runs are trained that have none."""
    if budget != "hours":
        return
    for experiment in experiments:
        if not experiment.has_clock:
            raise ConfigError(
                f"--budget is hours, but a run of {experiment.method.name} has no devices by whose"
                " times they are counted; name them: fleet=phones.",
                key="--budget",
            )


def split_commas(text: str) -> list[str]:
    """Return the distinct values of an option that takes several, in their order."""
    values = filter(None, map(str.strip, text.split(",")))
    return list(dict.fromkeys(values))


def parse_targets(text: str, shares: bool = True) -> list[float]:
    """Parse `0.6,0.7`; `shares` are in (0, 1], as the built-in metrics of classification are."""
    targets = []
    for item in split_commas(text):
        try:
            target = float(item)
        except ValueError:
            raise ConfigError(
                f"--targets must be numbers separated by commas, such as 0.6,0.7; got {item!r}.",
                key="--targets",
            ) from None
        if shares and not 0 < target <= 1:
            hint = f" For {target:g}% write {target / 100:g}." if 1 < target <= 100 else ""
            raise ConfigError(f"--targets must be in (0, 1], got {item}.{hint}", key="--targets")
        targets.append(target)
    return sorted(set(targets))


def print_table(table: "Table", console: "Console", where_omitted: str) -> None:
    """Print a table with its notes; `where_omitted` says where columns without room are."""
    from dispfl.report.tables import omitted_note

    drawn, omitted = table.on_console(console)
    console.print(drawn)
    for sentence in table.notes:
        print_text(console, sentence, "dim")
    if omitted:
        print_text(console, omitted_note(omitted, where_omitted))


def _count_states(cells: "Sequence[GridRun]") -> str:
    """`27 runs, 21 trainings: 20 done, 1 to resume, 6 to start.`"""
    from dispfl.report.wording import plural

    states = Counter(cell.state.value for cell in cells)
    parts = []
    for state, name in (("done", "done"), ("interrupted", "to resume"), ("missing", "to start")):
        if states[state]:
            parts.append(f"{states[state]} {name}")
    counts = plural(len(cells), "run")
    trainings = len({cell.training for cell in cells})
    if trainings < len(cells):
        counts += f", {plural(trainings, 'training')}"
    return f"{counts}: {', '.join(parts)}."


def _first_named(cells: "Sequence[GridRun]", names: "Mapping[str, str]") -> int:
    """Return the position of the first run of a row with these names."""
    for position, cell in enumerate(cells):
        if names.items() <= cell.row.items():
            return position
    raise AssertionError("reference_names returns the names of a row")


def _write_comparison(
    cells: "Sequence[GridRun]",
    out: Path,
    targets: Sequence[float],
    options: TableOptions,
    against: "Mapping[str, str] | None",
    console: "Console",
) -> None:
    from dispfl.extras import can_draw
    from dispfl.report.comparison import compare_runs, in_percent
    from dispfl.report.page import write_page
    from dispfl.report.result_tables import comparison_table, write_tables
    from dispfl.report.runs import Budget, read_run, run_labels

    runs = [read_run(cell.path) for cell in cells]
    labels = run_labels(runs)
    is_sweep = any(cell.row.keys() != {"method"} for cell in cells)
    names: list[Mapping[str, str]] = [{"method": label} for label in labels]
    if is_sweep:
        names = [cell.row for cell in cells]
    reference = None
    if against is not None:
        position = _first_named(cells, against)
        reference = labels[position]
        if not is_sweep:
            against = names[position]
    named_runs = list(zip(names, runs, strict=True))
    comparison = compare_runs(named_runs, Budget(options.budget), targets, against)
    if options.percent:
        comparison = in_percent(comparison)
    table = comparison_table(comparison, options.columns)
    print_table(table, console, "The files contain all columns.")

    files = write_tables(comparison, out, columns=options.columns)
    pages = []
    if can_draw():
        from dispfl.report.plots import plot_comparison

        pages.append(out / f"learning-curves.{options.figure}")
        plot_comparison(comparison, pages[0])
    pages.append(out / "report.html")
    write_page(runs, out / "report.html", reference)
    suffixes = ", ".join(file.suffix for file in files[1:])
    written = f"Written: {files[0]}, {suffixes}; {'; '.join(map(str, pages))}"
    print_text(console, written)
