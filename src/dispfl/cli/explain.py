"""`dispfl explain`: the reference entry of a setting, a table or a component."""

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from dispfl.cli.completion import complete_explained
from dispfl.terminal import SafeConsole

if TYPE_CHECKING:
    from dispfl.reference import Entry


def explain(
    key: Annotated[
        str,
        typer.Argument(
            help="A setting (train.momentum), table (train), component (ditto, mine:MyMethod),"
            " or site.toml.",
            autocompletion=complete_explained,
        ),
    ] = "",
) -> None:
    """Print what a setting means: type, range, default. Without a key, all tables.

    The settings of real sites need the extra peer.
    """
    from dispfl.reference import find_entries

    console = SafeConsole()
    if not key:
        _print_tables(console)
        return
    table, entries = find_entries(key)
    if key in (table.name, *table.components):
        _print_title(console, key, table.components.get(key, table.meaning))
        if key == table.name:
            for name, meaning in table.components.items():
                _print_indented(console, f"{table.name}={name}: {meaning}")
        console.print()
    for entry in entries:
        _print_entry(console, entry)


def _print_tables(console: Console) -> None:
    from dispfl.reference import settings_reference, site_reference

    for table in (*settings_reference(), *site_reference()):
        _print_title(console, table.name or "top-level keys", table.meaning)
        keys = dict.fromkeys(entry.key.removeprefix(f"{table.name}.") for entry in table.entries)
        _print_indented(console, ", ".join(keys))


def _print_entry(console: Console, entry: "Entry") -> None:
    _print_title(console, entry.key, entry.kind)
    sentences = [entry.meaning]
    if entry.default:
        sentences.append(f"Default: {entry.default}.")
    if entry.components:
        sentences.append(f"Of {', '.join(entry.components)}.")
    elif entry.of_site:
        sentences.append("Of real sites.")
    _print_indented(console, " ".join(filter(None, sentences)))


def _print_title(console: Console, name: str, meaning: str) -> None:
    console.print(Text.assemble((name, "bold"), f"  {meaning}"))


def _print_indented(console: Console, text: str) -> None:
    console.print(Padding(Text(text), (0, 0, 0, 2)))
