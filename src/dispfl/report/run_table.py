"""The results of single runs as a table for the terminal."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from dispfl.config import MADE_IN_PYTHON
from dispfl.files import is_site, run_folder
from dispfl.report.comparison import compare
from dispfl.report.labels import (
    UNKNOWN,
    connections_note,
    flops_kind,
    flops_note,
    join_and,
    row_labels,
)
from dispfl.report.markup import format_number, format_seconds
from dispfl.report.runs import find_runs
from dispfl.report.tables import (
    ALWAYS,
    NEEDED,
    TableColumn,
    against_sentence,
    fit_table,
    omitted_note,
)
from dispfl.runs.directory import read_config, read_metrics, read_summary
from dispfl.runs.metrics import last, main_scores, measure_of, seconds_per_peer_round
from dispfl.terminal import print_text


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
    count = max(1, len(records))
    return {
        "method": config["method"]["name"],
        "rounds": len(records),
        "unfinished": f"{len(records)} of {config['rounds']} rounds; resume with: {command}",
        "metric": records[-1]["metric"] if records else "score",
        "scores": last(records, "scores") or {},
        "test_loss": last(records, "test_loss"),
        "busiest": {
            f"{unit}_mb_per_round": sum(record["busiest"][f"{unit}_mb"] for record in records)
            / count
            for unit in ("paper", "wire")
        }
        | {"connections": max((record["busiest"]["connections"] for record in records), default=0)},
        "flops_per_peer_round": sum(record["flops_per_peer"] for record in records) / count,
        "seconds": sum(record["seconds"] for record in records),
        "seconds_per_peer_round": seconds_per_peer_round(records),
    }


def short(number: float, decimals: int) -> str:
    """Return a number with some decimals, or with none if it is large, so that a table fits 80
    columns."""
    return f"{number:.{decimals}f}" if number < 1000 else f"{number:.0f}"


def find_shown(paths: Sequence[Path]) -> dict[Path, str]:
    """Return the runs and sites among these paths, and all runs in folders among them, with their
    names in a table."""
    shown: dict[Path, str] = {}
    for path in paths:
        if is_site(path) or (path / "config.toml").exists() or not path.is_dir():
            shown[path] = path.resolve().name
        else:
            shown |= {run: str(run.relative_to(path)) for run in find_runs([path])}
    return shown


def print_results(given: Sequence[Path], console: Console) -> None:
    """Print one row per run, also of all in a folder: its scores, traffic of the busiest node,
    FLOPs and seconds."""
    notes = []
    names = find_shown(given)
    paths = list(names)
    configs = [read_config(run_folder(path)) for path in paths]
    labels, summaries = row_labels(configs), [overview(path) for path in paths]
    for path, label, summary in zip(paths, labels, summaries, strict=True):
        if "unfinished" in summary:
            notes.append(f"{label}: {summary['unfinished']}")
        elif path in given:
            notes.append(f"Run directory: {path}")
        notes += [_group_note(group, summary) for group in summary.get("groups", [])]
        notes += _other_scores(summary)
        if summary.get("failures"):
            notes.append(
                f"{summary['failures']} steps failed; see metrics.jsonl for the peers and reasons."
            )
    table, omitted = fit_table(_columns(labels, summaries, list(names.values())), console)
    console.print("", table, "", sep="\n")
    flops = flops_note(dict(zip(labels, map(flops_kind, configs), strict=True)))
    metric = join_and(list(dict.fromkeys(summary["metric"] for summary in summaries)))
    print_text(console, f"{metric}: mean ± std over peers on own test data. {flops}", "dim")
    if omitted:
        print_text(console, omitted_note(omitted, "`dispfl show --json` has all values."), "dim")
    for sentence in (*_compared(paths, labels), *notes):
        print_text(console, sentence)


def _compared(paths: Sequence[Path], labels: Sequence[str]) -> list[str]:
    """Return who is ahead of whom, and whether at equal connections, of runs with different
    settings."""
    folders = {run_folder(path): label for path, label in zip(paths, labels, strict=True)}
    runs = [
        ({"method": label}, folder) for folder, label in folders.items() if read_metrics(folder)
    ]
    if len(set(folders.values())) < 2 or len(runs) < len(folders):
        return []
    comparison = compare(runs)
    counts = {row.label: row.connections for row in comparison.rows}
    return [
        sentence
        for sentence in (against_sentence(comparison), connections_note(counts))
        if sentence
    ]


def _group_note(group: dict[str, Any], summary: dict[str, Any]) -> str:
    """`  density 0.2: accuracy 0.805, 0.122 s per peer and round, 2 peers`"""
    seconds = (
        f"{format_seconds(group['seconds'])} s per peer and round, " if "seconds" in group else ""
    )
    score = f"{summary['metric']} {measure_of([summary]).text(group['mean'])}"
    return f"  density {group['density']:g}: {score}, {seconds}{group['peers']} peers"


def _columns(
    labels: Sequence[str], summaries: Sequence[dict[str, Any]], directories: Sequence[str]
) -> list[TableColumn]:
    """Return the columns of a table of runs, with their directories unless the labels identify
    them."""

    def column(
        first: str, second: str, priority: int, cell: Callable[[dict[str, Any]], str]
    ) -> TableColumn:
        return TableColumn((first, second), [cell(summary) for summary in summaries], priority)

    names = dict.fromkeys(
        name for summary in summaries for name in (summary["metric"], *summary["scores"])
    )
    main = {summary["metric"] for summary in summaries}
    shown = [
        TableColumn(("method", ""), labels, ALWAYS, text=True),
        column("rounds", "", NEEDED, lambda summary: str(summary["rounds"])),
    ]
    for name in names:
        priority = ALWAYS if name in main else 2
        shown.append(column(name, "over peers", priority, partial(_mean_and_std, name)))
    shown += [
        column("worst,", "best peer", 3, _worst_and_best),
        *(
            [column("test", "loss", 1, _test_loss)]
            if any(summary.get("test_loss") for summary in summaries)
            else []
        ),
        column(
            "busiest",
            "MB/round",
            NEEDED,
            lambda summary: short(summary["busiest"]["paper_mb_per_round"], 2),
        ),
        column(
            "on wire",
            "MB/round",
            NEEDED,
            lambda summary: short(summary["busiest"]["wire_mb_per_round"], 2),
        ),
        column(
            "GFLOPs/",
            "peer",
            NEEDED,
            lambda summary: short(summary["flops_per_peer_round"] / 1e9, 2),
        ),
        column("time", "s", NEEDED, lambda summary: short(summary["seconds"], 1)),
    ]
    if len(set(labels)) < len(labels):
        shown.append(TableColumn(("run", ""), directories, ALWAYS, text=True))
    return shown


def _other_scores(summary: dict[str, Any]) -> list[str]:
    """`  accuracy on validation data 0.712 ± 0.050; on the global test data 0.412 ± 0.030`, of
    those that there are."""
    unseen, text = summary.get("unseen_peers") or {}, measure_of([summary]).text
    scores = {
        "on validation data": summary.get("validation"),
        "on the global test data": summary.get("global_test"),
        f"of {unseen.get('peers')} unseen peers after {unseen.get('steps')} steps": unseen.get(
            "score"
        ),
    }
    found = [
        f"{what} {text(score['mean'])} ± {text(score['std'])}"
        for what, score in scores.items()
        if score
    ]
    return [f"  {summary['metric']} {'; '.join(found)}"] if found else []


def _mean_and_std(name: str, summary: dict[str, Any]) -> str:
    found = summary["scores"].get(name)
    return (
        f"{found['mean']:{found['format']}} ± {found['std']:{found['format']}}"
        if found
        else UNKNOWN
    )


def _test_loss(summary: dict[str, Any]) -> str:
    found = summary.get("test_loss")
    return format_number(found["mean"] if found else None, 3)


def _worst_and_best(summary: dict[str, Any]) -> str:
    scores = main_scores(summary)
    known = [value for value in scores["per_peer"] if value is not None] if scores else []
    measure = measure_of([summary])
    return f"{measure.worst(known):.2f}, {measure.best(known):.2f}" if known else UNKNOWN
