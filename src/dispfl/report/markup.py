"""HTML and SVG as text, and the building blocks of the page.

Text that is not `Markup` is escaped when it is inserted, so the contents of files cannot become
tags.
"""

import os
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from dispfl.report.labels import UNKNOWN
from dispfl.report.results import ReportSeries


class Markup(str):
    """Text that is already HTML."""

    __slots__ = ()


Attribute = str | float | None


def element(tag: str, *children: str, **attributes: Attribute) -> Markup:
    """`element("td", "a<b", class_="number")` is `<td class="number">a&lt;b</td>`; attributes of
    None are omitted."""
    text = "".join(
        f' {_name(key)}="{_value(value)}"' for key, value in attributes.items() if value is not None
    )
    return Markup(f"<{tag}{text}>{join_markup(children)}</{tag}>")


def join_markup(parts: Iterable[str]) -> Markup:
    """Join parts and escape those that are plain text."""
    return Markup("".join(part if isinstance(part, Markup) else escape(part) for part in parts))


def coordinate(number: float) -> str:
    """Return a coordinate with at most one decimal: a tenth of a pixel is fine enough."""
    text = f"{number:.1f}".removesuffix(".0")
    return "0" if text == "-0" else text


def section(name: str, heading: str, *children: str) -> Markup:
    """Return a section with a heading and an anchor."""
    title = element("h2", heading, id=f"{name}-heading")
    return element("section", title, *children, id=name, aria_labelledby=f"{name}-heading")


def figure(title: str, *children: str, note: str = "") -> Markup:
    """Return a chart below its title and a note."""
    caption = [element("strong", title), *([element("span", note)] if note else [])]
    return element("figure", element("figcaption", *caption), *children)


def figures(parts: Iterable[str], kind: str = "two") -> Markup:
    """Return figures side by side where there is room: `two` large ones, or `many` small ones."""
    return element("div", *parts, class_=f"figures {kind}")


def remark(text: str) -> Markup:
    """Return a paragraph in small print."""
    return element("p", text, class_="remark")


def colour_legend(series: Sequence[ReportSeries]) -> Markup:
    """Return a list of the rows with their colours."""
    items = [element("li", swatch(one), element("span", one.label)) for one in series]
    return element("ul", *items, class_="legend", role="list")


def swatch(series: ReportSeries) -> Markup:
    """Return a short piece of the row's line."""
    line = element("path", d="M1 6H25", class_=f"line {series.css_class}")
    return element(
        "svg", line, class_="swatch", viewBox="0 0 26 12", width=26, height=12, aria_hidden="true"
    )


def html_table(
    caption: str,
    headings: Sequence[tuple[str, str]],
    rows: Sequence[Sequence[str]],
    kind: str,
    best: Sequence[int] = (),
) -> Markup:
    """Return a table: headings with a class for their column, cells as text or Markup, the first
    cell as row heading.

    On a phone a table of kind `cards` becomes one card per row, so its cells carry their headings;
    the roles keep it a table for screen readers.
    """
    head = [
        element("th", text, class_=name or None, scope="col", role="columnheader")
        for text, name in headings
    ]
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


def details(summary: str, *children: str) -> Markup:
    """Return a collapsed block."""
    return element(
        "details", element("summary", summary), element("div", *children, class_="details-body")
    )


def _name(key: str) -> str:
    return key.rstrip("_").replace("_", "-")


def _value(value: str | float) -> str:
    return escape(value) if isinstance(value, str) else coordinate(value)


FLOPS_UNITS = ((1e12, "TFLOPs"), (1e9, "GFLOPs"), (1e6, "MFLOPs"))


def plural(number: int, noun: str) -> str:
    """`1 peer`, `2 peers`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def capitalized(word: str) -> str:
    """Return the word with its first letter in upper case and the others unchanged: `F1`,
    `MIoU`."""
    return word[:1].upper() + word[1:]


def format_number(value: float | None, decimals: int) -> str:
    """Return a number with a fixed number of decimals, or a dash for None."""
    return UNKNOWN if value is None else f"{value:.{decimals}f}"


def format_seconds(value: float | None) -> str:
    """Return seconds with three decimals, one for large values and two digits for small ones, or a
    dash for None."""
    if value is None:
        return UNKNOWN
    return f"{value:.2g}" if 0 < value < 0.01 else f"{value:.3f}" if value < 10 else f"{value:.1f}"


def format_amount(value: float) -> str:
    """Return megabytes or FLOPs with two decimals, fewer for large values and two significant
    digits for small ones."""
    if 0 < value < 0.1:
        return f"{value:.2g}"
    decimals = 2 if value < 100 else 1 if value < 1000 else 0
    return f"{value:,.{decimals}f}".replace(",", "\u202f")


def flops_unit_of_largest(values: Sequence[float]) -> tuple[float, str]:
    """Return scale and unit that suit the largest of some FLOPs."""
    largest = max(values, default=0.0)
    return next((unit for unit in FLOPS_UNITS if largest >= 0.1 * unit[0]), FLOPS_UNITS[-1])


def flops_unit_of_smallest(values: Sequence[float]) -> tuple[float, str]:
    """Return scale and unit in which the smallest positive FLOPs are at least 1, where there is
    such a unit."""
    smallest = min((value for value in values if value > 0), default=0.0)
    return next((unit for unit in FLOPS_UNITS if smallest >= unit[0]), FLOPS_UNITS[-1])


def relative_to_page(page: Path, path: Path) -> str:
    """Return a run directory relative to the page's folder: both can be moved, and no home
    directory is shown."""
    relative = os.path.relpath(path.resolve(), page.resolve().parent)
    return path.resolve().name if relative == "." else relative


def format_ratio(value: float, other: float, label: str) -> str:
    """`51 % of D-PSGD's`, `as much as D-PSGD's` or `2.1 times D-PSGD's`."""
    ratio = value / other
    if abs(ratio - 1) < 0.005:
        return f"as much as {label}’s"
    return f"{100 * ratio:.0f} % of {label}’s" if ratio < 1 else f"{ratio:.1f} times {label}’s"
