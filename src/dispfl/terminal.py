"""What commands print on a terminal: text as it is, and tables of numbers."""

from rich import box
from rich.console import Console
from rich.table import Table


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
