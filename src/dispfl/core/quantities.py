"""The quantities that a run records: what each one measures, and where it is shown.

Every quantity is declared once. The fields of `core/report.py: Report` that call `per_peer` are
those of single peers; `ROUND_QUANTITIES` below are those of a whole round. The declarations decide
what is in `metrics.jsonl` and in its reference, what is checked when a run is read, what trackers
get, which columns a DataFrame has, and what tables and reports show.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from math import isfinite
from typing import Any

from dispfl.core.metric import is_number_format


class Shape(StrEnum):
    """What a line of the metrics has for a quantity."""

    PEERS = "spread"
    """The mean and the standard deviation over peers, and every peer's value; or null."""
    METRICS = "spread of each metric"
    """By the name of each metric: its spread, its direction and the format of its numbers."""
    LOGGED = "spread of each name"
    """By the name of each quantity that methods log: its spread; or null."""
    NUMBER = "number"
    OPTIONAL = "number or null"
    NAME = "name"
    """A text, or null."""
    REASONS = "text by peer"
    """By peer: a sentence."""
    NODES = "object by node"
    """By node: several numbers by name; or null."""
    CLASSES = "object by class"
    """By class of devices: several numbers by name, or null each; or null."""
    TRAFFIC = "pair by node"
    """By node: a number for what it sends and one for what it receives; or null."""
    LINKS = "text"
    """One text for the links of all nodes (`runs/links.py`); or null."""

    def accepts(self, value: Any, peers: int) -> bool:
        """Whether a value that was read from a file has this shape, in a run of so many peers."""
        match self:
            case Shape.PEERS:
                return value is None or _is_spread(value, peers)
            case Shape.METRICS:
                return _is_object_of(value, lambda spread: _is_metric(spread, peers))
            case Shape.LOGGED:
                return value is None or _is_object_of(
                    value, lambda spread: _is_spread(spread, peers)
                )
            case Shape.NUMBER:
                return is_finite_number(value)
            case Shape.OPTIONAL:
                return value is None or is_finite_number(value)
            case Shape.NAME | Shape.LINKS:
                return value is None or isinstance(value, str)
            case Shape.REASONS:
                return _is_object_of(value, lambda reason: isinstance(reason, str))
            case Shape.NODES:
                return value is None or _is_object_of(value, _is_numbers)
            case Shape.CLASSES:
                return value is None or _is_object_of(value, _is_numbers)
            case Shape.TRAFFIC:
                return value is None or _is_object_of(value, _is_pair)


@dataclass(frozen=True)
class ResultColumn:
    """A column of the tables that compare runs: the mean over peers and seeds."""

    name: str
    """Names the column in files; `{metric}` stands for the main metric's name."""
    heading: tuple[str, str]
    """Two lines."""
    priority: int
    """Columns of the lowest priority are dropped first where a terminal is too narrow."""


@dataclass(frozen=True)
class ReportFigure:
    """A chart of the HTML report: the quantity by round, mean over peers."""

    section: str
    """The section of the page that has it."""
    title: str
    y_label: str


