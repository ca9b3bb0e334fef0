"""The table of a comparison, for the terminal and as files: one row per method or swept value."""

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

from dispfl.core.report import QUANTITIES
from dispfl.errors import ConfigError
from dispfl.files import write_atomically
from dispfl.report.comparison import (
    VALIDATION,
    Comparison,
    ComparisonRow,
    connections_by_label,
    flops_by_label,
    traffic_per_round,
)
from dispfl.report.differences import paired_over
from dispfl.report.labels import connections_note, flops_note
from dispfl.report.runs import GAP, Budget, RecordedRun
from dispfl.report.tables import Table, TableColumn, csv_text
from dispfl.report.units import BYTES, FLOPS, bytes_text, common_unit, flops_text
from dispfl.report.wording import (
    UNKNOWN,
    capitalized,
    format_amount,
    format_number,
    format_seconds,
    plural,
)

MAX_REFERENCE = 12
"""Longer labels of the reference row do not fit a heading."""
BUDGET_UNITS = {
    Budget.ROUNDS: "rounds",
    Budget.BYTES: "MB",
    Budget.FLOPS: "FLOPs",
    Budget.SECONDS: "s",
    Budget.HOURS: "h",
}


SCORE = "score"
"""The key of the column with the main metric."""


COLUMNS = (
    SCORE, "std", "against", "difference", "round", "busiest", "wire", "flops", "flops-all",
    "seconds", GAP, "hours", "time",
)  # fmt: skip
"""The keys of the columns that a comparison may have, whatever its runs record."""


def check_columns(
    columns: Sequence[str], metrics: Collection[str], targets: Sequence[float]
) -> None:
    """Refuse columns that no comparison of runs with these metrics has, before it is made."""
    keys = [*COLUMNS, *metrics]
    for target in targets:
        keys += [f"rounds-to-{target:g}", f"hours-to-{target:g}"]
    for quantity in QUANTITIES:
        if quantity.column:
            for metric in metrics:
                keys.append(_key_of(quantity.column.name.format(metric=metric)))
    for column in columns:
        if column not in keys:
            names = ", ".join(dict.fromkeys(keys))
            raise ConfigError(f"--columns has no {column!r}. There are: {names}.", key="--columns")


def _key_of(name: str) -> str:
    return name.replace(" ", "-")


def comparison_table(comparison: Comparison, columns: Sequence[str] = ()) -> Table:
    """Return the table of a comparison with its legend: all columns, or those with these keys."""
    shown = list(_columns(comparison, with_empty=bool(columns)))
    table = Table(shown, legend(comparison), caption=_caption(comparison))
    if not columns:
        return table
    return replace(table.choose(columns), notes=legend(comparison, columns))


def _columns(comparison: Comparison, with_empty: bool) -> Iterator[TableColumn]:
    """Yield all columns of the table, from left to right; those without a value if wanted."""
    rows = comparison.rows
    measure = comparison.measure
    spread_priority = 1 if comparison.most_seeds > 1 else 3
    bytes_unit = common_unit(traffic_per_round(rows), BYTES)

    def column(
        key: str, first: str, second: str, priority: int, cell: Callable[[ComparisonRow], str]
    ) -> TableColumn:
        return TableColumn((first, second), list(map(cell, rows)), priority, key)

    def traffic(
        key: str, first: str, priority: int, amount: Callable[[ComparisonRow], float]
    ) -> TableColumn:
        cells = bytes_unit.column(list(map(amount, rows)))
        return TableColumn((first, f"{bytes_unit.name}/round"), cells, priority, key)

    yield from _name_columns(rows)
    yield _score_column(comparison)
    yield column(
        "std", "std over", "peers", spread_priority, lambda row: measure.text(row.peer_std)
    )
    if comparison.differences or with_empty:
        yield from _difference_columns(comparison)
    if comparison.budget is not Budget.ROUNDS:
        yield column("round", "at", "round", 7, lambda row: _rounds(_final_round(row)))
    yield traffic("busiest", "busiest", 8, lambda row: row.paper_bytes)
    yield traffic("wire", "on wire", 6, lambda row: row.wire_bytes)
    yield _flops_column("flops", "per peer", 4, [row.flops_per_peer for row in rows])
    yield _flops_column("flops-all", "all peers", 7, [row.flops_total for row in rows])
    if comparison.has_seconds:
        cells = [format_seconds(row.seconds_per_peer) for row in rows]
        yield TableColumn(("s per peer", "and round"), cells, 3, "seconds")
    for target in comparison.targets:
        yield column(
            f"rounds-to-{target:g}", "rounds", f"to {target:g}", 5, partial(_rounds_to, target)
        )
        if comparison.has_hours:
            yield column(
                f"hours-to-{target:g}", "hours", f"to {target:g}", 6, partial(_hours_to, target)
            )
    for name in comparison.extras:
        yield _extra_column(comparison, name)
    if comparison.has_hours:
        yield column("hours", "simulated", "hours", 6, lambda row: hours_text(_final_hours(row)))
    yield column("time", "time", "s", 2, lambda row: format_number(_final_seconds(row), 1))


