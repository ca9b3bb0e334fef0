"""The first sentences of the page: who is ahead, for which peers, at what cost; no more than was measured."""

from collections.abc import Sequence
from statistics import fmean

from dispfl.analysis.report.reading import Run
from dispfl.analysis.report.results import Results, Series, by_density, separates
from dispfl.analysis.report.tally import TIE, tally
from dispfl.analysis.report.wording import counted, flops_unit, listed, score, share_of, size

MOST_NAMED = 3
"""A sentence does not list more than so many names."""


def verdict(results: Results) -> list[str]:
    """A sentence that leads, and two or three more."""
    if len(results.series) == 1:
        return _one(results, results.series[0])
    if not results.comparable:
        keys = [key for key in results.differing if separates(key)]
        return [f"The runs differ in {listed(keys)}, so their scores do not compare."]
    best = [series for series in results.series if series.row in results.comparison.best]
    if not best:
        return ["No row has a score of all its seeds yet, so nobody is ahead."]
    said = [_lead(results, best), *_seeds(results, best), *_peers(results, best)]
    return [*said, _cost(results, best[0]) if len(best) == 1 else _costs(results.series)]


def _lead(results: Results, best: Sequence[Series]) -> str:
    """Who has the highest score, and by how much."""
    so_far = "So far, " if any(series.unfinished for series in results.series) else ""
    value = score(best[0].row.accuracy)
    over = _over(best[0])
    if len(best) > 1:
        labels = listed([series.label for series in best])
        return f"{so_far}{labels} share the highest {results.metric}, {value} {over}."
    others = [series for series in results.series if series is not best[0] and series.row.accuracy is not None]
    if not others:
        return f"{so_far}{best[0].label} reaches {results.metric} {value} {over}; the others have no score yet."
    lead = round(best[0].row.accuracy or 0, 3) - round(others[0].row.accuracy or 0, 3)
    second = [series.label for series in others if score(series.row.accuracy) == score(others[0].row.accuracy)]
    follow = f"{listed(second)} {'follows' if len(second) == 1 else 'follow'} with {score(others[0].row.accuracy)}"
    return f"{so_far}{best[0].label} has the highest {results.metric}, {value} {over}; {follow} ({lead:.3f} less)."


def _over(series: Series) -> str:
    """What a score is the mean of."""
    peers = counted(series.runs[0].config["peers"], "peer")
    many = len(series.runs)
    return f"on average over {peers}" + (f" and {many} seeds" if many > 1 else "")


def _seeds(results: Results, best: Sequence[Series]) -> list[str]:
    """How far the seeds bear out a lead."""
    rivals = [series for series in results.series if series not in best and series.row.accuracy is not None]
    if not rivals or len(best) > 1:
        return []
    seeds = results.common_seeds
    if not seeds:
        return ["No seed is common to all rows, so differences may come from the data."]
    if len(seeds) == 1:
        return ["There is one seed to compare, so small differences may be chance."]
    means = {s.label: {seed: fmean(s.seeds[seed].scores.values()) for seed in seeds} for s in (best[0], *rivals)}
    leader = means.pop(best[0].label)
    ahead = sum(all(leader[seed] > other[seed] + TIE for other in means.values()) for seed in seeds)
    if ahead == len(seeds):
        return [f"It is ahead of all others in {'both' if ahead == 2 else f'each of the {ahead}'} seeds."]
    return [f"It is ahead of all others in {ahead} of {len(seeds)} seeds only: no clear win."]


def _peers(results: Results, best: Sequence[Series]) -> list[str]:
    """For which peers."""
    found = tally(results)
    if found is None:
        return []
    seeds = results.common_seeds
    of = counted(found.peers, "peer") + (f" over {len(seeds)} seeds" if len(seeds) > 1 else "")
    top = "best" if results.metric == "accuracy" else "highest"
    if len(best) > 1:
        counts = [f"{series.label} alone is {top} for {found.alone[series.label]}" for series in best]
        return [f"Of {of}, {listed(counts)}."]
    label = best[0].label
    said = f"It is {top} for {found.alone[label]} of {of}"
    said += f", level with another for {found.level[label]}" if found.level[label] else ""
    beaten = found.beaten[label]
    if not beaten:
        return [f"{said}, and behind for none."]
    named = len(seeds) == 1 and len(beaten) <= MOST_NAMED
    names = f" ({listed([f'peer {peer}' for peer in beaten])})" if named else ""
    return [f"{said}, and behind for {len(beaten)}{names}."]