@dataclass(frozen=True)
class Quantity:
    """A quantity that is recorded in every round."""

    name: str
    """Its key in `metrics.jsonl`; `busiest.wire_mb` is a key of the object `busiest`."""
    shape: Shape
    meaning: str
    """A part of a sentence, for the reference."""
    unit: str = ""
    higher_is_better: bool | None = None
    """None if neither direction is better, or if it follows the main metric."""
    evaluation: bool = False
    """Whether it is measured in rounds with evaluation only."""
    summarized: bool = False
    """Whether `summary.json` has its last value."""
    column: ResultColumn | None = None
    figure: ReportFigure | None = None

    @property
    def group(self) -> str:
        """The group that trackers show it in."""
        if self.name.startswith("busiest."):
            return "busiest"
        if self.name.startswith(f"{SIMULATED}."):
            return SIMULATED
        return "cost" if self.shape is Shape.NUMBER else "peers"

    def value(self, record: Mapping[str, Any]) -> Any:
        """Return its value in a line of the metrics; None if the line does not have it."""
        value: Any = record
        for key in self.name.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        return value

    def numbers(self, record: Mapping[str, Any]) -> dict[str, float]:
        """Return its value in a line as single numbers, by name: those that were measured."""
        value = self.value(record)
        match self.shape:
            case Shape.PEERS if value:
                return {self.name: value["mean"]}
            case Shape.METRICS | Shape.LOGGED if value:
                return {name: spread["mean"] for name, spread in value.items()}
            case Shape.NUMBER | Shape.OPTIONAL if value is not None:
                return {self.name: value}
            case Shape.REASONS:
                return {self.name: len(value)}
        return {}

    def spreads(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Return the spreads over peers that a line has of it, by name."""
        value = self.value(record)
        match self.shape:
            case Shape.PEERS if value:
                return {self.name: value}
            case Shape.METRICS | Shape.LOGGED if value:
                return dict(value)
        return {}


QUANTITY = "quantity"
SIMULATED = "simulated"
"""The object of a line with the times of a simulated fleet; null without a clock."""


def per_peer(
    meaning: str,
    *,
    unit: str = "",
    higher_is_better: bool | None = None,
    evaluation: bool = False,
    summarized: bool = False,
    column: ResultColumn | None = None,
    figure: ReportFigure | None = None,
) -> Any:
    """Declare a field of `Report` as a recorded quantity; None means not measured."""
    quantity = Quantity(
        name="",  # the name of the field
        shape=Shape.PEERS,
        meaning=meaning,
        unit=unit,
        higher_is_better=higher_is_better,
        evaluation=evaluation,
        summarized=summarized,
        column=column,
        figure=figure,
    )
    return field(default=None, metadata={QUANTITY: quantity})


ROUND_QUANTITIES = (
    Quantity(
        "busiest.paper_mb",
        Shape.NUMBER,
        "traffic of the busiest node, as the paper counts it: values received",
        unit="MB",
        higher_is_better=False,
    ),
    Quantity(
        "busiest.wire_mb",
        Shape.NUMBER,
        "traffic of the busiest node, as sent: the larger of `wire_up_mb` and `wire_down_mb`",
        unit="MB",
        higher_is_better=False,
    ),
    Quantity("busiest.wire_up_mb", Shape.NUMBER, "what that node sends", unit="MB"),
    Quantity("busiest.wire_down_mb", Shape.NUMBER, "what that node receives", unit="MB"),
    Quantity("busiest.peer", Shape.NAME, "the name of that node"),
    Quantity(
        "busiest.connections",
        Shape.NUMBER,
        "the largest number of nodes that one node receives models from",
    ),
    Quantity(
        "traffic", Shape.TRAFFIC, "sent and received by every node with any traffic", unit="bytes"
    ),
    Quantity(
        "links",
        Shape.LINKS,
        "whose models each node received: for each peer in order, and the server last, their"
        " positions, as in `1-3 5;0 2;;-`; empty: none, `-`: took no part",
    ),
    Quantity(
        "missed_links",
        Shape.LINKS,
        "in the same form, the models that were requested in vain, or refused; null: none",
    ),
    Quantity(
        "similarities",
        Shape.LINKS,
        "with [affinities](../affinity.md), how similar the sender of each of `links` is to its"
        " receiver, in hundredths: `93 -20;8`; `x`: not comparable; null: no affinities",
    ),
    Quantity(
        "message_bytes",
        Shape.LINKS,
        "the size of each received model in bytes, by receiver, as in `1-3:400,5:380?20;0:390`:"
        " whose models, their size, and after `?` the size of each request; null: more than"
        " 100,000 messages, and no [clock](../time.md)",
    ),
    Quantity(
        "senders",
        Shape.NODES,
        "with a [robust rule](../robust.md), of each sender: how often it was `received` and `far`"
        " beyond the threshold, and its mean `distance`",
    ),
    Quantity(
        "flops_per_peer",
        Shape.NUMBER,
        "training FLOPs of a peer that trains, mean over those",
        unit="FLOPs",
        higher_is_better=False,
    ),
    Quantity(
        "flops_total",
        Shape.NUMBER,
        "training FLOPs of all peers",
        unit="FLOPs",
        higher_is_better=False,
    ),
    Quantity(
        "kernel_flops",
        Shape.PEERS,
        "FLOPs that the kernels do for a peer, dense where masks leave out single weights:"
        " training, the mask search and evaluation; null for a peer that took no part",
        unit="FLOPs",
        higher_is_better=False,
    ),
    Quantity(
        "failures",
        Shape.REASONS,
        "why a peer's step was discarded; the peer keeps its last valid state",
        higher_is_better=False,
    ),
    Quantity("seconds", Shape.NUMBER, "wall time of the round", unit="s", higher_is_better=False),
    Quantity(
        f"{SIMULATED}.hours",
        Shape.OPTIONAL,
        "with a [clock](../time.md), the simulated time at which the last peer has finished the"
        " round, since the start of the run",
        unit="h",
        higher_is_better=False,
    ),
    Quantity(
        f"{SIMULATED}.end",
        Shape.PEERS,
        "the simulated time at which the peer has finished the round, since the start of the run;"
        " null for a peer that took no part",
        unit="s",
        higher_is_better=False,
    ),
    Quantity(
        f"{SIMULATED}.computing",
        Shape.PEERS,
        "simulated time that the peer computes in the round, offline time not counted; null for a"
        " peer that took no part",
        unit="s",
        higher_is_better=False,
    ),
    Quantity(
        f"{SIMULATED}.transferring",
        Shape.PEERS,
        "simulated time in which a model, or a request for it, is on its way to the peer, or to the"
        " server and back, while both ends are online",
        unit="s",
        higher_is_better=False,
    ),
    Quantity(
        f"{SIMULATED}.waiting",
        Shape.PEERS,
        "the rest of the peer's round: it waits for others",
        unit="s",
        higher_is_better=False,
    ),
    Quantity(
        f"{SIMULATED}.offline",
        Shape.PEERS,
        "simulated time of the peer's round in which its device is offline",
        unit="s",
        higher_is_better=False,
    ),
    Quantity(
        f"{SIMULATED}.sending",
        Shape.PEERS,
        "with `schedule=async`, simulated time in which models of the peer leave, while it"
        " computes: this is part of `computing`; otherwise null",
        unit="s",
        higher_is_better=False,
    ),
    Quantity(
        f"{SIMULATED}.busy",
        Shape.PEERS,
        "the share of the peer's round in which it computes",
        unit="share",
        higher_is_better=True,
        figure=ReportFigure("time", "Share of a round that peers compute", "share of the round"),
    ),
    Quantity(
        f"{SIMULATED}.energy",
        Shape.OPTIONAL,
        "energy that all peers take for computing in the round, if every class has `watts`",
        unit="Wh",
        higher_is_better=False,
    ),
    Quantity(
        f"{SIMULATED}.classes",
        Shape.CLASSES,
        "`computing`, `transferring`, `waiting`, `offline` and `busy` of each class of devices,"
        " mean over its peers, and with `schedule=async` `sending` and `steps`; null where none"
        " took part",
    ),
)
"""The quantities of a whole round; `runs/metrics.py: round_metrics` computes them."""


def is_finite_number(value: Any) -> bool:
    """Whether a value that was read from a file is a number; true and false are none."""
    if type(value) not in (int, float):
        return False
    try:
        return isfinite(value)
    except OverflowError:  # a whole number of hundreds of digits
        return False


def _is_object_of(value: Any, accepts: Callable[[Any], bool]) -> bool:
    return isinstance(value, dict) and all(map(accepts, value.values()))


def _is_numbers(value: Any) -> bool:
    return _is_object_of(value, lambda number: number is None or is_finite_number(number))


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(is_finite_number, value))


def _is_spread(value: Any, peers: int) -> bool:
    if not isinstance(value, dict):
        return False
    per_peer = value.get("per_peer")
    if not isinstance(per_peer, list) or len(per_peer) != peers:
        return False
    numbers = [value.get("mean"), value.get("std")]
    numbers += [number for number in per_peer if number is not None]
    return all(map(is_finite_number, numbers))


def _is_metric(value: Any, peers: int) -> bool:
    return (
        _is_spread(value, peers)
        and isinstance(value.get("higher_is_better"), bool)
        and is_number_format(value.get("format"))
    )
