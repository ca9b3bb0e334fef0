"""Space on the disk that is kept for one file, so that it can be replaced when the disk is full."""

import contextlib
import os
from pathlib import Path

from dispfl.files import leave_to_owner, plain_disk_errors, sync_folder

SLACK_BYTES = 65_536
"""How much the file may grow on a full disk."""


class Reserve:
    """A second file beside `path`, with blocks of its own, that can take its place.

    Writing into blocks that a file has needs no space, except on file systems that copy on write.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = path.with_name(f".{path.name}.reserve")

    def keep(self, size: int) -> None:
        """Reserve the space for a file of this size; a full disk is tried again the next time."""
        with contextlib.suppress(OSError):
            if self.file.stat().st_size >= size + SLACK_BYTES // 2:
                return
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        with contextlib.suppress(OSError):
            descriptor = os.open(self.file, flags, 0o600)
            try:
                leave_to_owner(descriptor, self.file.parent)
                os.posix_fallocate(descriptor, 0, size + SLACK_BYTES)
            finally:
                os.close(descriptor)

    def holds(self, size: int) -> bool:
        """Whether a file of this size fits."""
        try:
            return self.file.stat().st_size >= size
        except OSError:
            return False

    def replace(self, content: bytes) -> None:
        """Replace the file by the reserve with this content; readers find one or the other."""
        with plain_disk_errors(self.path):
            descriptor = os.open(self.file, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            with os.fdopen(descriptor, "r+b") as file:
                file.write(content)
                file.truncate()
                file.flush()
                os.fsync(descriptor)
            self.file.replace(self.path)
            sync_folder(self.path.parent)
