"""Tables of results: of a comparison, for the terminal and as files, and of single runs."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from dispfl.core.report import QUANTITIES
from dispfl.files import is_site, run_folder, write_atomically
from dispfl.report.comparison import Comparison, ComparisonRow, compare_runs
from dispfl.report.differences import paired_over
from dispfl.report.labels import connections_note, flops_note, row_labels
from dispfl.report.runs import GAP, Budget, RecordedRun, find_runs, load_run
from dispfl.report.tables import (
    ALWAYS,
    NEEDED,
    Table,
    TableColumn,
    csv_text,
    omitted_note,
)
from dispfl.report.wording import (
    UNKNOWN,
    flops_unit_of_smallest,
    format_number,
    format_seconds,
    format_short,
    join_and,
    plural,
)
from dispfl.runs.metrics import Metrics, main_scores, measure_of, summarize_rounds
from dispfl.terminal import print_text

VALIDATION = "validation"
MAX_REFERENCE = 12
"""Longer labels of the reference row do not fit a heading."""
BUDGET_UNITS = {
    Budget.ROUNDS: "rounds",
    Budget.BYTES: "MB",
    Budget.FLOPS: "FLOPs",
    Budget.SECONDS: "s",
}


# A comparison: one row per method or value of a sweep


def comparison_table(comparison: Comparison) -> Table:
    """Return the table of a comparison, with all its columns and the legend."""
    return Table(list(_columns(comparison)), legend(comparison))


def _columns(comparison: Comparison) -> Iterator[TableColumn]:
    """Yield all columns of the table, from left to right."""
    rows = comparison.rows
    measure = comparison.measure
    several = comparison.most_seeds > 1
    show_seconds = any(row.seconds_per_peer is not None for row in rows)

    def column(
        first: str, second: str, priority: int, cell: Callable[[ComparisonRow], str]
    ) -> TableColumn:
        return TableColumn((first, second), list(map(cell, rows)), priority)

    for key in rows[0].name:
        yield TableColumn((key, ""), [row.name[key] for row in rows], text=True)
    yield _score_column(comparison)
    yield column("std over", "peers", 1 if several else 3, lambda row: measure.text(row.peer_std))
    if comparison.differences:
        yield from _difference_columns(comparison)
    if comparison.budget is not Budget.ROUNDS:
        yield column("at", "round", 7, lambda row: _rounds(_final_round(row)))
    yield column("busiest", "MB/round", 8, lambda row: f"{row.paper_mb:.2f}")
    yield column("on wire", "MB/round", 6, lambda row: f"{row.wire_mb:.2f}")
    yield _flops_column("per peer", 4, [row.flops_per_peer for row in rows])
    yield _flops_column("all peers", 7, [row.flops_total for row in rows])
    if show_seconds:
        yield column("s per peer", "and round", 3, lambda row: format_seconds(row.seconds_per_peer))
    for target in comparison.targets:
        cells = [_rounds_to(row, target) for row in rows]
        yield TableColumn(("rounds", f"to {target:g}"), cells, 5)
    for name in comparison.extras:
        yield _extra_column(comparison, name)
    yield column("time", "s", 2, lambda row: format_number(_final_seconds(row), 1))


def _score_column(comparison: Comparison) -> TableColumn:
    measure = comparison.measure
    cells = []
    best = set()
    for number, row in enumerate(comparison.rows):
        cell = measure.text(row.score)
        if row.score_std is not None:
            cell += f" ± {measure.text(row.score_std)}"
        cells.append(cell)
        if comparison.is_best(row):
            best.add(number)
    over = "over seeds" if comparison.most_seeds > 1 else ""
    return TableColumn((measure.name, over), cells, best=frozenset(best))


def _difference_columns(comparison: Comparison) -> Iterator[TableColumn]:
    """Yield what the test says about each row, and the difference with its interval."""
    labels = comparison.reference_labels
    short = len(labels) == 1 and len(labels[0]) <= MAX_REFERENCE
    verdicts = []
    texts = []
    for row in comparison.rows:
        difference = comparison.differences.get(row.label)
        if difference:
            verdicts.append(str(difference.verdict(comparison.measure)))
            texts.append(difference.text(comparison.measure))
        else:
            is_reference = row.label in labels and not short
            verdicts.append("reference" if is_reference else UNKNOWN)
            texts.append(UNKNOWN)
    name = labels[0] if short else "reference"
    yield TableColumn(("against", name), verdicts, 8)
    yield TableColumn(("difference", f"to {name}"), texts, 5)


def _flops_column(second: str, priority: int, flops: Sequence[float]) -> TableColumn:
    scale, unit = flops_unit_of_smallest(flops)
    cells = [f"{value / scale:.2f}" for value in flops]
    return TableColumn((unit, second), cells, priority)


def _extra_column(comparison: Comparison, name: str) -> TableColumn:
    """Return the column of another metric, or of a quantity as it is declared."""
    metric = comparison.measure.name
    heading = (name, "")
    priority = 8 if name == GAP else 4
    for quantity in QUANTITIES:
        column = quantity.column
        if column and column.name.format(metric=metric) == name:
            first, second = column.heading
            heading = (first.format(metric=metric), second.format(metric=metric))
            priority = column.priority
    cells = [format_number(row.extra(name), 3) for row in comparison.rows]
    return TableColumn(heading, cells, priority)


def _final_round(row: ComparisonRow) -> float | None:
    return row.mean_final(lambda point: point.round)


def _final_seconds(row: ComparisonRow) -> float | None:
    return row.mean_final(lambda point: point.seconds)


def _rounds(mean: float | None) -> str:
    return format_number(mean, 1).removesuffix(".0")


def _rounds_to(row: ComparisonRow, target: float) -> str:
    rounds = row.rounds_to(target)
    return f">{row.rounds}" if rounds is None else _rounds(rounds)


def legend(comparison: Comparison) -> list[str]:
    """Return sentences that explain the numbers."""
    return list(_legend(comparison))


def _legend(comparison: Comparison) -> Iterator[str]:
    rows = comparison.rows
    metric = comparison.measure.name
    yield _budget_sentence(comparison)
    if any(row.score is None for row in rows):
        yield f"{UNKNOWN}: no evaluated round within the budget."
    yield _score_sentence(comparison)
    if comparison.differences:
        yield f"Against {_references(comparison)}: {paired_over(comparison.differences)}"
    connections = connections_note({row.label: row.connections for row in rows})
    if connections:
        yield connections
    yield (
        "MB: traffic of the busiest node, as the paper counts it (values only) and on the wire (as"
        " sent)."
    )
    flops = flops_note({row.label: row.flops_kind for row in rows})
    yield f"FLOPs: training per round, of one participating peer and of all peers. {flops}"
    if any(row.seconds_per_peer is not None for row in rows):
        yield (
            "s per peer and round: computing time of a participating peer; time: wall time of all"
            " rounds."
        )
    if VALIDATION in comparison.extras:
        yield (
            f"validation: {metric} on the peers' validation data; choose by it, not by the test"
            " data."
        )
    if GAP in comparison.extras:
        yield (
            f"gap: how much better {metric} is on the peers' own training data than on their test"
            " data."
        )
    if comparison.targets:
        yield _targets_sentence(comparison)
    failed = [f"{row.label} {row.failures}" for row in rows if row.failures]
    if failed:
        yield f"Failed steps, after which the peer keeps its last valid state: {', '.join(failed)}."


def _score_sentence(comparison: Comparison) -> str:
    measure = comparison.measure
    direction = "" if measure.higher_is_better else " (lower is better)"
    seeds = comparison.most_seeds
    spread = "one seed"
    if seeds > 1:
        spread = f"mean ± sample standard deviation over {seeds} seeds"
    return f"{measure.name}{direction}: mean over peers, each on its own test data; {spread}."


def _targets_sentence(comparison: Comparison) -> str:
    rounds = comparison.rows[0].rounds
    if comparison.most_seeds > 1:
        return (
            "rounds to a target: the first evaluated round that reaches it, mean over seeds;"
            f" >{rounds}: not reached by every seed."
        )
    return f"rounds to a target: the first evaluated round that reaches it; >{rounds}: not reached."


def _references(comparison: Comparison) -> str:
    labels = comparison.reference_labels
    return labels[0] if len(labels) == 1 else "the reference of the same data"


def against_sentence(comparison: Comparison) -> str:
    """`Against Dis-PFL: Local behind, -0.031 [-0.045, -0.017]; ...`; empty without any pair."""
    measure = comparison.measure
    differences = comparison.differences
    if not differences:
        return ""
    parts = []
    for label, difference in differences.items():
        parts.append(f"{label} {difference.verdict(measure)}, {difference.text(measure)}")
    return (
        f"Against {_references(comparison)} in {measure.name}: {'; '.join(parts)}"
        f" ({paired_over(differences)[:-1]})."
    )


def _equal_rounds(comparison: Comparison) -> int | None:
    """Return the number of rounds if all rows have the same, else None."""
    rounds = {row.rounds for row in comparison.rows}
    return rounds.pop() if len(rounds) == 1 else None


def _budget_sentence(comparison: Comparison) -> str:
    budget = comparison.budget
    if budget is Budget.ROUNDS:
        rounds = _equal_rounds(comparison)
        if rounds is None:
            return "Compared after each run's last round."
        return f"Compared after {plural(rounds, 'round')}."
    if all(run.limit is None for run in comparison.runs):
        return f"Compared at equal {budget}; no run spends any, so each row shows its last round."
    if comparison.limit is None:
        return f"Compared at equal {budget}: the smallest total of the rows with the same data."
    mean = ", mean over seeds" if len(comparison.limits) > 1 else ""
    return f"{_limit_text(budget, comparison.limit)}{mean}."


def _limit_text(budget: Budget, limit: float) -> str:
    if budget is Budget.BYTES:
        return f"Compared at equal bytes: {limit:.2f} MB on the wire of the busiest node"
    if budget is Budget.SECONDS:
        return f"Compared at equal computing: {format_seconds(limit)} s of a peer"
    scale, unit = flops_unit_of_smallest([limit])
    return f"Compared at equal FLOPs: {limit / scale:.2f} {unit} of training by all peers"


# The same as files


def write_tables(comparison: Comparison, out: Path, name: str = "comparison") -> list[Path]:
    """Write `comparison.md`, `.tex`, `.csv` and `.json` into a folder."""
    table = comparison_table(comparison)
    values = comparison_json(comparison, out)
    texts = {
        "md": table.markdown(),
        "tex": table.latex(),
        "csv": comparison_csv(comparison),
        "json": json.dumps(values, indent=2, allow_nan=False, ensure_ascii=False) + "\n",
    }
    paths = []
    for ending, text in texts.items():
        path = out / f"{name}.{ending}"
        write_atomically(path, text.encode())
        paths.append(path)
    return paths


def comparison_csv(comparison: Comparison) -> str:
    """Return one line per row, with plain numbers in plain units and empty cells for None."""
    return csv_text([_row_values(row, comparison) for row in comparison.rows])


def _row_values(row: ComparisonRow, comparison: Comparison) -> dict[str, Any]:
    metric = comparison.measure.name
    values: dict[str, Any] = {
        **row.name,
        "seeds": len(row.runs),
        "rounds": row.rounds,
        "round": _final_round(row),
        f"{metric}_mean": row.score,
        f"{metric}_std": row.score_std,
        f"{metric}_std_over_peers": row.peer_std,
    }
    for name in comparison.extras:
        values[f"{name.replace(' ', '_')}_mean"] = row.extra(name)
    for key, value in _difference_values(row, comparison).items():
        values[f"difference_{key}"] = value
    values |= {
        "busiest_paper_mb_per_round": row.paper_mb,
        "busiest_wire_mb_per_round": row.wire_mb,
        "flops_per_peer_round": row.flops_per_peer,
        "flops_all_peers_round": row.flops_total,
        "flops": row.flops_kind,
        "seconds_per_peer_round": row.seconds_per_peer,
    }
    for target in comparison.targets:
        values[f"rounds_to_{target:g}"] = row.rounds_to(target)
    return values | {
        "spent_wire_mb": row.mean_final(lambda point: point.wire_mb),
        "spent_flops": row.mean_final(lambda point: point.flops),
        "seconds": _final_seconds(row),
    }


def comparison_json(comparison: Comparison, out: Path) -> dict[str, Any]:
    """Return all values, those of each seed included; run directories are relative to `out`."""
    measure = comparison.measure
    limit: float | None = comparison.limit
    if comparison.budget is Budget.ROUNDS:
        limit = _equal_rounds(comparison)
    budget = {
        "of": comparison.budget.value,
        "unit": BUDGET_UNITS[comparison.budget],
        "mean": limit,
        "by_seed": {str(seed): seed_limit for seed, seed_limit in comparison.limits.items()},
    }
    return {
        "metric": measure.name,
        "higher_is_better": measure.higher_is_better,
        "budget": budget,
        "targets": list(comparison.targets),
        "rows": [_row_json(row, comparison, out) for row in comparison.rows],
    }


def _row_json(row: ComparisonRow, comparison: Comparison, out: Path) -> dict[str, Any]:
    targets = comparison.targets
    return {
        "name": dict(row.name),
        "rounds": row.rounds,
        "score": {"mean": row.score, "std": row.score_std, "std_over_peers": row.peer_std},
        "others": {name: row.extra(name) for name in comparison.extras},
        "difference": _difference_values(row, comparison),
        "busiest": {"paper_mb_per_round": row.paper_mb, "wire_mb_per_round": row.wire_mb},
        "flops": {
            "per_peer_round": row.flops_per_peer,
            "all_peers_round": row.flops_total,
            "kind": row.flops_kind,
        },
        "seconds_per_peer_round": row.seconds_per_peer,
        "rounds_to": {f"{target:g}": row.rounds_to(target) for target in targets},
        "seconds": _final_seconds(row),
        "seeds": [_seed_json(run, targets, out) for run in row.runs],
    }


def _seed_json(run: RecordedRun, targets: Sequence[float], out: Path) -> dict[str, Any]:
    path = run.path.relative_to(out) if run.path.is_relative_to(out) else run.path
    final = run.final
    return {
        "seed": run.seed,
        "run": str(path),
        "round": final and final.round,
        "score": final and final.score,
        "std_over_peers": final and final.peer_std,
        "limit": run.limit,
        "spent_wire_mb": final and final.wire_mb,
        "spent_flops": final and final.flops,
        "seconds": final and final.seconds,
        "rounds_to": {f"{target:g}": run.rounds_to(target) for target in targets},
        "failures": len(run.failures),
    }


def _difference_values(row: ComparisonRow, comparison: Comparison) -> dict[str, Any]:
    difference = comparison.differences.get(row.label)
    if difference is None:
        return dict.fromkeys(("to", "mean", "low", "high", "verdict"))
    low, high = difference.interval or (None, None)
    return {
        "to": comparison.references[row.label].label,
        "mean": difference.mean,
        "low": low,
        "high": high,
        "verdict": str(difference.verdict(comparison.measure)),
    }


# Single runs


def overview(run: RecordedRun) -> Metrics:
    """Return a run's summary; for an unfinished run, the same values over its rounds so far."""
    if run.summary is not None:
        return run.summary
    rounds = f"{len(run.records)} of {run.config['rounds']} rounds"
    return {
        "method": run.method,
        "unfinished": f"{rounds}; resume with: {_resume_command(run)}",
        **summarize_rounds(run.records),
    }


