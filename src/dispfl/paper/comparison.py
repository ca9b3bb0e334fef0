"""The paper's tables with our numbers in them: the same rows, every number twice."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import floor, log10
from statistics import fmean
from typing import Any, TypeVar

import numpy as np

from dispfl.paper.printed import PrintedColumn, PrintedNumber, PrintedRow, PrintedTable, errata
from dispfl.paper.similarity import spearman
from dispfl.report.comparison import DISPFL, ComparisonRow
from dispfl.report.wording import UNKNOWN
from dispfl.runs.directory import read_config, read_summary

T = TypeVar("T")
SHORT = {"dirichlet": "Dir", "pathological": "Path"}
"""Abbreviations that let a table with every number twice fit 80 columns."""
HEADINGS = {"density": ("den-", "sity"), "topology": ("topo-", "logy")}


@dataclass(frozen=True)
class PaperReference:
    """The part of the paper that a row of our results is compared with."""

    labels: Mapping[str, str]
    """Data, partition, model, topology, method, density in the paper's names; drop probability;
    variant."""
    printed: PrintedRow | None = None
    targets: Sequence[float] = ()
    """Our target accuracies, in the order of the paper's."""
    mean_mb: float | None = None
    """A peer's download per round, where the paper prints the mean over nodes instead of the
    busiest node."""


@dataclass(frozen=True)
class ComparedRow:
    """A row of our results, over all seeds, and the paper's numbers for it."""

    reference: PaperReference
    row: ComparisonRow

    def __getitem__(self, key: str) -> str:
        """Return one of the reference's labels."""
        return self.reference.labels[key]

    @property
    def printed_accuracy(self) -> float | None:
        """The paper's accuracy as a fraction."""
        printed = self.reference.printed
        return printed.accuracy.value if printed and printed.accuracy else None


TableLine = Mapping[str, ComparedRow]
"""One line of a table: its rows by partition."""


@dataclass(frozen=True)
class ComparisonColumn:
    """A heading of two lines and a function that returns the cell of a line."""

    heading: tuple[str, str]
    cell: Callable[[TableLine], str]
    value: Callable[[TableLine], float | None] = lambda line: None
    """The value that determines the best line, rounded to the printed digits; None in columns
    without a best one."""


@dataclass(frozen=True)
class ComparisonTable:
    """A table of texts: names, then numbers, under headings of two lines."""

    title: str
    headings: Sequence[tuple[str, str]]
    lines: Sequence[Sequence[str]]
    best: frozenset[tuple[int, int]]
    """Line and column of the highest accuracies, printed in bold."""
    notes: Sequence[str] = ()

    def markdown(self) -> str:
        """Return the table as aligned Markdown, the best numbers in bold."""
        cells = [
            [f"**{c}**" if (i, j) in self.best else c for j, c in enumerate(r)]
            for i, r in enumerate(self.lines)
        ]
        table = [[" ".join(heading).strip().replace("- ", "") for heading in self.headings], *cells]
        widths = [max(len(row[j]) for row in table) for j in range(len(self.headings))]
        head, *body = (
            " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in table
        )
        rule = " | ".join("-" * (w - 1) + ("-" if j == 0 else ":") for j, w in enumerate(widths))
        lines = [f"| {line} |" for line in (head, rule, *body)]
        return "\n".join(
            [f"### {self.title}", "", *lines, "", *(f"- {note}" for note in self.notes), ""]
        )


def comparison_tables(
    rows: Sequence[ComparedRow], table: PrintedTable, against: Mapping[str, str] = DISPFL
) -> list[ComparisonTable]:
    """Return one table per data set and model, and per partition where rounds to a target are
    printed."""
    sections: dict[tuple[str, ...], list[ComparedRow]] = {}
    for row in rows:
        key = (row["model"], row["data"], *([row["partition"]] if table.rounds else []))
        sections.setdefault(key, []).append(row)
    return [_comparison_table(table, key, section, against) for key, section in sections.items()]