def _caption(comparison: Comparison) -> str:
    """Return a caption of two sentences at most: what the scores are, and of how many seeds."""
    caption = capitalized(_score_sentence(comparison))
    if comparison.budget is not Budget.ROUNDS:
        caption = f"{caption} {_budget_sentence(comparison)}"
    return caption


def _name_columns(rows: Sequence[ComparisonRow]) -> Iterator[TableColumn]:
    for key in rows[0].name:
        names = [row.name[key] for row in rows]
        yield TableColumn((key, ""), names, text=True)


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
    heading = (measure.name, "")
    if comparison.most_seeds > 1:
        heading = (measure.name, "over seeds")
    return TableColumn(heading, cells, key=SCORE, best=frozenset(best))


def _difference_columns(comparison: Comparison) -> Iterator[TableColumn]:
    """Yield what the test says about each row, and the difference with its interval."""
    labels = comparison.reference_labels
    name = "reference"
    if len(labels) == 1 and len(labels[0]) <= MAX_REFERENCE:
        name = labels[0]

    verdicts = []
    texts = []
    for row in comparison.rows:
        verdict = UNKNOWN
        text = UNKNOWN
        difference = comparison.differences.get(row.label)
        if difference:
            verdict = str(difference.verdict(comparison.measure))
            text = difference.text(comparison.measure)
        elif row.label in labels and name == "reference":
            verdict = "reference"
        verdicts.append(verdict)
        texts.append(text)
    yield TableColumn(("against", name), verdicts, 8, "against")
    yield TableColumn(("difference", f"to {name}"), texts, 5, "difference")


def _flops_column(key: str, second: str, priority: int, flops: Sequence[float]) -> TableColumn:
    unit = common_unit(flops, FLOPS)
    return TableColumn((unit.name, second), unit.column(flops), priority, key)


def _extra_column(comparison: Comparison, name: str) -> TableColumn:
    """Return the column of another metric, or of a quantity as it is declared."""
    key = _key_of(name)
    values = [row.extra(name) for row in comparison.rows]
    cells = [format_number(value, 3) for value in values]
    of_main_metric = list(map(comparison.measure.text, values))
    if name == GAP:
        return TableColumn((name, ""), of_main_metric, 8, key)

    metric = comparison.runs[0].measure.name
    for quantity in QUANTITIES:
        column = quantity.column
        if column and column.name.format(metric=metric) == name:
            first, second = column.heading
            if "{metric}" in first + second:
                cells = of_main_metric
            heading = (first.format(metric=metric), second.format(metric=metric))
            return TableColumn(heading, cells, column.priority, key)
    return TableColumn((name, ""), cells, 4, key)


def _final_round(row: ComparisonRow) -> float | None:
    return row.mean_final(lambda point: point.round)


def _final_seconds(row: ComparisonRow) -> float | None:
    return row.mean_final(lambda point: point.seconds)


def _final_hours(row: ComparisonRow) -> float | None:
    hours = row.mean_final(lambda point: point.hours)
    return hours or None