def _resume_command(run: RecordedRun) -> str:
    if run.made_in_python:
        return "Federation.run(..., resume=True)"
    if "spec" in run.config:
        return f"dispfl peer run {run.path.parent}"
    return f"dispfl run --resume {run.path}"


def find_shown(paths: Sequence[Path]) -> dict[Path, str]:
    """Return the runs and sites among these paths, and all runs in folders, with their names."""
    shown: dict[Path, str] = {}
    for path in paths:
        if is_site(path) or (path / "config.toml").exists() or not path.is_dir():
            shown[path] = path.resolve().name
        else:
            for run in find_runs([path]):
                shown[run] = str(run.relative_to(path))
    return shown


def print_results(given: Sequence[Path], console: Console) -> None:
    """Print one row per run, also of all in a folder: scores, traffic, FLOPs and seconds."""
    names = find_shown(given)
    runs = [load_run(run_folder(path)) for path in names]
    labels = row_labels([run.config for run in runs])
    summaries = [overview(run) for run in runs]

    table = runs_table(labels, summaries, list(names.values()))
    drawn, omitted = table.on_console(console)
    console.print("", drawn, "", sep="\n")
    metric = join_and(list(dict.fromkeys(summary["metric"] for summary in summaries)))
    kinds = {label: run.flops_kind for label, run in zip(labels, runs, strict=True)}
    scores_note = f"{metric}: mean ± std over peers on own test data."
    print_text(console, f"{scores_note} {flops_note(kinds)}", "dim")
    if omitted:
        print_text(console, omitted_note(omitted, "`dispfl show --json` has all values."), "dim")

    for sentence in _comparison_sentences(labels, runs):
        print_text(console, sentence)
    for path, label, summary in zip(names, labels, summaries, strict=True):
        for note in _notes(label, summary, path if path in given else None):
            print_text(console, note)


