"""The table of single runs (`dispfl show`), and the notes below it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from dispfl.core.metric import Measure
from dispfl.core.quantities import SIMULATED
from dispfl.files import is_site, run_folder
from dispfl.report.comparison import compare_runs, connections_by_label
from dispfl.report.labels import connections_note, flops_note
from dispfl.report.result_tables import against_sentence, hours_text
from dispfl.report.runs import RecordedRun, find_runs, load_run, run_labels
from dispfl.report.tables import ALWAYS, NEEDED, Table, TableColumn, omitted_note
from dispfl.report.units import BYTES, FLOPS, common_unit, duration_text
from dispfl.report.wording import (
    UNKNOWN,
    format_amount,
    format_seconds,
    format_short,
    join_and,
    plural,
)
from dispfl.runs.metrics import Metrics, main_scores, measure_of, measured_values, summarize_rounds
from dispfl.runs.timing import PHASES, summarize_times
from dispfl.terminal import print_text


def overview(run: RecordedRun) -> Metrics:
    """Return a run's summary; for an unfinished run, the same values over its rounds so far."""
    if run.summary is not None:
        return run.summary
    rounds = f"{len(run.records)} of {run.config['rounds']} rounds"
    summary = {
        "method": run.method,
        "unfinished": f"{rounds}; resume with: {_resume_command(run)}",
        **summarize_rounds(run.records),
    }
    if any(record.get(SIMULATED) for record in run.records):
        summary[SIMULATED] = summarize_times(run.records, run.roster, run.device_class_of)
    return summary


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


def print_results(paths: Sequence[Path], console: Console) -> None:
    """Print one row per run, also of all in a folder: scores, traffic, FLOPs and seconds."""
    names = find_shown(paths)
    runs = [load_run(run_folder(path)) for path in names]
    labels = run_labels(runs)
    summaries = list(map(overview, runs))

    table = runs_table(labels, summaries, list(names.values()))
    drawn, omitted = table.on_console(console)
    console.print("", drawn, "", sep="\n")
    print_text(console, _runs_legend(labels, runs, summaries), "dim")
    if omitted:
        print_text(console, omitted_note(omitted, "`dispfl show --json` has all values."), "dim")

    for sentence in _comparison_sentences(labels, runs):
        print_text(console, sentence)
    for path, label, summary in zip(names, labels, summaries, strict=True):
        if "unfinished" in summary:
            print_text(console, f"{label}: {summary['unfinished']}")
        elif path in paths:
            print_text(console, f"Run directory: {path}")
        for note in _notes(summary):
            print_text(console, note)


def _runs_legend(
    labels: Sequence[str], runs: Sequence[RecordedRun], summaries: Sequence[Metrics]
) -> str:
    """Return the meaning of scores and FLOPs, in two sentences."""
    metrics: dict[str, None] = {}
    kinds: dict[str, str] = {}
    for label, run, summary in zip(labels, runs, summaries, strict=True):
        metrics[summary["metric"]] = None
        kinds[label] = run.flops_kind
    scores = join_and(list(metrics))
    return f"{scores}: mean ± std over peers on own test data. {flops_note(kinds)}"


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

    priorities: dict[str, int] = {}
    for summary in summaries:
        for metric in (summary["metric"], *summary["scores"]):
            priorities.setdefault(metric, 2)
        priorities[summary["metric"]] = ALWAYS
    losses = list(map(_test_loss, summaries))
    traffic = []
    for summary in summaries:
        traffic += [_busiest_bytes(summary, "paper"), _busiest_bytes(summary, "wire")]
    bytes_unit = common_unit(traffic, BYTES)
    flops = [float(summary["flops_per_peer_round"]) for summary in summaries]
    flops_unit = common_unit(flops, FLOPS)

    yield column("rounds", "", NEEDED, lambda summary: str(summary["rounds"]))
    for metric, priority in priorities.items():
        yield column(metric, "over peers", priority, partial(_mean_and_std, metric))
    yield column("worst,", "best peer", 3, _worst_and_best)
    if set(losses) != {UNKNOWN}:
        yield TableColumn(("test", "loss"), losses, 1)
    for heading, kind in (("busiest", "paper"), ("on wire", "wire")):
        cells = bytes_unit.column([_busiest_bytes(summary, kind) for summary in summaries])
        yield TableColumn((heading, f"{bytes_unit.name}/round"), cells, NEEDED)
    yield TableColumn((f"{flops_unit.name}/", "peer"), flops_unit.column(flops), NEEDED)
    if any(map(_simulated_hours, summaries)):
        yield column("simulated", "hours", 3, lambda each: hours_text(_simulated_hours(each)))
    yield column("time", "s", NEEDED, lambda summary: format_short(summary["seconds"], 1))


