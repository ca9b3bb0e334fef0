"""How far received models were from the receivers' own, under a robust rule."""

from collections.abc import Sequence
from dataclasses import dataclass

from dispfl.report.comparison import ComparisonRow
from dispfl.report.html import Block, Details, Figure, Figures, Heading, HtmlTable
from dispfl.report.results import ReportResults
from dispfl.report.runs import RecordedRun
from dispfl.report.wording import UNKNOWN
from dispfl.runs.metrics import byzantine_of

MAX_SENDERS = 20
"""Senders that are listed for each row."""


@dataclass
class Senders:
    """One or more senders, as their receivers measured them over all rounds."""

    count: int = 0
    """How many peers."""
    received: int = 0
    """How often they were received."""
    far: int = 0
    """How often they were clipped or ignored."""
    measured: int = 0
    """How many of the received models have a distance."""
    total_distance: float = 0.0

    def add(self, senders: "Senders") -> None:
        self.count += senders.count
        self.received += senders.received
        self.far += senders.far
        self.measured += senders.measured
        self.total_distance += senders.total_distance

    @property
    def far_share(self) -> float:
        return self.far / max(1, self.received)

    @property
    def cells(self) -> list[str]:
        """The mean distance and how often they were far."""
        distance = UNKNOWN
        if self.measured:
            distance = f"{self.total_distance / self.measured:.3g}"
        return [distance, f"{self.far_share:.0%}"]


@dataclass
class Sender(Senders):
    """A single sender."""

    name: str = ""
    seed: int = 0
    byzantine: bool = False


def senders_of(run: RecordedRun) -> list[Sender]:
    """Return all peers that were received, in the order of their names.

    There are none if the run has no robust rule.
    """
    byzantine = byzantine_of(run.config)
    senders: dict[str, Sender] = {}
    for record in run.records:
        for name, reception in record.get("senders", {}).items():
            if name not in senders:
                senders[name] = Sender(1, name=name, seed=run.seed, byzantine=name in byzantine)
            sender = senders[name]
            received = reception["received"]
            distance = reception["distance"]
            sender.received += received
            sender.far += reception["far"]
            if distance is not None:
                sender.measured += received
                sender.total_distance += distance * received
    return [senders[name] for name in sorted(senders)]


def sender_blocks(results: ReportResults) -> list[Block]:
    """Return how far honest and Byzantine senders were, and who was far most often.

    There is nothing if no run has a robust rule.
    """
    table = HtmlTable("Senders under a robust rule", _sender_headings("Row", "Senders", "Number"))
    lists: list[Block] = []
    for row in results.rows:
        senders: list[Sender] = []
        for run in row.runs:
            senders += senders_of(run)
        if senders:
            for group_name, group in _sender_groups(senders).items():
                table.rows.append([row.label, group_name, str(group.count), *group.cells])
            lists.append(_most_often_far(row, senders))
    if not lists:
        return []
    note = (
        "Distance: root mean square difference to a receiver's own weights, on what both hold; mean"
        " over receivers and rounds. Far: how often a sender was beyond the rule's threshold, so"
        " that it was clipped, or did not decide weights that few hold."
    )
    return [Figures([Figure("Distances of senders", table, note)]), *lists]


def _sender_groups(senders: Sequence[Sender]) -> dict[str, Senders]:
    """Return honest and Byzantine senders; all together if there is no attack."""
    honest = Senders()
    byzantine = Senders()
    for sender in senders:
        if sender.byzantine:
            byzantine.add(sender)
        else:
            honest.add(sender)
    if not byzantine.count:
        return {"all": honest}
    if not honest.count:
        return {"Byzantine": byzantine}
    return {"honest": honest, "Byzantine": byzantine}


def _most_often_far(row: ComparisonRow, senders: Sequence[Sender]) -> Details:
    title = f"Senders that were far most often: {row.label}"
    table = HtmlTable(title, _sender_headings("Peer", "", "Received"))
    ranked = sorted(senders, key=lambda sender: (-sender.far_share, sender.seed, sender.name))
    for sender in ranked[:MAX_SENDERS]:
        name = sender.name
        if len(row.runs) > 1:
            name += f" (seed {sender.seed})"
        role = "Byzantine" if sender.byzantine else ""
        table.rows.append([name, role, str(sender.received), *sender.cells])
    return Details(title, table)


def _sender_headings(first: str, second: str, third: str) -> list[Heading]:
    numbers = [Heading(third, "number"), Heading("Distance", "number"), Heading("Far", "number")]
    return [Heading(first), Heading(second), *numbers]
