"""The top of the page: the main result in a few sentences, caveats, and the results table."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from dispfl.core.metric import Measure
from dispfl.report.differences import Verdict
from dispfl.report.labels import connections_note, join_and, prevents_comparison
from dispfl.report.markup import (
    Markup,
    element,
    flops_unit_of_largest,
    format_amount,
    format_ratio,
    format_seconds,
    join_markup,
    plural,
    relative_to_page,
)
from dispfl.report.results import (
    ReportResults,
    ReportSeries,
    count_wins,
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
        parts.append(
            element("aside", heading, items, class_="caveats", aria_labelledby="caveats-heading")
        )
    return join_markup(parts)


def summary_sentences(results: ReportResults) -> list[str]:
    """Return the main result and up to three more sentences: which row leads, for which peers, at
    what cost."""
    if len(results.series) == 1:
        return _single_row(results, results.series[0])
    if not results.comparable:
        keys = [key for key in results.differing if prevents_comparison(key)]
        return [
            f"The runs differ in {join_and(keys or ['their data'])}, so only rows with the same"
            " data are compared."
        ]
    scored = [series for series in results.series if series.row.score is not None]
    if not scored:
        return ["No row has scores for all its seeds yet."]
    leader, others = scored[0], scored[1:]
    cost = _cost_of_leader(results, leader)
    return [
        _lead(results, leader, others),
        *_margin(results, leader, others),
        *_peers(results, leader),
        cost,
    ]


def _lead(results: ReportResults, leader: ReportSeries, others: Sequence[ReportSeries]) -> str:
    """Say which rows the one with the best mean is ahead of, and which it is level with, by the
    paired test."""
    so_far = "So far, " if any(series.unfinished for series in results.series) else ""
    measure = results.measure
    score = f"{measure.name} {measure.text(leader.row.score)} {_averaged_over(leader)}"
    if not others:
        return f"{so_far}{leader.label} reaches {score}; the others have no score yet."
    by_verdict: dict[Verdict, list[str]] = {}
    for series in others:
        found = leader.row.difference_to(series.row)
        verdict = found.verdict(measure) if found else Verdict.UNTESTED
        by_verdict.setdefault(verdict, []).append(series.label)
    words = {Verdict.AHEAD: "ahead of", Verdict.LEVEL: "level with", Verdict.BEHIND: "behind"}
    parts = [
        f"{word} {join_and(by_verdict[verdict])}"
        for verdict, word in words.items()
        if verdict in by_verdict
    ]
    second = f"the next, {others[0].label}, has {measure.text(others[0].row.score)}"
    if not parts:
        return (
            f"{so_far}{leader.label} has the best mean, {score}; {second}. Too few pairs of peers"
            " to test it."
        )
    return f"{so_far}{leader.label} is {' and '.join(parts)}: {score}; {second}."


def _margin(
    results: ReportResults, leader: ReportSeries, others: Sequence[ReportSeries]
) -> list[str]:
    """Return the difference to the next row with its interval, and what the interval does not
    cover."""
    if not others:
        return []
    if not results.common_seeds:
        return ["No seed is common to all rows, so differences may come from the data."]
    found = leader.row.difference_to(others[0].row)
    if found is None or found.interval is None:
        return []
    over = f"{plural(found.peers, 'pair')} of peers" + (
        f" in {found.seeds} seeds" if found.seeds > 1 else ""
    )
    text = (
        f"Its paired difference to {others[0].label} is {found.text(results.measure)}, over {over}"
    )
    one = (
        "; with one seed, this says nothing about other splits and first weights"
        if found.seeds == 1
        else ""
    )
    return [f"{text} (95 % bootstrap interval){one}."]


def _averaged_over(series: ReportSeries) -> str:
    peers = plural(series.runs[0].config["peers"], "peer")
    seeds = len(series.runs)
    return f"on average over {peers}" + (f" and {seeds} seeds" if seeds > 1 else "")


def _peers(results: ReportResults, leader: ReportSeries) -> list[str]:
    """Count the peers for which the row with the best mean wins."""
    counts = count_wins(results)
    if counts is None:
        return []
    seeds = results.common_seeds
    peers = plural(counts.peers, "peer") + (f" over {len(seeds)} seeds" if len(seeds) > 1 else "")
    label = leader.label
    sentence = f"It is best for {counts.wins[label]} of {peers}"
    sentence += f", tied for {counts.ties[label]}" if counts.ties[label] else ""
    losses = counts.losses[label]
    if not losses:
        return [f"{sentence}, and worse for none."]
    named = len(seeds) == 1 and len(losses) <= MAX_NAMED
    names = f" ({join_and([f'peer {peer}' for peer in losses])})" if named else ""
    return [f"{sentence}, and worse for {len(losses)}{names}."]


def _cost_of_leader(results: ReportResults, best: ReportSeries) -> str:
    """Compare the leader's traffic and FLOPs with those of the others."""
    others = [series for series in results.series if series is not best]
    silent = [series.label for series in others if series.wire_mb == 0]
    sending = sorted(
        (series for series in others if series.wire_mb > 0), key=lambda series: -series.wire_mb
    )
    if best.wire_mb == 0:
        own = "It sends nothing"
        rest = [
            f"{series.label}’s busiest node transfers {format_amount(series.wire_mb)} MB per round"
            for series in _first_and_last(sending)
        ]
    else:
        own = f"Its busiest node transfers {format_amount(best.wire_mb)} MB per round on the wire"
        ratios = [
            format_ratio(best.wire_mb, series.wire_mb, series.label)
            for series in _first_and_last(sending)
        ]
        own += f", {join_and(ratios)}" if ratios else ""
        rest = (
            [f"{join_and(silent)} {'sends' if len(silent) == 1 else 'send'} nothing"]
            if silent
            else []
        )
    scale, unit = flops_unit_of_largest([series.flops for series in results.series])
    amounts = list(
        dict.fromkeys(
            format_amount(flops / scale) for flops in sorted(series.flops for series in others)
        )
    )
    range_ = amounts[0] if len(amounts) == 1 else f"{amounts[0]} to {amounts[-1]}"
    whose = "the others" if len(others) > 1 else others[0].label
    flops = (
        f"training takes {format_amount(best.flops / scale)} {unit} per peer and round ({whose}:"
        f" {range_})"
    )
    return "; ".join([own, *rest, flops]) + "."


