"""The top of the page: the main result in a few sentences, and caveats."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from dispfl.core.metric import Measure
from dispfl.report.comparison import VALIDATION, ComparisonRow, connections_by_label
from dispfl.report.differences import Verdict
from dispfl.report.html import Block
from dispfl.report.labels import connections_note, prevents_comparison
from dispfl.report.results import (
    ReportResults,
    count_wins,
    scores_by_density,
    seconds_by_density,
    silence_note,
    split_by_traffic,
)
from dispfl.report.runs import RecordedRun, relative_to_page
from dispfl.report.units import FLOPS, bytes_text, common_unit, flops_text
from dispfl.report.wording import (
    format_ratio,
    format_seconds,
    join_and,
    join_numbers,
    plural,
    text_range,
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
        keys = list(filter(prevents_comparison, results.differing)) or ["their data"]
        return [
            f"The runs differ in {join_and(keys)}, so only rows with the same data are compared."
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

    verdicts = _verdicts(leader, rivals, measure)
    if results.comparison.is_chosen_on_validation:
        validation = measure.text(leader.extra(VALIDATION))
        return (
            f"{name} is chosen on validation data ({validation}): {score}; on test data it is"
            f" {' and '.join(verdicts) or 'not tested against the others'}."
        )
    second = f"the next, {rivals[0].label}, has {measure.text(rivals[0].score)}"
    if verdicts:
        return f"{name} is {' and '.join(verdicts)}: {score}; {second}."
    return f"{name} has the best mean, {score}; {second}. Too few pairs of peers to test it."


def _verdicts(
    leader: ComparisonRow, rivals: Sequence[ComparisonRow], measure: Measure
) -> list[str]:
    """`ahead of Local and FedAvg`, `level with Ditto`: one text per verdict of the paired test."""
    labels: dict[Verdict, list[str]] = {}
    for rival in rivals:
        difference = leader.difference_to(rival)
        if difference:
            labels.setdefault(difference.verdict(measure), []).append(rival.label)
    verdicts = []
    for verdict, words in VERDICT_WORDS.items():
        if verdict in labels:
            verdicts.append(f"{words} {join_and(labels[verdict])}")
    return verdicts


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
        peers = [f"peer {peer}" for peer in count.losses]
        sentence += f" ({join_and(peers)})"
    return f"{sentence}."


def _cost_of_leader(results: ReportResults, leader: ComparisonRow) -> str:
    """Compare the leader's traffic and FLOPs with those of the others."""
    rivals = [row for row in results.rows if row is not leader]
    sending, silent = split_by_traffic(rivals)
    sending.sort(key=lambda row: -row.wire_mb)
    if len(sending) > MAX_NAMED:
        sending = [sending[0], sending[-1]]

    parts = []
    if leader.wire_mb == 0:
        parts.append("It sends nothing")
        for row in sending:
            amount = bytes_text(row.wire_bytes)
            parts.append(f"{row.label}’s busiest node transfers {amount} per round")
    else:
        parts.append(_traffic_of_leader(leader, sending))
        if silent:
            parts.append(silence_note(silent))
    parts.append(_flops_of_leader(results, leader, rivals))
    return f"{'; '.join(parts)}."


def _traffic_of_leader(leader: ComparisonRow, sending: Sequence[ComparisonRow]) -> str:
    amount = bytes_text(leader.wire_bytes)
    traffic = f"Its busiest node transfers {amount} per round on the wire"
    if not sending:
        return traffic
    ratios = []
    for row in sending:
        ratios.append(format_ratio(leader.wire_mb, row.wire_mb, row.label))
    return f"{traffic}, {join_and(ratios)}"


def _flops_of_leader(
    results: ReportResults, leader: ComparisonRow, rivals: Sequence[ComparisonRow]
) -> str:
    unit = common_unit(results.flops_per_peer, FLOPS)
    rival_flops = [row.flops_per_peer for row in rivals]
    lowest = unit.text(min(rival_flops))
    highest = unit.text(max(rival_flops))
    names = "the others"
    if len(rivals) == 1:
        names = rivals[0].label
    amount = unit.text(leader.flops_per_peer)
    return (
        f"training takes {amount} {unit.name} per peer and round"
        f" ({names}: {text_range(lowest, highest)})"
    )


def _single_row(results: ReportResults, row: ComparisonRow) -> Iterator[str]:
    """Yield the sentences of a page about one row."""
    measure = results.measure
    rounds = plural(row.rounds, "round")
    after = f"After {rounds},"
    if row.unfinished:
        after = f"So far, after {rounds},"
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

    def gain(peer: str) -> float:
        return measure.gain(scores[peer], 0.0)

    worst = min(scores, key=gain)
    best = max(scores, key=gain)
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
    flops = f"training takes {flops_text(row.flops_per_peer)} per peer and round"
    if not row.wire_mb:
        return f"No peer sends anything; {flops}."
    return f"The busiest node transfers {bytes_text(row.wire_bytes)} per round; {flops}."


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
    rows = "The rows"
    if len({row.runs[0].method for row in results.rows}) > 1:
        rows = "Besides the method, the rows"
    yield f"{rows} differ in {join_and(keys)}; see Settings."


def _differing_connections(results: ReportResults) -> Iterator[str]:
    counts = connections_by_label(results.rows)
    if len(set(counts.values()) - {0}) > 1:
        yield connections_note(counts)


def _differing_seeds(results: ReportResults) -> Iterator[str]:
    if results.omitted_seeds:
        shown = join_numbers(results.common_seeds)
        omitted = _seeds_text(results.omitted_seeds)
        yield f"Only seeds that all rows have are shown ({shown}); omitted: {omitted}."

    seeds = {row.label: sorted(row.by_seed) for row in results.rows}
    if len(set(map(tuple, seeds.values()))) > 1:
        yield f"The rows have different seeds and therefore different data: {_seeds_text(seeds)}."

    for row in results.rows:
        yield from _repeated_seeds(row)


def _seeds_text(seeds_by_label: Mapping[str, Sequence[int]]) -> str:
    """`Dis-PFL 0, 1; Local 0`."""
    parts = []
    for label, seeds in seeds_by_label.items():
        parts.append(f"{label} {join_numbers(seeds)}")
    return "; ".join(parts)


def _repeated_seeds(row: ComparisonRow) -> Iterator[str]:
    repeated = []
    for seed, count in Counter(run.seed for run in row.runs).items():
        if count > 1:
            repeated.append(str(seed))
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
