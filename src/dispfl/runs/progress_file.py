"""`.progress.json` in a run directory: which peers have finished the present round.

    {"round": 3, "began": 1700000000.0, "finished": ["000", "004"], "error": null}

`dispfl view` reads it. It is replaced at most once a second while the run makes rounds, and removed
at its end. After an error it stays, with the error's sentence, until the run is resumed. Results
never depend on it: what cannot be written or read is left out.
"""

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dispfl.core.quantities import is_finite_number
from dispfl.errors import DispflError
from dispfl.files import read_regular, write_atomically

PROGRESS = ".progress.json"
WRITE_INTERVAL = 1.0
"""Seconds between two writes."""


@dataclass(frozen=True)
class RunProgress:
    """The progress of a run in its present round."""

    round: int
    began: float
    """When the round began, as a Unix time."""
    finished: tuple[str, ...]
    """The peers that have finished their step of the round."""
    error: str | None = None
    """Why the run ended, if it was an error."""


class ProgressFile:
    """Writes the progress of a run, without waiting for the disk."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / PROGRESS
        self._round = 0
        self._began = 0.0
        self._finished: list[str] = []
        self._written = 0.0

    def begin_round(self, t: int) -> None:
        """Note that a round begins."""
        self._round = t
        self._began = time.time()
        self._finished = []
        self._write_at_intervals()

    def add(self, peer: str) -> None:
        """Note that a peer has finished its step."""
        self._finished.append(peer)
        self._write_at_intervals()

    @contextlib.contextmanager
    def kept_after_error(self) -> Iterator[None]:
        """Remove the file at the end of the block; after an error it has the reason instead."""
        try:
            yield
        except Exception as problem:
            kind = "" if isinstance(problem, DispflError) else f"{type(problem).__name__}: "
            self._write(f"{kind}{problem}")
            raise
        except BaseException:
            self._remove()
            raise
        self._remove()

    def _write_at_intervals(self) -> None:
        if time.monotonic() - self._written >= WRITE_INTERVAL:
            self._write()

    def _write(self, error: str | None = None) -> None:
        content = {
            "round": self._round,
            "began": self._began,
            "finished": self._finished,
            "error": error,
        }
        with contextlib.suppress(DispflError, OSError):
            write_atomically(self._file, json.dumps(content).encode(), durable=False)
        self._written = time.monotonic()

    def _remove(self) -> None:
        if self._written:
            with contextlib.suppress(OSError):
                self._file.unlink(missing_ok=True)


def read_progress(folder: Path) -> RunProgress | None:
    """Return the progress of the run in a directory; None without a valid file."""
    try:
        content = json.loads(read_regular(folder / PROGRESS))
        finished = content["finished"]
        error = content["error"]
        t = content["round"]
        began = content["began"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    is_valid = (
        type(t) is int
        and is_finite_number(began)
        and isinstance(finished, list)
        and all(isinstance(peer, str) for peer in finished)
        and (error is None or isinstance(error, str))
    )
    return RunProgress(t, began, tuple(finished), error) if is_valid else None
