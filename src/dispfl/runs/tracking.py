"""Showing a run in other programs while it goes on. TensorBoard is the one that there is."""

import contextlib
import importlib.util
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dispfl.errors import ConfigError
from dispfl.runs.directory import read_metrics
from dispfl.runs.loop import Progress
from dispfl.runs.records import Record

TRACKERS = ("tensorboard",)


def check_tracker(track: str | None) -> None:
    """Refuse a tracker that does not exist or is not installed, before anything runs."""
    if track is None:
        return
    if track not in TRACKERS:
        raise ConfigError(f"--track must be {' or '.join(TRACKERS)}, got {track!r}.")
    if importlib.util.find_spec(track) is None:
        raise ConfigError("--track tensorboard needs TensorBoard: pip install 'dispfl[tensorboard]'.")


@contextlib.contextmanager
def tracking(track: str | None, path: Path, progress: Progress) -> Iterator[Progress]:
    """The same progress, which also writes each round into `path`/tensorboard; unchanged where nothing is tracked."""
    if track is None:
        yield progress
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of what TensorBoard imports
        from torch.utils.tensorboard import SummaryWriter
    done = len(read_metrics(path))
    writer = SummaryWriter(str(path / "tensorboard"), purge_step=done or None)

    def each(record: Record) -> None:
        progress.round(record)
        for name, value in scalars(record).items():
            writer.add_scalar(name, value, record["round"] + 1)
        writer.flush()

    try:
        yield replace(progress, round=each)
    finally:
        writer.close()


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """What of a round is one number, by the name that TensorBoard groups it under."""
    found: dict[str, float | None] = {
        f"peers/{key}": record[key]["mean"]
        for key in ("accuracy", "accuracy_mixed", "loss", "mask_change", "overlap")
        if record.get(key)
    }
    found |= {f"busiest/{key}": record["busiest"][key] for key in ("paper_mb", "wire_mb")}
    found |= {f"cost/{key}": record[key] for key in ("flops_per_peer", "flops_total", "seconds")}
    found["peers/failures"] = len(record["failures"])
    return {name: float(value) for name, value in found.items() if value is not None}
