"""`dispfl time`: what finished runs would have taken on a fleet of devices."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dispfl.cli.completion import complete_runs
from dispfl.cli.grid import TargetsOption, parse_targets
from dispfl.errors import ConfigError, reading
from dispfl.terminal import SafeConsole, print_text

if TYPE_CHECKING:
    from dispfl.report.runs import RecordedRun

FORMATS = (".png", ".pdf", ".svg")


def time(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="DIR... [KEY=VALUE]...",
            autocompletion=complete_runs,
            help=(
                "Run directories, or folders that contain some, and a clock: fleet=phones,"
                " classes.NAME={...}, network.latency=20. Default: the run's own."
            ),
        ),
    ],
    targets: TargetsOption = "",
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="Draw who computes, transfers and waits, of one run: .png, .pdf or .svg.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all times as JSON.")] = False,
) -> None:
    """Print how long runs would have taken on a fleet of devices, without training again.

    The times follow from what a run has recorded: the size of every message
    and the operations of every peer. Learning is the same on every fleet.

    Example: dispfl time runs/dispfl-fashion-sample fleet=phones
    Example: dispfl time runs/five fleet=edge-boards network.latency=50 --targets 0.6
    """
    from dispfl.config import parse_overrides
    from dispfl.core.metric import SHARES
    from dispfl.report.runs import read_runs
    from dispfl.runs.timing import summarize_times, times_after

    if out is not None and out.suffix not in FORMATS:
        raise ConfigError(f"--out must end with {', '.join(FORMATS)}, got {out}.", key="--out")
    directories, overrides = _split(arguments)
    changes = parse_overrides(overrides)
    with reading(directories[0]):
        runs = read_runs(directories)
    if out is not None and len(runs) > 1:
        raise ConfigError(f"--out draws one run, but there are {len(runs)}.", key="--out")

    timed = []
    summaries = []
    for run in runs:
        records, fleet = times_after(run.config, run.records, run.roster, changes)
        timed.append(replace(run, records=records))
        summary = summarize_times(timed[-1].records, run.roster, fleet.class_of)
        if summary is None:
            raise ConfigError(f"{run.path} has no finished round; run it first.")
        summaries.append(summary)

    shares = all(run.measure.name in SHARES for run in runs)
    scores = parse_targets(targets, shares)
    if as_json:
        typer.echo(json.dumps(_values(timed, summaries, scores), indent=2))
    else:
        _print_times(timed, summaries, scores)
    if out is not None:
        from dispfl.extras import require

        require("report", "--out")
        from dispfl.report.timeline import draw_timeline

        draw_timeline(timed[0], fleet.class_of, out)
        if not as_json:
            print_text(SafeConsole(), f"Written: {out}")


def _split(arguments: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Return the directories and the overrides among arguments; a folder may be called `lr=0.1`."""
    directories = []
    overrides = []
    for argument in arguments:
        if "=" in argument and not Path(argument).exists():
            overrides.append(argument)
        else:
            directories.append(Path(argument))
    if not directories:
        raise ConfigError("Name a run directory: dispfl time runs/NAME fleet=phones.")
    return directories, overrides


def _values(
    runs: "Sequence[RecordedRun]", summaries: Sequence[dict[str, Any]], targets: Sequence[float]
) -> list[dict[str, Any]]:
    values = []
    for run, summary in zip(runs, summaries, strict=True):
        hours_to = {f"{target:g}": run.hours_to(target) for target in targets}
        values.append(
            {"run": str(run.path), "rounds": len(run.records), **summary, "hours_to": hours_to}
        )
    return values


def _print_times(
    runs: "Sequence[RecordedRun]", summaries: Sequence[dict[str, Any]], targets: Sequence[float]
) -> None:
    """Print one row per run; of a single run also the times of each class."""
    from dispfl.report.run_tables import time_notes
    from dispfl.report.runs import run_labels
    from dispfl.report.tables import Table, TableColumn
    from dispfl.report.units import HOURS, common_unit

    unit = common_unit([1e-9 + summary["hours_per_round"] for summary in summaries], HOURS)
    columns = [
        TableColumn(("method", ""), run_labels(runs), text=True),
        TableColumn(("rounds", ""), [str(len(run.records)) for run in runs]),
        TableColumn(("simulated", "hours"), _hours([summary["hours"] for summary in summaries])),
        TableColumn(
            (unit.name, "per round"),
            unit.column([summary["hours_per_round"] for summary in summaries]),
        ),
        TableColumn(("peers", "busy"), [f"{summary['busy'] or 0:.0%}" for summary in summaries]),
    ]
    for target in targets:
        cells = _hours([run.hours_to(target) for run in runs])
        columns.append(TableColumn(("hours", f"to {target:g}"), cells))

    console = SafeConsole()
    drawn, _ = Table(columns).on_console(console)
    console.print("", drawn, "", sep="\n")
    print_text(
        console,
        "Busy: share of its rounds in which a peer computes, mean over peers; the rest is"
        " transfers, waiting and time offline.",
        "dim",
    )
    if len(runs) == 1:
        for note in time_notes(summaries[0]):
            print_text(console, note)


def _hours(hours: Sequence[float | None]) -> list[str]:
    from dispfl.report.result_tables import hours_text

    return list(map(hours_text, hours))