def runs_table(
    labels: Sequence[str], summaries: Sequence[Metrics], directories: Sequence[str]
) -> Table:
    """Return a table of runs, with their directories unless the labels identify them."""
    columns = [TableColumn(("method", ""), labels, text=True), *_summary_columns(summaries)]
    if len(set(labels)) < len(labels):
        columns.append(TableColumn(("run", ""), directories, text=True))
    return Table(columns)


def _summary_columns(summaries: Sequence[Metrics]) -> Iterator[TableColumn]:
    def column(
        first: str, second: str, priority: int, cell: Callable[[Metrics], str]
    ) -> TableColumn:
        return TableColumn((first, second), list(map(cell, summaries)), priority)

    main_metrics = {summary["metric"] for summary in summaries}
    metrics: dict[str, None] = {}
    for summary in summaries:
        metrics |= dict.fromkeys([summary["metric"], *summary["scores"]])

    yield column("rounds", "", NEEDED, lambda summary: str(summary["rounds"]))
    for metric in metrics:
        cells = [_mean_and_std(summary, metric) for summary in summaries]
        yield TableColumn((metric, "over peers"), cells, ALWAYS if metric in main_metrics else 2)
    yield column("worst,", "best peer", 3, _worst_and_best)
    if any(summary.get("test_loss") for summary in summaries):
        yield column("test", "loss", 1, _test_loss)
    yield column("busiest", "MB/round", NEEDED, lambda summary: _busiest_mb(summary, "paper"))
    yield column("on wire", "MB/round", NEEDED, lambda summary: _busiest_mb(summary, "wire"))
    yield column("GFLOPs/", "peer", NEEDED, _gflops)
    yield column("time", "s", NEEDED, lambda summary: format_short(summary["seconds"], 1))


