"""The run directory: everything about one run, in files that other tools can read.

config.toml         complete; `dispfl run config.toml` does it all again
split.safetensors   which samples each peer has
metrics.jsonl       a line a round
checkpoints/        see checkpoint.py
summary.json        at the end
learning-curve.png  at the end
report.html         at the end, from the command line
"""

import fcntl
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import tomli_w

from dispfl.errors import RunError
from dispfl.runs.checkpoint import Checkpoints
from dispfl.runs.files import append_durably, plain_disk_errors, write_atomically
from dispfl.runs.records import Record

MADE_IN_PYTHON = "made_in_python"
"""The key of a config that describes a federation made in Python, which the command line cannot make again."""


class RunDirectory:
    """A run directory that this process alone writes to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = Checkpoints(path / "checkpoints")
        self._lock = self._take_lock()

    @classmethod
    def create(cls, path: Path, config: Mapping[str, Any]) -> "RunDirectory":
        """Make a new one. A folder that has something in it, hidden files apart, is left alone."""
        if path.exists() and (not path.is_dir() or any(not entry.name.startswith(".") for entry in path.iterdir())):
            fix = f"Go on with it (--resume {path}), or choose" if (path / "config.toml").exists() else "Choose"
            raise RunError(f"The run directory {path} exists already. {fix} another (--out).")
        with plain_disk_errors(path):
            path.mkdir(parents=True, exist_ok=True)
        directory = cls(path)
        try:
            directory.write_config(config)
        except RunError:
            directory.close()
            raise
        return directory

    @classmethod
    def open(cls, path: Path) -> "RunDirectory":
        """Open one that exists, to go on with it."""
        read_config(path)
        return cls(path)

    def _take_lock(self) -> IO[bytes]:
        """The lock goes with the process, however it ends, so a killed run leaves none behind."""
        with plain_disk_errors(self.path):
            lock = (self.path / ".lock").open("ab")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise RunError(f"Another process is working on {self.path}; wait for it or end it first.") from None
        return lock

    def close(self) -> None:
        """Let others have it."""
        self._lock.close()

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Write how it is run."""
        write_atomically(self.path / "config.toml", tomli_w.dumps(dict(config)).encode())

    def append(self, record: Record) -> None:
        """Add a line to the metrics."""
        append_durably(self.path / "metrics.jsonl", json.dumps(record, allow_nan=False).encode() + b"\n")

    def truncate_metrics(self, rounds: int) -> list[Record]:
        """Keep the lines of the first rounds only: what was written after the checkpoint is done again."""
        records = read_metrics(self.path)[:rounds]
        if len(records) < rounds:
            raise RunError(
                f"{self.path / 'metrics.jsonl'} has {len(records)} lines, but {rounds} rounds are finished: lines were "
                "lost. Restore the file, or start the run again."
            )
        lines = b"".join(json.dumps(record, allow_nan=False).encode() + b"\n" for record in records)
        write_atomically(self.path / "metrics.jsonl", lines)
        return records

    def write_summary(self, summary: Record) -> None:
        """Write the run in one object."""
        write_atomically(self.path / "summary.json", json.dumps(summary, indent=2, allow_nan=False).encode() + b"\n")


def read_config(path: Path) -> dict[str, Any]:
    """A run directory's config."""
    file = path / "config.toml"
    try:
        return tomllib.loads(file.read_text())
    except FileNotFoundError:
        raise RunError(f"{path} is not a run directory: it has no config.toml.") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as problem:
        raise RunError(f"{file} cannot be read: {problem}.") from problem


def read_metrics(path: Path) -> list[Record]:
    """A run directory's rounds so far; a last line that a crash cut short is left out."""
    file = path / "metrics.jsonl"
    if not file.exists():
        return []
    records: list[Record] = []
    for line in file.read_bytes().split(b"\n"):
        try:
            record = json.loads(line)
        except ValueError:
            break
        if not isinstance(record, dict) or record.get("round") != len(records):
            break
        records.append(record)
    return records


def read_summary(path: Path) -> Record | None:
    """A run directory's summary, or None while the run is not finished."""
    file = path / "summary.json"
    try:
        summary: Record = json.loads(file.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as problem:
        raise RunError(f"{file} cannot be read: {problem}.") from problem
    return summary
