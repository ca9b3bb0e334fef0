"""Our numbers beside the paper's: the same rows and columns, each number twice."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dispfl import paper
from dispfl.analysis.paper_columns import Column, Entry, Line, cost_and_accuracy_columns, rounds_columns
from dispfl.analysis.similarity import spearman

HEADINGS = {"density": ("den-", "sity"), "topology": ("topo-", "logy")}


@dataclass(frozen=True)
class Sheet:
    """A table of texts: headings of two lines, names, then numbers."""

    title: str
    headings: Sequence[tuple[str, str]]
    lines: Sequence[Sequence[str]]
    best: frozenset[tuple[int, int]]
    """Line and column of the highest accuracies, to be printed in bold."""
    notes: Sequence[str] = ()

    def markdown(self) -> str:
        """Aligned pipes, the best in bold."""
        cells = [[f"**{c}**" if (i, j) in self.best else c for j, c in enumerate(r)] for i, r in enumerate(self.lines)]
        table = [[" ".join(heading).strip().replace("- ", "") for heading in self.headings], *cells]
        widths = [max(len(row[j]) for row in table) for j in range(len(self.headings))]
        head, *body = (" | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in table)
        rule = " | ".join("-" * (w - 1) + ("-" if j == 0 else ":") for j, w in enumerate(widths))
        lines = [f"| {line} |" for line in (head, rule, *body)]
        return "\n".join([f"### {self.title}", "", *lines, "", *(f"- {note}" for note in self.notes), ""])


def sheets(entries: Sequence[Entry], table: paper.Table) -> list[Sheet]:
    """The paper's table with our numbers in it: a sheet for each data set and model, of rounds for each partition."""
    sections: dict[tuple[str, ...], list[Entry]] = {}
    for entry in entries:
        where = (entry["model"], entry["data"], *([entry["partition"]] if table.rounds else []))
        sections.setdefault(where, []).append(entry)
    return [_sheet(table, where, section) for where, section in sections.items()]


def legend(table: paper.Table) -> list[str]:
    """What the numbers are, in sentences."""
    if table.rounds:
        return ["to 60 %: rounds until the mean accuracy over peers is 60 %; >20: not within 20 rounds."]
    whose = "of the busiest node" if table.comm == "busiest" else "that a node receives on average"
    return [
        "Dir, Path: accuracy on Dirichlet and pathological partitions, mean over peers, each on its own test data.",
        f"MB: {whose} a round, values only. 1e12 and the like: FLOPs of a peer's local phase, counted, not saved.",
    ]


def misprints(entries: Iterable[Entry], table: paper.Table) -> list[str]:
    """What of the shown numbers cannot be meant as printed."""
    columns: tuple[paper.printed.Column, ...] = ("accuracy", "comm", "flops", "rounds_to")
    rows = [entry.place.printed for entry in entries if entry.place.printed]
    found = [
        erratum.sentence
        for erratum in paper.errata()
        if any(erratum.concerns(row, column) for row in rows for column in columns)
    ]
    return [f"Misprint in Table {table.number}: {sentence}" for sentence in found]


def as_json(entry: Entry) -> dict[str, Any]:
    """An entry for other programs: shares, MB and FLOPs in plain units."""
    row, place, printed = entry.row, entry.place, entry.place.printed
    theirs = None
    if printed:
        numbers = ("accuracy", "accuracy_std", "comm", "flops")
        theirs = {name: number.value if (number := getattr(printed, name)) else None for name in numbers}
        theirs["rounds_to"] = {f"{to.target.value:g}": to.rounds for to in printed.rounds_to}
    ours = {
        "accuracy": row.accuracy,
        "accuracy_std": row.accuracy_std,
        "busiest_mb": row.mean(lambda run: run.paper_mb),
        "mean_mb": place.mean_mb,
        "flops": row.mean(lambda run: run.flops_per_peer),
        "rounds_to": {f"{target:g}": row.rounds_to(target) for target in place.targets},
        "rounds": row.rounds,
        "runs": [str(run.path) for run in row.runs],
    }
    return {"place": dict(place.names), "paper": theirs, "ours": ours}


def _sheet(table: paper.Table, where: tuple[str, ...], entries: Sequence[Entry]) -> Sheet:
    by_names: dict[tuple[str, ...], dict[str, Entry]] = {}
    keys = [key for key in ("method", "density", "topology") if key == "method" or _tells(entries, key)]
    for entry in entries:
        by_names.setdefault(tuple(entry[key] for key in keys), {})[entry["partition"]] = entry
    lines = list(by_names.values())
    partitions = list(dict.fromkeys(entry["partition"] for entry in entries))
    if table.rounds:
        columns, notes = rounds_columns(table, entries[0]), []
    else:
        columns, notes = cost_and_accuracy_columns(table, partitions, lines), _order(entries, partitions)
    return Sheet(
        title=f"Table {table.number}, the paper's {where[0]} on {', '.join(where[1:])}",
        headings=[*(HEADINGS.get(key, ("", key)) for key in keys), *(column.heading for column in columns)],
        lines=[[*names, *(column.cell(line) for column in columns)] for names, line in by_names.items()],
        best=frozenset((i, len(keys) + j) for j, column in enumerate(columns) for i in _highest(column, lines)),
        notes=notes,
    )


def _tells(entries: Sequence[Entry], key: str) -> bool:
    """Whether a column of names is needed: the methods alone would not tell the lines apart."""
    methods: dict[str, set[str]] = {}
    for entry in entries:
        methods.setdefault(entry["method"], set()).add(entry[key])
    return any(len(values) > 1 for values in methods.values())


def _highest(column: Column, lines: Sequence[Line]) -> list[int]:
    """The lines of a column's highest value."""
    known = {i: value for i, line in enumerate(lines) if (value := column.value(line)) is not None}
    return [i for i, value in known.items() if value == max(known.values())]


def _order(entries: Iterable[Entry], partitions: Sequence[str]) -> list[str]:
    """How alike the lines are ordered by accuracy: what can be compared where the numbers cannot."""
    said = []
    for partition in partitions:
        pairs = [
            (theirs, ours)
            for entry in entries
            if entry["partition"] == partition
            and (theirs := entry.printed_accuracy) is not None
            and (ours := entry.row.accuracy) is not None
        ]
        rank = spearman(*np.array(pairs).T) if len(pairs) > 2 else None
        if rank is not None:
            said.append(f"{partition} {rank:.2f}")
    return [f"Rank correlation of our accuracies with the paper's: {', '.join(said)}."] if said else []
