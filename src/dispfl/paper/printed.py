"""The numbers printed in the paper, from `tables.toml`, with our names for methods, data, ..."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import cache
from importlib.resources import files
from typing import Any, Literal

PartitionName = Literal["dirichlet", "pathological"]
PrintedColumn = Literal["accuracy", "comm", "flops", "rounds_to"]
PARTITIONS: tuple[PartitionName, ...] = ("dirichlet", "pathological")
WITHOUT_TOPOLOGY = {"local", "fedavg", "fedavg-ft", "ditto", "subfedavg"}
"""Methods with a server or without communication."""
PERCENT = Decimal("0.01")


@dataclass(frozen=True)
class PrintedNumber:
    """A number as printed: its digits and their unit."""

    digits: Decimal
    unit: Decimal = Decimal(1)

    @property
    def value(self) -> float:
        """The number in plain units: an accuracy of 85.70 % is 0.857."""
        return float(self.digits * self.unit)

    @property
    def last_digit(self) -> float:
        """The value of one unit in the last printed digit."""
        return float(self.unit * Decimal(1).scaleb(int(self.digits.as_tuple().exponent)))

    def __str__(self) -> str:
        return str(self.digits)


@dataclass(frozen=True)
class PrintedRounds:
    """The rounds a method needs to reach a target accuracy; None if it does not reach it."""

    target: PrintedNumber
    rounds: int | None


@dataclass(frozen=True)
class PrintedRow:
    """One method in one setting; rows of both partitions repeat the costs, printed once."""

    table: str
    """The LaTeX label of the table."""
    data: str
    partition: PartitionName
    topology: str | None
    """None for methods with a server or without communication."""
    model: str
    method: str
    density: float | tuple[float, ...] | None
    """1 is dense; several are those of equal groups of peers; None if the paper does not say."""
    accuracy: PrintedNumber | None = None
    accuracy_std: PrintedNumber | None = None
    comm: PrintedNumber | None = None
    """MB (1e6 bytes) per round."""
    flops: PrintedNumber | None = None
    """FLOPs of a peer's local phase."""
    rounds_to: tuple[PrintedRounds, ...] = ()


@dataclass(frozen=True)
class PrintedTable:
    """One of the paper's tables."""

    label: str
    """As in the LaTeX source."""
    number: int
    """As in the PDF."""
    title: str
    comm: Literal["busiest", "mean"] | None
    """Whose traffic is printed: the busiest node's, or the mean over nodes."""
    flops_unit: Decimal
    """The unit of the printed FLOPs."""
    rounds: int | None
    """The number of rounds run, in tables of rounds to a target accuracy."""
    rows: tuple[PrintedRow, ...]


@dataclass(frozen=True)
class Erratum:
    """A misprint. A field that is None matches every row of the table."""

    table: str
    column: PrintedColumn
    sentence: str
    partition: PartitionName | None = None
    topology: str | None = None
    method: str | None = None

    def concerns(self, row: PrintedRow, column: PrintedColumn) -> bool:
        """Return whether this erratum is about a column of a row."""
        if (row.table, column) != (self.table, self.column):
            return False
        for field in ("partition", "topology", "method"):
            value = getattr(self, field)
            if value and getattr(row, field) != value:
                return False
        return True


@cache
def tables() -> tuple[PrintedTable, ...]:
    """Return the paper's tables in the order of the PDF."""
    return tuple(map(_table, _file()["table"]))


@cache
def errata() -> tuple[Erratum, ...]:
    """Return the known misprints."""
    return tuple(Erratum(**entry) for entry in _file()["erratum"])


@cache
def _file() -> dict[str, Any]:
    text = files("dispfl.paper").joinpath("tables.toml").read_text("utf-8")
    return tomllib.loads(text, parse_float=Decimal)  # Decimal keeps the zero of 89.30


def _table(entry: Mapping[str, Any]) -> PrintedTable:
    shared = dict(entry)
    lines = shared.pop("row")
    targets = shared.pop("targets", {})
    label = shared.pop("label")
    comm = shared.pop("comm", None)  # of the table; a row has a number of that name
    flops_unit = Decimal(shared.pop("flops_unit", 1))
    rows = []
    for line in lines:
        for partition in PARTITIONS:
            if partition in line:
                values = {**shared, **line}
                rows.append(_row(values, label, partition, flops_unit, targets.get(partition)))
    return PrintedTable(
        label=label,
        number=shared["number"],
        title=shared["title"],
        comm=comm,
        flops_unit=flops_unit,
        rounds=shared.get("rounds"),
        rows=tuple(rows),
    )


def _row(
    line: Mapping[str, Any],
    label: str,
    partition: PartitionName,
    flops_unit: Decimal,
    targets: list[int] | None,
) -> PrintedRow:
    method = line["method"]
    row = PrintedRow(
        table=label,
        data=line["data"],
        partition=partition,
        topology=None if method in WITHOUT_TOPOLOGY else line["topology"],
        model=line["model"],
        method=method,
        density=_density(line["density"]),
        comm=_number(line.get("comm")),
        flops=_number(line.get("flops"), flops_unit),
    )
    numbers = line[partition]
    if targets is not None:
        return replace(row, rounds_to=tuple(map(_rounds_to, targets, numbers)))
    accuracy, std = [*numbers, None][:2]
    return replace(row, accuracy=_number(accuracy, PERCENT), accuracy_std=_number(std, PERCENT))


def _number(digits: Decimal | None, unit: Decimal = Decimal(1)) -> PrintedNumber | None:
    if digits is None:
        return None
    return PrintedNumber(digits, unit)


def _rounds_to(target: int, rounds: int | str) -> PrintedRounds:
    """Return the rounds to a target; a text says that it is not reached."""
    accuracy = PrintedNumber(Decimal(target), PERCENT)
    if isinstance(rounds, str):
        return PrintedRounds(accuracy, None)
    return PrintedRounds(accuracy, rounds)


def _density(value: Decimal | list[Decimal] | str) -> float | tuple[float, ...] | None:
    if isinstance(value, str):  # "unknown"
        return None
    if isinstance(value, list):
        return tuple(map(float, value))
    return float(value)
