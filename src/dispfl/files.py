"""Where the files of runs and sites are, and crash-safe writing.

After a crash at any moment, readers find the old file or the new one, never half of one. Imports no
torch: commands that look after a site start at once.
"""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from dispfl.errors import RunError

SITE, RUN, SITES = "site.toml", "run", "sites"
"""A real site's settings and its run directory, and the folder of the sites of `dispfl up`."""


def is_site(path: Path) -> bool:
    """Whether a folder is a real site's."""
    return (path / SITE).is_file()


def run_folder(path: Path) -> Path:
    """Return the run directory of a path: the path itself, or that of a real site."""
    return path / RUN if is_site(path) else path


def write_atomically(path: Path, content: bytes, *, durable: bool = True) -> None:
    """Replace a file: temporary file, fsync, rename, fsync of the folder.

    Without `durable` there is no fsync: readers still find one whole file, but a power failure may
    lose both.
    """
    temporary = path.with_name(f".{path.name}.partial")
    with plain_disk_errors(path):
        try:
            with temporary.open("wb") as file:
                file.write(content)
                file.flush()
                if durable:
                    os.fsync(file.fileno())
            temporary.replace(path)
            if durable:
                sync_folder(path.parent)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def append_durably(path: Path, content: bytes) -> None:
    """Append lines to a file, and wait until they are on the disk.

    A last line that a power failure has truncated is ended first, so that it does not absorb the
    next one.
    """
    with plain_disk_errors(path), path.open("a+b") as file:
        if file.tell() > 0:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                content = b"\n" + content
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the folder's entries are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def plain_disk_errors(path: Path) -> Iterator[None]:
    """Turn OS errors into a sentence: the disk is full, or a path cannot be written."""
    try:
        yield
    except OSError as problem:
        if problem.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise RunError(
                f"The disk is full: {path} could not be written. Everything saved before is intact;"
                " free some space and start again; a run is resumed with --resume."
            ) from problem
        reason = problem.strerror or problem
        if problem.errno == errno.ENOENT and not path.parent.exists():
            reason = f"the folder {path.parent} does not exist; create it first"
        raise RunError(f"{path} could not be written: {reason}.") from problem
