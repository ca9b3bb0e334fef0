"""Bytes and FLOPs as text: in every table, figure and sentence, a small number has a small unit."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dispfl.report.wording import format_amount, with_thousands

SMALLEST = 0.1
"""The smallest positive number of a column is at least this much in the column's unit."""


@dataclass(frozen=True)
class Unit:
    """A unit, such as MB."""

    scale: float
    name: str

    def text(self, value: float) -> str:
        """Return a value as a number of this unit, without its name."""
        return format_amount(value / self.scale)

    def column(self, values: Sequence[float]) -> list[str]:
        """Return the cells of a column, all with the same number of decimals.

        The largest has at least four digits, and the smallest two, of which two are decimals.
        """
        amounts = [value / self.scale for value in values]
        positive = [amount for amount in amounts if amount > 0]
        if not positive:
            return ["0" for _ in amounts]
        decimals = max(4 - _digits(max(positive)), 2 - _digits(min(positive)), 0)
        cells = []
        for amount in amounts:
            cells.append(with_thousands(amount, min(decimals, 2)) if amount else "0")
        return cells


def _digits(amount: float) -> int:
    """Return how many digits a number has before its point; at least 1."""
    return len(str(int(amount)))


BYTES = (Unit(1e9, "GB"), Unit(1e6, "MB"), Unit(1e3, "kB"), Unit(1, "B"))
FLOPS = (
    Unit(1e12, "TFLOPs"),
    Unit(1e9, "GFLOPs"),
    Unit(1e6, "MFLOPs"),
    Unit(1e3, "kFLOPs"),
    Unit(1, "FLOPs"),
)
HOURS = (Unit(1, "hours"), Unit(1 / 60, "minutes"), Unit(1 / 3600, "seconds"))
"""Of durations in hours."""


def common_unit(values: Iterable[float], units: Sequence[Unit]) -> Unit:
    """Return the unit in which even the smallest positive value is no fraction of a tenth."""
    smallest = min((value for value in values if value > 0), default=0.0)
    for unit in units:
        if smallest >= SMALLEST * unit.scale:
            return unit
    return _default(units, smallest)


def axis_unit(largest: float, units: Sequence[Unit]) -> Unit:
    """Return the unit for an axis that ends at a value."""
    for unit in units:
        if largest >= unit.scale:
            return unit
    return _default(units, largest)


def _default(units: Sequence[Unit], value: float) -> Unit:
    """Return the smallest unit, or for nothing but zeros the one that people expect."""
    if value:
        return units[-1]
    return next(unit for unit in units if unit.scale == 1e6)


def with_unit(value: float, units: Sequence[Unit]) -> str:
    """`0.85 MB`, `38.50 kB`."""
    unit = common_unit([value], units)
    return f"{unit.text(value)} {unit.name}"


def bytes_text(count: float) -> str:
    """Return a number of bytes with its unit."""
    return with_unit(count, BYTES)


def duration_text(hours: float) -> str:
    """`1.50 hours`, `3.20 seconds`."""
    if not hours:
        return "0 seconds"
    unit = axis_unit(hours, HOURS)
    return f"{unit.text(hours)} {unit.name}"


def flops_text(count: float) -> str:
    """Return a number of FLOPs with its unit."""
    return with_unit(count, FLOPS)
