"""The page of a real site, from its folder alone: what its operator needs to see.

The node may run or not; nothing is written, and no other site is asked. `dispfl peer doctor` checks
more: data, training, memory and every member on the network.
"""

import datetime
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from dispfl.files import RUN, open_regular
from dispfl.report.charts import Curve, line_chart
from dispfl.report.html import (
    Block,
    Figure,
    Figures,
    Heading,
    HtmlPage,
    HtmlTable,
    Hyperlink,
    Section,
)
from dispfl.report.units import bytes_text
from dispfl.report.wording import UNKNOWN
from dispfl.runs.directory import read_metrics
from dispfl.runs.metrics import main_scores, measure_of
from dispfl.view.overview import UNREADABLE, check_files

if TYPE_CHECKING:
    from dispfl.peer.doctor.findings import Finding
    from dispfl.peer.site import Site
    from dispfl.peer.state.site_status import SiteStatus

MAX_ROUNDS = 12
"""The last rounds that the table shows."""
MAX_LOG_CHARS = 8000
LOG_FILE = "log.txt"
"""Of the sites of `dispfl up`, which have no terminal."""
CONTENTS = {
    "site": "Now",
    "checks": "Checks",
    "rounds": "Rounds",
    "members": "Members",
    "refused": "Refused",
    "log": "Log",
}
SIGNS = {"ok": "✓", "warning": "!", "failure": "✗"}


@dataclass(frozen=True)
class LogTail(Block):
    """The last lines of a log."""

    template = "log.html"
    text: str


@dataclass(frozen=True)
class FindingMark(Block):
    """How good or bad a finding is, as a word behind a sign."""

    template = "finding.html"
    level: str

    @property
    def sign(self) -> str:
        return SIGNS[self.level]


class SitePage:
    """The page of the site in a folder."""

    def __init__(self, folder: Path, home: Hyperlink | None) -> None:
        self._folder = folder
        self._home = home

    def page(self) -> HtmlPage:
        """Return the page as it is now."""
        from dispfl.peer.site import Site
        from dispfl.peer.state.site_status import SiteStatus

        try:
            check_files(self._folder / RUN)
            site = Site.open(self._folder)
            status = SiteStatus.of(site)
            sections = self._sections(site, status)
        except UNREADABLE as problem:
            section = Section("site", "This site cannot be read")
            section.remark(str(problem))
            return HtmlPage(
                self._folder.name, str(self._folder), [section], {}, None, "site", self._home
            )
        return HtmlPage(
            title=f"{status.name}: {status.state}",
            headline=f"federation {status.federation} · reached at {status.address}",
            sections=sections,
            contents=CONTENTS,
            kicker=f"site {self._folder}",
            home=self._home,
        )

    def _sections(self, site: "Site", status: "SiteStatus") -> list[Section]:
        node = status.node or {}
        records = read_metrics(self._folder / RUN)
        sections = [
            _now_section(status, self._folder, records),
            _checks_section(site),
            _rounds_section(records),
            _members_section(site, status),
        ]
        if node.get("refused"):
            sections.append(_refused_section(node["refused"]))
        sections.append(_log_section(self._folder, node))
        return sections


def _now_section(
    status: "SiteStatus", folder: Path, records: Sequence[Mapping[str, Any]]
) -> Section:
    from dispfl.peer.membership.identity import readable_fingerprint
    from dispfl.peer.state.status_text import progress_text, status_notes

    section = Section("site", "Now")
    section.remark(progress_text(status, quote(str(folder))))
    if status.score is not None:
        measure = measure_of(records)
        section.remark(f"Score of the personal model: {measure.name} {measure.text(status.score)}.")
    for note in status_notes(status):
        section.remark(note)
    section.remark(f"Fingerprint {' '.join(readable_fingerprint(status.fingerprint))}")
    return section


# Checks that take no time


def _checks_section(site: "Site") -> Section:
    section = Section("checks", "Checks")
    headings = [Heading("Topic"), Heading("Result"), Heading("Finding"), Heading("What to do")]
    table = HtmlTable("What can be checked without data and network", headings)
    for finding in _findings(site):
        table.rows.append(
            [finding.topic, FindingMark(finding.level), finding.text, finding.advice or UNKNOWN]
        )
    section.add(table)
    section.remark(
        f"Data, training, memory and each member are checked by: dispfl peer doctor"
        f" {quote(str(site.folder))}"
    )
    return section


def _findings(site: "Site") -> "Iterator[Finding]":
    from dispfl.peer.doctor.examine import check_key, check_owner
    from dispfl.peer.doctor.findings import check_certificate, failure
    from dispfl.peer.state.store import isolation_problem

    yield from check_owner(site.folder)
    yield check_key(site)
    rotate = f"dispfl peer rotate {quote(str(site.folder))}"
    yield check_certificate("certificate", site.identity.certificate, rotate)
    problem = isolation_problem(site.run_folder)
    if problem:
        yield failure("run", problem, f"dispfl peer reopen {quote(str(site.folder))}")
    for name, member in sorted(site.members.file.current().members.items()):
        ask = f"Ask the operator of {name} to run: dispfl peer rotate"
        finding = check_certificate(name, member.certificate, ask)
        if finding.advice:
            yield finding


