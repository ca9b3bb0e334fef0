"""Comparison tables for the terminal, as Markdown, LaTeX, CSV and JSON.

The terminal shows the columns that fit; the files contain all of them.
"""

import csv
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dispfl.core.metric import Measure
from dispfl.files import write_atomically
from dispfl.report.comparison import GAP, TEST_LOSS, VALIDATION, Budget, Comparison, ComparisonRow
from dispfl.report.differences import paired_over
from dispfl.report.labels import UNKNOWN, connections_note, flops_note
from dispfl.report.markup import flops_unit_of_smallest, format_number, format_seconds


@dataclass(frozen=True)
class TableColumn:
    """A column: a heading of two lines and one cell per row."""

    heading: tuple[str, str]
    cells: Sequence[str]
    priority: int
    """Columns of the lowest priority are dropped first if a console is too narrow."""
    text: bool = False
    """Whether the column is left-aligned, as names are."""
    best: frozenset[int] = frozenset()
    """Indices of the rows to print in bold."""

    @property
    def title(self) -> str:
        """The heading on one line."""
        return " ".join(line for line in self.heading if line).replace("/ ", "/")

    @property
    def width(self) -> int:
        """The characters of its longest line."""
        return max(map(cell_len, (*self.heading, *self.cells)))

    def marked(self, start: str, end: str, escape: Callable[[str], str]) -> list[str]:
        """Return the escaped cells, with the best ones between marks."""
        cells = [escape(cell) for cell in self.cells]
        return [
            f"{start}{cell}{end}" if number in self.best else cell
            for number, cell in enumerate(cells)
        ]


def columns(comparison: Comparison) -> list[TableColumn]:
    """Return all columns of the table, from left to right."""
    rows, several = comparison.rows, _seed_count(comparison) > 1
    best = frozenset(number for number, row in enumerate(rows) if row in comparison.best)

    def column(
        first: str, second: str, priority: int, cell: Callable[[ComparisonRow], str]
    ) -> TableColumn:
        return TableColumn((first, second), [cell(row) for row in rows], priority)

    def flops(second: str, priority: int, value: Callable[[ComparisonRow], float]) -> TableColumn:
        scale, unit = flops_unit_of_smallest([value(row) for row in rows])
        return column(unit, second, priority, lambda row: f"{value(row) / scale:.2f}")

    table = [
        TableColumn((key, ""), [row.name[key] for row in rows], ALWAYS, text=True)
        for key in rows[0].name
    ]
    measure = comparison.measure
    scores = [_score(row, measure) for row in rows]
    table.append(
        TableColumn((measure.name, "over seeds" if several else ""), scores, ALWAYS, best=best)
    )
    table.append(
        column("std over", "peers", 1 if several else 3, lambda row: measure.text(row.peer_std))
    )
    if comparison.differences:
        table += _difference_columns(comparison)
    if comparison.budget is not Budget.ROUNDS:
        table.append(
            column("at", "round", 7, lambda row: _rounds(row.mean_final(lambda point: point.round)))
        )
    table.append(
        column("busiest", "MB/round", 8, lambda row: f"{row.mean(lambda run: run.paper_mb):.2f}")
    )
    table.append(
        column("on wire", "MB/round", 6, lambda row: f"{row.mean(lambda run: run.wire_mb):.2f}")
    )
    table.append(flops("per peer", 4, lambda row: row.mean(lambda run: run.flops_per_peer)))
    table.append(flops("all peers", 7, lambda row: row.mean(lambda run: run.flops_total)))
    if any(row.seconds_per_peer is not None for row in rows):
        table.append(
            column("s per peer", "and round", 3, lambda row: format_seconds(row.seconds_per_peer))
        )
    for target in comparison.targets:
        table.append(
            TableColumn(("rounds", f"to {target:g}"), [_rounds_to(row, target) for row in rows], 5)
        )
    for name in comparison.others:
        other = [format_number(row.other(name), 3) for row in rows]
        other_data = {VALIDATION: VALIDATION, f"train {measure.name}": "train"}.get(name)
        asked_for = name == GAP or other_data is not None
        heading = (other_data, measure.name) if other_data else (name, "")
        table.append(TableColumn(heading, other, 8 if asked_for else 0 if name == TEST_LOSS else 4))
    table.append(
        column(
            "time",
            "s",
            2,
            lambda row: format_number(row.mean_final(lambda point: point.seconds), 1),
        )
    )
    return table