def _mean_and_std(summary: Metrics, metric: str) -> str:
    scores = summary["scores"].get(metric)
    if not scores:
        return UNKNOWN
    return f"{scores['mean']:{scores['format']}} ± {scores['std']:{scores['format']}}"


def _worst_and_best(summary: Metrics) -> str:
    scores = main_scores(summary)
    if not scores:
        return UNKNOWN
    measure = measure_of([summary])
    values = [value for value in scores["per_peer"] if value is not None]
    return f"{measure.worst(values):.2f}, {measure.best(values):.2f}"


def _test_loss(summary: Metrics) -> str:
    loss = summary.get("test_loss")
    return f"{loss['mean']:.3f}" if loss else UNKNOWN


def _busiest_mb(summary: Metrics, unit: str) -> str:
    return format_short(summary["busiest"][f"{unit}_mb_per_round"], 2)


def _gflops(summary: Metrics) -> str:
    return format_short(summary["flops_per_peer_round"] / 1e9, 2)


def _comparison_sentences(labels: Sequence[str], runs: Sequence[RecordedRun]) -> Iterator[str]:
    """Yield who is ahead of whom, and whether at equal connections, of runs that differ."""
    if len(set(labels)) < 2 or not all(run.records for run in runs):
        return
    named_runs = [({"method": label}, run) for label, run in zip(labels, runs, strict=True)]
    comparison = compare_runs(named_runs)
    sentences = [
        against_sentence(comparison),
        connections_note({row.label: row.connections for row in comparison.rows}),
    ]
    yield from filter(None, sentences)


