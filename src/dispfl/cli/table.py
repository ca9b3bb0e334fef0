"""`dispfl table`: finished runs as one table for a paper."""

from pathlib import Path
from typing import Annotated

import typer

from dispfl.cli.grid import (
    AgainstOption,
    BudgetOption,
    ColumnsOption,
    PercentOption,
    TargetsOption,
    parse_targets,
    print_table,
    split_commas,
)
from dispfl.cli.run import RunFolders
from dispfl.errors import ConfigError, reading
from dispfl.terminal import SafeConsole, print_text

FORMATS = (".tex", ".md", ".csv")


def table(
    directories: RunFolders,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Also write it to this file: .tex, .md or .csv."),
    ] = None,
    against: AgainstOption = None,
    columns: ColumnsOption = "",
    percent: PercentOption = False,
    targets: TargetsOption = "",
    budget: BudgetOption = "rounds",
) -> None:
    """Print runs as one table: of one data set as compare does, of several methods x data sets.

    Runs that differ only in their seed are one row. Columns are chosen with --columns, and of
    several data sets each has these columns: by default its scores. A file for LaTeX needs the
    package booktabs, and without --columns has at most six columns.

    Example: dispfl table runs/five --against fedavg --percent -o five.tex
    Example: dispfl table runs/mnist runs/cifar10 --columns score,wire
    """
    from dispfl.core.metric import SHARES
    from dispfl.files import write_atomically
    from dispfl.report.data_tables import compare_by_data, data_csv, data_table
    from dispfl.report.result_tables import comparison_table
    from dispfl.report.runs import Budget, read_runs

    if out is not None and out.suffix not in FORMATS:
        raise ConfigError(f"--out must end with {', '.join(FORMATS)}, got {out}.", key="--out")
    with reading(directories[0]):
        runs = read_runs(directories)
    shares = all(run.measure.name in SHARES for run in runs)
    comparisons = compare_by_data(
        runs, Budget(budget), parse_targets(targets, shares), against, percent
    )
    keys = split_commas(columns)
    if len(comparisons) == 1:
        shown = comparison_table(next(iter(comparisons.values())), keys)
    else:
        shown = data_table(comparisons, keys)

    console = SafeConsole()
    print_table(shown, console, "A file (--out) has more room.")
    if out is not None:
        match out.suffix:
            case ".tex":
                text = shown.latex()
            case ".md":
                text = shown.markdown()
            case _:
                text = data_csv(comparisons)
        write_atomically(out, text.encode())
        print_text(console, f"Written: {out}")
