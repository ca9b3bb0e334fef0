"""The top of the page: the main result in a few sentences, and caveats."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from dispfl.core.metric import Measure
from dispfl.report.comparison import ComparisonRow
from dispfl.report.differences import Verdict
from dispfl.report.html import Block
from dispfl.report.labels import connections_note, prevents_comparison
from dispfl.report.results import (
    ReportResults,
    count_wins,
    scores_by_density,
    seconds_by_density,
)
from dispfl.report.runs import RecordedRun, relative_to_page
from dispfl.report.wording import (
    flops_unit_of_largest,
    format_amount,
    format_ratio,
    format_seconds,
    join_and,
    join_numbers,
    plural,
)

MAX_NAMED = 3
"""A sentence lists at most this many names."""
VERDICT_WORDS = {
    Verdict.AHEAD: "ahead of",
    Verdict.LEVEL: "level with",
    Verdict.BEHIND: "behind",
}


@dataclass(frozen=True)
class Summary(Block):
    """The main result and the caveats."""

    template = "summary.html"
    lead: str
    details: Sequence[str]
    caveats: Sequence[str]


def summary_block(results: ReportResults, page: Path) -> Summary:
    """Return the top of a page."""
    lead, *details = summary_sentences(results)
    return Summary(lead, details, list(caveats(results, page)))


def summary_sentences(results: ReportResults) -> list[str]:
    """Return the main result and up to three more sentences.

    They say which row leads, for which peers, at what cost.
    """
    if len(results.rows) == 1:
        return list(_single_row(results, results.rows[0]))
    if not results.comparable:
        keys = [key for key in results.differing if prevents_comparison(key)]
        return [
            f"The runs differ in {join_and(keys or ['their data'])}, so only rows with the same"
            " data are compared."
        ]
    scored = [row for row in results.rows if row.score is not None]
    if not scored:
        return ["No row has scores for all its seeds yet."]
    leader, *rivals = scored
    sentences = [
        _lead(results, leader, rivals),
        _margin(results, leader, rivals),
        _wins(results, leader),
        _cost_of_leader(results, leader),
    ]
    return list(filter(None, sentences))


def _lead(results: ReportResults, leader: ComparisonRow, rivals: Sequence[ComparisonRow]) -> str:
    """Say which rows the one with the best mean is ahead of or level with, by the paired test."""
    measure = results.measure
    name = leader.label
    if any(row.unfinished for row in results.rows):
        name = f"So far, {name}"
    score = f"{measure.name} {measure.text(leader.score)} {_averaged_over(leader)}"
    if not rivals:
        return f"{name} reaches {score}; the others have no score yet."

    by_verdict: dict[Verdict, list[str]] = {}
    for rival in rivals:
        difference = leader.difference_to(rival)
        verdict = difference.verdict(measure) if difference else Verdict.UNTESTED
        by_verdict.setdefault(verdict, []).append(rival.label)
    verdicts = []
    for verdict, words in VERDICT_WORDS.items():
        if verdict in by_verdict:
            verdicts.append(f"{words} {join_and(by_verdict[verdict])}")

    second = f"the next, {rivals[0].label}, has {measure.text(rivals[0].score)}"
    if verdicts:
        return f"{name} is {' and '.join(verdicts)}: {score}; {second}."
    return f"{name} has the best mean, {score}; {second}. Too few pairs of peers to test it."


def _margin(results: ReportResults, leader: ComparisonRow, rivals: Sequence[ComparisonRow]) -> str:
    """Give the difference to the next row with its interval, and what that does not cover."""
    if not rivals:
        return ""
    if not results.common_seeds:
        return "No seed is common to all rows, so differences may come from the data."
    difference = leader.difference_to(rivals[0])
    if difference is None or difference.interval is None:
        return ""
    over = f"{plural(difference.peers, 'pair')} of peers"
    if difference.seeds > 1:
        over += f" in {difference.seeds} seeds"
    sentence = (
        f"Its paired difference to {rivals[0].label} is {difference.text(results.measure)}, over"
        f" {over} (95 % bootstrap interval)"
    )
    if difference.seeds == 1:
        sentence += "; with one seed, this says nothing about other splits and first weights"
    return f"{sentence}."


def _averaged_over(row: ComparisonRow) -> str:
    peers = plural(row.runs[0].config["peers"], "peer")
    if len(row.runs) == 1:
        return f"on average over {peers}"
    return f"on average over {peers} and {len(row.runs)} seeds"


def _wins(results: ReportResults, leader: ComparisonRow) -> str:
    """Count the peers for which the row with the best mean wins."""
    counts = count_wins(results)
    if not counts:
        return ""
    count = counts[leader.label]
    seeds = len(results.common_seeds)
    sentence = f"It is best for {count.wins} of {plural(count.peers, 'peer')}"
    if seeds > 1:
        sentence += f" over {seeds} seeds"
    if count.ties:
        sentence += f", tied for {count.ties}"
    if not count.losses:
        return f"{sentence}, and worse for none."
    sentence += f", and worse for {len(count.losses)}"
    if seeds == 1 and len(count.losses) <= MAX_NAMED:
        sentence += f" ({join_and([f'peer {peer}' for peer in count.losses])})"
    return f"{sentence}."


def _cost_of_leader(results: ReportResults, leader: ComparisonRow) -> str:
    """Compare the leader's traffic and FLOPs with those of the others."""
    rivals = [row for row in results.rows if row is not leader]
    silent = [row.label for row in rivals if row.wire_mb == 0]
    sending = [row for row in rivals if row.wire_mb > 0]
    sending.sort(key=lambda row: -row.wire_mb)
    if len(sending) > MAX_NAMED:
        sending = [sending[0], sending[-1]]

    if leader.wire_mb == 0:
        parts = ["It sends nothing"]
        for row in sending:
            amount = format_amount(row.wire_mb)
            parts.append(f"{row.label}’s busiest node transfers {amount} MB per round")
    else:
        amount = format_amount(leader.wire_mb)
        parts = [f"Its busiest node transfers {amount} MB per round on the wire"]
        if sending:
            ratios = [format_ratio(leader.wire_mb, row.wire_mb, row.label) for row in sending]
            parts[0] += f", {join_and(ratios)}"
        if silent:
            parts.append(f"{join_and(silent)} {'sends' if len(silent) == 1 else 'send'} nothing")
    parts.append(_flops_of_leader(results, leader, rivals))
    return f"{'; '.join(parts)}."


