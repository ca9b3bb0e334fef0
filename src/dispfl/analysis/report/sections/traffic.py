"""Traffic of every node: what it sends and what it hears."""

import statistics

from dispfl.analysis.report.bars import Bar, bar_chart
from dispfl.analysis.report.blocks import figure, figures, remark, section
from dispfl.analysis.report.lines import thinned
from dispfl.analysis.report.markup import Markup
from dispfl.analysis.report.results import Results, Series
from dispfl.analysis.report.wording import listed, size

MOST_BARS = 200
Load = tuple[float, float]


def traffic_section(results: Results) -> Markup:
    """Megabytes a round of each node, the busiest first."""
    loads = {series.label: _loads(series) for series in results.series}
    unknown = [series.label for series in results.series if loads[series.label] is None]
    silent = [series.label for series in results.series if loads[series.label] == {}]
    shown = [series for series in results.series if loads[series.label]]
    remarks = []
    if silent:
        remarks.append(remark(f"{listed(silent)}: nobody sends anything."))
    if unknown:
        remarks.append(remark(f"{listed(unknown)}: the metrics do not say what each node sent."))
    if not shown:
        return section("traffic", "Traffic of every node", *remarks)
    every = [load for series in shown for load in (loads[series.label] or {}).values()]
    reach = (-max(down for _, down in every), max(up for up, _ in every))
    drawn = [_chart(series, loads[series.label] or {}, reach) for series in shown]
    how = "Megabytes a round on the wire, mean over rounds: sent above the line, heard below it. "
    scale = "All charts have the same scale." if len(shown) > 1 else "The busiest nodes come first."
    return section("traffic", "Traffic of every node", remark(how + scale), figures(drawn, "many"), *remarks)


def _loads(series: Series) -> dict[str, Load] | None:
    """Each node's load, mean over seeds; empty where nobody sends, None where it was not written down."""
    by_seed = [run.traffic for run in series.runs]
    known = [traffic for traffic in by_seed if traffic is not None]
    if len(known) < len(by_seed):
        return None
    mean = {
        node: (
            statistics.fmean(traffic.get(node, (0.0, 0.0))[0] for traffic in known),
            statistics.fmean(traffic.get(node, (0.0, 0.0))[1] for traffic in known),
        )
        for node in dict.fromkeys(node for traffic in known for node in traffic)
    }
    return mean if any(max(load) for load in mean.values()) else {}


def _chart(series: Series, loads: dict[str, Load], reach: tuple[float, float]) -> Markup:
    ranked = sorted(loads.items(), key=lambda pair: (-max(pair[1]), pair[0]))
    bars = [
        Bar(
            "",
            [(up, series.paint), (-down, f"{series.paint} below")],
            f"{_name(node)}: {size(up)} MB up, {size(down)} down",
        )
        for node, (up, down) in ranked
    ]
    busiest, (up, down) = ranked[0]
    said = f"Busiest: {_name(busiest)}, {size(up)} MB up and {size(down)} down."
    chart = bar_chart(
        thinned(bars, MOST_BARS),
        "nodes, busiest first",
        "MB a round",
        f"{series.label}. {said}",
        reach=reach,
        mirrored=True,
    )
    return figure(series.label, chart, note=said)


def _name(node: str) -> str:
    return f"peer {node}" if node.isdecimal() else f"the {node}"