def legend(comparison: Comparison) -> list[str]:
    """Return sentences that explain the numbers."""
    seeds, metric = _seed_count(comparison), comparison.measure.name
    spread = f"; mean ± sample standard deviation over {seeds} seeds" if seeds > 1 else "; one seed"
    sentences = [
        _budget_sentence(comparison),
        *(
            [f"{UNKNOWN}: no evaluated round within the budget."]
            if _any_unknown(comparison)
            else []
        ),
        f"{metric}{_direction(comparison)}: mean over peers, each on its own test data{spread}.",
        *_reference_sentence(comparison),
        *filter(None, [connections_note({row.label: row.connections for row in comparison.rows})]),
        (
            "MB: traffic of the busiest node, as the paper counts it (values only) and on the wire"
            " (as sent)."
        ),
        (
            "FLOPs: training per round, of one participating peer and of all peers."
            f" {_flops_note(comparison)}"
        ),
    ]
    if any(row.seconds_per_peer is not None for row in comparison.rows):
        sentences.append(
            "s per peer and round: computing time of a participating peer; time: wall time of all"
            " rounds."
        )
    if VALIDATION in comparison.others:
        sentences.append(
            f"validation: {metric} on the peers' validation data; choose by it, not by the test"
            " data."
        )
    if GAP in comparison.others:
        sentences.append(
            f"gap: how much better {metric} is on the peers' own training data than on their test"
            " data."
        )
    if comparison.targets:
        over, missed = (
            (", mean over seeds", "not reached by every seed") if seeds > 1 else ("", "not reached")
        )
        sentences.append(
            f"rounds to a target: the first evaluated round that reaches it{over}; "
            f">{comparison.rows[0].rounds}: {missed}."
        )
    failed = {row.label: sum(run.failures for run in row.runs) for row in comparison.rows}
    if any(failed.values()):
        counts = ", ".join(f"{label} {count}" for label, count in failed.items() if count)
        sentences.append(
            f"Failed steps, after which the peer keeps its last valid state: {counts}."
        )
    return sentences


def _difference_columns(comparison: Comparison) -> list[TableColumn]:
    """Return what the test says about each row and its reference, and the difference with its
    interval."""
    measure, (label, *more) = comparison.measure, comparison.reference_labels
    name = label if len(label) <= MAX_REFERENCE and not more else "reference"
    found = [comparison.differences.get(row.label) for row in comparison.rows]
    own = {label: "reference" for label in comparison.reference_labels if name == "reference"}
    verdicts = [
        str(difference.verdict(measure)) if difference else own.get(row.label, UNKNOWN)
        for row, difference in zip(comparison.rows, found, strict=True)
    ]
    texts = [difference.text(measure) if difference else UNKNOWN for difference in found]
    return [
        TableColumn(("against", name), verdicts, 8),
        TableColumn(("difference", f"to {name}"), texts, 5),
    ]


def _reference_sentence(comparison: Comparison) -> list[str]:
    """Explain the two columns."""
    if not comparison.differences:
        return []
    return [f"Against {_references(comparison)}: {paired_over(comparison.differences)}"]


def _references(comparison: Comparison) -> str:
    first, *more = comparison.reference_labels
    return "the reference of the same data" if more else first


