"""Sections about single peers: their scores, and the label distribution of their data."""

import statistics
from collections.abc import Callable

from dispfl.core.metric import Measure
from dispfl.report.charts import (
    LARGE,
    Bar,
    Curve,
    DotColumn,
    bar_chart,
    dot_chart,
    line_chart,
    thin_out,
)
from dispfl.report.diagrams import heat_map
from dispfl.report.labels import DATA_TABLES, UNKNOWN, flat_settings
from dispfl.report.markup import (
    Markup,
    capitalized,
    colour_legend,
    details,
    element,
    figure,
    figures,
    format_seconds,
    html_table,
    plural,
    remark,
    section,
)
from dispfl.report.results import (
    TIE,
    ReportResults,
    ReportSeries,
    count_wins,
    scores_by_density,
    seconds_by_density,
)
from dispfl.report.runs import ReportRun
from dispfl.report.senders import senders_parts
from dispfl.runs.metrics import main_scores

MAX_BARS = 200
MAX_LISTED = 1000
PEERS_PER_MAP = 25
"""Two maps fit side by side on a desktop."""
MAX_MAPPED_PEERS, MAX_SPLITS = 100, 3
MAX_CLASSES = 12
"""Number of classes that a tooltip lists."""


def peers_section(results: ReportResults) -> Markup:
    """Return the scores of every peer."""
    evaluated = [series for series in results.series if any(run.scores for run in series.runs)]
    if not evaluated:
        return section("peers", "Results per peer", remark("No peer has been evaluated."))
    measure = results.measure
    grouped = [series for series in evaluated if series.runs[0].densities]
    groups = [
        part
        for one in grouped
        for part in (_density_figure(one, measure), *_seconds_figures(one, measure))
    ]
    if len(evaluated) == 1:
        parts = [
            figures(
                [
                    _sorted_bars(evaluated[0], measure),
                    *groups,
                    _extremes_by_round(evaluated[0], measure),
                ]
            )
        ]
    else:
        parts = [
            colour_legend(evaluated),
            figures([_sorted_lines(evaluated, measure), *_wins_figure(results), *groups]),
        ]
        parts += (
            [figures(differences, "many")] if (differences := _difference_figures(results)) else []
        )
    return section(
        "peers",
        "Results per peer",
        *parts,
        *senders_parts(results),
        _all_scores(evaluated, measure),
    )


def _sorted_title(measure: Measure) -> str:
    return f"Peers sorted by {measure.name}"


def _sorted_lines(evaluated: list[ReportSeries], measure: Measure) -> Markup:
    """Draw every row's k-th worst score, mean over seeds."""
    curves = []
    for series in evaluated:
        by_seed = [_worst_first(run, measure).values() for run in series.runs if run.scores]
        ranked = [statistics.fmean(scores) for scores in zip(*by_seed, strict=False)]
        curves.append(
            Curve(series.label, series.css_class, [k + 1.0 for k in range(len(ranked))], ranked)
        )
    several = any(len(series.runs) > 1 for series in evaluated)
    note = f"Each row sorts its own peers{'; mean over seeds' if several else ''}."
    chart = line_chart(
        curves,
        "peers, worst to best",
        measure.name,
        whole_x=True,
        x_word="rank",
        y_format=measure.format,
    )
    return figure(_sorted_title(measure), chart, note=note)


def _worst_first(run: ReportRun, measure: Measure) -> dict[str, float]:
    """Return the scores of a run's peers, the worst first."""
    return dict(sorted(run.scores.items(), key=lambda pair: measure.gain(pair[1], 0.0)))


def _wins_figure(results: ReportResults) -> list[Markup]:
    """Show for how many peers each row is the best."""
    counts = count_wins(results)
    if counts is None:
        return []
    rows = []
    for series in results.series:
        wins, ties = counts.wins[series.label], counts.ties[series.label]
        bars = [
            element("span", class_="part", style=f"--share:{wins / counts.peers:.4f}"),
            element("span", class_="part tied", style=f"--share:{ties / counts.peers:.4f}"),
        ]
        track = element("span", *bars, class_=f"track {series.css_class}", aria_hidden="true")
        text = f"{wins}" + (f" + {ties} tied" if ties else "")
        rows.append(
            element(
                "li", element("span", series.label), track, element("span", text, class_="count")
            )
        )
    seeds = len(results.common_seeds)
    note = (
        f"Out of {plural(counts.peers, 'peer')}{f' over {seeds} seeds' if seeds > 1 else ''}; ties"
        " are lighter."
    )
    title = "Number of peers for which each row is best"
    return [figure(title, element("ul", *rows, class_="wins", role="list"), note=note)]


