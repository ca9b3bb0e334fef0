"""Single peers by round: their curves, the distribution of their scores, and their masks."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from markupsafe import Markup

from dispfl.core.metric import Measure
from dispfl.report.charts import Curve, element, line_chart, point, svg, thin_out
from dispfl.report.diagrams import HeatMap
from dispfl.report.html import Block, Figure
from dispfl.report.runs import RecordedRun
from dispfl.runs.metrics import main_scores, measured_values

MAPPED = {
    "overlap": "Overlap with the neighbours, by peer",
    "mask_change": "Mask changes, by peer",
}
"""The recorded shares of which there is a heat map."""
MAX_MAPPED_PEERS = 50
MAX_MAPPED_ROUNDS = 30
QUANTILES = {"80 % of the peers": (0.1, 0.9), "the middle half": (0.25, 0.75)}
"""The bands of the distribution."""
MAX_MULTIPLES = 120
"""Small charts of single peers; of more peers, the worst and the best ones."""
MULTIPLE_POINTS = 30
MULTIPLE_WIDTH = 120.0
MULTIPLE_HEIGHT = 48.0


def distribution_by_round(run: RecordedRun, measure: Measure, colour: str) -> Figure:
    """Draw how the scores of a single run's peers are distributed in each round."""
    best = Curve("best peer", colour, secondary=True)
    middle = Curve("median", colour)
    worst = Curve("worst peer", colour, secondary=True)
    bands = {name: Curve(name, colour, band_only=True) for name in QUANTILES}
    for record in run.records:
        scores = main_scores(record)
        if not scores:
            continue
        values = measured_values(scores)
        number = record["round"] + 1.0
        best.add(number, measure.best(values))
        middle.add(number, median(values))
        worst.add(number, measure.worst(values))
        for name, shares in QUANTILES.items():
            low, high = map(float, np.quantile(values, shares))
            bands[name].add(number, (low + high) / 2, (high - low) / 2)
    chart = line_chart(
        [best, middle, worst, *bands.values()],
        "communication round",
        measure.name,
        whole_x=True,
        x_word="round",
        y_format=measure.format,
    )
    bands_hold = " and ".join(QUANTILES)
    note = f"Median, best and worst (dashed); the bands hold {bands_hold}. Seed {run.seed}."
    return Figure(f"Distribution of {measure.name} over peers", chart, note)


@dataclass(frozen=True)
class PeerCurve:
    """The small chart of a peer."""

    name: str
    drawing: Markup
    text: str
    change: float
    """By how much the score has become better since the first evaluated round."""


@dataclass(frozen=True)
class PeerCurves(Block):
    """Small charts of peers, all on one scale, the worst peer first."""

    template = "peer_curves.html"
    note: str
    curves: Sequence[PeerCurve]


def peer_curves(run: RecordedRun, measure: Measure, colour: str) -> PeerCurves | None:
    """Return a small chart of each peer's scores by round; None with fewer than two rounds."""
    evaluated = []
    for record in run.records:
        scores = main_scores(record)
        if scores:
            evaluated.append(scores["per_peer"])
    if len(evaluated) < 2 or len(run.scores) < 2:
        return None
    evaluated = thin_out(evaluated, MULTIPLE_POINTS)
    known = [value for values in evaluated for value in values if value is not None]
    scale = (min(known), max(known))

    order = sorted(run.scores, key=lambda peer: measure.gain(run.scores[peer], 0.0))
    note = "One chart for each peer, all on one scale, the worst peer first."
    if len(order) > MAX_MULTIPLES:
        half = MAX_MULTIPLES // 2
        order = [*order[:half], *order[-half:]]
        note = f"The {half} worst and the {half} best peers, all on one scale."
    position_of = {peer: position for position, peer in enumerate(run.roster)}
    curves = []
    for peer in order:
        values = [of_round[position_of[peer]] for of_round in evaluated]
        curves.append(_peer_curve(peer, values, scale, measure, colour))
    return PeerCurves(f"{note} Seed {run.seed}.", curves)


def _peer_curve(
    peer: str,
    values: Sequence[float | None],
    scale: tuple[float, float],
    measure: Measure,
    colour: str,
) -> PeerCurve:
    low, high = scale
    extent = high - low or 1.0
    positions = []
    scores = []
    for number, value in enumerate(values):
        if value is None:
            continue
        x = 2 + (MULTIPLE_WIDTH - 4) * number / (len(values) - 1)
        y = MULTIPLE_HEIGHT - 3 - (MULTIPLE_HEIGHT - 6) * (value - low) / extent
        positions.append(point(x, y))
        scores.append(value)
    first, last = scores[0], scores[-1]
    line = element("path", d="M" + "L".join(positions), class_=f"line {colour}")
    base = element("path", d=f"M0 {MULTIPLE_HEIGHT - 1:g}H{MULTIPLE_WIDTH:g}", class_="rail")
    label = f"peer {peer}: {measure.name} from {measure.text(first)} to {measure.text(last)}"
    drawing = svg(MULTIPLE_WIDTH, MULTIPLE_HEIGHT, label, base, line, size="multiple")
    return PeerCurve(peer, drawing, measure.text(last), measure.gain(last, first))


def mask_maps(run: RecordedRun) -> Iterator[Figure]:
    """Yield a heat map of the peers by round, of what was recorded about their masks."""
    for name, title in MAPPED.items():
        measured = [record for record in run.records if record.get(name)]
        if len(measured) < 2:
            continue
        shown = thin_out(measured, MAX_MAPPED_ROUNDS)
        roster = run.roster[:MAX_MAPPED_PEERS]
        columns = []
        tooltips = []
        for position, peer in enumerate(roster):
            shares = [record[name]["per_peer"][position] or 0.0 for record in shown]
            columns.append([round(1000 * max(0.0, share)) for share in shares])
            tooltips.append(f"peer {peer}: {shares[0]:.1%} at first, {shares[-1]:.1%} at last")
        most = max(map(max, columns)) or 1
        rounds = [str(record["round"] + 1) for record in shown]
        drawing = HeatMap(columns, roster, tooltips, most, len(roster), "round", rounds)
        note = f"Seed {run.seed}. The largest share is {most / 1000:.1%}."
        if len(roster) < len(run.roster):
            note += f" The first {len(roster)} peers are shown."
        yield Figure(title, drawing.svg(f"{title}, by peer and round. {note}"), note)
