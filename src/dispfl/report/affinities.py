"""Whom peers resemble, as affinities find it: a map of all pairs, and the most similar peers."""

from collections.abc import Mapping, Sequence
from statistics import fmean

from dispfl.report.comparison import ComparisonRow
from dispfl.report.diagrams import HeatMap
from dispfl.report.html import Block, Details, Figure, Figures, Heading, HtmlTable, Section
from dispfl.report.results import ReportResults
from dispfl.report.runs import RecordedRun
from dispfl.report.wording import plural

MAX_MAPPED_PEERS = 100
MAX_LISTED_PEERS = 1000
NEAREST = 5
"""Similar peers that are listed for each peer."""

Similarities = Mapping[str, Mapping[str, float]]
"""By peer and sender."""


def affinities_section(results: ReportResults) -> Section | None:
    """Return whom the peers of each row resemble; None if no run has affinities."""
    figures = []
    tables: list[Block] = []
    for row in results.rows:
        similarities = mean_similarities(row.runs[0])
        if not similarities:
            continue
        roster = row.runs[0].roster
        if len(roster) <= MAX_MAPPED_PEERS:
            figures.append(_similarity_map(row, roster, similarities))
        tables.append(_nearest_peers(row, similarities))
    if not tables:
        return None
    section = Section("affinities", "Whom peers resemble")
    if figures:
        section.add(Figures(figures))
    section.add(*tables)
    return section


def mean_similarities(run: RecordedRun) -> dict[str, dict[str, float]]:
    """Return how similar each peer found its senders, mean over the second half of the rounds.

    In the first half, models have not learned yet what tells their peers apart.
    """
    measured: dict[str, dict[str, list[float]]] = {}
    for t in range(len(run.records) // 2, len(run.records)):
        for peer, of_senders in run.similarities(t).items():
            for sender, similarity in of_senders.items():
                measured.setdefault(peer, {}).setdefault(sender, []).append(similarity)
    means = {}
    for peer in sorted(measured):
        means[peer] = {sender: fmean(values) for sender, values in sorted(measured[peer].items())}
    return means


def _similarity_map(
    row: ComparisonRow, roster: Sequence[str], similarities: Similarities
) -> Figure:
    """Draw a column for each peer and a row for each sender."""
    columns = []
    tooltips = []
    for peer in roster:
        of_senders = similarities.get(peer, {})
        columns.append([max(0, round(100 * of_senders.get(name, 0.0))) for name in roster])
        nearest = ", ".join(_nearest_texts(of_senders)) or "nobody"
        tooltips.append(f"peer {peer} resembles {nearest}")
    drawing = HeatMap(columns, roster, tooltips, 100, len(roster), "sender", roster)
    note = (
        "The stronger the colour, the more similar the sender's last layer is to the peer's; white:"
        " not similar, or never received. Mean over the second half of the rounds"
        f" (seed {row.runs[0].seed})."
    )
    return Figure(row.label, drawing.svg(f"{row.label}. {note}"), note)


def _nearest_peers(row: ComparisonRow, similarities: Similarities) -> Details:
    title = f"The most similar peers of each peer: {row.label}"
    table = HtmlTable(title, [Heading("Peer"), Heading("Most similar"), Heading("Met", "number")])
    for peer, of_senders in list(similarities.items())[:MAX_LISTED_PEERS]:
        nearest = ", ".join(_nearest_texts(of_senders))
        table.rows.append([peer, nearest, plural(len(of_senders), "peer")])
    return Details(title, table)


def _nearest_texts(of_senders: Mapping[str, float]) -> list[str]:
    """`003 (0.91)`, the most similar first."""
    ranked = sorted(of_senders, key=lambda name: (-of_senders[name], name))
    return [f"{name} ({of_senders[name]:.2f})" for name in ranked[:NEAREST]]