def _difference_figures(results: ReportResults) -> list[Markup]:
    """Compare the leader with each other row, peer by peer, if the peers are the same."""
    if not results.comparable:
        return []
    measure = results.measure
    leader, *others = results.series
    differences = {series.label: _differences(results, leader, series) for series in others}
    values = [value for pairs in differences.values() for value, _ in pairs]
    if not values:
        return []
    y_range = (min(0.0, *values), max(0.0, *values))
    drawn = []
    for series in others:
        pairs = sorted(differences[series.label], reverse=True)
        if not pairs:
            continue
        gains = [measure.gain(value, 0.0) for value, _ in pairs]
        better, worse = sum(gain > TIE for gain in gains), sum(gain < -TIE for gain in gains)
        bars = [
            Bar(
                "",
                [(value, leader.css_class if gain > 0 else series.css_class)],
                f"{peer}: {value:+{measure.format}}",
            )
            for (value, peer), gain in zip(pairs, gains, strict=True)
        ]
        note = f"Better for {better} of {plural(len(pairs), 'peer')}, worse for {worse}."
        title = f"{leader.label} minus {series.label}"
        chart = bar_chart(
            thin_out(bars, MAX_BARS), "peers", measure.name, f"{title}. {note}", y_range=y_range
        )
        drawn.append(figure(title, chart, note=note))
    return drawn


def _differences(
    results: ReportResults, leader: ReportSeries, other: ReportSeries
) -> list[tuple[float, str]]:
    differences = []
    for seed in results.common_seeds:
        first, second = leader.seeds[seed].scores, other.seeds[seed].scores
        suffix = f", seed {seed}" if len(results.common_seeds) > 1 else ""
        differences += [
            (first[peer] - second[peer], f"peer {peer}{suffix}") for peer in first if peer in second
        ]
    return differences


def _sorted_bars(series: ReportSeries, measure: Measure) -> Markup:
    """Draw one bar per peer of a single row, for the first seed that has scores."""
    run = next(run for run in series.runs if run.scores)
    ranked = [*_worst_first(run, measure).items()]
    bars = [
        Bar(peer, [(value, series.css_class)], f"peer {peer}: {measure.text(value)}")
        for peer, value in ranked
    ]
    label = (
        f"{measure.name} of every peer, from {measure.text(ranked[0][1])} to"
        f" {measure.text(ranked[-1][1])}."
    )
    chart = bar_chart(
        thin_out(bars, MAX_BARS), "peers, worst to best", measure.name, label, size=LARGE
    )
    return figure(_sorted_title(measure), chart, note=f"Seed {run.seed}.")


def _extremes_by_round(series: ReportSeries, measure: Measure) -> Markup:
    """Draw the best, median and worst score of a single row in each round, for the same seed."""
    run = next(run for run in series.runs if run.scores)
    scores = {
        record["round"] + 1.0: [value for value in found["per_peer"] if value is not None]
        for record in run.records
        if (found := main_scores(record))
    }
    picks: dict[str, Callable[[list[float]], float]] = {
        "best peer": measure.best,
        "median": statistics.median,
        "worst peer": measure.worst,
    }
    curves = [
        Curve(
            name,
            series.css_class,
            [*scores],
            [pick(values) for values in scores.values()],
            secondary=name != "median",
        )
        for name, pick in picks.items()
    ]
    chart = line_chart(
        curves,
        "communication round",
        measure.name,
        whole_x=True,
        x_word="round",
        y_format=measure.format,
    )
    return figure("Best, median and worst peer of each round", chart, note=f"Seed {run.seed}.")


def _density_figure(series: ReportSeries, measure: Measure) -> Markup:
    groups = scores_by_density(series)
    columns = [
        DotColumn(f"{density:g}", values, series.css_class) for density, values in groups.items()
    ]
    means = ", ".join(f"{measure.text(column.mean)} at {column.name}" for column in columns)
    chart = dot_chart(
        columns, "density: share of weights that a peer keeps", measure.name, measure.format
    )
    return figure(
        f"{series.label} by density", chart, note=f"Dots are peers, lines are group means: {means}."
    )


def _seconds_figures(series: ReportSeries, measure: Measure) -> list[Markup]:
    """Return a table with the score and the computing time of each group of peers, if times were
    measured."""
    scores, seconds = (
        {density: statistics.fmean(values) for density, values in groups.items()}
        for groups in (scores_by_density(series), seconds_by_density(series))
    )
    if scores.keys() != seconds.keys():
        return []
    densities = list((series.runs[0].densities or {}).values())
    densest = seconds[max(seconds)]
    rows = [
        [
            f"{density:g}",
            str(densities.count(density)),
            measure.text(scores[density]),
            format_seconds(seconds[density]),
            f"{seconds[density] / densest:.2f}" if densest else UNKNOWN,
        ]
        for density in seconds
    ]
    metric = capitalized(measure.name)
    headings = [
        ("Density", ""),
        *((text, "number") for text in ("Peers", metric, "Seconds", "Ratio")),
    ]
    note = (
        "Seconds that a peer computes in a round, mean over the group; the ratio is to the densest"
        " group."
    )
    table = html_table(f"{metric} and seconds of each group", headings, rows, "plain")
    return [
        figure(
            f"{series.label}: computing time by density",
            element("div", table, class_="scrolling"),
            note=note,
        )
    ]