def _first_and_last(series: Sequence[ReportSeries]) -> list[ReportSeries]:
    """Return all of a few rows, or the first and the last of many."""
    return list(series) if len(series) <= MAX_NAMED else [series[0], series[-1]]


def _single_row(results: ReportResults, series: ReportSeries) -> list[str]:
    """Summarize a page about one row."""
    rounds = plural(series.row.rounds, "round")
    after = f"So far, after {rounds}," if series.unfinished else f"After {rounds},"
    measure = results.measure
    if series.row.score is None:
        return [
            f"{after} {series.label} has not been evaluated in all its runs.",
            _own_cost(series),
        ]
    std = (
        f" (± {measure.text(series.row.score_std)} over seeds)"
        if series.row.score_std is not None
        else ""
    )
    score = f"{measure.name} {measure.text(series.row.score)} {_averaged_over(series)}{std}"
    extremes = _extremes(series.runs[0], measure) if len(series.runs) == 1 else []
    return [
        f"{after} {series.label} reaches {score}.",
        *extremes,
        *_by_density(series, measure),
        _own_cost(series),
    ]


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
        + (
            f" ({format_seconds(fmean(seconds[density]))} s per round)"
            if density in seconds
            else ""
        )
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
    """Return what limits the comparison: unfinished runs, other settings, other seeds, failed
    steps."""
    return [
        *(
            f"{relative_to_page(page, path)} has no finished round yet and is omitted."
            for path in results.omitted
        ),
        *(sentence for series in results.series for sentence in _unfinished(series)),
        *_differing_settings(results),
        *_differing_connections(results),
        *_differing_seeds(results),
        *(sentence for series in results.series for sentence in _failures(series)),
    ]


def _unfinished(series: ReportSeries) -> list[str]:
    runs = [run for run in series.runs if run.summary is None]
    if not runs:
        return []
    parts = [
        f"{len(run.records)} of {run.config['rounds']} rounds (seed {run.seed})" for run in runs
    ]
    return [f"{series.label} is not finished: {join_and(parts)}."]


def _differing_settings(results: ReportResults) -> list[str]:
    keys = list(results.differing)
    if not keys or not results.comparable:  # then the summary names them
        return []
    several = len({series.runs[0].method for series in results.series}) > 1
    rows = "Besides the method, the rows" if several else "The rows"
    return [f"{rows} differ in {join_and(keys)}; see Settings."]


def _differing_connections(results: ReportResults) -> list[str]:
    counts = {series.label: series.row.connections for series in results.series}
    return (
        [connections_note(counts)] if len({count for count in counts.values() if count}) > 1 else []
    )


def _differing_seeds(results: ReportResults) -> list[str]:
    sentences = []
    if results.omitted_seeds:
        shown = ", ".join(map(str, results.common_seeds))
        others = [
            f"{label} {', '.join(map(str, seeds))}"
            for label, seeds in results.omitted_seeds.items()
        ]
        sentences.append(
            f"Only seeds that all rows have are shown ({shown}); omitted: {'; '.join(others)}."
        )
    seeds = {series.label: sorted(series.seeds) for series in results.series}
    if len(set(map(tuple, seeds.values()))) > 1:
        parts = [f"{label} {', '.join(map(str, own))}" for label, own in seeds.items()]
        sentences.append(
            f"The rows have different seeds and therefore different data: {'; '.join(parts)}."
        )
    for series in results.series:
        repeated = [
            seed for seed, count in Counter(run.seed for run in series.runs).items() if count > 1
        ]
        if repeated:
            names = join_and(list(map(str, repeated)))
            sentences.append(
                f"{series.label} has several runs of seed {names}; each is counted separately."
            )
    return sentences


def _failures(series: ReportSeries) -> list[str]:
    failures = [failure for run in series.runs for failure in run.failures]
    if not failures:
        return []
    peers = {(run.seed, peer) for run in series.runs for _, peer, _ in run.failures}
    return [
        f"{series.label}: {plural(len(failures), 'step')} of {plural(len(peers), 'peer')} failed,"
        f" and the peers kept their last valid model. First reason: {failures[0][2]}"
    ]
