"""What sections are built from: headings, figures, legends, tables, remarks."""

from collections.abc import Iterable, Sequence

from dispfl.analysis.report.markup import Markup, element
from dispfl.analysis.report.results import Series


def section(name: str, heading: str, *inside: str) -> Markup:
    """A section with a heading and an anchor."""
    title = element("h2", heading, id=f"{name}-heading")
    return element("section", title, *inside, id=name, aria_labelledby=f"{name}-heading")


def figure(title: str, *inside: str, note: str = "") -> Markup:
    """A chart below its title and what to know when reading it."""
    caption = [element("strong", title), *([element("span", note)] if note else [])]
    return element("figure", element("figcaption", *caption), *inside)


def figures(parts: Iterable[str], kind: str = "two") -> Markup:
    """Figures side by side where there is room: `two` large ones, or `many` small ones."""
    return element("div", *parts, class_=f"figures {kind}")


def remark(text: str) -> Markup:
    """A paragraph of less weight."""
    return element("p", text, class_="remark")


def legend(series: Sequence[Series]) -> Markup:
    """Which colour is which row."""
    items = [element("li", swatch(one), element("span", one.label)) for one in series]
    return element("ul", *items, class_="legend", role="list")


def swatch(series: Series) -> Markup:
    """A piece of the row's line."""
    line = element("path", d="M1 6H25", class_=f"line {series.paint}")
    return element("svg", line, class_="swatch", viewBox="0 0 26 12", width=26, height=12, aria_hidden="true")


def table(
    caption: str,
    headings: Sequence[tuple[str, str]],
    rows: Sequence[Sequence[str]],
    kind: str,
    best: Sequence[int] = (),
) -> Markup:
    """A table: headings with a class for their column, cells as text or Markup, the first of a row its own heading.

    On a phone a table of kind `cards` becomes one card a row, so its cells carry their headings; the roles keep it a
    table for a screen reader then.
    """
    head = [element("th", text, class_=name or None, scope="col", role="columnheader") for text, name in headings]
    body = []
    for number, cells in enumerate(rows):
        parts = [element("th", cells[0], scope="row", role="rowheader")]
        for (text, name), cell in zip(headings[1:], cells[1:], strict=True):
            parts.append(element("td", cell, class_=name or None, data_label=text, role="cell"))
        body.append(element("tr", *parts, class_="best" if number in best else None, role="row"))
    return element(
        "table",
        element("caption", caption),
        element("thead", element("tr", *head, role="row"), role="rowgroup"),
        element("tbody", *body, role="rowgroup"),
        class_=kind,
        role="table",
    )


def details(summary: str, *inside: str) -> Markup:
    """Something to unfold."""
    return element("details", element("summary", summary), element("div", *inside, class_="unfolded"))
