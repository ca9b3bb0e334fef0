"""The page about one run, a comparison or a sweep: its report, and what happens now."""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dispfl.errors import DispflError
from dispfl.files import RUN, SITES, is_locked, is_site, read_regular
from dispfl.report.html import Block, Heading, HtmlPage, HtmlTable, Link, Remark, Section
from dispfl.report.page import CONTENTS, report_page
from dispfl.report.results import group_runs
from dispfl.report.runs import RecordedRun, read_run
from dispfl.report.wording import capitalized, join_and, plural
from dispfl.runs.progress_file import RunProgress, read_progress
from dispfl.view.folders import WatchedFolders
from dispfl.view.list_page import ActivityMark, page_address, time_text
from dispfl.view.overview import (
    UNREADABLE,
    Activity,
    activity_of,
    is_active,
    overview,
    run_signature,
    seconds_left,
)

HOME = Link("All runs", "/")
MAX_RUNS = 500
"""Runs that one page compares."""
MAX_NAMED = 40
"""Peers that a sentence names."""
NOW = "now"


@dataclass
class _Report:
    """A report as it was last drawn."""

    signature: object
    page: HtmlPage


class RunPage:
    """The page about the runs at an address; the report is drawn again when a round is finished."""

    def __init__(self, address: str, paths: Sequence[Path], folders: WatchedFolders) -> None:
        self.address = address
        self.paths = list(paths)
        self._root = folders.roots[address.partition("/")[0]]
        self._report: _Report | None = None

    def page(self) -> HtmlPage:
        """Return the page as it is now."""
        signature = [run_signature(path) for path in self.paths]
        if self._report is None or self._report.signature != signature:
            self._report = _Report(signature, self._draw())
        page = self._report.page
        sections = [self._now(), *page.sections]
        contents = {NOW: "Now", **CONTENTS}
        return replace(
            page,
            sections=sections,
            contents=contents,
            kicker=self.address,
            home=HOME,
        )

    def _draw(self) -> HtmlPage:
        """Draw the report; of runs that cannot be read or have no round yet, say so."""
        if len(self.paths) > MAX_RUNS:
            return _without_report(
                f"{len(self.paths)} runs are too many for one page of at most {MAX_RUNS}; open one"
                " of the folders in it."
            )
        runs = []
        problems = []
        for path in self.paths:
            try:
                runs.append(read_run(path))
            except UNREADABLE as problem:
                problems.append(_sentence(path, problem))
        try:
            if not any(run.records for run in runs):
                return _without_report(*problems, "No round is finished yet.")
            page = report_page(group_runs(runs), self._root / "report.html")
            _ = page.parts  # a template shows what a file is damaged with only now
        except UNREADABLE as problem:
            return _without_report(*problems, _sentence(self.paths[0], problem))
        if problems:
            section = Section("problems", "Runs that cannot be read")
            for text in problems:
                section.remark(text)
            page = replace(page, sections=[section, *page.sections])
        return page

    def _now(self) -> Section:
        section = Section(NOW, "Now")
        if len(self.paths) == 1:
            section.add(*_run_now(self.paths[0]))
        else:
            section.add(self._table())
        for path in self.paths:
            sites = self._sites_of(path)
            if sites:
                section.add(sites)
        return section

    def _table(self) -> HtmlTable:
        headings = [Heading("Run"), Heading("State"), Heading("Round", "number")]
        headings += [Heading("Time left", "number"), Heading("Score", "number")]
        table = HtmlTable("What the runs do", headings, kind="cards runs", scrolling=True)
        for path in self.paths:
            name = self._address_of(path)
            shown = overview(path)
            left = "–" if shown.seconds_left is None else time_text(shown.seconds_left)
            table.rows.append(
                [
                    Link(name.removeprefix(f"{self.address}/"), page_address(name)),
                    ActivityMark(shown.activity, shown.detail),
                    f"{shown.rounds} of {shown.all_rounds}" if shown.all_rounds else "–",
                    left,
                    f"{shown.metric} {shown.score}".strip(),
                ]
            )
        return table

    def _address_of(self, path: Path) -> str:
        relative = path.relative_to(self._root)
        return "/".join([self.address.partition("/")[0], *relative.parts])

    def _sites_of(self, path: Path) -> Block | None:
        """Return the sites of a run of `dispfl up`; None if it has none."""
        headings = [Heading("Peer"), Heading("State"), Heading("Round", "number")]
        headings += [Heading("Score", "number"), Heading("Models missed", "number")]
        table = HtmlTable("Peers, each a process of its own", headings, kind="cards runs")
        for site in site_folders(path):
            status = _site_status(site)
            peers = status.get("peers", {})
            missed = sum(peer["missed"] for peer in peers.values())
            score = status.get("score")
            state = str(status.get("state", "starting"))
            if status and not is_locked(site / RUN) and not state.startswith("finished"):
                state = "not running"
            table.rows.append(
                [
                    Link(site.name, page_address(f"{self._address_of(path)}/{SITES}/{site.name}")),
                    state,
                    str(status.get("round", "–")),
                    "–" if score is None else f"{score:.3f}",
                    str(missed),
                ]
            )
        return table if table.rows else None