def _notes(label: str, summary: Metrics, path: Path | None) -> Iterator[str]:
    """Yield what a table does not show of a run; `path` is its directory, if the user named it."""
    if "unfinished" in summary:
        yield f"{label}: {summary['unfinished']}"
    elif path:
        yield f"Run directory: {path}"
    for group in summary.get("groups", []):
        yield _group_note(group, summary)
    yield from _scores_on_other_data(summary)
    if summary.get("failures"):
        yield f"{summary['failures']} steps failed; see metrics.jsonl for the peers and reasons."


def _group_note(group: Mapping[str, Any], summary: Metrics) -> str:
    """`  density 0.2: accuracy 0.805, 0.122 s per peer and round, 2 peers`"""
    score = f"{summary['metric']} {measure_of([summary]).text(group['mean'])}"
    parts = [score]
    if "seconds" in group:
        parts.append(f"{format_seconds(group['seconds'])} s per peer and round")
    parts.append(f"{group['peers']} peers")
    return f"  density {group['density']:g}: {', '.join(parts)}"


def _scores_on_other_data(summary: Metrics) -> Iterator[str]:
    """Yield `  accuracy on validation data 0.712 ± 0.050; on the global test data ...`."""
    unseen = summary.get("unseen_peers") or {}
    newcomers = f"of {unseen.get('peers')} unseen peers after {unseen.get('steps')} steps"
    by_data = {
        "on validation data": summary.get("validation"),
        "on the global test data": summary.get("global_test"),
        newcomers: unseen.get("score"),
    }
    text = measure_of([summary]).text
    parts = []
    for data, scores in by_data.items():
        if scores:
            parts.append(f"{data} {text(scores['mean'])} ± {text(scores['std'])}")
    if parts:
        yield f"  {summary['metric']} {'; '.join(parts)}"
