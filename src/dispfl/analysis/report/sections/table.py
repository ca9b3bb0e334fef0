"""The comparison table: one line a row of runs, best first."""

from dispfl.analysis.report.blocks import remark, section, swatch, table
from dispfl.analysis.report.markup import Markup, compact, element, joined
from dispfl.analysis.report.results import Results, Series
from dispfl.analysis.report.wording import UNKNOWN, capital, counted, flops_unit, score, size


def table_section(results: Results) -> Markup:
    """Scores and costs of every row."""
    several = max(len(series.runs) for series in results.series) > 1
    scale, unit = flops_unit([series.flops for series in results.series])
    headings = [
        ("Method", ""),
        (f"{capital(results.metric)} ± {'seeds' if several else 'peers'}", "number score"),
        ("Worst to best peer", "range"),
        ("Busiest MB/round", "number"),
        ("On wire MB/round", "number"),
        (f"{unit}/peer", "number"),
        ("Rounds", "number"),
        ("Seconds", "number"),
    ]
    rows = [
        [
            joined([swatch(series), element("span", series.label)]),
            _score(series),
            _range(series, results),
            size(series.paper_mb),
            size(series.wire_mb),
            size(series.flops / scale),
            _rounds(series),
            _seconds(series),
        ]
        for series in results.series
    ]
    best = [k for k, s in enumerate(results.series) if len(rows) > 1 and results.comparable and _is_best(results, s)]
    caption = f"{capital(results.metric)} and costs" + (", highest first" if len(rows) > 1 else "")
    shown = element("div", table(caption, headings, rows, "cards", best), class_="scrolling")
    return section("results", "Results", shown, remark(_legend(results, several)))


def _is_best(results: Results, series: Series) -> bool:
    return series.row in results.comparison.best


def _score(series: Series) -> str:
    spread = series.row.accuracy_std if len(series.runs) > 1 else series.row.peer_std
    if series.row.accuracy is None or spread is None:
        return score(series.row.accuracy)
    return f"{score(series.row.accuracy)} ± {score(spread)}"


def _range(series: Series, results: Results) -> str:
    """A line from the worst to the best peer with a dot at the mean, all rows on one scale."""
    every = [value for run in results.runs for value in run.scores.values()]
    own = [value for run in series.runs for value in run.scores.values()]
    if not own or series.row.accuracy is None:
        return UNKNOWN
    low, high = min(every), max(every)

    def at(value: float) -> float:
        return 6 + (value - low) / (high - low or 1) * 108

    line = f"M{compact(at(min(own)))} 8H{compact(at(max(own)))}"
    said = f"{min(own):.2f} to {max(own):.2f}"
    drawing = element(
        "svg",
        element("path", d="M6 8H114", class_="rail"),
        element("path", d=line, class_=f"reach {series.paint}"),
        element("circle", class_=f"dot {series.paint}", cx=at(series.row.accuracy), cy=8, r=5),
        class_="ranges",
        viewBox="0 0 120 16",
        width=120,
        height=16,
        aria_hidden="true",
    )
    return joined([drawing, element("span", said)])


def _rounds(series: Series) -> str:
    counts = sorted({len(run.records) for run in series.runs})
    text = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]}–{counts[-1]}"
    return f"{text} of {series.runs[0].config['rounds']}" if series.unfinished else text


def _seconds(series: Series) -> str:
    """All rounds' time, mean over seeds."""
    return f"{series.row.mean(lambda run: run.points[-1].seconds):.1f}"


def _legend(results: Results, several: bool) -> str:
    seeds = max(len(series.runs) for series in results.series)
    spread = f"the standard deviation over {counted(seeds, 'seed')}" if several else "the standard deviation over peers"
    return (
        f"{capital(results.metric)}: mean over the peers, each on its own test data, in the last scored round; ± "
        f"is {spread}. MB: megabytes (10⁶ bytes) a round through the busiest node, first in the paper’s currency "
        "(values only), then on the wire (as sent). FLOPs: a peer’s training in a round; counted, not saved: dense "
        "kernels do the work."
    )
