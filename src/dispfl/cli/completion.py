"""Completion in the shell: settings and their values, methods, experiments, rows and run folders.

The words are in `completion.json`, which `make reference` writes: importing the settings would
import torch, and a shell does not wait for that. Whole words are completed; `bash_words` undoes
that bash divides them at `=`, `@` and `:`.
"""

import contextlib
import io
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

WORDS = Path(__file__).with_name("completion.json")
GROUPS = {"method": "methods", "topology": "topologies", "partition": "partitions"}
"""By table, the group of entry points in which installed packages declare their components."""
BREAKS = frozenset("=@:")
MAX_DEPTH = 3
"""How deep below a folder runs are looked for: `runs/five/dispfl/seed-0`."""
MAX_FOLDERS = 1000
COMPLETE_VARIABLE = "_DISPFL_COMPLETE"


@cache
def _words() -> Any:
    return json.loads(WORDS.read_bytes())


def _values(key: str) -> list[str]:
    """Return the values that a key may have, as far as they are listed."""
    values = list(_words()["settings"].get(key, []))
    if key in GROUPS:
        from importlib.metadata import entry_points  # a tenth of the time of `dispfl --help`

        values += [entry.name for entry in entry_points(group=f"dispfl.{GROUPS[key]}")]
    return values


def complete_settings(incomplete: str) -> list[str]:
    """Complete `key=value`; after a comma, the next value of a sweep."""
    key, equals, value = incomplete.partition("=")
    if equals:
        before, comma, _ = value.rpartition(",")
        return [f"{key}={before}{comma}{word}" for word in _values(key)]
    keys = [word for word in _words()["settings"] if word.startswith(incomplete)]
    if len(keys) != 1:
        return [f"{key}=" for key in keys]

    # Two words or more, so that the shell adds no space behind the `=`.
    [key] = keys
    default = _words()["defaults"].get(key, "")
    values = dict.fromkeys([*_values(key), default, ""])
    return [f"{key}={value}" for value in values]


def complete_config_and_settings(incomplete: str) -> list[str]:
    """Complete a config file, or `key=value`."""
    if "=" in incomplete:
        return complete_settings(incomplete)
    files = [str(path) for path in _entries(incomplete) if path.suffix == ".toml"]
    return [*files, *complete_settings(incomplete)]


def complete_rows(incomplete: str) -> list[str]:
    """Complete a row of a comparison, `METHOD` or `METHOD@KEY=VALUE,...`, or `key=value`."""
    method, at, changes = incomplete.partition("@")
    if not at:
        return [*_values("method"), *complete_settings(incomplete)]
    before, comma, change = changes.rpartition(",")
    words = [*complete_settings(change), "label="]
    return [f"{method}@{before}{comma}{word}" for word in words]


def complete_experiments(incomplete: str) -> list[str]:
    """Complete the name of an experiment of the paper, or `key=value`."""
    return [*_words()["experiments"], *complete_settings(incomplete)]


def complete_explained() -> list[str]:
    """Complete a setting, a table or a component."""
    names = dict.fromkeys(_words()["settings"])
    for table in _words()["tables"]:
        names |= dict.fromkeys([table, *_values(table)])
    return list(names)


def complete_runs(incomplete: str) -> list[str]:
    """Complete a run directory, or a folder that contains some."""
    folders: list[Path] = []
    for folder in _entries(incomplete):
        if folder.is_dir():
            runs = list(_runs_in(folder, MAX_DEPTH))
            if runs:
                folders += dict.fromkeys([folder, *runs])
    return list(map(str, folders))


def _entries(incomplete: str) -> list[Path]:
    """Return the files and folders whose paths begin with a text."""
    parent = Path(incomplete) if incomplete.endswith("/") else Path(incomplete).parent
    beginning = "" if incomplete.endswith("/") else Path(incomplete).name
    try:
        entries = sorted(parent.iterdir())
    except OSError:
        return []
    return [path for path in entries if path.name.startswith(beginning)][:MAX_FOLDERS]


def _runs_in(folder: Path, depth: int) -> Iterator[Path]:
    """Yield the run directories in a folder, itself included."""
    if (folder / "config.toml").is_file():
        yield folder
    elif depth:
        for path in _entries(f"{folder}/"):
            if path.is_dir():
                yield from _runs_in(path, depth - 1)


class _BashWords(NamedTuple):
    """The words of a command line, as other shells divide it."""

    words: list[str]
    position: int
    """Of the word to be completed."""
    kept: str
    """The beginning of that word, which bash keeps: it replaces what follows the last break."""


def bash_words(environment: Mapping[str, str]) -> _BashWords:
    """Return the words that bash has divided at `=`, `@` and `:`, in one piece."""
    text = environment["COMP_WORDS"]
    parts = text.split("\n") if "\n" in text else text.split(" ")
    position = int(environment["COMP_CWORD"])
    last = parts[position] if position < len(parts) else ""

    words: list[str] = []
    for part in parts[:position]:
        _append(words, part)
    _append(words, last)
    typed = "" if _is_break(last) else last
    return _BashWords(words, len(words) - 1, words[-1].removesuffix(typed))


def _append(words: list[str], part: str) -> None:
    """Add a part to the words; a break joins what is around it."""
    if words and (_is_break(part) or words[-1][-1:] in BREAKS):
        words[-1] += part
    else:
        words.append(part)


def _is_break(part: str) -> bool:
    return bool(part) and BREAKS.issuperset(part)


def complete_in_bash(app: Callable[[], object]) -> None:
    """Let an app complete whole words, and print what bash inserts."""
    line = bash_words(os.environ)
    os.environ["COMP_WORDS"] = "\n".join(line.words)
    os.environ["COMP_CWORD"] = str(line.position)
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            app()
    finally:
        _print_inserted(printed.getvalue().splitlines(), line.kept)


def _print_inserted(words: Sequence[str], kept: str) -> None:
    for word in words:
        sys.stdout.write(f"{word.removeprefix(kept)}\n")
