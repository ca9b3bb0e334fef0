"""A disk that tests can fill."""

from pathlib import Path


class SmallDisk:
    """A file system of its own, in memory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def fill(self) -> None:
        """Leave no space."""
        with (self.path / "filler").open("wb", buffering=0) as filler:
            for size in (4096, 1):
                try:
                    while True:
                        filler.write(bytes(size))
                except OSError:
                    continue

    def free(self) -> None:
        """Free the space again."""
        (self.path / "filler").unlink()