def _simulated_hours(summary: Metrics) -> float | None:
    simulated = summary.get(SIMULATED)
    return simulated["hours"] if simulated else None


def _mean_and_std(metric: str, summary: Metrics) -> str:
    scores = summary["scores"].get(metric)
    if not scores:
        return UNKNOWN
    text = Measure(metric, scores["higher_is_better"], scores["format"]).text
    return f"{text(scores['mean'])} ± {text(scores['std'])}"


def _worst_and_best(summary: Metrics) -> str:
    scores = main_scores(summary)
    if not scores:
        return UNKNOWN
    measure = measure_of([summary])
    values = measured_values(scores)
    return f"{measure.worst(values):.2f}, {measure.best(values):.2f}"


def _test_loss(summary: Metrics) -> str:
    loss = summary.get("test_loss")
    if not loss:
        return UNKNOWN
    return f"{loss['mean']:.3f}"


def _busiest_bytes(summary: Metrics, kind: str) -> float:
    """Return the busiest node's bytes per round, as the paper counts them or on the wire."""
    return 1e6 * float(summary["busiest"][f"{kind}_mb_per_round"])


def _comparison_sentences(labels: Sequence[str], runs: Sequence[RecordedRun]) -> Iterator[str]:
    """Yield who is ahead of whom, and whether at equal connections, of runs that differ."""
    if len(set(labels)) < 2 or not all(run.records for run in runs):
        return
    named_runs = [({"method": label}, run) for label, run in zip(labels, runs, strict=True)]
    comparison = compare_runs(named_runs)
    sentences = [
        against_sentence(comparison),
        connections_note(connections_by_label(comparison.rows)),
    ]
    yield from filter(None, sentences)


def _notes(summary: Metrics) -> Iterator[str]:
    """Yield what a table does not show of a run."""
    for group in summary.get("groups", []):
        yield _group_note(group, summary)
    yield from _scores_on_other_data(summary)
    yield from time_notes(summary.get(SIMULATED))
    if summary.get("failures"):
        yield f"{summary['failures']} steps failed; see metrics.jsonl for the peers and reasons."


def time_notes(simulated: Metrics | None) -> Iterator[str]:
    """Yield `  old, 3 peers: computing 0.40 hours, transferring ..., busy 12%` for each class."""
    if not simulated:
        return
    for of_class in simulated["classes"]:
        durations = {phase: duration_text(of_class[f"{phase}_hours"]) for phase in PHASES}
        if "steps" in of_class:  # nobody waits
            steps = format_short(of_class["steps"], 1)
            sending = duration_text(of_class["sending_hours"])
            parts = [
                f"{steps} steps",
                f"computing {durations['computing']}",
                f"meanwhile sending {sending}",
                f"offline {durations['offline']}",
            ]
        else:
            parts = [f"{phase} {duration}" for phase, duration in durations.items()]
        peers = plural(of_class["peers"], "peer")
        yield f"  {of_class['class']}, {peers}: {', '.join(parts)}, busy {of_class['busy']:.0%}"
    if simulated["energy"] is not None:
        yield f"  energy for computing: {format_amount(simulated['energy'])} Wh"


def _group_note(group: Mapping[str, Any], summary: Metrics) -> str:
    """`  density 0.2: accuracy 0.805, 0.122 s per peer and round, 2 peers`"""
    score = f"{summary['metric']} {measure_of([summary]).text(group['mean'])}"
    parts = [score]
    if "seconds" in group:
        parts.append(f"{format_seconds(group['seconds'])} s per peer and round")
    parts.append(plural(group["peers"], "peer"))
    name = f"density {group['density']:g}"
    if "class" in group:
        name = f"class {group['class']}, {name}"
    return f"  {name}: {', '.join(parts)}"


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
