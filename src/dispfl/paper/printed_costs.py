"""Every cost printed in the paper next to our estimate (`dispfl costs --paper`).

The paper says little about how it counts; its numbers show the rest. For ResNet-18 on CIFAR-10, as
printed = computed:

    446.9 MB  = 11,173,962 parameters x 4 bytes x 10 neighbours: values only, no masks,
                1e6 bytes to the MB
    89.4, 4423.9 MB = the same x 2 (ring) and x 99 (fully connected): the download of a node
    268.0 MB  = the mean over nodes of five groups, 0.6 x 446.96; the busiest node has far more
    8.3e12    = 1.1108e9 (forward, 2 per multiply-add) x 3 (backward counts twice) x 5 epochs
                x 500 samples
    66.6e12   = 4.4435e9 x 3 x 5 x 1,000 samples: Tiny-ImageNet, 64 x 64, twice as many samples
    7.0e12    = 6.63e12 for training under ERK masks + 0.43e12 for one dense batch of 128;
                6.6 without that batch
    20.9e11   = 16.66e11 under a uniform mask + 4.27e11: masked D-PSGD is charged that batch too

Most last digits are truncated, not rounded.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
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
from dispfl.report.wording import UNKNOWN
from dispfl.terminal import number_table, print_text
from dispfl.topology import RandomRegular, Topology
from dispfl.wire.codec import Wire

PEERS = 100
NEIGHBOURS = 10
BATCH = 128
TOLERANCE = 0.005
"""Costs agree within half a percent or one unit of the last printed digit.

The paper truncates digits.
"""

CostColumn = Literal["comm", "flops"]
NO_CELLS = (UNKNOWN, UNKNOWN, "")


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
        if self.printed is None:
            return None
        return self.ours / self.printed.value - 1

    @property
    def verdict(self) -> CostVerdict:
        if self.row.method == "subfedavg":
            return CostVerdict.TRAINED
        if self.erratum or self.printed is None:
            return CostVerdict.MISPRINT
        allowed = max(TOLERANCE * self.printed.value, self.printed.last_digit)
        if abs(self.ours - self.printed.value) > allowed:
            return CostVerdict.OFF
        return CostVerdict.AGREES

    @property
    def cells(self) -> tuple[str, str, str]:
        """The paper's number, ours with one digit more, and the deviation or the verdict."""
        unit = 1e12
        decimals = 2
        if self.printed:
            unit = float(self.printed.unit)
            decimals = 1 - int(self.printed.digits.as_tuple().exponent)
        ours = f"{self.ours / unit:.{decimals}f}"
        match self.verdict:
            case CostVerdict.TRAINED:
                return str(self.printed), UNKNOWN, "trained"
            case CostVerdict.MISPRINT:
                return str(self.printed or "blank"), ours, "misprint"
            case CostVerdict.OFF:
                return str(self.printed), ours, f"{self.deviation:+.2%} !"
        return str(self.printed), ours, f"{self.deviation:+.2%}"


@dataclass(frozen=True)
class CostTable:
    """The costs of one table that share a data set and a model."""

    table: PrintedTable
    data: str
    model: str
    costs: list[ComparedCost] = field(default_factory=list)

    @property
    def errata(self) -> list[str]:
        """The misprints of this table, as sentences."""
        sentences = []
        for cost in self.costs:
            if cost.erratum:
                sentences.append(f"Table {self.table.number}: {cost.erratum.sentence}")
        return sentences

    def to_json(self) -> list[dict[str, Any]]:
        """Return its costs in plain units."""
        return list(map(self._cost_json, self.costs))

    def _cost_json(self, cost: ComparedCost) -> dict[str, Any]:
        figure = "flops_per_peer_round"
        if cost.column == "comm":
            figure = f"{self.table.comm}_mb"
        return {
            "table": self.table.number,
            "label": self.table.label,
            "data": self.data,
            "model": self.model,
            "topology": cost.row.topology,
            "method": cost.row.method,
            "density": cost.row.density,
            "figure": figure,
            "paper": cost.printed and cost.printed.value,
            "ours": cost.ours,
            "deviation": cost.deviation,
            "verdict": cost.verdict.value,
        }


def compare_costs() -> list[CostTable]:
    """Return all printed costs next to ours, table by table."""
    compared: dict[tuple[str, str, str], CostTable] = {}
    for table in tables():
        if table.comm is None:
            continue
        for row in table.rows:
            if row.partition != "dirichlet":  # the pathological one has the same costs
                continue
            key = (table.label, row.data, row.model)
            section = compared.setdefault(key, CostTable(table, row.data, row.model))
            section.costs.extend(_compared(table, row))
    return list(compared.values())


