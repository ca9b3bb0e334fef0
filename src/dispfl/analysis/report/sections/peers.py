"""Peer by peer: who has how good a model, who gains by which method, and what a density costs."""

import statistics
from collections.abc import Callable

from dispfl.analysis.report.axes import LARGE
from dispfl.analysis.report.bars import Bar, Column, bar_chart, dot_columns
from dispfl.analysis.report.blocks import details, figure, figures, legend, remark, section, table
from dispfl.analysis.report.lines import Curve, line_chart, thinned
from dispfl.analysis.report.markup import Markup, element
from dispfl.analysis.report.results import Results, Series, by_density
from dispfl.analysis.report.tally import TIE, tally
from dispfl.analysis.report.wording import counted, score

MOST_BARS = 200
MOST_LISTED = 1000


def peers_section(results: Results) -> Markup:
    """Scores of every peer."""
    scored = [series for series in results.series if any(run.scores for run in series.runs)]
    if not scored:
        return section("peers", "Peer by peer", remark("No peer was scored."))
    groups = [_by_density(series, results.metric) for series in scored if series.runs[0].densities]
    if len(scored) == 1:
        parts = [figures([_sorted_bars(scored[0], results.metric), *groups, _by_round(scored[0], results.metric)])]
    else:
        wins = _wins(results)
        parts = [legend(scored), figures([_sorted_lines(scored, results.metric), *wins, *groups])]
        parts += [figures(gains, "many")] if (gains := _gains(results)) else []
    return section("peers", "Peer by peer", *parts, _all_scores(scored))


def _sorted_lines(scored: list[Series], metric: str) -> Markup:
    """Every row's k-th worst score, mean over seeds."""
    curves = []
    for series in scored:
        by_seed = [sorted(run.scores.values()) for run in series.runs if run.scores]
        ranked = [statistics.fmean(scores) for scores in zip(*by_seed, strict=False)]
        curves.append(Curve(series.label, series.paint, [k + 1.0 for k in range(len(ranked))], ranked))
    several = any(len(series.runs) > 1 for series in scored)
    note = f"Each row’s peers in the order of their own scores{'; mean over seeds' if several else ''}."
    chart = line_chart(curves, "peers, worst to best", metric, whole_x=True, x_word="place")
    return figure("From the worst peer to the best", chart, note=note)


def _wins(results: Results) -> list[Markup]:
    """For how many peers each row is the best."""
    found = tally(results)
    if found is None:
        return []
    rows = []
    for series in results.series:
        alone, level = found.alone[series.label], found.level[series.label]
        bars = [
            element("span", class_="part", style=f"--share:{alone / found.peers:.4f}"),
            element("span", class_="part shared", style=f"--share:{level / found.peers:.4f}"),
        ]
        track = element("span", *bars, class_=f"track {series.paint}", aria_hidden="true")
        said = f"{alone}" + (f" + {level} shared" if level else "")
        rows.append(element("li", element("span", series.label), track, element("span", said, class_="count")))
    seeds = len(results.common_seeds)
    note = f"Out of {counted(found.peers, 'peer')}{f' over {seeds} seeds' if seeds > 1 else ''}; a tie is shared."
    title = (
        "For how many peers each is the best" if results.metric == "accuracy" else "For how many peers each is highest"
    )
    return [figure(title, element("ul", *rows, class_="wins", role="list"), note=note)]