def _all_scores(evaluated: list[ReportSeries], measure: Measure) -> Markup:
    """Return a collapsed table of all scores."""
    peers = list(
        dict.fromkeys(
            (run.seed, peer) for series in evaluated for run in series.runs for peer in run.roster
        )
    )
    several = len({seed for seed, _ in peers}) > 1
    scores = {
        (series.label, seed): run.scores
        for series in evaluated
        for seed, run in series.seeds.items()
    }
    headings = [("Peer", ""), *((series.label, "number") for series in evaluated)]
    rows = [
        [
            f"{peer} (seed {seed})" if several else peer,
            *(measure.text(scores.get((series.label, seed), {}).get(peer)) for series in evaluated),
        ]
        for seed, peer in peers[:MAX_LISTED]
    ]
    suffix = f", the first {MAX_LISTED} of {len(peers)}" if len(peers) > MAX_LISTED else ""
    return details(
        "All scores as a table", html_table(f"Scores of all peers{suffix}", headings, rows, "plain")
    )


def labels_section(results: ReportResults) -> Markup:
    """Return one heat map of class counts for every 25 peers of each split."""
    parts: list[Markup] = []
    splits = _splits(results)
    for name, run in list(splits.items())[:MAX_SPLITS]:
        counts = run.label_counts()
        parts += [remark(name)] if len(splits) > 1 else []
        parts += [remark(_why_no_split(run))] if counts is None else _maps(run, counts)
    if len(splits) > MAX_SPLITS:
        parts.append(remark(f"{plural(len(splits) - MAX_SPLITS, 'more split')} not shown."))
    return section("labels", "Label distribution", *parts)


def _splits(results: ReportResults) -> dict[str, ReportRun]:
    """Return one run, of the lowest seed, for every way in which the data is split."""
    splits: dict[str, ReportRun] = {}
    for run in sorted(results.runs, key=lambda run: run.seed):
        settings = flat_settings(run.config)
        keys = [key for key in settings if key.startswith(DATA_TABLES) or key == "peers"]
        splits.setdefault(", ".join(f"{key} {settings[key]}" for key in keys), run)
    return splits


def _why_no_split(run: ReportRun) -> str:
    if run.made_in_python:
        return "No split was saved, because the federation was made in Python with its own data."
    return "No split was saved with the run."


def _maps(run: ReportRun, counts: list[list[int]]) -> list[Markup]:
    shown, roster = counts[:MAX_MAPPED_PEERS], run.roster
    most = max(max(row, default=0) for row in counts) or 1
    maps = []
    for start in range(0, len(shown), PEERS_PER_MAP):
        part = shown[start : start + PEERS_PER_MAP]
        names = roster[start : start + PEERS_PER_MAP]
        tooltips = [_labels_tooltip(name, labels) for name, labels in zip(names, part, strict=True)]
        title = f"Peers {names[0]} to {names[-1]}" if len(names) > 1 else f"Peer {names[0]}"
        label = f"Training samples of each class. {title}. The largest count is {most}."
        columns = min(PEERS_PER_MAP, len(shown))
        maps.append(figure(title, heat_map(part, names, tooltips, most, label, columns)))
    totals = {sum(row) for row in counts}
    each = (
        f"{plural(totals.pop(), 'training sample')} each"
        if len(totals) == 1
        else "different numbers of samples"
    )
    note = f"{plural(len(counts), 'peer')}, {each}, in {len(counts[0])} classes (seed {run.seed}). "
    note += f"The stronger the colour, the more samples of that class; the largest count is {most}."
    if len(shown) < len(counts):
        note += f" The first {len(shown)} peers are shown."
    return [remark(note), figures(maps, "two")]


def _labels_tooltip(name: str, labels: list[int]) -> str:
    ranked = sorted((-count, label) for label, count in enumerate(labels) if count)
    lines = [f"class {label}: {-count}" for count, label in ranked[:MAX_CLASSES]]
    more = [f"and {len(ranked) - MAX_CLASSES} more classes"] if len(ranked) > MAX_CLASSES else []
    return "\n".join([f"peer {name}: {plural(sum(labels), 'sample')}", *lines, *more])
