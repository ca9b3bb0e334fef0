"""A comparison as a table: for a terminal, in Markdown, in LaTeX and in CSV; and whole, in JSON.

The terminal shows the columns that fit. The files have all of them.
"""

import csv
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dispfl.analysis.comparison import Budget, Comparison, Row
from dispfl.runs.files import write_atomically

UNKNOWN = "–"


@dataclass(frozen=True)
class Column:
    """One column: a heading of two lines and a cell for each row."""

    heading: tuple[str, str]
    cells: Sequence[str]
    worth: int
    """Where room is short, columns of least worth go first."""
    text: bool = False
    """Whether it stands on the left, as names do."""
    best: frozenset[int] = frozenset()
    """The rows to print in bold."""

    @property
    def title(self) -> str:
        """The heading in one line."""
        return " ".join(line for line in self.heading if line)

    def marked(self, start: str, end: str, escape: Callable[[str], str]) -> list[str]:
        """The cells, escaped, the best between marks."""
        cells = [escape(cell) for cell in self.cells]
        return [f"{start}{cell}{end}" if number in self.best else cell for number, cell in enumerate(cells)]


def columns(comparison: Comparison) -> list[Column]:
    """All columns of the table, from left to right."""
    rows, several = comparison.rows, _seeds(comparison) > 1
    best = frozenset(number for number, row in enumerate(rows) if row in comparison.best)

    def column(first: str, second: str, worth: int, cell: Callable[[Row], str]) -> Column:
        return Column((first, second), [cell(row) for row in rows], worth)

    def flops(second: str, worth: int, value: Callable[[Row], float]) -> Column:
        scale, letter = _unit([value(row) for row in rows])
        return column(f"{letter}FLOPs", second, worth, lambda row: f"{value(row) / scale:.2f}")

    found = [Column((key, ""), [row.name[key] for row in rows], 9, text=True) for key in rows[0].name]
    accuracy = [_accuracy(row) for row in rows]
    found.append(Column((comparison.metric, "over seeds" if several else ""), accuracy, 9, best=best))
    found.append(column("std over", "peers", 1 if several else 3, lambda row: _number(row.peer_std, 3)))
    if comparison.budget is not Budget.ROUNDS:
        found.append(column("at", "round", 7, lambda row: _rounds(row.counted(lambda point: point.round))))
    found.append(column("busiest", "MB/round", 8, lambda row: f"{row.mean(lambda run: run.paper_mb):.2f}"))
    found.append(column("on wire", "MB/round", 6, lambda row: f"{row.mean(lambda run: run.wire_mb):.2f}"))
    found.append(flops("a peer", 4, lambda row: row.mean(lambda run: run.flops_per_peer)))
    found.append(flops("all peers", 7, lambda row: row.mean(lambda run: run.flops_total)))
    for target in comparison.targets:
        found.append(Column(("rounds", f"to {target:g}"), [_rounds_to(row, target) for row in rows], 5))
    found.append(column("time", "s", 2, lambda row: _number(row.counted(lambda point: point.seconds), 1)))
    return found


def legend(comparison: Comparison) -> list[str]:
    """What the numbers are, in sentences."""
    seeds, metric = _seeds(comparison), comparison.metric
    spread = f"; then mean ± sample standard deviation over {seeds} seeds" if seeds > 1 else "; one seed"
    said = [
        _budget(comparison),
        f"{metric}: mean over peers, each on its own test data{spread}.",
        "MB: the busiest node's, in the paper's currency (values only) and on the wire (as sent).",
        "FLOPs: of training, a round, by a peer that trains and by all peers together; counted, not saved.",
    ]
    if comparison.targets:
        over, who = (", mean over seeds", "not every seed does") if seeds > 1 else ("", "none does")
        never = f">{comparison.rows[0].rounds}: {who}"
        said.append(f"rounds to a target: the first scored round that reaches it{over}; {never}.")
    if any(row.accuracy is None for row in comparison.rows):
        said.append(f"{UNKNOWN}: no scored round within the budget.")
    failed = {row.label: sum(run.failures for run in row.runs) for row in comparison.rows}
    if any(failed.values()):
        counts = ", ".join(f"{label} {count}" for label, count in failed.items() if count)
        said.append(f"Steps that failed, so that the peer kept its last good state: {counts}.")
    return said


