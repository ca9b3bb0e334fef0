"""Tables for the terminal: the results of single runs, and tables of numbers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dispfl.config import MADE_IN_PYTHON
from dispfl.report.labels import flops_kind, flops_note, row_labels
from dispfl.report.markup import UNKNOWN, format_seconds
from dispfl.runs.directory import read_config, read_metrics, read_summary
from dispfl.runs.files import run_folder
from dispfl.runs.metrics import seconds_per_peer_round

WORST_AND_BEST, RUN = "worst,\nbest peer", "run"
WIDE = 100
"""Console width from which on a table of several runs shows all columns."""
SHORT = 10
"""Labels up to this length leave room for all columns in 80."""


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
        "seconds_per_peer_round": seconds_per_peer_round(records),
    }


def short(number: float, decimals: int) -> str:
    """Return a number with some decimals, or with none if it is large, so that a table fits 80 columns."""
    return f"{number:.{decimals}f}" if number < 1000 else f"{number:.0f}"


def print_results(paths: Sequence[Path], console: Console) -> None:
    """Print one row per run: accuracy, traffic of the busiest node, FLOPs and seconds."""
    rows, notes = [], []
    configs = [read_config(run_folder(path)) for path in paths]
    labels = row_labels(configs)
    for path, label in zip(paths, labels, strict=True):
        summary = overview(path)
        rows.append(_cells(summary, label, path.resolve().name))
        notes.append(f"{label}: {summary['unfinished']}" if "unfinished" in summary else f"Run directory: {path}")
        notes += [_group_note(group) for group in summary.get("groups", [])]
        notes += _other_scores(summary)
        if summary.get("failures"):
            notes.append(f"{summary['failures']} steps failed; see metrics.jsonl for the peers and reasons.")
    console.print("", _table(rows, console.width), "", sep="\n")
    flops = flops_note(dict(zip(labels, map(flops_kind, configs), strict=True)))
    print_text(console, f"accuracy: mean ± std over peers on own test data. {flops}", "dim")
    for note in notes:
        console.print(note, soft_wrap=True, highlight=False, markup=False)


def _group_note(group: dict[str, Any]) -> str:
    """`  density 0.2: accuracy 0.805, 0.122 s per peer and round, 2 peers`"""
    seconds = f"{format_seconds(group['seconds'])} s per peer and round, " if "seconds" in group else ""
    return f"  density {group['density']:g}: accuracy {group['mean']:.3f}, {seconds}{group['peers']} peers"


def _other_scores(summary: dict[str, Any]) -> list[str]:
    """`  on validation data 0.712 ± 0.050; on the global test data 0.412 ± 0.030`, where there are such scores."""
    unseen = summary.get("unseen_peers") or {}
    scores = {
        "on validation data": summary.get("validation"),
        "on the global test data": summary.get("global_test"),
        f"of {unseen.get('peers')} unseen peers after {unseen.get('steps')} steps": unseen.get("accuracy"),
    }
    found = [f"{what} {score['mean']:.3f} ± {score['std']:.3f}" for what, score in scores.items() if score]
    return [f"  {'; '.join(found)}"] if found else []


def _cells(summary: dict[str, Any], label: str, directory: str) -> dict[str, str]:
    """Return a run's cells by heading; `directory` is the name of its directory."""
    accuracy, busiest = summary["accuracy"], summary["busiest"]
    known = [value for value in accuracy["per_peer"] if value is not None] if accuracy else []
    return {
        "method": label,
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
    """Return a table of runs, with their directories unless the labels identify them."""
    labels = {row["method"] for row in rows}
    hidden = {RUN} if len(labels) == len(rows) else set()
    if width < WIDE and (not hidden or max(map(len, labels)) > SHORT):
        hidden.add(WORST_AND_BEST)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)  # fits 80 columns
    headings = [heading for heading in rows[0] if heading not in hidden]
    for heading in headings:
        right = heading not in ("method", RUN)
        table.add_column(heading, justify="right" if right else "left", no_wrap=right, overflow="fold")
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
