"""`dispfl compare`: methods side by side, on the same splits, initial weights and test data."""

import shlex
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from dispfl.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from dispfl.grid import Cell

Config = Annotated[
    Path | None, typer.Option("--config", "-c", help="A config file. Its method table is for the method it names.")
]
Seeds = Annotated[int, typer.Option(min=1, help="How many seeds: the config's and the next ones.")]
Out = Annotated[
    Path | None,
    typer.Option(help="The folder of the runs; by default a new one under runs/. An existing one is gone on with."),
]
DataDir = Annotated[Path | None, typer.Option(help="Where the data set's files are.")]
Targets = Annotated[str, typer.Option(help="Count the rounds to these accuracies: 0.6,0.7,0.8.")]
Equal = Annotated[
    Literal["rounds", "bytes", "flops"],
    typer.Option(
        "--budget",
        help="What is equal: rounds, the busiest node's bytes, or all peers' training FLOPs. The last two look at what "
        "each run had reached within the smallest total of those that spend any; nothing is trained again.",
    ),
]

Track = Annotated[str | None, typer.Option(help="Show the runs in another program too: tensorboard.")]


def compare(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="METHOD... [KEY=VALUE]...", help="Methods, and settings for all that have them."),
    ] = None,
    config: Config = None,
    seeds: Seeds = 1,
    out: Out = None,
    data_dir: DataDir = None,
    targets: Targets = "",
    budget: Equal = "rounds",
    track: Track = None,
) -> None:
    """Train several methods on the same splits, initial weights and test data, and print one table.

    Runs go to OUT/<method>/seed-<n>. Those that are finished are skipped and
    those that were cut are gone on with, so the same command may be given
    again: with more methods, more seeds, other targets or another budget.
    The table is also written as Markdown, LaTeX, CSV and JSON, beside a
    picture of the learning curves.

    Example: dispfl compare dispfl local rounds=10 --seeds 3 --targets 0.6,0.7
    """
    from dispfl.grid import methods_grid

    see_grid_through(
        "compare", methods_grid, list(words or []), Options(config, seeds, out, data_dir, targets, budget, track)
    )


@dataclass(frozen=True)
class Options:
    """What `compare` and `sweep` are asked beside their words."""

    config: Path | None
    seeds: int
    out: Path | None
    data_dir: Path | None
    targets: str
    budget: str
    track: str | None = None


def see_grid_through(
    command: str,
    grid: "Callable[[Sequence[str], Mapping[str, Any], int, Path], list[Cell]]",
    words: list[str],
    asked: Options,
) -> None:
    """Lay out a grid of runs, run what is missing with a progress bar, then print and write the comparison."""
    from rich.console import Console

    from dispfl.cli.run import data_dir_words, first_free
    from dispfl.config import read_toml
    from dispfl.grid import check
    from dispfl.runs.tracking import check_tracker

    check_tracker(asked.track)
    targets = accuracies(asked.targets)
    words += data_dir_words(asked.data_dir)
    out = asked.out or first_free(Path("runs") / command)
    cells = grid(words, read_toml(asked.config) if asked.config else {}, asked.seeds, out)
    check(cells)
    console = Console()
    console.print(_standing(cells), soft_wrap=True, highlight=False, markup=False)
    run_grid(cells, console, asked.track, [] if asked.out else ["--out", str(out)])
    _report(cells, out, targets, asked.budget, console)


def run_grid(
    cells: "Sequence[Cell]", console: "Console", track: str | None = None, to_go_on: Sequence[str] = ()
) -> None:
    """Run what is missing of a grid with a progress bar; Ctrl-C says how to go on: the same command, and `to_go_on`."""
    from dispfl.cli.grid_progress import watching_grid
    from dispfl.cli.run import warn_of_noise
    from dispfl.grid import State, run_missing

    warn_of_noise(cell.experiment for cell in cells if cell.state is not State.DONE)
    try:
        with watching_grid(cells, console) as watch:
            run_missing(cells, watch, watch.decoding, track)
    except KeyboardInterrupt:
        again = shlex.join(["dispfl", *sys.argv[1:], *to_go_on])
        message = f"\nStopped; nothing that was finished is lost. Go on with: {again}"
        console.print(message, soft_wrap=True, highlight=False, markup=False)
        raise typer.Exit(130) from None


def accuracies(text: str) -> list[float]:
    """`0.6,0.7` as numbers."""
    found = []
    for word in filter(None, (part.strip() for part in text.split(","))):
        try:
            target = float(word)
        except ValueError:
            raise ConfigError(
                f"--targets must be numbers with commas between them, such as 0.6,0.7; got {word!r}."
            ) from None
        if not 0 < target <= 1:
            hint = f" For {target:g}% write {target / 100:g}." if 1 < target <= 100 else ""
            raise ConfigError(f"--targets must be in (0, 1], got {word}.{hint}")
        found.append(target)
    return sorted(set(found))


def _standing(cells: "Sequence[Cell]") -> str:
    """`27 runs: 20 done, 1 to go on with, 6 to begin.`"""
    states = Counter(cell.state.value for cell in cells)
    words = {"done": "done", "cut": "to go on with", "missing": "to begin"}
    parts = [f"{states[state]} {said}" for state, said in words.items() if states[state]]
    return f"{len(cells)} {'run' if len(cells) == 1 else 'runs'}: {', '.join(parts)}."


def _report(cells: "Sequence[Cell]", out: Path, targets: Sequence[float], budget: str, console: "Console") -> None:
    from dispfl.analysis.comparison import Budget
    from dispfl.analysis.comparison import compare as lay_side_by_side
    from dispfl.analysis.curves import learning_curves
    from dispfl.analysis.formats import legend, rich_table, write_all
    from dispfl.analysis.report.page import write_report

    comparison = lay_side_by_side([(cell.row, cell.path) for cell in cells], Budget(budget), targets)
    table, left_out = rich_table(comparison, console)
    console.print(table)
    for sentence in legend(comparison):
        console.print(sentence, style="dim", soft_wrap=True, highlight=False, markup=False)
    if left_out:
        notes = f"No room here for: {', '.join(left_out)}. The files have them."
        console.print(notes, soft_wrap=True, highlight=False, markup=False)
    files = write_all(comparison, out)
    learning_curves(comparison, out / "learning-curves.png")
    write_report([cell.path for cell in cells], out / "report.html")
    suffixes = ", ".join(file.suffix for file in files[1:])
    written = f"Written: {files[0]}, {suffixes}; {out / 'learning-curves.png'}; {out / 'report.html'}"
    console.print(written, soft_wrap=True, highlight=False, markup=False)
