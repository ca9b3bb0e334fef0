"""What commands print on a terminal: text as it is, and tables of numbers.

Names and texts come from files that somebody else may have made. What controls a terminal in them,
such as escape codes, is printed as `\\u001b` instead of being sent.
"""

import re
from collections.abc import Iterable

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table

_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # all but tab and line feed
    "\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"  # invisible, reversing
    "\ud800-\udfff]"  # halves of characters, which no file can hold
)


def printable(text: str) -> str:
    r"""Return a text with `\u001b` in place of each character that controls a terminal.

    In JSON and in a JavaScript string, this is the same character.
    """
    return _CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


class SafeConsole(Console):
    """A console that prints what controls a terminal as text, wherever it stands in a table."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Return the segments of what is printed; the styles are rich's own."""
        for segment in super().render(renderable, options):
            if segment.control is None:
                segment = segment._replace(text=printable(segment.text))
            yield segment


def print_text(console: Console, text: str, style: str | None = None) -> None:
    """Print text as it is: no markup, no highlighting, no hard wrapping."""
    console.print(text, style=style, soft_wrap=True, highlight=False, markup=False)


def number_table(*headings: str, names: int = 1) -> Table:
    """Return an empty table; the first `names` columns hold names, the others numbers.

    Cells that do not fit are folded. The gaps let tables fit 80 columns.
    """
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for position, heading in enumerate(headings):
        table.add_column(heading, justify="left" if position < names else "right", overflow="fold")
    return table