def table_legend(table: PrintedTable) -> list[str]:
    """Return the meaning of the numbers, in sentences."""
    if table.rounds:
        return [
            "to 60 %: rounds until the mean accuracy over peers is 60 %; >20: not within 20 rounds."
        ]
    mb = "download of the busiest node" if table.comm == "busiest" else "mean download of a node"
    return [
        (
            "Dir, Path: accuracy on Dirichlet and pathological partitions, mean over peers, each on"
            " its own test data."
        ),
        (
            f"MB: {mb} per round, values only. 1e12 etc.: FLOPs of a peer's local phase, counted,"
            " not saved."
        ),
    ]


def misprints(rows: Iterable[ComparedRow], table: PrintedTable) -> list[str]:
    """Return the errata that concern these rows."""
    columns: tuple[PrintedColumn, ...] = ("accuracy", "comm", "flops", "rounds_to")
    printed = [row.reference.printed for row in rows if row.reference.printed]
    found = [
        erratum.sentence
        for erratum in errata()
        if any(erratum.concerns(row, column) for row in printed for column in columns)
    ]
    return [f"Misprint in Table {table.number}: {sentence}" for sentence in found]


def row_as_json(compared: ComparedRow) -> dict[str, Any]:
    """Return a row in plain units (fractions, MB, FLOPs), for other programs."""
    row, reference, printed = compared.row, compared.reference, compared.reference.printed
    theirs = None
    if printed:
        numbers = ("accuracy", "accuracy_std", "comm", "flops")
        theirs = {
            name: number.value if (number := getattr(printed, name)) else None for name in numbers
        }
        theirs["rounds_to"] = {f"{to.target.value:g}": to.rounds for to in printed.rounds_to}
    ours = {
        "accuracy": row.score,
        "accuracy_std": row.score_std,
        "busiest_mb": row.paper_mb,
        "mean_mb": reference.mean_mb,
        "flops": row.flops_per_peer,
        "rounds_to": {f"{target:g}": row.rounds_to(target) for target in reference.targets},
        "rounds": row.rounds,
        "runs": [str(run.path) for run in row.runs],
    }
    return {"place": dict(reference.labels), "paper": theirs, "ours": ours}


def group_accuracies(rows: Sequence[ComparedRow]) -> dict[tuple[str, str], dict[float, float]]:
    """Return the accuracy of each group of peers of one density, mean over seeds, by partition and
    model."""
    found: dict[tuple[str, str], dict[float, float]] = {}
    for row in rows:
        scores: dict[float, list[float]] = {}
        for run in row.row.runs:
            for group in (read_summary(run.path) or {"groups": []})["groups"]:
                scores.setdefault(group["density"], []).append(group["mean"])
        means = {density: fmean(values) for density, values in scores.items()}
        found[row["partition"], read_config(row.row.runs[0].path)["model"]["name"]] = means
    return found


def _comparison_table(
    table: PrintedTable,
    key: tuple[str, ...],
    rows: Sequence[ComparedRow],
    against: Mapping[str, str],
) -> ComparisonTable:
    by_names: dict[tuple[str, ...], dict[str, ComparedRow]] = {}
    names = ("method", "variant", "density", "topology")
    keys = [key for key in names if key == "method" or _distinguishes(rows, key)]
    for row in rows:
        by_names.setdefault(tuple(row[key] for key in keys), {})[row["partition"]] = row
    lines = list(by_names.values())
    partitions = list(dict.fromkeys(row["partition"] for row in rows))
    if table.rounds:
        example = next((row for row in rows if row.reference.printed), rows[0])
        columns, notes = _rounds_columns(table, example), []
    else:
        columns, notes = (
            _cost_and_accuracy_columns(table, partitions, lines),
            _rank_correlations(rows, partitions),
        )
    return ComparisonTable(
        title=f"Table {table.number}, the paper's {key[0]} on {', '.join(key[1:])}",
        headings=[
            *(HEADINGS.get(key, ("", key)) for key in keys),
            *(column.heading for column in columns),
        ],
        lines=[
            [*names, *(column.cell(line) for column in columns)] for names, line in by_names.items()
        ],
        best=frozenset(
            (i, len(keys) + j) for j, column in enumerate(columns) for i in _highest(column, lines)
        ),
        notes=[*notes, *_verdicts(rows, against)],
    )


