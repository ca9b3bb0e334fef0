"""Mask drift: how much of its mask a peer exchanges in a round, and how much it shares with those it hears."""

from dispfl.analysis.report.blocks import figure, figures, legend, remark, section
from dispfl.analysis.report.courses import Moment, over_seeds
from dispfl.analysis.report.lines import Curve, line_chart
from dispfl.analysis.report.markup import Markup
from dispfl.analysis.report.reading import Record
from dispfl.analysis.report.results import Results, Series
from dispfl.analysis.report.wording import listed


def masks_section(results: Results) -> Markup:
    """The share of kept weights that each round replaces, and the share that neighbours keep too."""
    moving = [series for series in results.series if _course(series, "mask_change")]
    if not moving:
        return section("masks", "Mask drift", remark("No method here prunes and regrows in every round."))
    drawn = [
        _figure(results, "mask_change", "Weights that a round prunes and regrows elsewhere", "share of kept weights"),
        _figure(results, "overlap", "Kept weights that the heard neighbours keep too", "share of kept weights"),
    ]
    still = [series.label for series in results.series if series not in moving]
    parts = [legend(moving)] if len(results.series) > 1 else []
    parts.append(figures([part for part in drawn if part]))
    parts += (
        [remark(f"Not recorded for {listed(still)}, which do not prune and regrow in every round.")] if still else []
    )
    return section("masks", "Mask drift", *parts)


def _figure(results: Results, key: str, title: str, y_label: str) -> Markup | None:
    found = [(series, course) for series in results.series if (course := _course(series, key))]
    if not found:
        return None
    over = "seeds" if any(len(series.runs) > 1 for series, _ in found) else "peers"
    curves = [course for _, course in found]
    chart = line_chart(curves, "communication round", y_label, whole_x=True, x_word="round")
    return figure(title, chart, note=f"Mean over peers; the band is one standard deviation over {over}.")


def _course(series: Series, key: str) -> Curve | None:
    """Mean over peers and seeds; around it the spread over seeds, or over the peers of the only one."""
    runs = [[_moment(record, key) for record in run.records] for run in series.runs]
    course = over_seeds(runs)
    if not course:
        return None
    rounds, mean, spread = map(list, zip(*course, strict=True))
    if len(runs) == 1:
        spread = [record[key]["std"] for record in series.runs[0].records if record.get(key)]
    return Curve(series.label, series.paint, rounds, mean, spread)


def _moment(record: Record, key: str) -> Moment:
    return (record["round"] + 1.0, record[key]["mean"]) if record.get(key) else None
