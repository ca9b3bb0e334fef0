"""Finds the run directories and sites below folders; each has an address on the pages.

Pages are looked up by address among what was found, never by a path: a request cannot name a file.
"""

import contextlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from dispfl.errors import RunError
from dispfl.files import SITE, SITES

CONFIG = "config.toml"
MAX_DEPTH = 8
MAX_FOLDERS = 50_000
"""Folders that a search enters at most, if somebody names the root of a disk."""
SEED = "seed-"


@dataclass(frozen=True)
class FoundFolders:
    """Run directories and sites by address, such as `runs/five/dispfl/seed-0`."""

    runs: dict[str, Path] = field(default_factory=dict)
    sites: dict[str, Path] = field(default_factory=dict)

    def runs_below(self, address: str) -> list[Path]:
        """Return the run directories of a comparison, a sweep or a whole folder."""
        prefix = f"{address}/"
        return [path for name, path in self.runs.items() if name.startswith(prefix)]

    def groups(self) -> dict[str, list[str]]:
        """Return the addresses of runs by the folder that they are listed under.

        The seeds of a comparison or a sweep, DIR/ROW/seed-0, are listed under DIR.
        """
        groups: dict[str, list[str]] = {}
        for address in self.runs:
            folder, _, name = address.rpartition("/")
            above, slash, _ = folder.rpartition("/")
            group = above if name.startswith(SEED) and slash else folder
            groups.setdefault(group, []).append(address)
        return groups


class WatchedFolders:
    """The folders that a view was started with."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self.roots: dict[str, Path] = {}
        """By the first part of addresses."""
        for path in dict.fromkeys(path.resolve() for path in paths):
            if not path.is_dir():
                raise RunError(
                    f"{path} is not a folder; name a run directory, or a folder of runs."
                )
            self.roots[self._free_name(path)] = path

    def _free_name(self, path: Path) -> str:
        first_name = address_part(path.name) or "root"
        name = first_name
        number = 2
        while name in self.roots:
            name = f"{first_name}-{number}"
            number += 1
        return name

    def search(self) -> FoundFolders:
        """Return what is there now. Links to folders are not followed."""
        found = FoundFolders()
        for name, root in self.roots.items():
            for address, path in islice(_below(name, root, MAX_DEPTH), MAX_FOLDERS):
                if (path / SITE).is_file():
                    found.sites[address] = path
                elif (path / CONFIG).is_file():
                    found.runs[address] = path
        return found


def _below(address: str, folder: Path, depth: int) -> Iterator[tuple[str, Path]]:
    """Yield a folder and the folders in it; of a run only the sites of `dispfl up`."""
    yield address, folder
    if depth == 0:
        return
    try:
        with os.scandir(folder) as entries:
            names = sorted(
                (entry.name for entry in entries if entry.is_dir(follow_symlinks=False)),
                key=_natural_order,
            )
    except OSError:  # deleted meanwhile, or not readable
        return
    if (folder / SITE).is_file():
        return
    if (folder / CONFIG).is_file():
        names = [SITES] if SITES in names else []
    for name in names:
        if not name.startswith("."):
            yield from _below(f"{address}/{address_part(name)}", folder / name, depth - 1)


def address_part(name: str) -> str:
    """Return the name of a folder as addresses have it: bytes that are no text are replaced."""
    return os.fsencode(name).decode(errors="replace")


def _natural_order(name: str) -> tuple[str, int, str]:
    """Sort `seed-2` before `seed-10`."""
    start, _, number = name.rpartition("-")
    if number.isdecimal() and number.isascii() and len(number) < 10:
        return start, int(number), ""
    return name, -1, ""


Signature = tuple[tuple[int, int, int] | None, ...]


def signature(folder: Path, names: Iterable[str]) -> Signature:
    """Return what changes when one of these files in a folder does."""
    found: list[tuple[int, int, int] | None] = []
    for name in names:
        entry = None
        with contextlib.suppress(OSError, ValueError):
            status = (folder / name).stat()
            entry = (status.st_ino, status.st_mtime_ns, status.st_size)
        found.append(entry)
    return tuple(found)
