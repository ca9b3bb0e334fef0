"""The top of the page: the main result in a few sentences, caveats, and the results table."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from dispfl.core.metric import Measure
from dispfl.report.labels import flops_note, join_and
from dispfl.report.markup import (
    UNKNOWN,
    Markup,
    capitalized,
    coordinate,
    element,
    flops_unit_of_largest,
    format_amount,
    format_number,
    format_ratio,
    format_seconds,
    html_table,
    join_markup,
    plural,
    relative_to_page,
    remark,
    section,
    swatch,
)
from dispfl.report.results import (
    TIE,
    ReportResults,
    ReportSeries,
    count_wins,
    prevents_comparison,
    scores_by_density,
    seconds_by_density,
)
from dispfl.report.runs import ReportRun

MAX_NAMED = 3
"""A sentence lists at most this many names."""


def summary_block(results: ReportResults, page: Path) -> Markup:
    """Return the main result and the caveats."""
    lead, *more = summary_sentences(results)
    parts = [element("p", lead, class_="lead")]
    if more:
        parts.append(element("p", " ".join(more), class_="lead-details"))
    if notes := caveats(results, page):
        heading = element("h2", "Caveats", id="caveats-heading")
        items = element("ul", *(element("li", sentence) for sentence in notes))
        parts.append(element("aside", heading, items, class_="caveats", aria_labelledby="caveats-heading"))
    return join_markup(parts)


def summary_sentences(results: ReportResults) -> list[str]:
    """Return the main result and up to three more sentences: which row leads, for which peers, at what cost."""
    if len(results.series) == 1:
        return _single_row(results, results.series[0])
    if not results.comparable:
        keys = [key for key in results.differing if prevents_comparison(key)]
        return [f"The runs differ in {join_and(keys)}, so their scores cannot be compared."]
    best = [series for series in results.series if series.row in results.comparison.best]
    if not best:
        return ["No row has scores for all its seeds yet."]
    sentences = [_lead(results, best), *_seeds(results, best), *_peers(results, best)]
    return [*sentences, _cost_of_leader(results, best[0]) if len(best) == 1 else _traffic_of_all(results.series)]


def _lead(results: ReportResults, best: Sequence[ReportSeries]) -> str:
    """Name the rows with the highest score, and the margin."""
    so_far = "So far, " if any(series.unfinished for series in results.series) else ""
    measure = results.measure
    value, metric = measure.text(best[0].row.score), measure.name
    over = _averaged_over(best[0])
    top, apart = ("highest", "lower") if measure.higher_is_better else ("lowest", "higher")
    if len(best) > 1:
        labels = join_and([series.label for series in best])
        return f"{so_far}{labels} share the {top} {metric}, {value} {over}."
    others = [series for series in results.series if series is not best[0] and series.row.score is not None]
    if not others:
        return f"{so_far}{best[0].label} reaches {metric} {value} {over}; the others have no score yet."
    next_value = measure.text(others[0].row.score)
    margin = measure.text(measure.gain(best[0].row.score or 0.0, others[0].row.score or 0.0))
    second = [series.label for series in others if measure.text(series.row.score) == next_value]
    follow = f"{join_and(second)} {'follows' if len(second) == 1 else 'follow'} with {next_value}"
    return f"{so_far}{best[0].label} has the {top} {metric}, {value} {over}; {follow} ({margin} {apart})."


def _averaged_over(series: ReportSeries) -> str:
    peers = plural(series.runs[0].config["peers"], "peer")
    seeds = len(series.runs)
    return f"on average over {peers}" + (f" and {seeds} seeds" if seeds > 1 else "")


def _seeds(results: ReportResults, best: Sequence[ReportSeries]) -> list[str]:
    """Say whether the seeds agree on the leader."""
    rivals = [series for series in results.series if series not in best and series.row.score is not None]
    if not rivals or len(best) > 1:
        return []
    seeds = results.common_seeds
    if not seeds:
        return ["No seed is common to all rows, so differences may come from the data."]
    if len(seeds) == 1:
        return ["Only one seed is compared, so small differences may be due to chance."]
    means = {s.label: {seed: fmean(s.seeds[seed].scores.values()) for seed in seeds} for s in (best[0], *rivals)}
    leader = means.pop(best[0].label)
    gain = results.measure.gain
    ahead = sum(all(gain(leader[seed], other[seed]) > TIE for other in means.values()) for seed in seeds)
    if ahead == len(seeds):
        return [f"It leads in {'both' if ahead == 2 else f'each of the {ahead}'} seeds."]
    return [f"It leads in only {ahead} of {len(seeds)} seeds, so the order is not certain."]


def _peers(results: ReportResults, best: Sequence[ReportSeries]) -> list[str]:
    """Count the peers for which the best rows win."""
    counts = count_wins(results)
    if counts is None:
        return []
    seeds = results.common_seeds
    peers = plural(counts.peers, "peer") + (f" over {len(seeds)} seeds" if len(seeds) > 1 else "")
    if len(best) > 1:
        wins = [f"{series.label} alone is best for {counts.wins[series.label]}" for series in best]
        return [f"Of {peers}, {join_and(wins)}."]
    label = best[0].label
    sentence = f"It is best for {counts.wins[label]} of {peers}"
    sentence += f", tied for {counts.ties[label]}" if counts.ties[label] else ""
    losses = counts.losses[label]
    if not losses:
        return [f"{sentence}, and behind for none."]
    named = len(seeds) == 1 and len(losses) <= MAX_NAMED
    names = f" ({join_and([f'peer {peer}' for peer in losses])})" if named else ""
    return [f"{sentence}, and behind for {len(losses)}{names}."]


def _cost_of_leader(results: ReportResults, best: ReportSeries) -> str:
    """Compare the leader's traffic and FLOPs with those of the others."""
    others = [series for series in results.series if series is not best]
    silent = [series.label for series in others if series.wire_mb == 0]
    sending = sorted((series for series in others if series.wire_mb > 0), key=lambda series: -series.wire_mb)
    if best.wire_mb == 0:
        own = "It sends nothing"
        rest = [
            f"{series.label}’s busiest node transfers {format_amount(series.wire_mb)} MB per round"
            for series in _first_and_last(sending)
        ]
    else:
        own = f"Its busiest node transfers {format_amount(best.wire_mb)} MB per round on the wire"
        ratios = [format_ratio(best.wire_mb, series.wire_mb, series.label) for series in _first_and_last(sending)]
        own += f", {join_and(ratios)}" if ratios else ""
        rest = [f"{join_and(silent)} {'sends' if len(silent) == 1 else 'send'} nothing"] if silent else []
    scale, unit = flops_unit_of_largest([series.flops for series in results.series])
    amounts = list(dict.fromkeys(format_amount(flops / scale) for flops in sorted(series.flops for series in others)))
    range_ = amounts[0] if len(amounts) == 1 else f"{amounts[0]} to {amounts[-1]}"
    whose = "the others" if len(others) > 1 else others[0].label
    flops = f"training takes {format_amount(best.flops / scale)} {unit} per peer and round ({whose}: {range_})"
    return "; ".join([own, *rest, flops]) + "."


