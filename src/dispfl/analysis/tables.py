"""Result tables of run directories."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from dispfl.runs.directory import read_config, read_metrics, read_summary


def overview(path: Path) -> dict[str, Any]:
    """A run's summary; of an unfinished run, what its rounds so far can tell."""
    config = read_config(path)
    summary = read_summary(path)
    if summary is not None:
        return summary
    records = read_metrics(path)
    scored = [record for record in records if record["accuracy"]]
    count = max(1, len(records))
    return {
        "method": config["method"]["name"],
        "rounds": len(records),
        "unfinished": f"{len(records)} of {config['rounds']} rounds; go on with: dispfl run --resume {path}",
        "accuracy": scored[-1]["accuracy"] if scored else None,
        "busiest": {
            f"{currency}_mb_per_round": sum(record["busiest"][f"{currency}_mb"] for record in records) / count
            for currency in ("paper", "wire")
        },
        "flops_per_peer_round": sum(record["flops_per_peer"] for record in records) / count,
        "seconds": sum(record["seconds"] for record in records),
    }


def print_results(paths: Sequence[Path], console: Console) -> None:
    """One row a run: accuracy, the busiest node's megabytes, FLOPs, seconds."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)  # fits 80 columns
    table.add_column("method", no_wrap=True)
    for heading in (
        "rounds",
        "accuracy\nover peers",
        "worst,\nbest peer",
        "busiest\nMB/round",
        "on wire\nMB/round",
        "GFLOPs/\npeer",
        "time s",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    notes = []
    for path in paths:
        summary = overview(path)
        accuracy = summary["accuracy"]
        table.add_row(
            summary["method"],
            str(summary["rounds"]),
            f"{accuracy['mean']:.3f} ± {accuracy['std']:.3f}" if accuracy else "–",
            f"{min(accuracy['per_peer']):.2f}, {max(accuracy['per_peer']):.2f}" if accuracy else "–",
            f"{summary['busiest']['paper_mb_per_round']:.2f}",
            f"{summary['busiest']['wire_mb_per_round']:.2f}",
            f"{summary['flops_per_peer_round'] / 1e9:.2f}",
            f"{summary['seconds']:.1f}",
        )
        notes.append(
            f"{summary['method']}: {summary['unfinished']}" if "unfinished" in summary else f"Run directory: {path}"
        )
        if summary.get("failures"):
            notes.append(f"{summary['failures']} steps failed; metrics.jsonl says which peers and why.")
    console.print(table)
    legend = "accuracy: mean ± std over peers on own test data; FLOPs are counted, not saved"
    console.print(legend, style="dim", soft_wrap=True, highlight=False)
    for note in notes:
        console.print(note, soft_wrap=True, highlight=False, markup=False)
