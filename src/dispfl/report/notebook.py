"""A run in a notebook: one line and its learning curve, as HTML that affects nothing else on the
page."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dispfl.report.charts import Curve, line_chart
from dispfl.report.markup import Markup, element
from dispfl.runs.metrics import main_scores, measure_of

STYLE = """
.dispfl-run { max-width: 540px; --colour: #3b82f6; }
.dispfl-run svg { display: block; width: 100%; height: auto; overflow: visible; }
.dispfl-run text { fill: currentColor; opacity: 0.75; font-size: 12px; }
.dispfl-run .tick.y { text-anchor: end; }
.dispfl-run .tick.x, .dispfl-run .axis.x { text-anchor: middle; }
.dispfl-run .grid { stroke: currentColor; opacity: 0.12; }
.dispfl-run .base { stroke: currentColor; opacity: 0.4; }
.dispfl-run .line { fill: none; stroke: var(--colour); stroke-width: 2.25; stroke-linejoin: round; }
.dispfl-run .line.secondary { stroke-width: 1.25; stroke-dasharray: 4 3; }
.dispfl-run .dots { fill: none; stroke: var(--colour); stroke-width: 6; stroke-linecap: round; }
.dispfl-run .band { fill: var(--colour); opacity: 0.14; }
.dispfl-run .tips rect { fill: transparent; }
"""
"""The rules of the report's style sheet that a curve needs, in the colours of the notebook."""


def run_markup(title: str, records: Sequence[Mapping[str, Any]]) -> str:
    """Return a title and the curve of the main metric: mean over peers, with a band of one standard
    deviation."""
    metric = measure_of(list(map(dict, records))).name
    own = [
        (record["round"] + 1, found) for record in records if (found := main_scores(dict(record)))
    ]
    mixed = [(record["round"] + 1, record["mixed"]) for record in records if record["mixed"]]
    curves = [
        Curve(
            label,
            "",
            [x for x, _ in points],
            [s["mean"] for _, s in points],
            [s["std"] for _, s in points][:band],
        )
        for label, points, band in ((metric, own, None), (f"{metric} after mixing", mixed, 0))
        if points
    ]
    curves = [curve if k == 0 else replace(curve, secondary=True) for k, curve in enumerate(curves)]
    parts = [element("style", Markup(STYLE)), element("p", title)]
    if curves:
        label = f"{metric}, mean over peers{' (dashed: after mixing)' if mixed else ''}"
        parts.append(line_chart(curves, "round", label, whole_x=True, x_word="round"))
    return element("div", *parts, class_="dispfl-run")
