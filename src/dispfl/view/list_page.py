"""The first page: all runs below the folders, running ones first, and the sites."""

import hashlib
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from urllib.parse import quote

from markupsafe import Markup

from dispfl.report.charts import coordinate, element, thin_out
from dispfl.report.html import Block, Cell, Heading, HtmlPage, HtmlTable, Hyperlink, Section
from dispfl.report.wording import UNKNOWN, plural
from dispfl.view.folders import FoundFolders, WatchedFolders
from dispfl.view.overview import (
    Activity,
    RunOverview,
    overview,
    quick_overview,
    run_signature,
)

READ_SECONDS = 0.7
"""How long one look at the folders may read runs; the next look continues."""
SPARK_POINTS = 40
SPARK_WIDTH = 120.0
SPARK_HEIGHT = 24.0
RUNNING = "running-now"
HEADINGS = (
    Heading("Run"),
    Heading("State"),
    Heading("Round", "number"),
    Heading("Time left", "number"),
    Heading("Score", "number"),
    Heading("Curve"),
)


def page_address(address: str) -> str:
    """Return the address of the page about a run, a folder of runs or a site."""
    return f"/page/{quote(address)}"


@dataclass(frozen=True)
class ActivityMark(Block):
    """The state of a run as a word behind a sign, and what is to be said about it."""

    template = "activity.html"
    activity: Activity
    detail: str = ""

    @property
    def sign(self) -> str:
        return {"running": "●", "finished": "✓", "stopped": "■", "failed": "✗"}[self.activity]


@dataclass
class _KnownRun:
    signature: object
    overview: RunOverview


class RunList:
    """The overviews of all runs, read again where a file has changed."""

    def __init__(self, folders: WatchedFolders) -> None:
        self.folders = folders
        self.found = FoundFolders()
        self._known: dict[str, _KnownRun] = {}

    def look(self) -> None:
        """Search the folders, and read what has changed, for a limited time."""
        self.found = self.folders.search()
        deadline = time.monotonic() + READ_SECONDS
        for address in self._known.keys() - self.found.runs.keys():
            del self._known[address]
        for address, path in self.found.runs.items():
            self._read(address, path, deadline)
        for address, path in self.found.runs.items():
            if time.monotonic() >= deadline:
                return
            known = self._known.get(address)
            if known and known.overview.curve is None:
                known.overview = overview(path)

    def _read(self, address: str, path: Path, deadline: float) -> None:
        present = run_signature(path)
        known = self._known.get(address)
        if known and known.signature == present:
            return
        if known or time.monotonic() < deadline:
            self._known[address] = _KnownRun(present, quick_overview(path))

    def overview_of(self, address: str) -> RunOverview | None:
        """Return the overview of a run; None if it was not read yet."""
        known = self._known.get(address)
        return known.overview if known else None

    def page(self) -> HtmlPage:
        """Return the page."""
        running = [address for address in self.found.runs if self._is_running(address)]
        sections = []
        if running:
            section = Section(RUNNING, "Running now")
            section.add(self._table("Runs that make rounds", "", running))
            sections.append(section)
        for group, addresses in self.found.groups().items():
            waiting = [address for address in addresses if not self._is_running(address)]
            if waiting or len(addresses) > 1:
                sections.append(self._group(group, addresses, waiting))
        if self.found.sites:
            sections.append(self._sites())
        if not sections:
            section = Section("empty", "No runs yet")
            section.remark("Runs appear here as soon as one is started below these folders.")
            sections.append(section)
        count = plural(len(self.found.runs), "run")
        roots = ", ".join(map(str, self.folders.roots.values()))
        return HtmlPage(
            title=f"{count}, {len(running)} running",
            headline=roots,
            sections=sections,
            contents={},
            kicker="dispfl view",
        )

    def _is_running(self, address: str) -> bool:
        known = self._known.get(address)
        return known is not None and known.overview.activity is Activity.RUNNING

    def _group(self, group: str, addresses: Sequence[str], shown: Sequence[str]) -> Section:
        heading = group or shown[0]
        section = Section(anchor(group), heading)
        below = len(self.found.runs_below(group))
        if group and below > 1:
            text = "Compare all of these runs"
            if below > len(addresses):
                text = f"Compare all {below} runs below {group}"
            section.add(PageLink(Hyperlink(text, page_address(group))))
        if shown:
            section.add(self._table(f"Runs in {heading}", group, shown))
        return section

    def _table(self, caption: str, group: str, addresses: Iterable[str]) -> HtmlTable:
        table = HtmlTable(caption, HEADINGS, kind="cards runs")
        for address in addresses:
            name = address.removeprefix(f"{group}/") if group else address
            table.rows.append(list(self._cells(address, name)))
        return table

    def _cells(self, address: str, name: str) -> Iterator[Cell]:
        yield Hyperlink(name, page_address(address))
        shown = self.overview_of(address)
        if shown is None:
            yield from ["not read yet", UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN]
            return
        yield from overview_cells(shown)

    def _sites(self) -> Section:
        section = Section("sites", "Sites")
        table = HtmlTable("Sites of real federations", [Heading("Site"), Heading("Folder")])
        for address, path in self.found.sites.items():
            table.rows.append([Hyperlink(address, page_address(address)), str(path)])
        section.add(table)
        return section


def anchor(address: str) -> str:
    """Return the anchor of a folder's section: the same every time, whatever its name is."""
    return f"folder-{hashlib.blake2b(address.encode(), digest_size=6).hexdigest()}"


def overview_cells(shown: RunOverview) -> Iterator[Cell]:
    """Yield the cells of a run behind its name, for tables with these headings."""
    yield ActivityMark(shown.activity, shown.detail)
    yield f"{shown.rounds} of {shown.all_rounds}" if shown.all_rounds else UNKNOWN
    yield UNKNOWN if shown.seconds_left is None else time_text(shown.seconds_left)
    yield f"{shown.metric} {shown.score}" if shown.all_rounds else UNKNOWN
    yield Spark(shown.curve or ())


def time_text(seconds: float) -> str:
    """`about 3 min`."""
    for unit, length in (("days", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"about {seconds / length:.0f} {unit}"
    return f"about {seconds:.0f} s"


@dataclass(frozen=True)
class PageLink(Block):
    """A link in a paragraph of its own."""

    template = "page_link.html"
    link: Hyperlink


@dataclass(frozen=True)
class Spark(Block):
    """A curve as small as a word."""

    template = "spark.html"
    values: Sequence[float]

    @property
    def drawing(self) -> Markup:
        """The line, from the first round to the last one."""
        values = thin_out([value for value in self.values if isfinite(value)], SPARK_POINTS)
        if len(values) < 2:
            return Markup("")
        return element(
            "svg",
            element("path", d=spark_path(values), class_="line s0"),
            class_="spark",
            viewBox=f"0 0 {SPARK_WIDTH:g} {SPARK_HEIGHT:g}",
            role="img",
            aria_label=f"Score from {values[0]:.3g} to {values[-1]:.3g}",
        )


def spark_path(
    values: Sequence[float], width: float = SPARK_WIDTH, height: float = SPARK_HEIGHT
) -> str:
    """Return the path of values at equal distances, from the lowest to the highest."""
    low = min(values)
    extent = max(values) - low or 1.0
    points = []
    for number, value in enumerate(values):
        x = 2 + (width - 4) * number / max(1, len(values) - 1)
        y = height - 2 - (height - 4) * (value - low) / extent
        points.append(f"{coordinate(x)} {coordinate(y)}")
    return "M" + "L".join(points)