def rich_table(comparison: Comparison, console: Console) -> tuple[Table, list[str]]:
    """The table of the columns that a console has room for, and the headings of the others."""
    shown = columns(comparison)
    left_out: list[str] = []
    endless = console.options.update(max_width=10_000)
    while True:
        for gap in (2, 1):
            table = _rich(shown, gap)
            if console.measure(table, options=endless).maximum <= console.width or len(shown) <= 2:
                return table, left_out
        least = min(reversed(shown), key=lambda column: column.worth)
        shown.remove(least)
        left_out.append(least.title)


def markdown(comparison: Comparison) -> str:
    """Aligned pipes, the best accuracy in bold, the legend below."""
    aligned = []
    for column in columns(comparison):
        cells = [column.title, *column.marked("**", "**", lambda cell: cell.replace("|", "\\|"))]
        width = max(map(len, cells))
        rule = "-" * width if column.text else "-" * (width - 1) + ":"
        head, *rest = [cell.ljust(width) if column.text else cell.rjust(width) for cell in cells]
        aligned.append([head, rule, *rest])
    table = [f"| {' | '.join(line)} |" for line in zip(*aligned, strict=True)]
    return "\n".join([*table, "", *(f"- {sentence}" for sentence in legend(comparison)), ""])


def latex(comparison: Comparison) -> str:
    """A table with booktabs, the best accuracy in bold, the legend as its caption."""
    shown = columns(comparison)
    heading = zip(*(map(_escaped, column.heading) for column in shown), strict=True)
    body = zip(*(column.marked(r"\textbf{", "}", _escaped) for column in shown), strict=True)
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
            rf"\caption{{{_escaped(' '.join(legend(comparison)))}}}",
            r"\end{table}",
            "",
        ]
    )


def csv_text(comparison: Comparison) -> str:
    """One line a row, plain numbers in plain units; empty where a number is not known."""
    lines = [
        {
            **row.name,
            "seeds": len(row.runs),
            "rounds": row.rounds,
            "round": row.counted(lambda point: point.round),
            "accuracy_mean": row.accuracy,
            "accuracy_std": row.accuracy_std,
            "accuracy_std_over_peers": row.peer_std,
            "busiest_paper_mb_per_round": row.mean(lambda run: run.paper_mb),
            "busiest_wire_mb_per_round": row.mean(lambda run: run.wire_mb),
            "flops_per_peer_round": row.mean(lambda run: run.flops_per_peer),
            "flops_all_peers_round": row.mean(lambda run: run.flops_total),
            **{f"rounds_to_{target:g}": row.rounds_to(target) for target in comparison.targets},
            "spent_wire_mb": row.counted(lambda point: point.wire_mb),
            "spent_flops": row.counted(lambda point: point.flops),
            "seconds": row.counted(lambda point: point.seconds),
        }
        for row in comparison.rows
    ]
    text = StringIO()
    writer = csv.DictWriter(text, list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def as_json(comparison: Comparison, out: Path) -> dict[str, Any]:
    """Everything, with the values of each seed; run directories as seen from `out`."""
    return {
        "metric": comparison.metric,
        "budget": {
            "of": comparison.budget.value,
            "unit": {"rounds": "rounds", "bytes": "MB", "flops": "FLOPs"}[comparison.budget],
            "mean": _same_rounds(comparison) if comparison.budget is Budget.ROUNDS else comparison.limit,
            "by_seed": {str(seed): limit for seed, limit in comparison.limits.items()},
        },
        "targets": list(comparison.targets),
        "rows": [_row_json(row, comparison, out) for row in comparison.rows],
    }


def write_all(comparison: Comparison, out: Path) -> list[Path]:
    """Write `comparison.md`, `.tex`, `.csv` and `.json` into a folder."""
    texts = {
        "md": markdown(comparison),
        "tex": latex(comparison),
        "csv": csv_text(comparison),
        "json": json.dumps(as_json(comparison, out), indent=2, allow_nan=False, ensure_ascii=False) + "\n",
    }
    paths = [out / f"comparison.{ending}" for ending in texts]
    for path, text in zip(paths, texts.values(), strict=True):
        write_atomically(path, text.encode())
    return paths


def _row_json(row: Row, comparison: Comparison, out: Path) -> dict[str, Any]:
    return {
        "name": dict(row.name),
        "rounds": row.rounds,
        "accuracy": {"mean": row.accuracy, "std": row.accuracy_std, "std_over_peers": row.peer_std},
        "busiest": {
            "paper_mb_per_round": row.mean(lambda run: run.paper_mb),
            "wire_mb_per_round": row.mean(lambda run: run.wire_mb),
        },
        "flops": {
            "per_peer_round": row.mean(lambda run: run.flops_per_peer),
            "all_peers_round": row.mean(lambda run: run.flops_total),
        },
        "rounds_to": {f"{target:g}": row.rounds_to(target) for target in comparison.targets},
        "seconds": row.counted(lambda point: point.seconds),
        "seeds": [
            {
                "seed": run.seed,
                "run": str(run.path.relative_to(out) if run.path.is_relative_to(out) else run.path),
                "round": run.counted.round if run.counted else None,
                "accuracy": run.counted.accuracy if run.counted else None,
                "std_over_peers": run.counted.peer_std if run.counted else None,
                "spent_wire_mb": run.counted.wire_mb if run.counted else None,
                "spent_flops": run.counted.flops if run.counted else None,
                "seconds": run.counted.seconds if run.counted else None,
                "rounds_to": {f"{target:g}": run.rounds_to(target) for target in comparison.targets},
                "failures": run.failures,
            }
            for run in row.runs
        ],
    }


def _rich(shown: Sequence[Column], gap: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, gap - 1, 0, 0), pad_edge=False)
    for column in shown:
        heading = Text("\n".join(column.heading).strip())
        table.add_column(heading, justify="left" if column.text else "right", no_wrap=True)
    for number in range(len(shown[0].cells)):
        table.add_row(*(Text(c.cells[number], "bold" if number in c.best else "") for c in shown))
    return table