def hours_text(hours: float | None) -> str:
    """Return hours with two decimals; small ones with two digits, and a dash for None."""
    return UNKNOWN if hours is None else format_amount(hours)


def _hours_to(target: float, row: ComparisonRow) -> str:
    hours = row.hours_to(target)
    if hours is None and row.hours is not None:
        return f">{hours_text(row.hours)}"
    return hours_text(hours)


def _rounds(mean: float | None) -> str:
    return format_number(mean, 1).removesuffix(".0")


def _rounds_to(target: float, row: ComparisonRow) -> str:
    rounds = row.rounds_to(target)
    if rounds is None:
        return f">{row.rounds}"
    return _rounds(rounds)


def legend(comparison: Comparison, columns: Collection[str] = ()) -> list[str]:
    """Return sentences that explain the numbers of all columns, or of those with these keys."""
    return list(_legend(comparison, set(columns)))


def _legend(comparison: Comparison, columns: set[str]) -> Iterator[str]:
    rows = comparison.rows
    metric = comparison.measure.name

    def shows(*keys: str) -> bool:
        return not columns or not columns.isdisjoint(keys)

    yield _budget_sentence(comparison)
    if comparison.lacks_scores:
        yield f"{UNKNOWN}: no evaluated round within the budget.{_more_hours_hint(comparison)}"
    yield _score_sentence(comparison)
    if comparison.differences and shows("against", "difference"):
        yield f"Against {_references(comparison)}: {paired_over(comparison.differences)}"
    connections = connections_note(connections_by_label(rows))
    if connections:
        yield connections
    if shows("busiest", "wire"):
        yield (
            "Busiest, on wire: bytes of the busiest node, as the paper counts them (values only)"
            " and as sent."
        )
    if shows("flops", "flops-all"):
        flops = flops_note(flops_by_label(rows))
        yield f"FLOPs: training per round, of one participating peer and of all peers. {flops}"
    if comparison.has_seconds and shows("seconds", "time"):
        yield (
            "s per peer and round: computing time of a participating peer; time: wall time of all"
            " rounds."
        )
    if comparison.has_hours and shows("hours"):
        yield "Simulated hours: when the last peer has finished the round, by the fleet's clock."
    if VALIDATION in comparison.extras:
        yield _validation_sentence(comparison)
    if GAP in comparison.extras and shows(GAP):
        yield (
            f"gap: how much better {metric} is on the peers' own training data than on their test"
            " data."
        )
    if comparison.targets:
        yield _targets_sentence(comparison)
    failures = []
    for row in rows:
        if row.failures:
            failures.append(f"{row.label} {row.failures}")
    if failures:
        counts = ", ".join(failures)
        yield f"Failed steps, after which the peer keeps its last valid state: {counts}."


def _score_sentence(comparison: Comparison) -> str:
    measure = comparison.measure
    metric = measure.name
    if not measure.higher_is_better:
        metric += " (lower is better)"
    seeds = comparison.most_seeds
    spread = "one seed"
    if seeds > 1:
        spread = f"mean ± sample standard deviation over {seeds} seeds"
    return f"{metric}: mean over peers, each on its own test data; {spread}."


def _validation_sentence(comparison: Comparison) -> str:
    """Say which row is chosen on validation data, and its score on test data."""
    measure = comparison.measure
    text = f"validation: {measure.name} on the peers' validation data"
    chosen = [row for row in comparison.rows if comparison.is_best(row)]
    if not comparison.is_chosen_on_validation or not chosen:
        return f"{text}; choose settings by it, not by the test data."
    results = [f"{row.label}, {measure.text(row.score)} on test data" for row in chosen]
    return f"{text}, which chooses {' or '.join(results)}."


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
    if len(labels) == 1:
        return labels[0]
    return "the reference of the same data"


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


