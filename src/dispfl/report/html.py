"""The building blocks of HTML pages: plain values here, their layout in `templates/`.

A block becomes HTML where a template inserts it. All other text is escaped when it is inserted, so
the contents of files cannot become tags.
"""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib.resources import files
from typing import Any, ClassVar

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from dispfl.report.charts import Curve, line_chart
from dispfl.report.comparison import ComparisonRow
from dispfl.runs.metrics import main_scores, measure_of

COLOURS = 9


@cache
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("dispfl.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def render(template: str, **values: Any) -> Markup:
    """Return a template of `templates/`, filled in."""
    return Markup(_environment().get_template(template).render(**values))


class Block:
    """A part of the page with a template of its own, which has the block as `block`."""

    template: ClassVar[str]

    def __html__(self) -> Markup:
        return render(self.template, block=self)

    def __str__(self) -> str:
        return self.__html__()


def css_class(row: ComparisonRow) -> str:
    """Return the classes for a row's colour, after the ninth another dash pattern, and the row."""
    colour = f"s{row.position % COLOURS}"
    if row.position >= COLOURS:
        colour += " repeated"
    return f"{colour} r{row.position}"


@dataclass(frozen=True)
class RowLabel(Block):
    """The label of a row beside a short piece of its line."""

    template = "row_label.html"
    row: ComparisonRow

    @property
    def css_class(self) -> str:
        return css_class(self.row)


@dataclass(frozen=True)
class ColourLegend(Block):
    """A list of rows with their colours."""

    template = "legend.html"
    rows: Sequence[ComparisonRow]

    @property
    def labels(self) -> list[RowLabel]:
        return list(map(RowLabel, self.rows))


@dataclass(frozen=True)
class Remark(Block):
    """A paragraph in small print."""

    template = "remark.html"
    text: str


@dataclass(frozen=True)
class Figure:
    """A chart, or another block, below its title and a note."""

    title: str
    content: Markup | Block
    note: str = ""
    rows: Sequence[ComparisonRow] = ()
    """The rows without which there is nothing to see."""
    metric: str = ""
    """The metric that it shows, if there is a figure for each."""

    @property
    def row_keys(self) -> str:
        """The positions of these rows."""
        return " ".join(str(row.position) for row in self.rows)


@dataclass(frozen=True)
class Figures(Block):
    """Figures side by side where there is room: `two` large ones, or `many` small ones."""

    template = "figures.html"
    figures: Sequence[Figure]
    kind: str = "two"


@dataclass(frozen=True)
class Heading:
    """The heading of a column and the CSS classes of its cells."""

    text: str
    css_class: str = ""
    metric: str = ""
    """The metric of the column, if rows can be sorted by it."""
    better: str = ""
    """`higher` or `lower`."""


Cell = str | Block


@dataclass
class HtmlTable(Block):
    """A table whose first column has the headings of its rows.

    On a phone, `cards` become one card per row, so cells carry their headings; the roles keep them
    a table for screen readers.
    """

    template = "table.html"
    caption: str
    headings: Sequence[Heading]
    rows: list[Sequence[Cell]] = field(default_factory=list)
    kind: str = "plain"
    best: set[int] = field(default_factory=set)
    """Indices of the best rows."""
    keys: Sequence[int] = ()
    """The positions of the rows of a comparison that the table's rows are about."""


@dataclass(frozen=True)
class Details(Block):
    """A collapsed table."""

    template = "details.html"
    summary: str
    table: HtmlTable


@dataclass
class Section(Block):
    """A part of the page with an anchor and a heading."""

    template = "section.html"
    name: str
    heading: str
    blocks: list[Block] = field(default_factory=list)

    def add(self, *blocks: Block) -> None:
        self.blocks += blocks

    def remark(self, text: str) -> None:
        self.blocks.append(Remark(text))


# A whole page


@cache
def page_script() -> Markup:
    """Return the script of all pages, which is ours: no text of a run is ever in it."""
    return Markup(files("dispfl.report").joinpath("templates", "page.js").read_text())


def content_policy(*, live: bool = False) -> str:
    """Return what a page may load: nothing but what is in it, and no script but ours.

    A live page may also ask its own server for what has changed.
    """
    digest = base64.b64encode(hashlib.sha256(page_script().encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline';"
        " img-src data:; base-uri 'none'; form-action 'self'"
    )
    return f"{policy}; connect-src 'self'" if live else policy


@dataclass(frozen=True)
class Hyperlink(Block):
    """A link to another page."""

    template = "link.html"
    text: str
    address: str


@dataclass(frozen=True)
class HtmlPage(Block):
    """A page: its top, and sections with a table of contents."""

    template = "page.html"
    title: str
    headline: str
    sections: Sequence[Section]
    contents: Mapping[str, str]
    """The names of sections in the table of contents."""
    summary: Block | None = None
    kicker: str = "dispfl report"
    home: Hyperlink | None = None

    @cached_property
    def parts(self) -> dict[str, Markup]:
        """The top and the sections as HTML, by their anchors, in order."""
        parts = {"top": render("top.html", block=self)}
        for section in self.sections:
            parts[section.name] = section.__html__()
        return parts

    def html(self, events: str = "") -> Markup:
        """Return the whole page; a live one asks for its changes at the address of `events`."""
        policy = Markup(content_policy(live=bool(events)))
        return render(self.template, block=self, events=events, policy=policy, script=page_script())

    def __html__(self) -> Markup:
        return self.html()


# A run in a notebook


def run_markup(title: str, records: Sequence[Mapping[str, Any]]) -> str:
    """Return a title and the learning curve of a run, as HTML that affects nothing else.

    The curve is the main metric, mean over peers, with a band of one standard deviation.
    """
    metric = measure_of(records).name
    trained = Curve(metric)
    mixed = Curve(f"{metric} after mixing", secondary=True)
    for record in records:
        scores = main_scores(record)
        if scores:
            trained.add(record["round"] + 1, scores["mean"], scores["std"])
        if record["mixed"]:
            mixed.add(record["round"] + 1, record["mixed"]["mean"])

    chart = None
    curves = [curve for curve in (trained, mixed) if curve.x]
    if curves:
        y_label = f"{metric}, mean over peers"
        if mixed.x:
            y_label += " (dashed: after mixing)"
        chart = line_chart(curves, "round", y_label, whole_x=True, x_word="round")
    return render("notebook.html", title=title, chart=chart)
