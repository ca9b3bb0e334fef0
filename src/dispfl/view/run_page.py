"""The page about one run, a comparison or a sweep: its report, and what happens now."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from shlex import quote

from markupsafe import Markup

from dispfl.files import RUN, SITES, is_locked
from dispfl.report.html import (
    Block,
    Cell,
    Details,
    Heading,
    HtmlPage,
    HtmlTable,
    Hyperlink,
    Remark,
    Section,
)
from dispfl.report.page import CONTENTS, report_page
from dispfl.report.results import group_runs
from dispfl.report.runs import RecordedRun
from dispfl.report.wording import join_and, plural
from dispfl.runs.progress_file import RunProgress, read_progress
from dispfl.view.folders import WatchedFolders, address_part
from dispfl.view.list_page import (
    HEADINGS,
    ActivityMark,
    overview_cells,
    page_address,
    time_text,
)
from dispfl.view.overview import (
    UNREADABLE,
    Activity,
    RunOverview,
    overview_of,
    read_run_for_page,
    reason_of,
    run_signature,
    site_folders,
    site_status,
    unreadable_overview,
)

HOME = Hyperlink("All runs", "/")
MAX_RUNS = 500
"""Runs that one page compares."""
MAX_NAMED = 40
"""Peers that a sentence names."""
MAX_MARKED = 200
"""Peers that have a mark each."""
NOW = "now"


Runs = dict[Path, RecordedRun | Exception]
"""Runs as they were read, or why they cannot be."""


@dataclass
class _Report:
    """A report as it was last drawn."""

    signature: object
    runs: Runs
    page: HtmlPage


@dataclass
class _DrawnSection(Section):
    """A section that is HTML already."""

    html: Markup = field(default_factory=Markup)

    def __html__(self) -> Markup:
        return self.html


def _drawn(section: Section) -> Section:
    return _DrawnSection(section.name, section.heading, html=section.__html__())


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
            runs = self._read()
            self._report = _Report(signature, runs, self._draw(runs))
        report = self._report
        return replace(
            report.page,
            sections=[self._now_or_problem(report.runs), *report.page.sections],
            contents={NOW: "Now", **CONTENTS},
            kicker=self.address,
            home=HOME,
        )

    def _read(self) -> Runs:
        """Return each run, or why it cannot be read."""
        runs: Runs = {}
        for path in self.paths[:MAX_RUNS]:
            try:
                runs[path] = read_run_for_page(path)
            except UNREADABLE as problem:
                runs[path] = problem
        return runs

    def _draw(self, runs: Runs) -> HtmlPage:
        """Draw the report; of runs that cannot be read or have no round yet, say so."""
        if len(self.paths) > MAX_RUNS:
            return self._without_report(
                f"{len(self.paths)} runs are too many for one page of at most {MAX_RUNS}; open one"
                " of the folders in it."
            )
        readable = [run for run in runs.values() if isinstance(run, RecordedRun)]
        problems = []
        for path, run in runs.items():
            if isinstance(run, Exception):
                problems.append(f"{self._address_of(path)}: {reason_of(path, run)}")
        if not any(run.records for run in readable):
            if readable or not problems:
                problems.append(self._why_no_round())
            return self._without_report(*problems)
        try:
            page = self._report_of(readable)
        except UNREADABLE as problem:
            undrawable = self._undrawable(readable)
            if undrawable:
                return self._draw(runs | undrawable)
            return self._without_report(*problems, reason_of(self.paths[0], problem))
        if problems:
            section = Section("problems", "Runs that cannot be read")
            for text in problems:
                section.remark(text)
            page = replace(page, sections=[section, *page.sections])
        return page

    def _report_of(self, runs: Sequence[RecordedRun]) -> HtmlPage:
        """Return the report with its sections as HTML."""
        page = report_page(group_runs(runs), self._root / "report.html")
        return replace(page, sections=list(map(_drawn, page.sections)))

    def _undrawable(self, runs: Sequence[RecordedRun]) -> Runs:
        """Return why those runs cannot be drawn of which there is no report, not even alone."""
        problems: Runs = {}
        for run in runs:
            try:
                if run.records:
                    self._report_of([run])
            except UNREADABLE as problem:
                problems[run.path] = problem
        return problems

    def _why_no_round(self) -> str:
        if any(map(site_folders, self.paths)):
            return "The report follows once all peers have finished."
        return "No round is finished yet."

    def _without_report(self, *sentences: str) -> HtmlPage:
        section = Section("report", "No report yet")
        for sentence in sentences:
            section.remark(sentence)
        name = self.address.rpartition("/")[2]
        return HtmlPage(name, "", [section], CONTENTS)

    def _now_or_problem(self, runs: Runs) -> Section:
        try:
            return self._now(runs)
        except UNREADABLE as problem:
            section = Section(NOW, "Now")
            section.remark(reason_of(self.paths[0], problem))
            return section

    def _now(self, runs: Runs) -> Section:
        section = Section(NOW, "Now")
        if len(self.paths) == 1:
            [(path, run)] = runs.items()
            section.add(*_run_now(path, run))
        else:
            section.add(*self._runs_now(runs))
        for path in runs:
            sites = self._sites_of(path)
            if sites:
                section.add(sites)
        return section

    def _runs_now(self, runs: Runs) -> Iterator[Block]:
        """Yield the runs that are not finished, and below them all others."""
        unfinished = HtmlTable("Runs that are not finished", HEADINGS, kind="cards runs")
        finished = HtmlTable("Finished runs", HEADINGS, kind="cards runs")
        for path, run in runs.items():
            shown = _overview(path, run)
            table = finished if shown.activity is Activity.FINISHED else unfinished
            table.rows.append(self._cells(path, shown))
        yield Remark(f"{len(finished.rows)} of {plural(len(runs), 'run')} finished.")
        if unfinished.rows:
            yield unfinished
        if finished.rows:
            yield Details("Finished runs", finished)

    def _cells(self, path: Path, shown: RunOverview) -> list[Cell]:
        address = self._address_of(path)
        return [
            Hyperlink(address.removeprefix(f"{self.address}/"), page_address(address)),
            *overview_cells(shown),
        ]

    def _address_of(self, path: Path) -> str:
        parts = path.relative_to(self._root).parts
        return "/".join([self.address.partition("/")[0], *map(address_part, parts)])

    def _sites_of(self, path: Path) -> Block | None:
        """Return the sites of a run of `dispfl up`; None if it has none."""
        headings = [Heading("Peer"), Heading("State"), Heading("Round", "number")]
        headings += [Heading("Score", "number"), Heading("Models missed", "number")]
        table = HtmlTable("Peers, each a process of its own", headings, kind="cards runs")
        for site in site_folders(path):
            status = site_status(site)
            peers = status.get("peers", {})
            missed = sum(peer["missed"] for peer in peers.values())
            score = status.get("score")
            state = str(status.get("state", "starting"))
            if status and not is_locked(site / RUN) and not state.startswith("finished"):
                state = "not running"
            table.rows.append(
                [
                    Hyperlink(
                        site.name, page_address(f"{self._address_of(path)}/{SITES}/{site.name}")
                    ),
                    state,
                    str(status.get("round", "–")),
                    "–" if score is None else f"{score:.3f}",
                    str(missed),
                ]
            )
        return table if table.rows else None


def _overview(path: Path, run: RecordedRun | Exception) -> RunOverview:
    if isinstance(run, Exception):
        return unreadable_overview(path, run)
    return overview_of(run)


def _run_now(path: Path, run: RecordedRun | Exception) -> Iterator[Block]:
    """Yield what a run does, and which peers have finished the present round."""
    shown = _overview(path, run)
    yield ActivityMark(shown.activity)
    if isinstance(run, Exception):
        yield Remark(shown.detail)
        return
    finished = f"{shown.rounds} of {plural(shown.all_rounds, 'round')} finished"
    if shown.seconds_left is not None:
        finished += f", {time_text(shown.seconds_left)} left"
    if shown.rounds or not site_folders(path):  # else the peers know better
        yield Remark(f"{finished}. {shown.detail}".strip())
    progress = read_progress(path)
    if shown.activity is Activity.RUNNING and progress is not None:
        yield PeersNow.of(run, progress)
    elif shown.activity in (Activity.STOPPED, Activity.FAILED) and not run.finished:
        yield Remark(f"Resume it with: {resume_command(path)}")


def resume_command(path: Path) -> str:
    """Return the command that continues a run."""
    command = "up" if site_folders(path) else "run"
    return f"dispfl {command} --resume {quote(str(path))}"


@dataclass(frozen=True)
class PeersNow(Block):
    """A mark for each peer, if there are not too many: finished with the present round, or not."""

    template = "peers_now.html"
    text: str
    finished: Sequence[str]
    others: Sequence[str]

    @classmethod
    def of(cls, run: RecordedRun, progress: RunProgress) -> "PeersNow":
        """Return the marks of a running run."""
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
        if len(run.roster) > MAX_MARKED:
            return cls(text, [], [])
        return cls(text, finished, others)