def _flops_of_leader(
    results: ReportResults, leader: ComparisonRow, rivals: Sequence[ComparisonRow]
) -> str:
    scale, unit = flops_unit_of_largest(row.flops_per_peer for row in results.rows)
    lowest = format_amount(min(row.flops_per_peer for row in rivals) / scale)
    highest = format_amount(max(row.flops_per_peer for row in rivals) / scale)
    amounts = lowest if lowest == highest else f"{lowest} to {highest}"
    whose = rivals[0].label if len(rivals) == 1 else "the others"
    own = format_amount(leader.flops_per_peer / scale)
    return f"training takes {own} {unit} per peer and round ({whose}: {amounts})"


def _single_row(results: ReportResults, row: ComparisonRow) -> Iterator[str]:
    """Yield the sentences of a page about one row."""
    measure = results.measure
    rounds = plural(row.rounds, "round")
    after = f"So far, after {rounds}," if row.unfinished else f"After {rounds},"
    if row.score is None:
        yield f"{after} {row.label} has not been evaluated in all its runs."
    else:
        score = f"{measure.name} {measure.text(row.score)} {_averaged_over(row)}"
        if row.score_std is not None:
            score += f" (± {measure.text(row.score_std)} over seeds)"
        yield f"{after} {row.label} reaches {score}."
        if len(row.runs) == 1:
            yield from _extremes(row.runs[0], measure)
        yield from _by_density(row, measure)
    yield _own_cost(row)