def _first_and_last(series: Sequence[ReportSeries]) -> list[ReportSeries]:
    """Return all of a few rows, or the first and the last of many."""
    return list(series) if len(series) <= MAX_NAMED else [series[0], series[-1]]


def _traffic_of_all(series: Sequence[ReportSeries]) -> str:
    amounts = [f"{one.label} {format_amount(one.wire_mb) if one.wire_mb else '0'}" for one in series]
    return f"MB per round through the busiest node: {', '.join(amounts)}."


def _single_row(results: ReportResults, series: ReportSeries) -> list[str]:
    """Summarize a page about one row."""
    rounds = plural(series.row.rounds, "round")
    after = f"So far, after {rounds}," if series.unfinished else f"After {rounds},"
    measure = results.measure
    if series.row.score is None:
        return [f"{after} {series.label} has not been evaluated in all its runs.", _own_cost(series)]
    std = f" (± {measure.text(series.row.score_std)} over seeds)" if series.row.score_std is not None else ""
    score = f"{measure.name} {measure.text(series.row.score)} {_averaged_over(series)}{std}"
    extremes = _extremes(series.runs[0], measure) if len(series.runs) == 1 else []
    return [f"{after} {series.label} reaches {score}.", *extremes, *_by_density(series, measure), _own_cost(series)]


