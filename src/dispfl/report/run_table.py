"""Tables for the terminal: the results of single runs, and tables of numbers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dispfl.config import MADE_IN_PYTHON
from dispfl.report.markup import UNKNOWN
from dispfl.runs.directory import read_config, read_metrics, read_summary
from dispfl.runs.files import run_folder

WORST_AND_BEST, RUN = "worst,\nbest peer", "run"
WIDE = 100
"""Console width from which on a table of several runs shows all columns."""


def overview(path: Path) -> dict[str, Any]:
    """Return a run's summary; for an unfinished run, the same values over its rounds so far."""
    path = run_folder(path)
    config = read_config(path)
    summary = read_summary(path)
    if summary is not None:
        return summary
    records = read_metrics(path)
    command = f"dispfl run --resume {path}"
    if MADE_IN_PYTHON in config:
        command = "Federation.run(..., resume=True)"
    elif "spec" in config:
        command = f"dispfl peer run {path.parent}"
    evaluated = [record for record in records if record["accuracy"]]
    count = max(1, len(records))
    return {
        "method": config["method"]["name"],
        "rounds": len(records),
        "unfinished": f"{len(records)} of {config['rounds']} rounds; resume with: {command}",
        "accuracy": evaluated[-1]["accuracy"] if evaluated else None,
        "busiest": {
            f"{unit}_mb_per_round": sum(record["busiest"][f"{unit}_mb"] for record in records) / count
            for unit in ("paper", "wire")
        },
        "flops_per_peer_round": sum(record["flops_per_peer"] for record in records) / count,
        "seconds": sum(record["seconds"] for record in records),
    }


def short(number: float, decimals: int) -> str:
    """Return a number with some decimals, or with none if it is large, so that a table fits 80 columns."""
    return f"{number:.{decimals}f}" if number < 1000 else f"{number:.0f}"


def print_results(paths: Sequence[Path], console: Console) -> None:
    """Print one row per run: accuracy, traffic of the busiest node, FLOPs and seconds."""
    rows, notes = [], []
    for path in paths:
        summary = overview(path)
        rows.append(_cells(summary, path.resolve().name))
        notes.append(
            f"{summary['method']}: {summary['unfinished']}" if "unfinished" in summary else f"Run directory: {path}"
        )
        for group in summary.get("groups", []):
            notes.append(f"  density {group['density']:g}: accuracy {group['mean']:.3f}, {group['peers']} peers")
        if summary.get("failures"):
            notes.append(f"{summary['failures']} steps failed; see metrics.jsonl for the peers and reasons.")
    console.print("", _table(rows, console.width), "", sep="\n")
    legend = "accuracy: mean ± std over peers on own test data; FLOPs are theoretical: the kernels are dense"
    console.print(legend, style="dim", soft_wrap=True, highlight=False)
    for note in notes:
        console.print(note, soft_wrap=True, highlight=False, markup=False)


def _cells(summary: dict[str, Any], directory: str) -> dict[str, str]:
    """Return a run's cells by heading; `directory` is the name of its directory."""
    accuracy, busiest = summary["accuracy"], summary["busiest"]
    known = [value for value in accuracy["per_peer"] if value is not None] if accuracy else []
    return {
        "method": summary["method"],
        "rounds": str(summary["rounds"]),
        "accuracy\nover peers": f"{accuracy['mean']:.3f} ± {accuracy['std']:.3f}" if accuracy else UNKNOWN,
        WORST_AND_BEST: f"{min(known):.2f}, {max(known):.2f}" if known else UNKNOWN,
        "busiest\nMB/round": short(busiest["paper_mb_per_round"], 2),
        "on wire\nMB/round": short(busiest["wire_mb_per_round"], 2),
        "GFLOPs/\npeer": short(summary["flops_per_peer_round"] / 1e9, 2),
        "time\ns": short(summary["seconds"], 1),
        RUN: directory,
    }


def _table(rows: Sequence[dict[str, str]], width: int) -> Table:
    """Return a table of runs, with their directories unless the methods identify them."""
    hidden = set()
    if len(rows) == 1 or all(row["method"] == row[RUN] for row in rows):
        hidden = {RUN}
    elif width < WIDE:
        hidden = {WORST_AND_BEST}
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)  # fits 80 columns
    headings = [heading for heading in rows[0] if heading not in hidden]
    for heading in headings:
        right = heading not in ("method", RUN)
        table.add_column(heading, justify="right" if right else "left", no_wrap=heading != RUN, overflow="fold")
    for row in rows:
        table.add_row(*(Text(row[heading]) for heading in headings))  # plain text: a directory may be called [red]
    return table


def number_table(*headings: str, names: int = 1) -> Table:
    """Return an empty table; the first `names` columns hold names, the others numbers."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)  # fits 80 columns
    for position, heading in enumerate(headings):
        table.add_column(heading, justify="left" if position < names else "right", no_wrap=True)
    return table


def print_text(console: Console, text: str, style: str | None = None) -> None:
    """Print text as it is: no markup, no highlighting, no hard wrapping."""
    console.print(text, style=style, soft_wrap=True, highlight=False, markup=False)
