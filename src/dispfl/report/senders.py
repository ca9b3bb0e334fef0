"""Senders: how far the models that peers received were from their own, under a robust rule."""

from collections.abc import Sequence
from typing import NamedTuple

from dispfl.report.labels import UNKNOWN
from dispfl.report.markup import Markup, details, element, figure, figures, html_table
from dispfl.report.results import ReportResults
from dispfl.report.runs import ReportRun
from dispfl.runs.metrics import byzantine_of

MAX_LISTED = 20
"""Senders that are listed for each row."""


class Sender(NamedTuple):
    """A peer as those that received it saw it, over all rounds of a run."""

    name: str
    seed: int
    byzantine: bool
    received: int
    """How often it was received."""
    far: int
    """How often it was clipped or ignored."""
    distances: Sequence[tuple[float, int]]
    """Mean distances, and of how many hearers each."""


def senders_of(run: ReportRun) -> list[Sender]:
    """Return all peers that were received, in the order of their names; none if the run has no
    robust rule."""
    byzantine_peers = byzantine_of(run.config)
    seen = [record.get("senders", {}) for record in run.records]
    found = []
    for name in sorted({name for of_round in seen for name in of_round}):
        rounds = [of_round[name] for of_round in seen if name in of_round]
        distances = [
            (one["distance"], one["received"]) for one in rounds if one["distance"] is not None
        ]
        received, far = (sum(one[key] for one in rounds) for key in ("received", "far"))
        found.append(Sender(name, run.seed, name in byzantine_peers, received, far, distances))
    return found


def senders_parts(results: ReportResults) -> list[Markup]:
    """Return how far honest senders and Byzantine peers were, and who was far most often; nothing
    if no run has a robust rule."""
    rows, lists = [], []
    for series in results.series:
        senders = [sender for run in series.runs for sender in senders_of(run)]
        if not senders:
            continue
        attacked = any(sender.byzantine for sender in senders)
        for byzantine, name in ((False, "honest" if attacked else "all"), (True, "Byzantine")):
            if group := [sender for sender in senders if sender.byzantine == byzantine]:
                rows.append([series.label, name, str(len(group)), *_distance_and_share(group)])
        title = f"Senders that were far most often: {series.label}"
        lists.append(details(title, _most_often_far(title, senders, len(series.runs) > 1)))
    if not rows:
        return []
    note = (
        "Distance: root mean square difference to a hearer's own weights, on what both hold; mean"
        " over hearers and rounds. Far: how often a sender was beyond the rule's threshold, so that"
        " it was clipped, or did not decide weights that few hold."
    )
    table = html_table(
        "Senders under a robust rule", _headings("Row", "Senders", "Number"), rows, "plain"
    )
    shown = figure("Distances of senders", element("div", table, class_="scrolling"), note=note)
    return [figures([shown]), *lists]


def _most_often_far(title: str, senders: Sequence[Sender], several_seeds: bool) -> Markup:
    ranked = sorted(
        senders,
        key=lambda sender: (-sender.far / max(1, sender.received), sender.seed, sender.name),
    )
    rows = []
    for sender in ranked[:MAX_LISTED]:
        name = f"{sender.name} (seed {sender.seed})" if several_seeds else sender.name
        rows.append(
            [
                name,
                "Byzantine" if sender.byzantine else "",
                str(sender.received),
                *_distance_and_share([sender]),
            ]
        )
    return html_table(title, _headings("Peer", "", "Heard"), rows, "plain")


def _headings(first: str, second: str, third: str) -> list[tuple[str, str]]:
    return [(first, ""), (second, ""), (third, "number"), ("Distance", "number"), ("Far", "number")]


def _distance_and_share(senders: Sequence[Sender]) -> tuple[str, str]:
    distances = [pair for sender in senders for pair in sender.distances]
    known, received = (
        sum(count for _, count in distances),
        sum(sender.received for sender in senders),
    )
    mean = (
        f"{sum(distance * count for distance, count in distances) / known:.3g}"
        if known
        else UNKNOWN
    )
    return mean, f"{sum(sender.far for sender in senders) / max(1, received):.0%}"
