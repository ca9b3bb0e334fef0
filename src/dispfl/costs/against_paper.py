"""Every cost that the paper prints, beside what we find for the same setting without training anything.

The paper says little about how it counts; its figures say the rest. For ResNet-18 on CIFAR-10, as printed = found:

    446.9 MB  = 11,173,962 parameters x 4 bytes x 10 neighbours: values only, no masks, 1e6 bytes to the MB
    89.4, 4423.9 MB = the same x 2 (ring) and x 99 (fully connected): what a node downloads
    268.0 MB  = the mean over nodes of five groups, 0.6 x 446.96; the busiest node has far more
    8.3e12    = 1.1108e9 (forward, 2 a multiply-add) x 3 (backward counts twice) x 5 epochs x 500 samples
    66.6e12   = 4.4435e9 x 3 x 5 x 1,000 samples: Tiny-ImageNet, 64 x 64, twice as many samples
    7.0e12    = 6.63e12 for training under ERK masks + 0.43e12 for one dense batch of 128; 6.6 without that batch
    20.9e11   = 16.66e11 under a uniform mask + 4.27e11: masked D-PSGD is charged that batch too

Most last digits are cut off, not rounded.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Literal

from dispfl import paper
from dispfl.core.train import Train
from dispfl.costs.estimate import Costs, Plan, estimate
from dispfl.data.catalogue import describe
from dispfl.methods.registry import METHODS
from dispfl.models.registry import Model
from dispfl.topology import TOPOLOGIES
from dispfl.wire.codec import Wire

PEERS = 100
ALLOWED = 0.005
"""A deviation of half a percent agrees, and so does one of one last digit: the paper cuts digits off."""

CostColumn = Literal["comm", "flops"]


class Verdict(StrEnum):
    """What is to be said about a printed figure."""

    AGREES = "agrees"
    OFF = "off"
    MISPRINT = "misprint"
    """An erratum says why it cannot be meant."""
    TRAINED = "depends on training"
    """It follows from what was pruned while training, so it cannot be found without."""


@dataclass(frozen=True)
class Figure:
    """One printed cost, or one that should have been, and ours."""

    row: paper.Row
    column: CostColumn
    printed: paper.Printed | None
    ours: float
    """MB, or operations; of a method that prunes as it trains, where it starts."""
    erratum: paper.Erratum | None

    @property
    def deviation(self) -> float | None:
        """Ours against the printed one, as a share of it."""
        return None if self.printed is None else self.ours / self.printed.value - 1

    @property
    def verdict(self) -> Verdict:
        if self.row.method == "subfedavg":
            return Verdict.TRAINED
        if self.erratum or self.printed is None:
            return Verdict.MISPRINT
        allowed = max(ALLOWED * self.printed.value, self.printed.last_digit)
        return Verdict.AGREES if abs(self.ours - self.printed.value) <= allowed else Verdict.OFF


@dataclass(frozen=True)
class Section:
    """The figures of one table that share a data set and a model."""

    table: paper.Table
    data: str
    model: str
    figures: tuple[Figure, ...]


def sections() -> list[Section]:
    """All printed costs, table by table."""
    found: dict[tuple[paper.Table, str, str], list[Figure]] = {}
    for table in paper.tables():
        for row in table.rows:
            if table.comm is not None and row.partition == "dirichlet":  # the pathological one has the same costs
                found.setdefault((table, row.data, row.model), []).extend(_figures(table, row))
    return [Section(*where, tuple(figures)) for where, figures in found.items()]


def _figures(table: paper.Table, row: paper.Row) -> Iterator[Figure]:
    costs = _costs(row.data, row.model, row.topology, row.method, row.density)
    ours: dict[CostColumn, float] = {
        "comm": costs.mean_mb if table.comm == "mean" else costs.busiest_mb,
        "flops": costs.flops_per_peer,
    }
    for column, value in ours.items():
        printed = row.comm if column == "comm" else row.flops
        erratum = next((erratum for erratum in paper.errata() if erratum.concerns(row, column)), None)
        if printed or erratum:
            yield Figure(row, column, printed, value, erratum)


@cache
def _costs(
    data: str, model: str, topology: str | None, method: str, density: float | tuple[float, ...] | None
) -> Costs:
    """Our costs in the paper's setting: 100 clients that share out all training samples, 10 neighbours, 5 epochs."""
    spec, kind = describe(data), METHODS[method]
    asked = {"density": density} if density is not None and "density" in kind.model_fields else {}
    plan = Plan(
        model=Model(name=model),
        data=spec,
        method=kind.model_validate(asked),
        topology=TOPOLOGIES[topology or "random"].model_validate({}),
        peers=PEERS,
        samples=spec.train // PEERS,
        train=Train(),
        wire=Wire(),
    )
    return estimate(plan, as_printed=True)