def _distinguishes(rows: Sequence[ComparedRow], key: str) -> bool:
    """Return whether lines of one method differ in a label, so that the table needs a column for
    it."""
    methods: dict[str, set[str]] = {}
    for row in rows:
        methods.setdefault(row["method"], set()).add(row[key])
    return any(len(values) > 1 for values in methods.values())


def _highest(column: ComparisonColumn, lines: Sequence[TableLine]) -> list[int]:
    """Return the lines with the highest value of a column."""
    known = {i: value for i, line in enumerate(lines) if (value := column.value(line)) is not None}
    return [i for i, value in known.items() if value == max(known.values())]


def _rank_correlations(rows: Iterable[ComparedRow], partitions: Sequence[str]) -> list[str]:
    """Compare the order of the rows by accuracy, which is meaningful even where the numbers are not
    comparable."""
    texts = []
    for partition in partitions:
        pairs = [
            (theirs, ours)
            for row in rows
            if row["partition"] == partition
            and (theirs := row.printed_accuracy) is not None
            and (ours := row.row.score) is not None
        ]
        rank = spearman(*np.array(pairs).T) if len(pairs) > 2 else None
        if rank is not None:
            texts.append(f"{partition} {rank:.2f}")
    return (
        [f"Rank correlation of our accuracies with the paper's: {', '.join(texts)}."]
        if texts
        else []
    )


def _verdicts(rows: Sequence[ComparedRow], against: Mapping[str, str]) -> Iterator[str]:
    """Yield `Against dispfl on dirichlet, ring, in accuracy: local behind, -0.020 [-0.026, -0.014];
    ...`.

    One sentence for every partition and, where a method has several, topology. Rows without a
    topology are compared with the reference of each.
    """
    keys = ["partition", *(["topology"] if _distinguishes(rows, "topology") else [])]
    places = dict.fromkeys(tuple(row[key] for key in keys) for row in rows)
    for place in (place for place in places if UNKNOWN not in place):
        here = [
            row
            for row in rows
            if all(row[key] in (UNKNOWN, own) for key, own in zip(keys, place, strict=True))
        ]
        reference = next((row for row in here if row.row.is_named(against)), here[0])
        measure = reference.row.runs[0].measure
        texts = [
            f"{_name(row, here)} {found.verdict(measure)}, {found.text(measure)}"
            for row in here
            if row is not reference and (found := row.row.difference_to(reference.row))
        ]
        if texts:
            yield (
                f"Against {_name(reference, here)} on {', '.join(place)}, in {measure.name}:"
                f" {'; '.join(texts)}."
            )


def _name(row: ComparedRow, rows: Sequence[ComparedRow]) -> str:
    """`dispfl`, or, where rows of one method differ, `dispfl (0.5)`."""
    known = [
        row[key]
        for key in ("variant", "density")
        if _distinguishes(rows, key) and row[key] != UNKNOWN
    ]
    return f"{row['method']} ({', '.join(known)})" if known else row["method"]


