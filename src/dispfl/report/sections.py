"""Sections that are tables: the results of every row, and the privacy of every run."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from dispfl.errors import RunError
from dispfl.files import read_regular
from dispfl.report.comparison import (
    TEST_LOSS,
    ComparisonRow,
    connections_by_label,
    flops_by_label,
    traffic_per_round,
)
from dispfl.report.diagrams import range_bar
from dispfl.report.differences import Difference, paired_over
from dispfl.report.html import (
    Block,
    Cell,
    Details,
    Heading,
    HtmlTable,
    RowLabel,
    Section,
    css_class,
)
from dispfl.report.labels import connections_note, flops_note
from dispfl.report.results import ReportResults
from dispfl.report.runs import RecordedRun
from dispfl.report.units import BYTES, FLOPS, Unit, common_unit
from dispfl.report.wording import (
    UNKNOWN,
    capitalized,
    format_number,
    format_seconds,
    number_range,
)
from dispfl.runs.metrics import last, measured_values

MAX_REFERENCES = 12
"""Rows of which each is compared with each other one."""

# The results table


@dataclass(frozen=True)
class DifferenceCell(Block):
    """`-0.031, behind`, and below it `[-0.045, -0.017]`."""

    template = "difference.html"
    mean: str
    verdict: str
    interval: str


@dataclass(frozen=True)
class RangeCell(Block):
    """A line from the worst to the best peer, and both scores."""

    template = "range.html"
    drawing: Markup
    text: str


def results_section(results: ReportResults) -> Section:
    """Return a table with the score and the costs of every row, best first."""
    measure = results.measure
    units = (
        common_unit(traffic_per_round(results.rows), BYTES),
        common_unit(results.flops_per_peer, FLOPS),
    )
    caption = f"{capitalized(measure.name)} and costs"
    if results.comparison.is_chosen_on_validation:
        caption += ", best on validation data first"
    elif len(results.rows) > 1:
        caption += ", best first"
    headings = list(_result_headings(results, *units))
    table = HtmlTable(caption, headings, kind="cards")
    for number, row in enumerate(results.rows):
        table.rows.append(list(_result_cells(results, row, *units)))
        if results.comparison.is_best(row):
            table.best.add(number)
    if len(results.rows) > 1:
        table.keys = [row.position for row in results.rows]

    section = Section("results", "Results")
    section.add(table)
    section.remark(" ".join(_results_legend(results)))
    differences = _all_differences(results)
    if differences:
        section.add(differences)
    return section


def _all_differences(results: ReportResults) -> Details | None:
    """Return how each row differs from each other one; None if that says nothing new."""
    rows = results.rows
    if not results.comparable or not 2 < len(rows) <= MAX_REFERENCES:
        return None
    headings = [Heading("Row")]
    for row in rows:
        headings.append(Heading(f"minus {row.label}", f"difference {css_class(row)}"))
    table = HtmlTable(
        "Paired difference of each row to each other one",
        headings,
        kind="plain differences",
        keys=[row.position for row in rows],
    )
    for row in rows:
        cells: list[Cell] = [row.label]
        for reference in rows:
            difference = None if row is reference else row.difference_to(reference)
            cells.append(_difference_cell(results, difference))
        table.rows.append(cells)
    return Details("Differences between all rows", table)


def _result_headings(
    results: ReportResults, bytes_unit: Unit, flops_unit: Unit
) -> Iterator[Heading]:
    score = capitalized(results.measure.name)
    if results.several_seeds:
        score += " ± std over seeds"
    references = results.comparison.reference_labels
    yield Heading("Method")
    better = "higher" if results.measure.higher_is_better else "lower"
    yield Heading(score, "number score", results.measure.name, better)
    if len(references) == 1:
        yield Heading(f"Difference to {references[0]}", "number difference")
    elif references:
        yield Heading("Difference to the reference of the same data", "number difference")
    yield Heading("Worst to best peer", "range")
    directions = _directions(results)
    for name in results.comparison.extras:
        better = directions.get(name, "")
        yield Heading(capitalized(name), "number", name if better else "", better)
    for title in (
        f"Busiest {bytes_unit.name}/round",
        f"On wire {bytes_unit.name}/round",
        f"{flops_unit.name} per peer",
        "Seconds per peer",
        "Rounds",
        "Time s",
    ):
        yield Heading(title, "number")


def _directions(results: ReportResults) -> dict[str, str]:
    """Return which direction is better, of each other metric and of the loss on test data."""
    directions = {TEST_LOSS: "lower"}
    for run in results.runs:
        for record in run.records:
            for name, values in record["scores"].items():
                directions[name] = "higher" if values["higher_is_better"] else "lower"
    return directions


def _result_cells(
    results: ReportResults, row: ComparisonRow, bytes_unit: Unit, flops_unit: Unit
) -> Iterator[Cell]:
    measure = results.measure
    yield RowLabel(row)
    if row.score_std is None:
        yield measure.text(row.score)
    else:
        yield f"{measure.text(row.score)} ± {measure.text(row.score_std)}"
    if results.comparison.reference_labels:
        yield _difference_cell(results, results.comparison.differences.get(row.label))
    yield _range_cell(results, row)
    for name in results.comparison.extras:
        yield format_number(row.extra(name), 3)
    yield bytes_unit.text(row.paper_bytes)
    yield bytes_unit.text(row.wire_bytes)
    yield flops_unit.text(row.flops_per_peer)
    yield format_seconds(row.seconds_per_peer)
    rounds = number_range(row.rounds_of_runs, "–")
    if row.unfinished:
        rounds += f" of {row.runs[0].config['rounds']}"
    yield rounds
    yield f"{row.seconds:.1f}"


def _difference_cell(results: ReportResults, difference: Difference | None) -> Cell:
    if difference is None:
        return UNKNOWN
    measure = results.measure
    return DifferenceCell(
        difference.mean_text(measure),
        difference.verdict(measure),
        difference.interval_text(measure),
    )


def _range_cell(results: ReportResults, row: ComparisonRow) -> Cell:
    """Return a line from the worst to the best peer with a dot at the mean, all on one scale."""
    measure = results.measure
    scores = _peer_scores(row.runs)
    if not scores or row.score is None:
        return UNKNOWN
    all_scores = _peer_scores(results.runs)
    low = min(all_scores)
    extent = max(all_scores) - low or 1

    def share(score: float) -> float:
        return (score - low) / extent

    drawing = range_bar(share(min(scores)), share(max(scores)), share(row.score), css_class(row))
    text = f"{measure.worst(scores):.2f} to {measure.best(scores):.2f}"
    return RangeCell(drawing, text)


def _peer_scores(runs: Sequence[RecordedRun]) -> list[float]:
    scores: list[float] = []
    for run in runs:
        scores += run.scores.values()
    return scores


def _results_legend(results: ReportResults) -> Iterator[str]:
    """Yield the sentences below the table."""
    measure = results.measure
    rows = results.rows
    metric = capitalized(measure.name)
    if not measure.higher_is_better:
        metric += " (lower is better)"
    spread = ""
    if results.several_seeds:
        seeds = results.comparison.most_seeds
        spread = f"; ± is the sample standard deviation over {seeds} seeds"
    yield (
        f"{metric}: mean over the peers, each on its own test data, in the last evaluated"
        f" round{spread}."
    )
    if results.comparison.differences:
        yield f"Difference: {paired_over(results.comparison.differences)}"
    connections = connections_note(connections_by_label(rows))
    if len(rows) > 1 and connections:
        yield connections
    yield (
        "Traffic per round is that of the busiest node (1 MB: 10⁶ bytes), first as the paper"
        " counts it (values only), then on the wire (as sent). FLOPs: training of one peer in one"
        " round."
    )
    yield flops_note(flops_by_label(rows))
    yield (
        "Seconds per peer: computing time of a peer’s whole step in one round. Time: wall time of"
        " all rounds."
    )


# Privacy: what each run has spent, and what its audit has shown

PRIVACY_NOTE = (
    "AUC: how well members of the training data are told from others by attacking the personal"
    " model, and what a neighbour received of it; 0.5 is a blind guess. Epsilon is at least what"
    " canaries have shown, with 95 % confidence, and at most what was accounted. Distance: of class"
    " histograms guessed from masks at best, and in brackets without masks; 0 is exact."
)
PRIVACY_HEADINGS = (
    Heading("Row"),
    Heading("Seed", "number"),
    Heading("AUC, model", "number"),
    Heading("AUC, received", "number"),
    Heading("Distance, masks", "number"),
    Heading("Epsilon at least", "number"),
    Heading("Epsilon at most", "number"),
)


def privacy_section(results: ReportResults) -> Section | None:
    """Return a row for each run that is private or was audited; None if there is none."""
    table = HtmlTable("Privacy of the runs", PRIVACY_HEADINGS)
    for row in results.rows:
        for run in row.runs:
            audit = _read_audit(run)
            spent = last(run.records, "epsilon")
            if audit or spent:
                cells = audit or ["not audited"] * 4
                table.rows.append([row.label, str(run.seed), *cells, _accounted(spent)])
    if not table.rows:
        return None
    section = Section("privacy", "Privacy")
    section.add(table)
    section.remark(PRIVACY_NOTE)
    return section


def _accounted(spent: Mapping[str, Any] | None) -> str:
    if not spent:
        return "not private"
    return f"{max(measured_values(spent)):.2f}"


def _read_audit(run: RecordedRun) -> list[str] | None:
    """Return the cells of a run's audit; None if it was not audited."""
    file = run.path / "audit.json"
    try:
        return _audit_cells(json.loads(read_regular(file)))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as problem:
        raise RunError(
            f"{file} cannot be read: {problem}. Repeat: dispfl audit {run.path}"
        ) from problem


def _audit_cells(audit: Mapping[str, Any]) -> list[str]:
    """Return how well members were recognized, labels guessed, and canaries detected."""
    auc = {attack["view"]: attack["auc"]["value"] for attack in audit["membership"]}
    masks = UNKNOWN
    if audit["labels"]:
        guess = min(audit["labels"], key=lambda labels: float(labels["distance"]))
        masks = f"{guess['distance']:.2f} ({guess['baseline']:.2f})"
    canaries = audit["canaries"]
    return [
        format_number(auc.get("personal model"), 3),
        format_number(auc.get("what a neighbour received"), 3),
        masks,
        format_number(canaries and canaries["epsilon"], 2),
    ]
