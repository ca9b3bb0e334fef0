"""Where the files of runs and sites are, crash-safe writing, and reading what others may have made.

After a crash at any moment, readers find the old file or the new one, never half of one. What root
creates belongs to the owner of its folder: a service that runs as another user can use it. Imports
no torch: commands that look after a site start at once.
"""

import contextlib
import errno
import fcntl
import os
import pwd
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from dispfl.errors import RunError

LOCK = ".lock"
"""In a run directory: the file that the process which writes to it has locked."""
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
SITE, RUN, SITES = "site.toml", "run", "sites"
"""A real site's settings and its run directory, and the folder of the sites of `dispfl up`."""


def is_site(path: Path) -> bool:
    """Whether a folder is a real site's."""
    return (path / SITE).is_file()


def run_folder(path: Path) -> Path:
    """Return the run directory of a path: the path itself, or that of a real site."""
    return path / RUN if is_site(path) else path


def is_locked(path: Path) -> bool:
    """Whether a process is using a run directory, which this one may only read."""
    try:
        lock = os.open(path / LOCK, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(lock)  # at once, so that a starting run finds it free
    return False


def open_regular(path: Path) -> BinaryIO:
    """Open a file to read it; refuse a pipe or a device, which could block for ever.

    Everything that somebody else may have made is opened by this function.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return open(path, "rb", opener=lambda *_: descriptor)
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: Path) -> bytes:
    """Return the content of a file; see `open_regular`."""
    with open_regular(path) as file:
        return file.read()


def write_atomically(
    path: Path, content: bytes | Iterable[bytes | memoryview], *, durable: bool = True
) -> None:
    """Replace a file: temporary file, fsync, rename, fsync of the folder.

    The content is given as a whole or in pieces.

    Without `durable` there is no fsync: readers still find one whole file, but a power failure may
    lose both.
    """
    temporary = path.with_name(f".{path.name}.partial")
    with plain_disk_errors(path):
        temporary.unlink(missing_ok=True)  # of a killed process, or a link
        try:
            with temporary.open("xb") as file:
                leave_to_owner(file.fileno(), path.parent)
                file.writelines([content] if isinstance(content, bytes) else content)
                file.flush()
                if durable:
                    os.fsync(file.fileno())
            temporary.replace(path)
            if durable:
                sync_folder(path.parent)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def new_private_file(path: Path, *, replace: bool) -> Iterator[BinaryIO]:
    """Yield a file to write, which is at `path` once the block ends without an error.

    It is never readable by other users, and is on the disk as a whole or not at all. Without
    `replace`, a file that is there meanwhile is an error, and stays.
    """
    temporary = path.with_name(f".{path.name}.partial")
    with plain_disk_errors(path):
        temporary.unlink(missing_ok=True)
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                leave_to_owner(descriptor, path.parent)
                yield file
                file.flush()
                os.fsync(descriptor)
            if replace:
                temporary.replace(path)
            else:
                os.link(temporary, path)  # unlike a rename, never over another file
            sync_folder(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


def append_durably(path: Path, content: bytes) -> None:
    """Append lines to a file, and wait until they are on the disk.

    A last line that a power failure has truncated is ended first, so that it does not absorb the
    next one. What a full disk takes of the lines is removed again.
    """
    with plain_disk_errors(path):
        descriptor = open_or_create(path, os.O_APPEND)
        with os.fdopen(descriptor, "a+b", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            if size > 0:
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    content = b"\n" + content
            try:
                remaining = memoryview(content)
                while remaining:
                    remaining = remaining[file.write(remaining) :]
                os.fsync(descriptor)
            except OSError:
                with contextlib.suppress(OSError):  # not of a file that can only be appended to
                    file.truncate(size)
                raise


def open_or_create(path: Path, flags: int = 0, mode: int = 0o666) -> int:
    """Open a file for reading and writing; return its descriptor."""
    flags |= os.O_RDWR | os.O_CLOEXEC
    with contextlib.suppress(FileExistsError):
        descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL, mode)
        leave_to_owner(descriptor, path.parent)
        return descriptor
    return os.open(path, flags)


def make_folder(path: Path, mode: int = 0o777) -> None:
    """Create a folder and its parents, unless it exists."""
    if path.is_dir():
        return
    if path.parent != path:
        make_folder(path.parent)
    path.mkdir(mode, exist_ok=True)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        leave_to_owner(descriptor, path.parent)
    finally:
        os.close(descriptor)


def leave_to_owner(descriptor: int, folder: Path) -> None:
    """Give a new file to the owner of its folder, if root has created it."""
    if os.geteuid() == 0:
        owner = folder.stat()
        os.fchown(descriptor, owner.st_uid, owner.st_gid)


def user_name(number: int) -> str:
    """The name of a user, or the number of one without a name."""
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def sync_folder(folder: Path) -> None:
    """Wait until the folder's entries are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_disk_full(error: RunError) -> bool:
    """Whether an error of `plain_disk_errors` is about missing space."""
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno in DISK_FULL


@contextlib.contextmanager
def plain_disk_errors(path: Path) -> Iterator[None]:
    """Turn OS errors into a sentence: the disk is full, or a path cannot be written."""
    try:
        yield
    except OSError as problem:
        if problem.errno in DISK_FULL:
            raise RunError(
                f"The disk is full: {path} could not be written. Everything saved before is intact;"
                " free some space and start again; a run is resumed with --resume."
            ) from problem
        reason = problem.strerror or problem
        if problem.errno == errno.ENOENT and not path.parent.exists():
            reason = f"the folder {path.parent} does not exist; create it first"
        elif problem.errno == errno.EACCES:
            reason = f"{reason}{_foreign_owner(path)}"
        raise RunError(f"{path} could not be written: {reason}.") from problem


def _foreign_owner(path: Path) -> str:
    """`; it belongs to root, and you are dispfl`, if a file or its folder is another user's."""
    for place in (path, path.parent):
        with contextlib.suppress(OSError):
            owner = place.stat().st_uid
            if owner != os.geteuid():
                owner_name = user_name(owner)
                return f"; {place} belongs to {owner_name}, and you are {user_name(os.geteuid())}"
    return ""