def _cost(results: Results, best: Series) -> str:
    """What the leader costs beside the others."""
    others = [series for series in results.series if series is not best]
    silent = [series.label for series in others if series.wire_mb == 0]
    sending = sorted((series for series in others if series.wire_mb > 0), key=lambda series: -series.wire_mb)
    if best.wire_mb == 0:
        said = "It sends nothing"
        rest = [f"{series.label}’s busiest node moves {size(series.wire_mb)} MB a round" for series in _few(sending)]
    else:
        said = f"Its busiest node moves {size(best.wire_mb)} MB a round on the wire"
        shares = [share_of(best.wire_mb, series.wire_mb, series.label) for series in _few(sending)]
        said += f", {listed(shares)}" if shares else ""
        rest = [f"{listed(silent)} {'sends' if len(silent) == 1 else 'send'} nothing"] if silent else []
    scale, unit = flops_unit([series.flops for series in results.series])
    theirs = list(dict.fromkeys(size(flops / scale) for flops in sorted(series.flops for series in others)))
    range_ = theirs[0] if len(theirs) == 1 else f"{theirs[0]} to {theirs[-1]}"
    whose = "the others" if len(others) > 1 else others[0].label
    flops = f"a peer’s training takes {size(best.flops / scale)} {unit} a round ({whose}: {range_})"
    return "; ".join([said, *rest, flops]) + "."


def _few(series: Sequence[Series]) -> list[Series]:
    """All of a few; the first and the last of many."""
    return list(series) if len(series) <= MOST_NAMED else [series[0], series[-1]]


def _costs(series: Sequence[Series]) -> str:
    said = [f"{one.label} {size(one.wire_mb) if one.wire_mb else 'nothing'}" for one in series]
    return f"Megabytes a round through the busiest node: {', '.join(said)}."


def _one(results: Results, only: Series) -> list[str]:
    """A page about one row."""
    run, rounds = only.runs[0], counted(only.row.rounds, "round")
    so_far = f"So far, after {rounds}," if only.unfinished else f"After {rounds},"
    if only.row.accuracy is None:
        return [f"{so_far} {only.label} has not been scored in all its runs.", _own_cost(only)]
    spread = f" (± {score(only.row.accuracy_std)} between seeds)" if only.row.accuracy_std is not None else ""
    lead = f"{so_far} {only.label} has {results.metric} {score(only.row.accuracy)} {_over(only)}{spread}."
    extremes = _extremes(run, results.metric) if len(only.runs) == 1 else []
    return [lead, *extremes, *_by_density(only), _own_cost(only)]


def _extremes(run: Run, metric: str) -> list[str]:
    scores = run.scores
    if len(scores) < 2:
        return []
    worst, best = min(scores, key=scores.__getitem__), max(scores, key=scores.__getitem__)
    low, high = ("worst", "best") if metric == "accuracy" else ("lowest", "highest")
    return [f"The {low} peer ({worst}) has {score(scores[worst])}, the {high} ({best}) {score(scores[best])}."]


def _by_density(only: Series) -> list[str]:
    """The mean of each group of peers, where densities differ."""
    means = [f"{score(fmean(values))} at {density:g}" for density, values in by_density(only).items()]
    return [f"By density: {listed(means)}."] if means else []


def _own_cost(only: Series) -> str:
    scale, unit = flops_unit([only.flops])
    traffic = f"The busiest node moves {size(only.wire_mb)} MB a round" if only.wire_mb else "Nobody sends anything"
    return f"{traffic}; a peer’s training takes {size(only.flops / scale)} {unit} a round."