def against_sentence(comparison: Comparison) -> str | None:
    """`Against Dis-PFL: Local behind, -0.031 [-0.045, -0.017]; FedAvg level, ...`; None if nothing
    can be paired."""
    measure, differences = comparison.measure, comparison.differences
    parts = [
        f"{label} {one.verdict(measure)}, {one.text(measure)}" for label, one in differences.items()
    ]
    if not parts:
        return None
    return (
        f"Against {_references(comparison)} in {measure.name}: {'; '.join(parts)}"
        f" ({paired_over(differences)[:-1]})."
    )


def _flops_note(comparison: Comparison) -> str:
    return flops_note({row.label: row.flops_kind for row in comparison.rows})


def rich_table(comparison: Comparison, console: Console) -> tuple[Table, list[str]]:
    """Return a table with the columns that fit a console, and the headings of the omitted ones."""
    return fit_table(columns(comparison), console)


MAX_REFERENCE = 12
"""Longer labels of the reference row do not fit a heading."""
NEEDED = 9
"""Columns of this priority are dropped only where names that are folded into several lines leave no
room for them."""
ALWAYS = 10
"""Columns of this priority are never dropped."""
FOLDED = 12
"""The least width into which longer names are folded to make room for needed columns."""


def fit_table(table: Sequence[TableColumn], console: Console) -> tuple[Table, list[str]]:
    """Return the columns that fit a console as a table, and the headings of the omitted ones."""
    shown, omitted = list(table), list[str]()
    unlimited = console.options.update(max_width=10_000)
    while True:
        least = min(reversed(shown), key=lambda column: column.priority)
        spare = (
            sum(max(0, column.width - FOLDED) for column in shown if column.text)
            if least.priority >= NEEDED
            else 0
        )
        for gap in (2, 1):
            drawn = _rich(shown, gap)
            width = console.measure(drawn, options=unlimited).maximum - spare
            if width <= console.width or least.priority >= ALWAYS:
                return drawn, omitted
        shown.remove(least)
        omitted.append(least.title)


def omitted_note(omitted: Sequence[str], where: str) -> str:
    """Say which columns a console had no room for, and where they are."""
    return f"Omitted for lack of space: {'; '.join(omitted)}. {where}"


def markdown_table(comparison: Comparison) -> str:
    """Return an aligned Markdown table, with the best score in bold and the legend below."""
    aligned = []
    for column in columns(comparison):
        cells = [column.title, *column.marked("**", "**", lambda cell: cell.replace("|", "\\|"))]
        width = max(map(len, cells))
        rule = "-" * width if column.text else "-" * (width - 1) + ":"
        head, *rest = [cell.ljust(width) if column.text else cell.rjust(width) for cell in cells]
        aligned.append([head, rule, *rest])
    table = [f"| {' | '.join(line)} |" for line in zip(*aligned, strict=True)]
    return "\n".join([*table, "", *(f"- {sentence}" for sentence in legend(comparison)), ""])


def latex_table(comparison: Comparison) -> str:
    """Return a booktabs table, with the best score in bold and the legend as its caption."""
    shown = columns(comparison)
    heading = zip(*(map(_escape_latex, column.heading) for column in shown), strict=True)
    body = zip(*(column.marked(r"\textbf{", "}", _escape_latex) for column in shown), strict=True)
    return "\n".join(
        [
            r"% needs \usepackage{booktabs}",
            r"\begin{table}",
            r"\centering",
            rf"\begin{{tabular}}{{{''.join('l' if column.text else 'r' for column in shown)}}}",
            r"\toprule",
            *(" & ".join(line) + r" \\" for line in heading),
            r"\midrule",
            *(" & ".join(line) + r" \\" for line in body),
            r"\bottomrule",
            r"\end{tabular}",
            rf"\caption{{{_escape_latex(' '.join(legend(comparison)))}}}",
            r"\end{table}",
            "",
        ]
    )