def _extremes(run: ReportRun, measure: Measure) -> list[str]:
    scores = run.scores
    if len(scores) < 2:
        return []
    gains = {peer: measure.gain(score, 0.0) for peer, score in scores.items()}
    worst, best = min(gains, key=gains.__getitem__), max(gains, key=gains.__getitem__)
    texts = measure.text(scores[worst]), measure.text(scores[best])
    return [f"The worst peer ({worst}) has {texts[0]}, the best ({best}) {texts[1]}."]


def _by_density(series: ReportSeries, measure: Measure) -> list[str]:
    """Return the mean of each group of peers, if densities differ."""
    seconds = seconds_by_density(series)
    means = [
        f"{measure.text(fmean(values))} at {density:g}"
        + (f" ({format_seconds(fmean(seconds[density]))} s per round)" if density in seconds else "")
        for density, values in scores_by_density(series).items()
    ]
    return [f"By density: {join_and(means)}."] if means else []


def _own_cost(series: ReportSeries) -> str:
    scale, unit = flops_unit_of_largest([series.flops])
    flops = f"training takes {format_amount(series.flops / scale)} {unit} per peer and round"
    if not series.wire_mb:
        return f"No peer sends anything; {flops}."
    return f"The busiest node transfers {format_amount(series.wire_mb)} MB per round; {flops}."


def caveats(results: ReportResults, page: Path) -> list[str]:
    """Return what limits the comparison: unfinished runs, other settings, other seeds, failed steps."""
    return [
        *(f"{relative_to_page(page, path)} has no finished round yet and is omitted." for path in results.omitted),
        *(sentence for series in results.series for sentence in _unfinished(series)),
        *_differing_settings(results),
        *_differing_seeds(results),
        *(sentence for series in results.series for sentence in _failures(series)),
    ]


def _unfinished(series: ReportSeries) -> list[str]:
    runs = [run for run in series.runs if run.summary is None]
    if not runs:
        return []
    parts = [f"{len(run.records)} of {run.config['rounds']} rounds (seed {run.seed})" for run in runs]
    return [f"{series.label} is not finished: {join_and(parts)}."]


def _differing_settings(results: ReportResults) -> list[str]:
    keys = list(results.differing)
    if not keys or not results.comparable:  # then the summary names them
        return []
    several = len({series.runs[0].method for series in results.series}) > 1
    rows = "Besides the method, the rows" if several else "The rows"
    return [f"{rows} differ in {join_and(keys)}; see Settings."]


def _differing_seeds(results: ReportResults) -> list[str]:
    sentences = []
    if results.omitted_seeds:
        shown = ", ".join(map(str, results.common_seeds))
        others = [f"{label} {', '.join(map(str, seeds))}" for label, seeds in results.omitted_seeds.items()]
        sentences.append(f"Only seeds that all rows have are shown ({shown}); omitted: {'; '.join(others)}.")
    seeds = {series.label: sorted(series.seeds) for series in results.series}
    if len(set(map(tuple, seeds.values()))) > 1:
        parts = [f"{label} {', '.join(map(str, own))}" for label, own in seeds.items()]
        sentences.append(f"The rows have different seeds and therefore different data: {'; '.join(parts)}.")
    for series in results.series:
        repeated = [seed for seed, count in Counter(run.seed for run in series.runs).items() if count > 1]
        if repeated:
            names = join_and(list(map(str, repeated)))
            sentences.append(f"{series.label} has several runs of seed {names}; each is counted separately.")
    if len(results.series) > 1 and any(run.made_in_python for run in results.runs):
        sentences.append("Runs made in Python do not record their data; it is assumed to be the same.")
    return sentences


