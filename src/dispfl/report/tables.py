"""A table as a value, and its renderings: terminal, Markdown, LaTeX, CSV; HTML has a template."""

import csv
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from io import StringIO
from typing import Any, Literal

from rich import box
from rich import table as rich_table
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from dispfl.errors import ConfigError
from dispfl.report.wording import NARROW_SPACE
from dispfl.terminal import printable

NEEDED = 9
"""Columns of this priority are dropped only where even folded names leave no room for them."""
ALWAYS = 10
"""Columns of this priority are never dropped."""
PAGE_COLUMNS = 6
"""Columns that fit a page of a paper."""
FOLDED = 12
"""The least width into which longer names are folded to make room for needed columns."""
MINUS = "\u2212"
LATEX_ESCAPES = str.maketrans(
    {
        "\\": r"\textbackslash{}",
        "&": r"\&",
        "%": r"\%",
        "$": r"\$",
        "#": r"\#",
        "_": r"\_",
        "{": r"\{",
        "}": r"\}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "[": "{[}",  # which would be an argument of the line's end before it
        "]": "{]}",
        "*": "{*}",
        "|": r"\textbar{}",
        '"': "''",
        "`": r"\textasciigrave{}",
        ">": "$>$",
        "<": "$<$",
        MINUS: "$-$",
        "±": r"$\pm$",
        "×": r"$\times$",
        "–": r"\textendash{}",
        "·": r"$\cdot$",
        "’": "'",
        "…": r"\dots{}",
        NARROW_SPACE: r"\,",
    }
)


@dataclass(frozen=True)
class TableColumn:
    """A column: a heading of two lines and one cell per row."""

    heading: tuple[str, str]
    cells: Sequence[str]
    priority: int = ALWAYS
    """Columns of the lowest priority are dropped first if a console or a page is too narrow."""
    key: str = ""
    """Names the column in `--columns`; empty for a column that every table has."""
    text: bool = False
    """Whether the column is left-aligned, as names are."""
    best: frozenset[int] = frozenset()
    """Indices of the rows to print in bold."""

    @property
    def title(self) -> str:
        """The heading on one line: `den-`, `sity` is `density`."""
        title = " ".join(filter(None, self.heading))
        return title.replace("/ ", "/").replace("- ", "")

    @property
    def alignment(self) -> Literal["left", "right"]:
        if self.text:
            return "left"
        return "right"

    @property
    def width(self) -> int:
        """The characters of its longest line."""
        return max(map(cell_len, (*self.heading, *self.cells)))

    def marked(self, start: str, end: str, escape: Callable[[str], str]) -> list[str]:
        """Return the escaped cells, with the best ones between marks."""
        cells = []
        for number, cell in enumerate(self.cells):
            escaped = escape(cell)
            if number in self.best:
                escaped = f"{start}{escaped}{end}"
            cells.append(escaped)
        return cells


@dataclass(frozen=True)
class Table:
    """Columns of texts from left to right, with notes below."""

    columns: Sequence[TableColumn]
    notes: Sequence[str] = ()
    title: str = ""
    caption: str = ""
    """A short caption for LaTeX; the notes are comments there."""
    is_chosen: bool = False
    """Whether somebody has chosen the columns, so that none is dropped from a page."""

    def choose(self, keys: Sequence[str]) -> "Table":
        """Return the table with the columns of these keys, in their order, after its names."""
        by_key = {column.key: column for column in self.columns if column.key}
        for key in keys:
            if key not in by_key:
                raise ConfigError(
                    f"--columns has no {key!r}. There are: {', '.join(by_key)}.", key="--columns"
                )
        always = [column for column in self.columns if not column.key]
        chosen = [replace(by_key[key], priority=NEEDED) for key in dict.fromkeys(keys)]
        return replace(self, columns=[*always, *chosen], is_chosen=True)

    def _page_columns(self) -> list[TableColumn]:
        """Return the columns of the highest priority that fit a page, in their order."""
        columns = list(self.columns)
        while len(columns) > PAGE_COLUMNS and not self.is_chosen:
            columns.remove(min(reversed(columns), key=lambda column: column.priority))
        return columns

    def on_console(self, console: Console) -> tuple[rich_table.Table, list[str]]:
        """Return the columns that fit a console, and the headings of the omitted ones."""
        shown = list(self.columns)
        omitted: list[str] = []
        while True:
            least = min(reversed(shown), key=lambda column: column.priority)
            for gap in (2, 1):
                drawn = _draw(shown, gap)
                if least.priority >= ALWAYS or _fits(drawn, shown, least, console):
                    return drawn, omitted
            shown.remove(least)
            omitted.append(least.title)

    def markdown(self) -> str:
        """Return an aligned table with the best cells in bold, and the notes as a list below."""
        lines = []
        if self.title:
            lines += [f"### {self.title}", ""]
        for cells in zip(*map(_markdown_column, self.columns), strict=True):
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
        for note in self.notes:
            lines.append(f"- {note}")
        return "\n".join([*lines, ""])

    def latex(self) -> str:
        """Return a booktabs table with the best cells in bold, and the notes as comments above."""
        columns = self._page_columns()
        cells = []
        alignment = ""
        for column in columns:
            cells.append(column.marked(r"\textbf{", "}", escape_latex))
            alignment += column.alignment[0]

        caption = self.caption or self.title
        lines = [
            r"% needs \usepackage{booktabs}",
            *(f"% {_one_line(note)}" for note in self.notes),
            r"\begin{table}",
            r"\centering\small",
            rf"\begin{{tabular}}{{{alignment}}}",
            r"\toprule",
            *_latex_headings(columns),
            r"\midrule",
            *_latex_lines(cells),
            r"\bottomrule",
            r"\end{tabular}",
            rf"\caption{{{escape_latex(caption)}}}",
            r"\end{table}",
            "",
        ]
        return "\n".join(lines)


def csv_text(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return one line per row, with plain numbers and empty cells for None."""
    text = StringIO()
    writer = csv.DictWriter(text, list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def omitted_note(omitted: Sequence[str], where: str) -> str:
    """Say which columns a console had no room for, and where they are."""
    return f"Omitted for lack of space: {'; '.join(omitted)}. {where}"


def _draw(columns: Sequence[TableColumn], gap: int) -> rich_table.Table:
    table = rich_table.Table(
        box=box.SIMPLE_HEAD, padding=(0, gap - 1, 0, 0), pad_edge=False, show_edge=False
    )
    for column in columns:
        table.add_column(
            Text("\n".join(column.heading).strip()),
            justify=column.alignment,
            no_wrap=not column.text,
            overflow="fold",
        )
    for row in zip(*map(_console_cells, columns), strict=True):
        table.add_row(*row)
    return table


def _console_cells(column: TableColumn) -> list[Text]:
    cells = list(map(Text, column.cells))
    for number in column.best:
        cells[number].stylize("bold")
    return cells


def _fits(
    table: rich_table.Table, columns: Sequence[TableColumn], least: TableColumn, console: Console
) -> bool:
    """Whether a table fits a console; names are folded only to keep needed columns."""
    unlimited = console.options.update(max_width=10_000)
    width = console.measure(table, options=unlimited).maximum
    if least.priority >= NEEDED:
        for column in columns:
            if column.text:
                width -= max(0, column.width - FOLDED)
    return width <= console.width


def _markdown_column(column: TableColumn) -> list[str]:
    """Return the heading, the rule below it and the cells, all of the same width."""
    cells = column.marked("**", "**", lambda cell: cell.replace("|", "\\|"))
    width = max(map(len, (column.title, *cells)))
    if column.text:
        justify = str.ljust
        rule = "-" * width
    else:
        justify = str.rjust
        rule = "-" * (width - 1) + ":"

    lines = [justify(column.title, width), rule]
    for cell in cells:
        lines.append(justify(cell, width))
    return lines


def _latex_headings(columns: Sequence[TableColumn]) -> Iterator[str]:
    """Yield the lines of the headings; one above several columns is printed once."""
    first_line = []
    rules = []
    position = 1
    for heading, group in itertools.groupby(columns, key=lambda column: column.heading[0]):
        width = len(list(group))
        text = escape_latex(heading)
        if width > 1:
            text = rf"\multicolumn{{{width}}}{{c}}{{{text}}}"
            rules.append(rf"\cmidrule(lr){{{position}-{position + width - 1}}}")
        first_line.append(text)
        position += width
    yield " & ".join(first_line) + r" \\"
    if rules:
        yield " ".join(rules)
    second_line = [escape_latex(column.heading[1]) for column in columns]
    if any(second_line):
        yield " & ".join(second_line) + r" \\"


def _latex_lines(columns: Sequence[Sequence[str]]) -> Iterator[str]:
    for cells in zip(*columns, strict=True):
        yield " & ".join(cells) + r" \\"


def escape_latex(text: str) -> str:
    """Return text that LaTeX prints as it is, whoever has written it.

    A hyphen before a number is a minus; two hyphens are no dash.
    """
    with_minus = re.sub(r"(?<![\w.-])-(?=[\d.])", MINUS, _one_line(text))
    return with_minus.translate(LATEX_ESCAPES).replace("--", "-{}-")


def _one_line(text: str) -> str:
    return " ".join(printable(text).split())
