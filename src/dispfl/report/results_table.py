"""The results table of the page: the scores and the costs of every row, best first."""

from collections.abc import Sequence

from dispfl.core.metric import Measure
from dispfl.report.differences import paired_over
from dispfl.report.labels import UNKNOWN, connections_note, flops_note
from dispfl.report.markup import (
    Markup,
    capitalized,
    coordinate,
    element,
    flops_unit_of_largest,
    format_amount,
    format_number,
    format_seconds,
    html_table,
    join_markup,
    remark,
    section,
    swatch,
)
from dispfl.report.results import ReportResults, ReportSeries


def results_section(results: ReportResults) -> Markup:
    """Return a table with the score and the costs of every row, best first."""
    several = max(len(series.runs) for series in results.series) > 1
    metric, others = results.measure.name, results.comparison.others
    references = results.comparison.reference_labels
    scale, unit = flops_unit_of_largest([series.flops for series in results.series])
    headings = [
        ("Method", ""),
        (capitalized(metric) + (" ± std over seeds" if several else ""), "number score"),
        *([(_difference_heading(references), "number difference")] if references else []),
        ("Worst to best peer", "range"),
        *((capitalized(name), "number") for name in others),
        ("Busiest MB/round", "number"),
        ("On wire MB/round", "number"),
        (f"{unit} per peer", "number"),
        ("Seconds per peer", "number"),
        ("Rounds", "number"),
        ("Time s", "number"),
    ]
    rows = [
        [
            join_markup([swatch(series), element("span", series.label)]),
            _score(series, results.measure),
            *([_difference(series, results)] if references else []),
            _range(series, results),
            *(format_number(series.row.other(name), 3) for name in others),
            format_amount(series.paper_mb),
            format_amount(series.wire_mb),
            format_amount(series.flops / scale),
            format_seconds(series.row.seconds_per_peer),
            _rounds(series),
            _seconds(series),
        ]
        for series in results.series
    ]
    best = [k for k, series in enumerate(results.series) if series.row in results.comparison.best]
    caption = f"{capitalized(metric)} and costs" + (", best first" if len(rows) > 1 else "")
    table = element("div", html_table(caption, headings, rows, "cards", best), class_="scrolling")
    return section("results", "Results", table, remark(_table_legend(results, several)))


def _difference_heading(references: Sequence[str]) -> str:
    return (
        f"Difference to {references[0]}"
        if len(references) == 1
        else "Difference to the reference of the same data"
    )


def _score(series: ReportSeries, measure: Measure) -> str:
    """Return the mean score, with its standard deviation over seeds where there are several."""
    std = series.row.score_std
    return measure.text(series.row.score) + ("" if std is None else f" ± {measure.text(std)}")


def _difference(series: ReportSeries, results: ReportResults) -> str:
    """`-0.031, behind`, and below it `[-0.045, -0.017]`."""
    found, measure = results.comparison.differences.get(series.label), results.measure
    if found is None:
        return UNKNOWN
    mean, _, interval = found.text(measure).partition(" ")
    below = [Markup("<br>"), element("small", interval)] if interval else []
    return element("span", f"{mean}, {found.verdict(measure)}", *below)


def _range(series: ReportSeries, results: ReportResults) -> str:
    """Return a line from the worst to the best peer with a dot at the mean, all rows on one
    scale."""
    all_scores = [value for run in results.runs for value in run.scores.values()]
    own = [value for run in series.runs for value in run.scores.values()]
    if not own or series.row.score is None:
        return UNKNOWN
    low, high = min(all_scores), max(all_scores)

    def x(value: float) -> float:
        return 6 + (value - low) / (high - low or 1) * 108

    line = f"M{coordinate(x(min(own)))} 8H{coordinate(x(max(own)))}"
    drawing = element(
        "svg",
        element("path", d="M6 8H114", class_="rail"),
        element("path", d=line, class_=f"range-bar {series.css_class}"),
        element("circle", class_=f"dot {series.css_class}", cx=x(series.row.score), cy=8, r=5),
        class_="ranges",
        viewBox="0 0 120 16",
        width=120,
        height=16,
        aria_hidden="true",
    )
    measure = results.measure
    return join_markup(
        [drawing, element("span", f"{measure.worst(own):.2f} to {measure.best(own):.2f}")]
    )


def _rounds(series: ReportSeries) -> str:
    counts = sorted({len(run.records) for run in series.runs})
    text = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]}–{counts[-1]}"
    return f"{text} of {series.runs[0].config['rounds']}" if series.unfinished else text


def _seconds(series: ReportSeries) -> str:
    """Return the time of all rounds, mean over seeds."""
    return f"{series.row.mean(lambda run: run.points[-1].seconds):.1f}"


def _paired(results: ReportResults) -> str:
    """Explain the differences, and say at how many connections rows are compared."""
    differences = results.comparison.differences
    counts = {series.label: series.row.connections for series in results.series}
    sentences = [
        f"Difference: {paired_over(differences)}" if differences else "",
        connections_note(counts) if len(counts) > 1 else "",
    ]
    return "".join(f"{sentence} " for sentence in sentences if sentence)


def _table_legend(results: ReportResults, several: bool) -> str:
    seeds = max(len(series.runs) for series in results.series)
    flops = flops_note({series.label: series.row.flops_kind for series in results.series})
    spread = f"; ± is the sample standard deviation over {seeds} seeds" if several else ""
    direction = "" if results.measure.higher_is_better else " (lower is better)"
    return (
        f"{capitalized(results.measure.name)}{direction}: mean over the peers, each on its own test"
        f" data, in the last evaluated round{spread}. {_paired(results)}MB: megabytes (10⁶ bytes)"
        " per round through the busiest node, first as the paper counts them (values only), then"
        f" on the wire (as sent). FLOPs: training of one peer in one round. {flops} Seconds per"
        " peer: computing time of a peer’s whole step in one round. Time: wall time of all rounds."
    )