def csv_table(comparison: Comparison) -> str:
    """Return one line per row, with plain numbers in plain units and empty cells for unknown
    ones."""
    metric = comparison.measure.name
    lines = [
        {
            **row.name,
            "seeds": len(row.runs),
            "rounds": row.rounds,
            "round": row.mean_final(lambda point: point.round),
            f"{metric}_mean": row.score,
            f"{metric}_std": row.score_std,
            f"{metric}_std_over_peers": row.peer_std,
            **{f"{name.replace(' ', '_')}_mean": row.other(name) for name in comparison.others},
            **_difference_json(row, comparison, "difference_"),
            "busiest_paper_mb_per_round": row.mean(lambda run: run.paper_mb),
            "busiest_wire_mb_per_round": row.mean(lambda run: run.wire_mb),
            "flops_per_peer_round": row.mean(lambda run: run.flops_per_peer),
            "flops_all_peers_round": row.mean(lambda run: run.flops_total),
            "flops": row.flops_kind,
            "seconds_per_peer_round": row.seconds_per_peer,
            **{f"rounds_to_{target:g}": row.rounds_to(target) for target in comparison.targets},
            "spent_wire_mb": row.mean_final(lambda point: point.wire_mb),
            "spent_flops": row.mean_final(lambda point: point.flops),
            "seconds": row.mean_final(lambda point: point.seconds),
        }
        for row in comparison.rows
    ]
    text = StringIO()
    writer = csv.DictWriter(text, list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def comparison_json(comparison: Comparison, out: Path) -> dict[str, Any]:
    """Return all values, those of each seed included; run directories are relative to `out`."""
    return {
        "metric": comparison.measure.name,
        "higher_is_better": comparison.measure.higher_is_better,
        "budget": {
            "of": comparison.budget.value,
            "unit": {"rounds": "rounds", "bytes": "MB", "flops": "FLOPs", "seconds": "s"}[
                comparison.budget
            ],
            "mean": (
                _same_rounds(comparison) if comparison.budget is Budget.ROUNDS else comparison.limit
            ),
            "by_seed": {str(seed): limit for seed, limit in comparison.limits.items()},
        },
        "targets": list(comparison.targets),
        "rows": [_row_json(row, comparison, out) for row in comparison.rows],
    }


def write_tables(comparison: Comparison, out: Path, name: str = "comparison") -> list[Path]:
    """Write `comparison.md`, `.tex`, `.csv` and `.json` into a folder."""
    texts = {
        "md": markdown_table(comparison),
        "tex": latex_table(comparison),
        "csv": csv_table(comparison),
        "json": (
            json.dumps(
                comparison_json(comparison, out), indent=2, allow_nan=False, ensure_ascii=False
            )
            + "\n"
        ),
    }
    paths = [out / f"{name}.{ending}" for ending in texts]
    for path, text in zip(paths, texts.values(), strict=True):
        write_atomically(path, text.encode())
    return paths


def _row_json(row: ComparisonRow, comparison: Comparison, out: Path) -> dict[str, Any]:
    return {
        "name": dict(row.name),
        "rounds": row.rounds,
        "score": {"mean": row.score, "std": row.score_std, "std_over_peers": row.peer_std},
        "others": {name: row.other(name) for name in comparison.others},
        "difference": _difference_json(row, comparison),
        "busiest": {
            "paper_mb_per_round": row.mean(lambda run: run.paper_mb),
            "wire_mb_per_round": row.mean(lambda run: run.wire_mb),
        },
        "flops": {
            "per_peer_round": row.mean(lambda run: run.flops_per_peer),
            "all_peers_round": row.mean(lambda run: run.flops_total),
            "kind": row.flops_kind,
        },
        "seconds_per_peer_round": row.seconds_per_peer,
        "rounds_to": {f"{target:g}": row.rounds_to(target) for target in comparison.targets},
        "seconds": row.mean_final(lambda point: point.seconds),
        "seeds": [
            {
                "seed": run.seed,
                "run": str(run.path.relative_to(out) if run.path.is_relative_to(out) else run.path),
                "round": run.final.round if run.final else None,
                "score": run.final.score if run.final else None,
                "std_over_peers": run.final.peer_std if run.final else None,
                "limit": run.limit,
                "spent_wire_mb": run.final.wire_mb if run.final else None,
                "spent_flops": run.final.flops if run.final else None,
                "seconds": run.final.seconds if run.final else None,
                "rounds_to": {
                    f"{target:g}": run.rounds_to(target) for target in comparison.targets
                },
                "failures": run.failures,
            }
            for run in row.runs
        ],
    }


def _difference_json(
    row: ComparisonRow, comparison: Comparison, prefix: str = ""
) -> dict[str, Any]:
    found = comparison.differences.get(row.label)
    low, high = (found and found.interval) or (None, None)
    return {
        f"{prefix}to": comparison.references[row.label].label if found else None,
        f"{prefix}mean": found.mean if found else None,
        f"{prefix}low": low,
        f"{prefix}high": high,
        f"{prefix}verdict": str(found.verdict(comparison.measure)) if found else None,
    }


def _rich(shown: Sequence[TableColumn], gap: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, gap - 1, 0, 0), pad_edge=False, show_edge=False)
    for column in shown:
        heading = Text("\n".join(column.heading).strip())
        table.add_column(
            heading,
            justify="left" if column.text else "right",
            no_wrap=not column.text,
            overflow="fold",
        )
    for number in range(len(shown[0].cells)):
        table.add_row(*(Text(c.cells[number], "bold" if number in c.best else "") for c in shown))
    return table