def _accuracy(row: Row) -> str:
    if row.accuracy is None:
        return UNKNOWN
    return f"{row.accuracy:.3f}" + (f" ± {row.accuracy_std:.3f}" if row.accuracy_std is not None else "")


def _number(value: float | None, decimals: int) -> str:
    return UNKNOWN if value is None else f"{value:.{decimals}f}"


def _rounds_to(row: Row, target: float) -> str:
    rounds = row.rounds_to(target)
    return f">{row.rounds}" if rounds is None else _rounds(rounds)


def _rounds(mean: float | None) -> str:
    return _number(mean, 1).removesuffix(".0")


def _unit(values: Sequence[float]) -> tuple[float, str]:
    """The scale and the letter in which the smallest of some FLOPs still reads well; those of nothing do not count."""
    smallest = min((value for value in values if value > 0), default=0.0)
    return next(((scale, letter) for scale, letter in ((1e12, "T"), (1e9, "G")) if smallest >= scale), (1e6, "M"))


def _seeds(comparison: Comparison) -> int:
    return max(len(row.runs) for row in comparison.rows)


def _same_rounds(comparison: Comparison) -> int | None:
    """How many rounds all rows have, if it is the same number."""
    rounds = {row.rounds for row in comparison.rows}
    return rounds.pop() if len(rounds) == 1 else None


def _budget(comparison: Comparison) -> str:
    if comparison.budget is Budget.ROUNDS:
        rounds = _same_rounds(comparison)
        return f"Compared after {rounds} rounds." if rounds else "Compared after each run's last round."
    if comparison.limit is None:
        return f"Compared at equal {comparison.budget}; no run spends any, so each after its last round."
    mean = ", mean over seeds" if len(comparison.limits) > 1 else ""
    if comparison.budget is Budget.BYTES:
        return f"Compared at equal bytes: {comparison.limit:.2f} MB on the wire of the busiest node{mean}."
    scale, letter = _unit([comparison.limit])
    return f"Compared at equal FLOPs: {comparison.limit / scale:.2f} {letter}FLOPs of training by all peers{mean}."


LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "–": "--", ">": "$>$", "<": "$<$",
}  # fmt: skip


def _escaped(text: str) -> str:
    return "".join(LATEX.get(letter, letter) for letter in text)