def _cost_and_accuracy_columns(
    table: PrintedTable, partitions: Sequence[str], lines: Sequence[TableLine]
) -> list[ComparisonColumn]:
    """Return columns of accuracy on each partition, MB and FLOPs. Costs are printed once for both
    partitions."""
    theirs = float(table.flops_unit)
    smallest = min((flops for line in lines if (flops := _flops(line)) > 0), default=theirs)
    ours = theirs if smallest >= theirs / 10 else 10.0 ** (3 * floor(log10(smallest) / 3))
    return [
        *(column for partition in partitions for column in _accuracy_columns(partition)),
        ComparisonColumn(("MB", "paper"), lambda line: _text(_printed(line, lambda row: row.comm))),
        ComparisonColumn(("", "ours"), lambda line: _three_digits(_megabytes(line, table))),
        ComparisonColumn(
            (_power(theirs), "paper"), lambda line: _text(_printed(line, lambda row: row.flops))
        ),
        ComparisonColumn((_power(ours), "ours"), lambda line: _three_digits(_flops(line) / ours)),
    ]


def _accuracy_columns(partition: str) -> Iterator[ComparisonColumn]:
    def printed(line: TableLine) -> PrintedNumber | None:
        row = line[partition].reference.printed if partition in line else None
        return row.accuracy if row else None

    def theirs(line: TableLine) -> float | None:
        found = printed(line)
        return round(found.value, 4) if found else None

    def ours(line: TableLine) -> float | None:
        accuracy = line[partition].row.score if partition in line else None
        return None if accuracy is None else round(accuracy, 3)

    def our_cell(line: TableLine) -> str:
        row = line[partition].row if partition in line else None
        if row is None or row.score is None:
            return UNKNOWN
        spread = "" if row.score_std is None else f"±{100 * row.score_std:.1f}"
        return f"{100 * row.score:.1f}{spread}"

    heading = (f"{SHORT.get(partition, partition)} %", "paper")
    yield ComparisonColumn(heading, lambda line: _text(printed(line)), theirs)
    yield ComparisonColumn(("", "ours"), our_cell, ours)


def _rounds_columns(table: PrintedTable, example: ComparedRow) -> list[ComparisonColumn]:
    """Return columns of rounds to each target; the paper's targets and ours are in the same
    order."""
    return [
        column
        for i in range(len(example.reference.targets))
        for column in _target_columns(table, example, i)
    ]


def _target_columns(
    table: PrintedTable, example: ComparedRow, i: int
) -> Iterator[ComparisonColumn]:
    def theirs(line: TableLine) -> str:
        rounds = _printed(line, lambda row: row.rounds_to[i])
        return UNKNOWN if rounds is None else str(rounds.rounds or f">{table.rounds}")

    def ours(line: TableLine) -> str:
        [compared] = line.values()  # each partition has its own targets and hence its own table
        rounds = compared.row.rounds_to(compared.reference.targets[i])
        return f">{compared.row.rounds}" if rounds is None else f"{rounds:.1f}".removesuffix(".0")

    printed = (
        example.reference.printed.rounds_to[i].target if example.reference.printed else UNKNOWN
    )
    yield ComparisonColumn((f"to {printed} %", "paper"), theirs)
    yield ComparisonColumn((f"to {100 * example.reference.targets[i]:g} %", "ours"), ours)


def _printed(line: TableLine, number: Callable[[PrintedRow], T]) -> T | None:
    """Return a number that is printed once for the whole line."""
    return next(
        (number(row.reference.printed) for row in line.values() if row.reference.printed), None
    )


def _megabytes(line: TableLine, table: PrintedTable) -> float:
    if table.comm == "mean":
        return fmean(row.reference.mean_mb or 0.0 for row in line.values())
    return fmean(row.row.paper_mb for row in line.values())


def _flops(line: TableLine) -> float:
    return fmean(row.row.flops_per_peer for row in line.values())


def _text(printed: PrintedNumber | None) -> str:
    return UNKNOWN if printed is None else str(printed)


def _three_digits(value: float) -> str:
    return UNKNOWN if not value else f"{value:.1f}" if value >= 100 else f"{value:.2f}"


def _power(unit: float) -> str:
    return f"1e{round(log10(unit))}"
