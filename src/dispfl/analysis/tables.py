"""Result tables of run directories."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from dispfl.runs.directory import MADE_IN_PYTHON, read_config, read_metrics, read_summary


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


def print_results(paths: Sequence[Path], console: Console) -> None:
    """One row a run: accuracy, the busiest node's megabytes, FLOPs, seconds."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)  # 80 columns
    table.add_column("method", no_wrap=True)
    for heading in (
        "rounds",
        "accuracy\nover peers",
        "worst,\nbest peer",
        "busiest\nMB/round",
        "on wire\nMB/round",
        "GFLOPs/\npeer",
        "time\ns",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    notes = []
    for path in paths:
        summary = overview(path)
        accuracy = summary["accuracy"]
        known = [value for value in accuracy["per_peer"] if value is not None] if accuracy else []
        table.add_row(
            summary["method"],
            str(summary["rounds"]),
            f"{accuracy['mean']:.3f} ± {accuracy['std']:.3f}" if accuracy else "–",
            f"{min(known):.2f}, {max(known):.2f}" if known else "–",
            short(summary["busiest"]["paper_mb_per_round"], 2),
            short(summary["busiest"]["wire_mb_per_round"], 2),
            short(summary["flops_per_peer_round"] / 1e9, 2),
            short(summary["seconds"], 1),
        )
        notes.append(
            f"{summary['method']}: {summary['unfinished']}" if "unfinished" in summary else f"Run directory: {path}"
        )
        for group in summary.get("groups", []):
            notes.append(f"  density {group['density']:g}: accuracy {group['mean']:.3f}, {group['peers']} peers")
        if summary.get("failures"):
            notes.append(f"{summary['failures']} steps failed; metrics.jsonl says which peers and why.")
    console.print("", table, "", sep="\n")
    legend = "accuracy: mean ± std over peers on own test data; FLOPs are counted, not saved"
    console.print(legend, style="dim", soft_wrap=True, highlight=False)
    for note in notes:
        console.print(note, soft_wrap=True, highlight=False, markup=False)
