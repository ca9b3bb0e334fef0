"""The reference of all settings, as `make reference` has written it: reading it needs neither torch nor an extra."""

import json
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from dispfl.errors import ConfigError

FILE = Path(__file__).with_name("reference.json")


@dataclass(frozen=True)
class Entry:
    """One setting."""

    key: str
    """As a user writes it: `train.momentum`."""
    kind: str
    """`a number in [0, 1)`."""
    default: str
    """As a config file has it; empty if there is none."""
    meaning: str
    components: tuple[str, ...] = ()
    """The components that have it: `dispfl`, `subfedavg`. Empty: all of the table."""
    of_site: bool = False
    """Whether only real sites have it."""


@dataclass(frozen=True)
class Table:
    """A table of settings, or the top-level keys."""

    name: str
    """`train`; empty for the top-level keys."""
    meaning: str
    components: dict[str, str]
    """The names that the table may have, with what they are."""
    entries: tuple[Entry, ...]


@cache
def read_reference() -> tuple[Table, ...]:
    """Return all tables: the top-level keys first, those of real sites last."""
    return tuple(
        Table(table["name"], table["meaning"], table["components"], tuple(map(_entry, table["entries"])))
        for table in json.loads(FILE.read_text(encoding="utf-8"))
    )


def _entry(record: dict[str, Any]) -> Entry:
    return Entry(**{**record, "components": tuple(record["components"])})


def as_json(tables: tuple[Table, ...]) -> str:
    """Return what `read_reference` reads."""
    return json.dumps([asdict(table) for table in tables], indent=1, ensure_ascii=False) + "\n"


def find_entries(key: str) -> tuple[Table, list[Entry]]:
    """Return a setting's table and entries, given by its key or the last part of it, or by a table; refuse others."""
    tables = read_reference()
    for table in tables:
        if key and key == table.name:
            return table, list(table.entries)
        if key in table.components and ":" not in key:
            return table, [e for e in table.entries if not e.components or key in e.components]
    every = [(table, entry) for table in tables for entry in table.entries]
    found = [pair for pair in every if key in (pair[1].key, pair[1].key.rpartition(".")[2])]
    if not found:
        from dispfl.settings import did_you_mean

        known = [entry.key for _, entry in every]
        if "." not in key:
            names = (name for table in tables for name in (table.name, *table.components) if name)
            known = [*(name.rpartition(".")[2] for name in known), *names]
        hint = did_you_mean(key, known)
        if hint.startswith("Known:"):
            hint = "`dispfl explain` without a key lists all."
        raise ConfigError(f"Unknown key {key}. {hint}")
    return found[0][0], [entry for _, entry in found]
