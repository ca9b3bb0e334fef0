"""Result tables of run directories."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dispfl.runs.directory import MADE_IN_PYTHON, read_config, read_metrics, read_summary

WORST_AND_BEST, RUN = "worst,\nbest peer", "run"
WIDE = 100
"""Columns from which on a table of several runs has room for everything."""


def overview(path: Path) -> dict[str, Any]:
    """A run's summary; of an unfinished run, what its rounds so far can tell."""
    config = read_config(path)
    summary = read_summary(path)
    if summary is not None:
        return summary
    records = read_metrics(path)
    how = "Federation.run(..., resume=True)" if MADE_IN_PYTHON in config else f"dispfl run --resume {path}"
    scored = [record for record in records if record["accuracy"]]
    count = max(1, len(records))
    return {
        "method": config["method"]["name"],
        "rounds": len(records),
        "unfinished": f"{len(records)} of {config['rounds']} rounds; go on with: {how}",
        "accuracy": scored[-1]["accuracy"] if scored else None,
        "busiest": {
            f"{currency}_mb_per_round": sum(record["busiest"][f"{currency}_mb"] for record in records) / count
            for currency in ("paper", "wire")
        },
        "flops_per_peer_round": sum(record["flops_per_peer"] for record in records) / count,
        "seconds": sum(record["seconds"] for record in records),
    }


def short(number: float, digits: int) -> str:
    """A number with so many digits after the point, or with none where it is large: a table has 80 columns."""
    return f"{number:.{digits}f}" if number < 1000 else f"{number:.0f}"


def _row(summary: dict[str, Any], name: str) -> dict[str, str]:
    """A run's cells, by their headings; `name` is its directory's."""
    accuracy, busiest = summary["accuracy"], summary["busiest"]
    known = [value for value in accuracy["per_peer"] if value is not None] if accuracy else []
    return {
        "method": summary["method"],
        "rounds": str(summary["rounds"]),
        "accuracy\nover peers": f"{accuracy['mean']:.3f} ± {accuracy['std']:.3f}" if accuracy else "–",
        WORST_AND_BEST: f"{min(known):.2f}, {max(known):.2f}" if known else "–",
        "busiest\nMB/round": short(busiest["paper_mb_per_round"], 2),
        "on wire\nMB/round": short(busiest["wire_mb_per_round"], 2),
        "GFLOPs/\npeer": short(summary["flops_per_peer_round"] / 1e9, 2),
        "time\ns": short(summary["seconds"], 1),
        RUN: name,
    }


def _table(rows: Sequence[dict[str, str]], width: int) -> Table:
    """A table of runs, which names their directories where the methods do not tell them apart."""
    hidden = set()
    if len(rows) == 1 or all(row["method"] == row[RUN] for row in rows):
        hidden = {RUN}
    elif width < WIDE:
        hidden = {WORST_AND_BEST}
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)  # 80 columns
    headings = [heading for heading in rows[0] if heading not in hidden]
    for heading in headings:
        right = heading not in ("method", RUN)
        table.add_column(heading, justify="right" if right else "left", no_wrap=heading != RUN, overflow="fold")
    for row in rows:
        table.add_row(*(Text(row[heading]) for heading in headings))  # as plain text: a folder may be called [red]
    return table


def print_results(paths: Sequence[Path], console: Console) -> None:
    """One row a run: accuracy, the busiest node's megabytes, FLOPs, seconds."""
    rows, notes = [], []
    for path in paths:
        summary = overview(path)
        rows.append(_row(summary, path.resolve().name))
        notes.append(
            f"{summary['method']}: {summary['unfinished']}" if "unfinished" in summary else f"Run directory: {path}"
        )
        for group in summary.get("groups", []):
            notes.append(f"  density {group['density']:g}: accuracy {group['mean']:.3f}, {group['peers']} peers")
        if summary.get("failures"):
            notes.append(f"{summary['failures']} steps failed; metrics.jsonl says which peers and why.")
    console.print("", _table(rows, console.width), "", sep="\n")
    legend = "accuracy: mean ± std over peers on own test data; FLOPs are counted, not saved"
    console.print(legend, style="dim", soft_wrap=True, highlight=False)
    for note in notes:
        console.print(note, soft_wrap=True, highlight=False, markup=False)
