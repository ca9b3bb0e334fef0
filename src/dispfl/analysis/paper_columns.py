"""The columns of the paper's tables, each twice: what is printed there, and what we found."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import floor, log10
from statistics import fmean
from typing import TypeVar

from dispfl import paper
from dispfl.analysis.comparison import Row

T = TypeVar("T")
UNKNOWN = "–"
SHORT = {"dirichlet": "Dir", "pathological": "Path"}
"""Eighty columns are few for a table that has every number twice."""


@dataclass(frozen=True)
class Place:
    """Where a row of ours stands in the paper."""

    names: Mapping[str, str]
    """Data, partition, model, topology, method and density in the paper's names, and the drop probability."""
    printed: paper.Row | None = None
    targets: Sequence[float] = ()
    """The accuracies to which our rounds are counted, beside the paper's targets in the same order."""
    mean_mb: float | None = None
    """A peer's download a round, where the paper prints the mean over peers and not the busiest node's."""


@dataclass(frozen=True)
class Entry:
    """A row of ours, over all seeds, in its place."""

    place: Place
    row: Row

    def __getitem__(self, key: str) -> str:
        """One of the place's names."""
        return self.place.names[key]

    @property
    def printed_accuracy(self) -> float | None:
        """The paper's, as a share."""
        printed = self.place.printed
        return printed.accuracy.value if printed and printed.accuracy else None


Line = Mapping[str, Entry]
"""One printed line: its entries by partition."""


@dataclass(frozen=True)
class Column:
    """A heading of two lines, and a cell for each line of the table."""

    heading: tuple[str, str]
    cell: Callable[[Line], str]
    value: Callable[[Line], float | None] = lambda line: None
    """What the best of the column is found by, to the digits that are printed; None where there is no best."""


def cost_and_accuracy_columns(table: paper.Table, partitions: Sequence[str], lines: Sequence[Line]) -> list[Column]:
    """Accuracy on each partition, megabytes and FLOPs. Costs are printed once for both partitions."""
    theirs = float(table.flops_unit)
    smallest = min((flops for line in lines if (flops := _flops(line)) > 0), default=theirs)
    ours = theirs if smallest >= theirs / 10 else 10.0 ** (3 * floor(log10(smallest) / 3))
    return [
        *(column for partition in partitions for column in _accuracy_columns(partition)),
        Column(("MB", "paper"), lambda line: _text(_printed(line, lambda row: row.comm))),
        Column(("", "ours"), lambda line: _three_digits(_megabytes(line, table))),
        Column((_power(theirs), "paper"), lambda line: _text(_printed(line, lambda row: row.flops))),
        Column((_power(ours), "ours"), lambda line: _three_digits(_flops(line) / ours)),
    ]


def _accuracy_columns(partition: str) -> Iterator[Column]:
    def printed(line: Line) -> paper.Printed | None:
        row = line[partition].place.printed if partition in line else None
        return row.accuracy if row else None

    def theirs(line: Line) -> float | None:
        found = printed(line)
        return round(found.value, 4) if found else None

    def ours(line: Line) -> float | None:
        accuracy = line[partition].row.accuracy if partition in line else None
        return None if accuracy is None else round(accuracy, 3)

    def our_cell(line: Line) -> str:
        row = line[partition].row if partition in line else None
        if row is None or row.accuracy is None:
            return UNKNOWN
        spread = "" if row.accuracy_std is None else f"±{100 * row.accuracy_std:.1f}"
        return f"{100 * row.accuracy:.1f}{spread}"

    yield Column((f"{SHORT.get(partition, partition)} %", "paper"), lambda line: _text(printed(line)), theirs)
    yield Column(("", "ours"), our_cell, ours)


def rounds_columns(table: paper.Table, example: Entry) -> list[Column]:
    """Rounds to each target; the paper's targets and ours stand in the same order."""
    return [column for i in range(len(example.place.targets)) for column in _target_columns(table, example, i)]


def _target_columns(table: paper.Table, example: Entry, i: int) -> Iterator[Column]:
    def theirs(line: Line) -> str:
        rounds = _printed(line, lambda row: row.rounds_to[i])
        return UNKNOWN if rounds is None else str(rounds.rounds or f">{table.rounds}")

    def ours(line: Line) -> str:
        [entry] = line.values()  # partitions have targets, and so tables, of their own
        rounds = entry.row.rounds_to(entry.place.targets[i])
        return f">{entry.row.rounds}" if rounds is None else f"{rounds:.1f}".removesuffix(".0")

    printed = example.place.printed.rounds_to[i].target if example.place.printed else UNKNOWN
    yield Column((f"to {printed} %", "paper"), theirs)
    yield Column((f"to {100 * example.place.targets[i]:g} %", "ours"), ours)


def _printed(line: Line, number: Callable[[paper.Row], T]) -> T | None:
    """A number that is printed once for all of a line."""
    return next((number(entry.place.printed) for entry in line.values() if entry.place.printed), None)


def _megabytes(line: Line, table: paper.Table) -> float:
    if table.comm == "mean":
        return fmean(entry.place.mean_mb or 0.0 for entry in line.values())
    return fmean(entry.row.mean(lambda run: run.paper_mb) for entry in line.values())


def _flops(line: Line) -> float:
    return fmean(entry.row.mean(lambda run: run.flops_per_peer) for entry in line.values())


def _text(printed: paper.Printed | None) -> str:
    return UNKNOWN if printed is None else str(printed)


def _three_digits(value: float) -> str:
    return UNKNOWN if not value else f"{value:.1f}" if value >= 100 else f"{value:.2f}"


def _power(unit: float) -> str:
    return f"1e{round(log10(unit))}"