def _gains(results: Results) -> list[Markup]:
    """The leader against each other row, peer by peer, where the peers are the same."""
    if not results.comparable:
        return []
    leader, *others = results.series
    pairs = {series.label: _differences(results, leader, series) for series in others}
    every = [value for found in pairs.values() for value, _ in found]
    if not every:
        return []
    reach = (min(0.0, *every), max(0.0, *every))
    drawn = []
    for series in others:
        found = sorted(pairs[series.label], reverse=True)
        if not found:
            continue
        better, worse = sum(value > TIE for value, _ in found), sum(value < -TIE for value, _ in found)
        bars = [
            Bar("", [(value, leader.paint if value > 0 else series.paint)], f"{who}: {value:+.3f}")
            for value, who in found
        ]
        said = f"Higher for {better} of {counted(len(found), 'peer')}, lower for {worse}."
        title = f"{leader.label} minus {series.label}"
        chart = bar_chart(thinned(bars, MOST_BARS), "peers", results.metric, f"{title}. {said}", reach=reach)
        drawn.append(figure(title, chart, note=said))
    return drawn


def _differences(results: Results, leader: Series, other: Series) -> list[tuple[float, str]]:
    found = []
    for seed in results.common_seeds:
        ours, theirs = leader.seeds[seed].scores, other.seeds[seed].scores
        where = f", seed {seed}" if len(results.common_seeds) > 1 else ""
        found += [(ours[peer] - theirs[peer], f"peer {peer}{where}") for peer in ours if peer in theirs]
    return found


def _sorted_bars(series: Series, metric: str) -> Markup:
    """One row alone: a bar a peer, of the first seed that has scores."""
    run = next(run for run in series.runs if run.scores)
    ranked = sorted(run.scores.items(), key=lambda pair: pair[1])
    bars = [Bar(peer, [(value, series.paint)], f"peer {peer}: {score(value)}") for peer, value in ranked]
    label = f"{metric} of every peer, from {score(ranked[0][1])} to {score(ranked[-1][1])}."
    chart = bar_chart(thinned(bars, MOST_BARS), "peers, worst to best", metric, label, size=LARGE)
    return figure("From the worst peer to the best", chart, note=f"Seed {run.seed}.")


def _by_round(series: Series, metric: str) -> Markup:
    """One row alone: how the worst, the middle and the best peer of that seed fared."""
    run = next(run for run in series.runs if run.scores)
    ranked = {
        record["round"] + 1.0: sorted(value for value in record["accuracy"]["per_peer"] if value is not None)
        for record in run.records
        if record["accuracy"]
    }
    picks: dict[str, Callable[[list[float]], float]] = {
        "best peer": max,
        "median": statistics.median,
        "worst peer": min,
    }
    curves = [
        Curve(name, series.paint, [*ranked], [pick(values) for values in ranked.values()], aside=name != "median")
        for name, pick in picks.items()
    ]
    chart = line_chart(curves, "communication round", metric, whole_x=True, x_word="round")
    return figure("Best, median and worst peer of each round", chart, note=f"Seed {run.seed}.")


def _by_density(series: Series, metric: str) -> Markup:
    columns = [Column(f"{density:g}", values, series.paint) for density, values in by_density(series).items()]
    means = ", ".join(f"{score(column.mean)} at {column.name}" for column in columns)
    chart = dot_columns(columns, "density: share of weights that a peer keeps", metric)
    return figure(f"{series.label} by density", chart, note=f"A dot is a peer, a line the group’s mean: {means}.")


def _all_scores(scored: list[Series]) -> Markup:
    """Every number, to unfold."""
    peers = list(dict.fromkeys((run.seed, peer) for series in scored for run in series.runs for peer in run.roster))
    seeds = len({seed for seed, _ in peers}) > 1
    known = {(series.label, seed): run.scores for series in scored for seed, run in series.seeds.items()}
    headings = [("Peer", ""), *((series.label, "number") for series in scored)]
    rows = [
        [
            f"{peer} (seed {seed})" if seeds else peer,
            *(score(known.get((series.label, seed), {}).get(peer)) for series in scored),
        ]
        for seed, peer in peers[:MOST_LISTED]
    ]
    left = f", the first {MOST_LISTED} of {len(peers)}" if len(peers) > MOST_LISTED else ""
    return details("All scores as a table", table(f"Scores of all peers{left}", headings, rows, "plain"))
