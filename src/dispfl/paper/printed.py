"""Reads `tables.toml`: the paper's tables as typed rows, with our names for methods, data, models and topologies."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from importlib.resources import files
from typing import Any, Literal

PartitionName = Literal["dirichlet", "pathological"]
Column = Literal["accuracy", "comm", "flops", "rounds_to"]
PARTITIONS: tuple[PartitionName, ...] = ("dirichlet", "pathological")
WITHOUT_TOPOLOGY = {"local", "fedavg", "fedavg-ft", "ditto", "subfedavg"}
PERCENT = Decimal("0.01")


@dataclass(frozen=True)
class Printed:
    """A number as printed: its digits, and the unit that they count."""

    digits: Decimal
    unit: Decimal = Decimal(1)

    @property
    def value(self) -> float:
        """The number itself: an accuracy of 85.70 % is 0.857."""
        return float(self.digits * self.unit)

    @property
    def last_digit(self) -> float:
        """How much one more in the last printed digit is."""
        return float(self.unit * Decimal(1).scaleb(int(self.digits.as_tuple().exponent)))

    def __str__(self) -> str:
        return str(self.digits)


@dataclass(frozen=True)
class RoundsTo:
    """How many rounds a method took to a target accuracy; None where it did not get there."""

    target: Printed
    rounds: int | None


@dataclass(frozen=True)
class Row:
    """One method in one setting. Costs are printed once for both partitions, so they are in both rows."""

    table: str
    """The table's LaTeX label."""
    data: str
    partition: PartitionName
    topology: str | None
    """None where it plays no part: a method with a server, or one that hears nobody."""
    model: str
    method: str
    density: float | tuple[float, ...] | None
    """1 is dense; several make groups of peers of equal size; None where the paper does not say."""
    accuracy: Printed | None = None
    accuracy_std: Printed | None = None
    comm: Printed | None = None
    """MB (1e6 bytes) a round."""
    flops: Printed | None = None
    """Of a peer's local phase."""
    rounds_to: tuple[RoundsTo, ...] = ()


@dataclass(frozen=True)
class Table:
    """One of the paper's tables."""

    label: str
    """As in the LaTeX source."""
    number: int
    """As in the PDF."""
    title: str
    comm: Literal["busiest", "mean"] | None
    """Whose traffic is printed: the busiest node's, or the mean over nodes."""
    flops_unit: Decimal
    """What the printed FLOPs count."""
    rounds: int | None
    """How many rounds were run, where rounds to a target are printed."""
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Erratum:
    """Something that cannot be meant as printed. What is None holds for all such rows of the table."""

    table: str
    column: Column
    sentence: str
    partition: PartitionName | None = None
    topology: str | None = None
    method: str | None = None

    def concerns(self, row: Row, column: Column) -> bool:
        """Whether this is about that column of that row."""
        said = {name: value for name in ("partition", "topology", "method") if (value := getattr(self, name))}
        same = all(getattr(row, name) == value for name, value in said.items())
        return same and (row.table, column) == (self.table, self.column)


@cache
def tables() -> tuple[Table, ...]:
    """The tables in the order of the PDF."""
    return tuple(_table(said) for said in _file()["table"])


@cache
def errata() -> tuple[Erratum, ...]:
    """The misprints that we found."""
    return tuple(Erratum(**said) for said in _file()["erratum"])


@cache
def _file() -> dict[str, Any]:
    text = files("dispfl.paper").joinpath("tables.toml").read_text("utf-8")
    return tomllib.loads(text, parse_float=Decimal)  # Decimal keeps the zero of 89.30


def _table(said: Mapping[str, Any]) -> Table:
    rest = dict(said)
    lines, unit, targets = rest.pop("row"), Decimal(rest.pop("flops_unit", 1)), rest.pop("targets", {})
    label, number, title = (rest.pop(name) for name in ("label", "number", "title"))
    comm, rounds = rest.pop("comm", None), rest.pop("rounds", None)
    rows = [
        _row({**rest, **line}, label, partition, unit, targets.get(partition))
        for line in lines
        for partition in PARTITIONS
        if partition in line
    ]
    return Table(label, number, title, comm, unit, rounds, tuple(rows))


def _row(
    line: Mapping[str, Any], label: str, partition: PartitionName, unit: Decimal, targets: list[int] | None
) -> Row:
    method, numbers = line["method"], line[partition]
    accuracy = [Printed(number, PERCENT) for number in numbers] if targets is None else []
    return Row(
        table=label,
        data=line["data"],
        partition=partition,
        topology=None if method in WITHOUT_TOPOLOGY else line["topology"],
        model=line["model"],
        method=method,
        density=_density(line["density"]),
        accuracy=accuracy[0] if accuracy else None,
        accuracy_std=accuracy[1] if len(accuracy) > 1 else None,
        comm=Printed(line["comm"]) if "comm" in line else None,
        flops=Printed(line["flops"], unit) if "flops" in line else None,
        rounds_to=tuple(
            RoundsTo(Printed(Decimal(target), PERCENT), rounds if isinstance(rounds, int) else None)
            for target, rounds in zip(targets or [], numbers if targets else [], strict=True)
        ),
    )


def _density(said: Decimal | list[Decimal] | str) -> float | tuple[float, ...] | None:
    if isinstance(said, str):
        return None
    return tuple(float(share) for share in said) if isinstance(said, list) else float(said)