def _score(row: ComparisonRow, measure: Measure) -> str:
    if row.score is None:
        return UNKNOWN
    return measure.text(row.score) + (
        f" ± {measure.text(row.score_std)}" if row.score_std is not None else ""
    )


def _direction(comparison: Comparison) -> str:
    return "" if comparison.measure.higher_is_better else " (lower is better)"


def _rounds_to(row: ComparisonRow, target: float) -> str:
    rounds = row.rounds_to(target)
    return f">{row.rounds}" if rounds is None else _rounds(rounds)


def _rounds(mean: float | None) -> str:
    return format_number(mean, 1).removesuffix(".0")


def _seed_count(comparison: Comparison) -> int:
    return max(len(row.runs) for row in comparison.rows)


def _same_rounds(comparison: Comparison) -> int | None:
    """Return the number of rounds if all rows have the same, else None."""
    rounds = {row.rounds for row in comparison.rows}
    return rounds.pop() if len(rounds) == 1 else None


def _any_unknown(comparison: Comparison) -> bool:
    return any(row.score is None for row in comparison.rows)


def _budget_sentence(comparison: Comparison) -> str:
    if comparison.budget is Budget.ROUNDS:
        rounds = _same_rounds(comparison)
        if rounds is None:
            return "Compared after each run's last round."
        return f"Compared after {'1 round' if rounds == 1 else f'{rounds} rounds'}."
    if all(run.limit is None for row in comparison.rows for run in row.runs):
        return (
            f"Compared at equal {comparison.budget}; no run spends any, so each row shows its last"
            " round."
        )
    if comparison.limit is None:
        return (
            f"Compared at equal {comparison.budget}: the smallest total of the rows with the same"
            " data."
        )
    mean = ", mean over seeds" if len(comparison.limits) > 1 else ""
    if comparison.budget is Budget.BYTES:
        return (
            f"Compared at equal bytes: {comparison.limit:.2f} MB on the wire of the busiest"
            f" node{mean}."
        )
    if comparison.budget is Budget.SECONDS:
        return f"Compared at equal computing: {format_seconds(comparison.limit)} s of a peer{mean}."
    scale, unit = flops_unit_of_smallest([comparison.limit])
    return (
        f"Compared at equal FLOPs: {comparison.limit / scale:.2f} {unit} of training by all"
        f" peers{mean}."
    )


LATEX_ESCAPES = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "–": "--", ">": "$>$", "<": "$<$",
}  # fmt: skip


def _escape_latex(text: str) -> str:
    return "".join(LATEX_ESCAPES.get(letter, letter) for letter in text)