# Rounds


def _rounds_section(records: Sequence[Mapping[str, Any]]) -> Section:
    """Return whose models were received, and the score before and after each mix."""
    section = Section("rounds", "Rounds")
    if not records:
        section.remark("No round is finished yet.")
        return section
    measure = measure_of(records)
    trained = Curve("after training", "s0")
    mixed = Curve("after mixing", "s0", secondary=True)
    for record in records:
        number = record["round"] + 1.0
        scores = main_scores(record)
        if scores:
            trained.add(number, scores["mean"])
        if record.get("mixed"):
            mixed.add(number, record["mixed"]["mean"])
    curves = [curve for curve in (trained, mixed) if curve.x]
    if curves:
        chart = line_chart(
            curves, "round", measure.name, whole_x=True, x_word="round", y_format=measure.format
        )
        note = "After training; dashed: after mixing, before training. On this site's test data."
        section.add(Figures([Figure("Score of the personal model", chart, note)]))

    headings = [Heading("Round", "number"), Heading("Received"), Heading("Missed")]
    for title in ("Before mixing", "After mixing", "After training"):
        headings.append(Heading(title, "number"))
    table = HtmlTable("The last rounds, newest first", headings)
    before: dict[int, float | None] = {}
    score: float | None = None
    for record in records:
        before[record["round"]] = score
        scores = main_scores(record)
        score = scores["mean"] if scores else score
    for record in reversed(records[-MAX_ROUNDS:]):
        scores = main_scores(record)
        after_mixing = record.get("mixed")
        table.rows.append(
            [
                str(record["round"] + 1),
                ", ".join(map(str, record.get("received") or ())) or "nobody",
                ", ".join(map(str, record.get("missed") or ())) or UNKNOWN,
                measure.text(before[record["round"]]),
                measure.text(after_mixing["mean"] if after_mixing else None),
                measure.text(scores["mean"] if scores else None),
            ]
        )
    section.add(table)
    return section


# Members


def _members_section(site: "Site", status: "SiteStatus") -> Section:
    """Return each member: its state, how it is reached, its traffic and its certificate."""
    from dispfl.peer.state.status_text import ago_text, latency_text, route_text

    section = Section("members", "Members")
    if not status.members:
        section.remark("No other site is accepted yet.")
        return section
    headings = [Heading(title) for title in ("Member", "State", "Reached", "Seen")]
    for title in ("Round", "Received", "Missed", "Latency", "In", "Out", "Certificate days"):
        headings.append(Heading(title, "number"))
    table = HtmlTable("Members of the federation", headings, kind="cards")
    known = (status.node or {}).get("peers") or {}
    entries = site.members.file.current().members
    for member in status.members:
        peer = known.get(member.name, {})
        state = member.state if member.by == "hand" else f"{member.state} by roster"
        if peer.get("unreachable"):
            state += ", unreachable"
        round_number = peer.get("round", -1)
        table.rows.append(
            [
                member.name,
                state,
                f"{member.address or UNKNOWN}, {route_text(peer.get('route'))}",
                ago_text(peer.get("last_seen")) or UNKNOWN,
                str(round_number) if round_number >= 0 else UNKNOWN,
                str(peer.get("answered", 0)),
                str(peer.get("missed", 0)),
                latency_text(peer),
                bytes_text(peer.get("received_bytes", 0)),
                bytes_text(peer.get("sent_bytes", 0)),
                str(_days_left(entries[member.name].certificate.not_valid_after_utc)),
            ]
        )
    section.add(table)
    return section


def _days_left(end: datetime.datetime) -> int:
    return (end - datetime.datetime.now(datetime.UTC)).days


def _refused_section(refused: Mapping[str, Mapping[str, int]]) -> Section:
    section = Section("refused", "Refused")
    from dispfl.wire.refusals import refusal_sentences

    headings = [Heading("From"), Heading("Reason"), Heading("Meaning"), Heading("Count", "number")]
    table = HtmlTable("Messages, requests and connections that were refused", headings)
    for name, reasons in sorted(refused.items()):
        for reason, count in sorted(reasons.items()):
            meaning = refusal_sentences().get(reason, UNKNOWN)
            table.rows.append([name, reason, meaning, str(count)])
    section.add(table)
    return section


def _log_section(folder: Path, node: Mapping[str, Any]) -> Section:
    section = Section("log", "Log")
    lines = node.get("log")
    text = ""
    if isinstance(lines, list):
        text = "\n".join(map(str, lines))
    if not text:
        text = _log_tail(folder / LOG_FILE)
    if text:
        section.add(LogTail(text))
    else:
        section.remark("The node has not written any events yet.")
    return section


def _log_tail(file: Path) -> str:
    """Return the end of a log; of a link nothing: it could lead out of the folder."""
    if file.is_symlink():
        return ""
    try:
        with open_regular(file) as log:
            end = log.seek(0, os.SEEK_END)
            log.seek(max(0, end - MAX_LOG_CHARS))
            return log.read().decode(errors="replace")
    except OSError:
        return ""
