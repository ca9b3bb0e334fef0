"""`dispfl explain`: the reference entry of a setting, a table or a component."""

from typing import Annotated

import typer
from rich.console import Console
from rich.padding import Padding
from rich.text import Text


def explain(
    key: Annotated[
        str,
        typer.Argument(
            help="A setting (train.momentum), table (train), component (ditto), or site.toml."
        ),
    ] = "",
) -> None:
    """Print what a setting means: type, range, default. Without a key, all tables.

    The settings of real sites need the extra peer.
    """
    from dispfl.reference import find_entries, settings_reference, site_reference

    console = Console()
    if not key:
        for table in (*settings_reference(), *site_reference()):
            console.print(
                Text.assemble((table.name or "top-level keys", "bold"), f"  {table.meaning}")
            )
            names = dict.fromkeys(
                entry.key.removeprefix(f"{table.name}.") for entry in table.entries
            )
            console.print(_indented(", ".join(names)))
        return
    table, entries = find_entries(key)
    if key in (table.name, *table.components):
        console.print(Text.assemble((key, "bold"), f"  {table.components.get(key, table.meaning)}"))
        for name, meaning in table.components.items() if key == table.name else ():
            console.print(_indented(f"{table.name}={name}: {meaning}"))
        console.print()
    for entry in entries:
        console.print(Text.assemble((entry.key, "bold"), f"  {entry.kind}"))
        default = f"Default: {entry.default}." if entry.default else ""
        of = (
            f"Of {', '.join(entry.components)}."
            if entry.components
            else "Of real sites."
            if entry.of_site
            else ""
        )
        console.print(_indented(" ".join(part for part in (entry.meaning, default, of) if part)))


def _indented(text: str) -> Padding:
    return Padding(Text(text), (0, 0, 0, 2))