def site_folders(path: Path) -> list[Path]:
    """Return the folders of the sites of a run of `dispfl up`."""
    try:
        return sorted(site for site in (path / SITES).iterdir() if is_site(site))
    except OSError:
        return []


def _site_status(site: Path) -> dict[str, Any]:
    """Return what the node of a site last wrote; nothing if it cannot be read."""
    try:
        status = json.loads(read_regular(site / RUN / "status.json"))
        sum(peer["missed"] for peer in status["peers"].values())
        float(status["score"] or 0)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}
    return dict(status)


def _sentence(path: Path, problem: Exception) -> str:
    if isinstance(problem, DispflError):
        return str(problem)
    return f"The files of {path} are damaged ({type(problem).__name__})."


def _without_report(*sentences: str) -> HtmlPage:
    section = Section("report", "No report yet")
    for sentence in sentences:
        section.remark(sentence)
    return HtmlPage("No report yet", "", [section], CONTENTS)


def _run_now(path: Path) -> Iterator[Block]:
    """Yield what a run does, and which peers have finished the present round."""
    progress = read_progress(path)
    try:
        run = read_run(path)
        activity = activity_of(path, run.summary, progress)
    except UNREADABLE:
        activity = Activity.RUNNING if is_active(path) else Activity.FAILED
        yield ActivityMark(activity)
        return
    finished = f"{len(run.records)} of {plural(run.config['rounds'], 'round')} finished"
    left = seconds_left(run, progress) if activity is Activity.RUNNING else None
    if left is not None:
        finished += f", {time_text(left)} left"
    detail = overview(path).detail
    yield ActivityMark(activity)
    yield Remark(f"{capitalized(finished)}. {detail}".strip())
    if activity is Activity.RUNNING and progress is not None:
        yield PeersNow.of(run, progress)
    elif activity is Activity.STOPPED:
        yield Remark(f"Resume it with: dispfl run --resume {path}")


@dataclass(frozen=True)
class PeersNow(Block):
    """A square for each peer: finished with the present round, or not yet."""

    template = "peers_now.html"
    text: str
    finished: Sequence[str]
    others: Sequence[str]

    @classmethod
    def of(cls, run: RecordedRun, progress: RunProgress) -> "PeersNow":
        """Return the squares of a running run."""
        done = set(progress.finished)
        finished = [peer for peer in run.roster if peer in done]
        others = [peer for peer in run.roster if peer not in done]
        seconds = max(0.0, time.time() - progress.began)
        text = (
            f"Round {progress.round + 1} since {seconds:.0f} s: {len(finished)} of"
            f" {plural(len(run.roster), 'peer')} have finished their step."
        )
        if others and finished and len(others) <= MAX_NAMED:
            text += f" Still to train: {join_and(others)}."
        return cls(text, finished, others)