def count_verdicts(compared: Sequence[CostTable]) -> dict[CostVerdict, int]:
    """Return how often each verdict occurs."""
    counts = dict.fromkeys(CostVerdict, 0)
    for table in compared:
        for cost in table.costs:
            counts[cost.verdict] += 1
    return counts


def _compared(table: PrintedTable, row: PrintedRow) -> Iterator[ComparedCost]:
    """Yield the traffic and the FLOPs of a row, as far as they are printed or should be."""
    costs = _estimate(row.data, row.model, row.topology, row.method, row.density)
    our_mb = costs.busiest_mb
    if table.comm == "mean":
        our_mb = costs.mean_mb
    compared = (
        ComparedCost(row, "comm", row.comm, our_mb, _erratum(row, "comm")),
        ComparedCost(row, "flops", row.flops, costs.flops_per_peer, _erratum(row, "flops")),
    )
    for cost in compared:
        if cost.printed or cost.erratum:
            yield cost


def _erratum(row: PrintedRow, column: CostColumn) -> Erratum | None:
    for erratum in errata():
        if erratum.concerns(row, column):
            return erratum
    return None


@cache
def _estimate(
    data: str,
    model: str,
    topology: str | None,
    method: str,
    density: float | tuple[float, ...] | None,
) -> RoundCosts:
    """Estimate costs in the paper's setting.

    100 peers split all training samples and have 10 neighbours; they train for 5 epochs.
    """
    spec = describe(data)
    method_class = METHODS[method]
    settings: dict[str, Any] = {}
    if density is not None and "density" in method_class.model_fields:
        settings["density"] = density
    links: Topology = RandomRegular(degree=NEIGHBOURS)
    if topology not in (None, "random"):
        links = TOPOLOGIES[topology]()
    plan = CostInputs(
        model=Model(name=model),
        data=spec,
        method=method_class.model_validate(settings),
        topology=links,
        peers=PEERS,
        samples=spec.train // PEERS,
        train=Train(batch_size=BATCH),
        wire=Wire(),
    )
    return estimate(plan, as_printed=True)


def costs_as_json(compared: Sequence[CostTable]) -> dict[str, Any]:
    """Return all costs in plain units, for other programs."""
    figures: list[dict[str, Any]] = []
    for table in compared:
        figures += table.to_json()
    counts = count_verdicts(compared)
    return {
        "figures": figures,
        "errata": _errata(compared),
        "verdicts": {verdict.value: count for verdict, count in counts.items()},
    }


def print_costs(compared: Sequence[CostTable], console: Console) -> None:
    """Print all tables, then how many costs agree and why others do not."""
    for table in compared:
        _print_table(table, console)
    counts = count_verdicts(compared)
    agree = counts[CostVerdict.AGREES]
    off = counts[CostVerdict.OFF]
    agreement = (
        f"{agree} of {agree + off} costs agree within 0.5 % or one unit of the last digit (the"
        " paper truncates digits)"
    )
    if off:
        agreement += f"; {off} do not, marked with !"
    print_text(console, f"{agreement}.")
    print_text(
        console,
        f"trained: {counts[CostVerdict.TRAINED]} costs of subfedavg depend on the weights pruned"
        " during training.",
    )
    misprints = _errata(compared)
    print_text(console, f"misprint: {len(misprints)} costs are misprinted:")
    for sentence in misprints:
        print_text(console, f"  {sentence}")


def _errata(compared: Sequence[CostTable]) -> list[str]:
    sentences: list[str] = []
    for table in compared:
        sentences += table.errata
    return sentences


def _print_table(section: CostTable, console: Console) -> None:
    flops = f"1e{section.table.flops_unit.adjusted()}"
    headings = []
    for unit in ("MB", flops):
        headings += [f"{unit}\npaper", f"{unit}\nours", f"{unit}\noff by"]
    table = number_table("\nmethod", "\ndensity", "\ntopology", *headings)

    lines: dict[tuple[str, str, str], dict[str, ComparedCost]] = {}
    for cost in section.costs:
        row = cost.row
        names = (row.method, _density(row.density), row.topology or UNKNOWN)
        lines.setdefault(names, {})[cost.column] = cost
    for names, costs in lines.items():
        cells = list(names)
        for column in ("comm", "flops"):
            if column in costs:
                cells += costs[column].cells
            else:
                cells += NO_CELLS
        table.add_row(*cells)

    mb = "mean MB over nodes"
    if section.table.comm == "busiest":
        mb = "MB of the busiest node"
    number = section.table.number
    title = f"Table {number}: {section.model} on {section.data}; {mb}, FLOPs in {flops}"
    console.print(title, style="bold", highlight=False)
    console.print(table, "", sep="\n")


def _density(density: float | tuple[float, ...] | None) -> str:
    if density is None:
        return "?"
    if isinstance(density, tuple):
        return f"{min(density):g}–{max(density):g}"
    return f"{density:g}"
