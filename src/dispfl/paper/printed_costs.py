"""Every cost printed in the paper next to our estimate for the same setting (`dispfl costs
--paper`).

The paper says little about how it counts; its numbers show the rest. For ResNet-18 on CIFAR-10, as
printed = found:

    446.9 MB  = 11,173,962 parameters x 4 bytes x 10 neighbours: values only, no masks, 1e6 bytes to the MB
    89.4, 4423.9 MB = the same x 2 (ring) and x 99 (fully connected): the download of a node
    268.0 MB  = the mean over nodes of five groups, 0.6 x 446.96; the busiest node has far more
    8.3e12    = 1.1108e9 (forward, 2 per multiply-add) x 3 (backward counts twice) x 5 epochs x 500 samples
    66.6e12   = 4.4435e9 x 3 x 5 x 1,000 samples: Tiny-ImageNet, 64 x 64, twice as many samples
    7.0e12    = 6.63e12 for training under ERK masks + 0.43e12 for one dense batch of 128; 6.6 without that batch
    20.9e11   = 16.66e11 under a uniform mask + 4.27e11: masked D-PSGD is charged that batch too

Most last digits are truncated, not rounded.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Any, Literal

from rich.console import Console

from dispfl.core.train import Train
from dispfl.costs.estimate import CostInputs, RoundCosts, estimate
from dispfl.data.catalogue import describe
from dispfl.models.settings import Model
from dispfl.paper.printed import Erratum, PrintedNumber, PrintedRow, PrintedTable, errata, tables
from dispfl.registry import METHODS, TOPOLOGIES
from dispfl.terminal import number_table, print_text
from dispfl.wire.codec import Wire

PEERS = 100
TOLERANCE = 0.005
"""Costs agree within half a percent or one unit of the last printed digit, because the paper
truncates digits."""

CostColumn = Literal["comm", "flops"]


class CostVerdict(StrEnum):
    """How a printed cost compares with ours."""

    AGREES = "agrees"
    OFF = "off"
    MISPRINT = "misprint"
    """An erratum explains why the printed number is wrong."""
    TRAINED = "depends on training"
    """It depends on the weights pruned during training and cannot be estimated without."""


@dataclass(frozen=True)
class ComparedCost:
    """One printed cost, or one missing in print, and ours."""

    row: PrintedRow
    column: CostColumn
    printed: PrintedNumber | None
    ours: float
    """MB or FLOPs; for a method that prunes as it trains, those of round 0."""
    erratum: Erratum | None

    @property
    def deviation(self) -> float | None:
        """The relative deviation of ours from the printed one."""
        return None if self.printed is None else self.ours / self.printed.value - 1

    @property
    def verdict(self) -> CostVerdict:
        if self.row.method == "subfedavg":
            return CostVerdict.TRAINED
        if self.erratum or self.printed is None:
            return CostVerdict.MISPRINT
        allowed = max(TOLERANCE * self.printed.value, self.printed.last_digit)
        return (
            CostVerdict.AGREES
            if abs(self.ours - self.printed.value) <= allowed
            else CostVerdict.OFF
        )


@dataclass(frozen=True)
class CostTable:
    """The costs of one table that share a data set and a model."""

    table: PrintedTable
    data: str
    model: str
    costs: tuple[ComparedCost, ...]


def compare_costs() -> list[CostTable]:
    """Return all printed costs next to ours, table by table."""
    found: dict[tuple[PrintedTable, str, str], list[ComparedCost]] = {}
    for table in tables():
        for row in table.rows:
            if (
                table.comm is not None and row.partition == "dirichlet"
            ):  # the pathological one has the same costs
                found.setdefault((table, row.data, row.model), []).extend(_compared(table, row))
    return [CostTable(*key, tuple(costs)) for key, costs in found.items()]


def count_verdicts(found: Sequence[CostTable]) -> dict[CostVerdict, int]:
    """Return how often each verdict occurs."""
    verdicts = [cost.verdict for table in found for cost in table.costs]
    return {verdict: verdicts.count(verdict) for verdict in CostVerdict}


def _compared(table: PrintedTable, row: PrintedRow) -> Iterator[ComparedCost]:
    costs = _estimate(row.data, row.model, row.topology, row.method, row.density)
    ours: dict[CostColumn, float] = {
        "comm": costs.mean_mb if table.comm == "mean" else costs.busiest_mb,
        "flops": costs.flops_per_peer,
    }
    for column, value in ours.items():
        printed = row.comm if column == "comm" else row.flops
        erratum = next((erratum for erratum in errata() if erratum.concerns(row, column)), None)
        if printed or erratum:
            yield ComparedCost(row, column, printed, value, erratum)


@cache
def _estimate(
    data: str,
    model: str,
    topology: str | None,
    method: str,
    density: float | tuple[float, ...] | None,
) -> RoundCosts:
    """Estimate costs in the paper's setting: 100 peers that split all training samples, 10
    neighbours, 5 epochs."""
    spec, kind = describe(data), METHODS[method]
    given = {"density": density} if density is not None and "density" in kind.model_fields else {}
    plan = CostInputs(
        model=Model(name=model),
        data=spec,
        method=kind.model_validate(given),
        topology=TOPOLOGIES[topology or "random"].model_validate({}),
        peers=PEERS,
        samples=spec.train // PEERS,
        train=Train(),
        wire=Wire(),
    )
    return estimate(plan, as_printed=True)


def costs_as_json(found: Sequence[CostTable]) -> dict[str, Any]:
    """Return all costs in plain units, for other programs."""
    return {
        "figures": [
            {
                "table": section.table.number,
                "label": section.table.label,
                "data": section.data,
                "model": section.model,
                "topology": cost.row.topology,
                "method": cost.row.method,
                "density": cost.row.density,
                "figure": (
                    f"{section.table.comm}_mb" if cost.column == "comm" else "flops_per_peer_round"
                ),
                "paper": cost.printed and cost.printed.value,
                "ours": cost.ours,
                "deviation": cost.deviation,
                "verdict": cost.verdict.value,
            }
            for section in found
            for cost in section.costs
        ],
        "errata": _errata(found),
        "verdicts": {verdict.value: count for verdict, count in count_verdicts(found).items()},
    }


def print_costs(found: Sequence[CostTable], console: Console) -> None:
    """Print all tables, then how many costs agree and why others do not."""
    for table in found:
        _print_table(table, console)
    counts, misprints = count_verdicts(found), _errata(found)
    agree, off = counts[CostVerdict.AGREES], counts[CostVerdict.OFF]
    marked = f"; {off} do not, marked with !" if off else ""
    for sentence in (
        (
            f"{agree} of {agree + off} costs agree within 0.5 % or one unit of the last digit (the"
            f" paper truncates digits){marked}."
        ),
        (
            f"trained: {counts[CostVerdict.TRAINED]} costs of subfedavg depend on the weights"
            " pruned during training."
        ),
        f"misprint: {len(misprints)} costs are misprinted:",
        *(f"  {sentence}" for sentence in misprints),
    ):
        print_text(console, sentence)


def _print_table(section: CostTable, console: Console) -> None:
    flops = f"1e{section.table.flops_unit.adjusted()}"
    columns = [f"{unit}\n{name}" for unit in ("MB", flops) for name in ("paper", "ours", "off by")]
    table = number_table("\nmethod", "\ndensity", "\ntopology", *columns)
    lines: dict[tuple[str, str, str], dict[str, ComparedCost]] = {}
    for cost in section.costs:
        row = cost.row
        lines.setdefault((row.method, _density(row.density), row.topology or "–"), {})[
            cost.column
        ] = cost
    for name, costs in lines.items():
        table.add_row(
            *name, *(cell for column in ("comm", "flops") for cell in _cells(costs.get(column)))
        )
    mb = "MB of the busiest node" if section.table.comm == "busiest" else "mean MB over nodes"
    title = (
        f"Table {section.table.number}: {section.model} on {section.data}; {mb}, FLOPs in {flops}"
    )
    console.print(title, style="bold", highlight=False)
    console.print(table, "", sep="\n")


def _density(density: float | tuple[float, ...] | None) -> str:
    if density is None:
        return "?"
    return f"{min(density):g}–{max(density):g}" if isinstance(density, tuple) else f"{density:g}"


def _cells(cost: ComparedCost | None) -> tuple[str, str, str]:
    """Return the paper's number, ours with one digit more, and the deviation or the verdict."""
    if cost is None:
        return "–", "–", ""
    printed = cost.printed
    unit = float(printed.unit) if printed else 1e12
    decimals = 1 - int(printed.digits.as_tuple().exponent) if printed else 2
    ours = f"{cost.ours / unit:.{decimals}f}"
    match cost.verdict:
        case CostVerdict.TRAINED:
            return str(printed), "–", "trained"
        case CostVerdict.MISPRINT:
            return str(printed or "blank"), ours, "misprint"
        case CostVerdict.OFF:
            return str(printed), ours, f"{cost.deviation:+.2%} !"
    return str(printed), ours, f"{cost.deviation:+.2%}"


def _errata(found: Sequence[CostTable]) -> list[str]:
    return [
        f"Table {table.table.number}: {cost.erratum.sentence}"
        for table in found
        for cost in table.costs
        if cost.erratum
    ]