def _budget_sentence(comparison: Comparison) -> str:
    budget = comparison.budget
    if budget is Budget.ROUNDS:
        rounds = comparison.equal_rounds
        if rounds is None:
            return "Compared after each run's last round."
        return f"Compared after {plural(rounds, 'round')}."
    if all(run.limit is None for run in comparison.runs):
        return f"Compared at equal {budget}; no run spends any, so each row shows its last round."
    if comparison.limit is None:
        return f"Compared at equal {budget}: the smallest total of the rows with the same data."
    limit = _limit_text(budget, comparison.limit)
    if len(comparison.limits) > 1:
        limit += ", mean over seeds"
    return f"{limit}."


def _more_hours_hint(comparison: Comparison) -> str:
    """Return which row leaves the others too few hours, and the setting that gives it more."""
    totals = {row.label: row.runs[0].hours for row in comparison.rows if row.runs[0].hours}
    if comparison.budget is not Budget.HOURS or len(totals) < 2:
        return ""
    shortest = min(comparison.rows, key=lambda row: totals.get(row.label, inf))
    longest = max(totals, key=lambda label: totals[label])
    hint = f" {shortest.label} has the fewest hours"
    run = shortest.runs[0]
    if run.config.get("schedule") != "async":
        return f"{hint}; raise its rounds."
    hours = totals[longest] / len(run.records)
    return f"{hint}; with hours_per_round={hours:.2g} it has as many as {longest}."


def _limit_text(budget: Budget, limit: float) -> str:
    if budget is Budget.BYTES:
        amount = bytes_text(1e6 * limit)
        return f"Compared at equal bytes: {amount} on the wire of the busiest node"
    if budget is Budget.SECONDS:
        return f"Compared at equal computing: {format_seconds(limit)} s of a peer"
    if budget is Budget.HOURS:
        return f"Compared at equal simulated time: {hours_text(limit)} hours"
    return f"Compared at equal FLOPs: {flops_text(limit)} of training by all peers"


# The same as files


def write_tables(
    comparison: Comparison, out: Path, name: str = "comparison", columns: Sequence[str] = ()
) -> list[Path]:
    """Write `comparison.md`, `.tex`, `.csv` and `.json` into a folder.

    The last two have all columns, with plain numbers.
    """
    table = comparison_table(comparison, columns)
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
    return csv_text(comparison_values(comparison))


def comparison_values(comparison: Comparison) -> list[dict[str, Any]]:
    """Return the plain numbers of each row, by name."""
    return [_row_values(row, comparison) for row in comparison.rows]


def _row_values(row: ComparisonRow, comparison: Comparison) -> dict[str, Any]:
    metric = comparison.runs[0].measure.name
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
        if comparison.has_hours:
            values[f"hours_to_{target:g}"] = row.hours_to(target)
    if comparison.has_hours:
        values["simulated_hours"] = _final_hours(row)
    return values | {
        "spent_wire_mb": row.mean_final(lambda point: point.wire_mb),
        "spent_flops": row.mean_final(lambda point: point.flops),
        "seconds": _final_seconds(row),
    }


def comparison_json(comparison: Comparison, out: Path) -> dict[str, Any]:
    """Return all values, those of each seed included; run directories are relative to `out`."""
    measure = comparison.runs[0].measure
    limit: float | None = comparison.limit
    if comparison.budget is Budget.ROUNDS:
        limit = comparison.equal_rounds
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
        "rounds_to": rounds_to_each(targets, row),
        "seconds": _final_seconds(row),
        "simulated_hours": _final_hours(row),
        "hours_to": {f"{target:g}": row.hours_to(target) for target in targets},
        "seeds": [_seed_json(run, targets, out) for run in row.runs],
    }


def rounds_to_each(
    targets: Sequence[float], row: ComparisonRow | RecordedRun
) -> dict[str, float | None]:
    """Return the rounds that a row or a run needs to reach each target; None if it does not."""
    return {f"{target:g}": row.rounds_to(target) for target in targets}


def _seed_json(run: RecordedRun, targets: Sequence[float], out: Path) -> dict[str, Any]:
    path = run.path
    if path.is_relative_to(out):
        path = path.relative_to(out)
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
        "rounds_to": rounds_to_each(targets, run),
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