def _failures(series: ReportSeries) -> list[str]:
    failures = [failure for run in series.runs for failure in run.failures]
    if not failures:
        return []
    peers = {(run.seed, peer) for run in series.runs for _, peer, _ in run.failures}
    return [
        f"{series.label}: {plural(len(failures), 'step')} of {plural(len(peers), 'peer')} failed, and the peers kept "
        f"their last valid model. First reason: {failures[0][2]}"
    ]


def results_section(results: ReportResults) -> Markup:
    """Return a table with the score and the costs of every row, best first."""
    several = max(len(series.runs) for series in results.series) > 1
    metric, others = results.measure.name, results.comparison.others
    scale, unit = flops_unit_of_largest([series.flops for series in results.series])
    headings = [
        ("Method", ""),
        (capitalized(metric) + (" ± std over seeds" if several else ""), "number score"),
        ("Std over peers", "number"),
        ("Worst to best peer", "range"),
        *((capitalized(name), "number") for name in others),
        ("Busiest MB/round", "number"),
        ("On wire MB/round", "number"),
        (f"{unit}/peer", "number"),
        ("Seconds/peer", "number"),
        ("Rounds", "number"),
        ("Time s", "number"),
    ]
    rows = [
        [
            join_markup([swatch(series), element("span", series.label)]),
            _score(series, results.measure),
            results.measure.text(series.row.peer_std),
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
    marks_best = len(rows) > 1 and results.comparable
    best = [k for k, series in enumerate(results.series) if marks_best and series.row in results.comparison.best]
    caption = f"{capitalized(metric)} and costs" + (", best first" if len(rows) > 1 else "")
    table = element("div", html_table(caption, headings, rows, "cards", best), class_="scrolling")
    return section("results", "Results", table, remark(_table_legend(results, several)))


def _score(series: ReportSeries, measure: Measure) -> str:
    """Return the mean score, with its standard deviation over seeds where there are several."""
    std = series.row.score_std
    return measure.text(series.row.score) + ("" if std is None else f" ± {measure.text(std)}")


def _range(series: ReportSeries, results: ReportResults) -> str:
    """Return a line from the worst to the best peer with a dot at the mean, all rows on one scale."""
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
    return join_markup([drawing, element("span", f"{measure.worst(own):.2f} to {measure.best(own):.2f}")])


def _rounds(series: ReportSeries) -> str:
    counts = sorted({len(run.records) for run in series.runs})
    text = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]}–{counts[-1]}"
    return f"{text} of {series.runs[0].config['rounds']}" if series.unfinished else text


def _seconds(series: ReportSeries) -> str:
    """Return the time of all rounds, mean over seeds."""
    return f"{series.row.mean(lambda run: run.points[-1].seconds):.1f}"


def _table_legend(results: ReportResults, several: bool) -> str:
    seeds = max(len(series.runs) for series in results.series)
    flops = flops_note({series.label: series.row.flops_kind for series in results.series})
    spread = f"; ± is the sample standard deviation over {seeds} seeds" if several else ""
    direction = "" if results.measure.higher_is_better else " (lower is better)"
    return (
        f"{capitalized(results.measure.name)}{direction}: mean over the peers, each on its own test data, in the last "
        f"evaluated round{spread}. Std over peers: standard deviation{', mean over seeds' if several else ''}. MB: "
        "megabytes (10⁶ bytes) per round through the busiest node, first as the paper counts them (values only), then "
        f"on the wire (as sent). FLOPs: training of one peer in one round. {flops} Seconds/peer: computing time of a "
        "peer’s whole step in one round. Time: wall time of all rounds."
    )