def _extremes(run: RecordedRun, measure: Measure) -> Iterator[str]:
    scores = run.scores
    if len(scores) < 2:
        return
    gains = {peer: measure.gain(score, 0.0) for peer, score in scores.items()}
    worst = min(gains, key=gains.__getitem__)
    best = max(gains, key=gains.__getitem__)
    yield (
        f"The worst peer ({worst}) has {measure.text(scores[worst])}, the best ({best})"
        f" {measure.text(scores[best])}."
    )


def _by_density(row: ComparisonRow, measure: Measure) -> Iterator[str]:
    """Yield the mean of each group of peers, if densities differ."""
    seconds = seconds_by_density(row)
    groups = []
    for density, scores in scores_by_density(row).items():
        group = f"{measure.text(fmean(scores))} at {density:g}"
        if density in seconds:
            group += f" ({format_seconds(fmean(seconds[density]))} s per round)"
        groups.append(group)
    if groups:
        yield f"By density: {join_and(groups)}."


def _own_cost(row: ComparisonRow) -> str:
    scale, unit = flops_unit_of_largest([row.flops_per_peer])
    amount = format_amount(row.flops_per_peer / scale)
    flops = f"training takes {amount} {unit} per peer and round"
    if not row.wire_mb:
        return f"No peer sends anything; {flops}."
    return f"The busiest node transfers {format_amount(row.wire_mb)} MB per round; {flops}."


def caveats(results: ReportResults, page: Path) -> Iterator[str]:
    """Yield what limits the comparison: unfinished runs, other settings or seeds, failed steps."""
    for path in results.omitted:
        yield f"{relative_to_page(page, path)} has no finished round yet and is omitted."
    for row in results.rows:
        yield from _unfinished(row)
    yield from _differing_settings(results)
    yield from _differing_connections(results)
    yield from _differing_seeds(results)
    for row in results.rows:
        yield from _failures(row)


def _unfinished(row: ComparisonRow) -> Iterator[str]:
    parts = []
    for run in row.runs:
        if not run.finished:
            rounds = f"{len(run.records)} of {run.config['rounds']} rounds"
            parts.append(f"{rounds} (seed {run.seed})")
    if parts:
        yield f"{row.label} is not finished: {join_and(parts)}."


def _differing_settings(results: ReportResults) -> Iterator[str]:
    keys = list(results.differing)
    if not keys or not results.comparable:  # then the summary names them
        return
    methods = {row.runs[0].method for row in results.rows}
    rows = "Besides the method, the rows" if len(methods) > 1 else "The rows"
    yield f"{rows} differ in {join_and(keys)}; see Settings."


def _differing_connections(results: ReportResults) -> Iterator[str]:
    counts = {row.label: row.connections for row in results.rows}
    if len(set(counts.values()) - {0}) > 1:
        yield connections_note(counts)


def _differing_seeds(results: ReportResults) -> Iterator[str]:
    if results.omitted_seeds:
        shown = join_numbers(results.common_seeds)
        omitted = []
        for label, seeds in results.omitted_seeds.items():
            omitted.append(f"{label} {join_numbers(seeds)}")
        yield f"Only seeds that all rows have are shown ({shown}); omitted: {'; '.join(omitted)}."

    seeds_of_rows = {row.label: tuple(sorted(row.by_seed)) for row in results.rows}
    if len(set(seeds_of_rows.values())) > 1:
        parts = [f"{label} {join_numbers(seeds)}" for label, seeds in seeds_of_rows.items()]
        yield f"The rows have different seeds and therefore different data: {'; '.join(parts)}."

    for row in results.rows:
        counts = Counter(run.seed for run in row.runs)
        repeated = [str(seed) for seed, count in counts.items() if count > 1]
        if repeated:
            numbers = join_and(repeated)
            yield f"{row.label} has several runs of seed {numbers}; each is counted separately."


def _failures(row: ComparisonRow) -> Iterator[str]:
    reasons = []
    peers = set()
    for run in row.runs:
        for _, peer, reason in run.failures:
            reasons.append(reason)
            peers.add((run.seed, peer))
    if reasons:
        yield (
            f"{row.label}: {plural(len(reasons), 'step')} of {plural(len(peers), 'peer')} failed,"
            f" and the peers kept their last valid model. First reason: {reasons[0]}"
        )
