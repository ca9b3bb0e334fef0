"""Trackers: show a run in another program while it runs. TensorBoard is supported."""

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dispfl.errors import ConfigError
from dispfl.extras import require
from dispfl.runs.directory import read_metrics
from dispfl.runs.loop import RunCallbacks
from dispfl.runs.metrics import Metrics

TRACKERS = ("tensorboard",)


def check_tracker(track: str | None) -> None:
    """Refuse a tracker that does not exist or is not installed, before anything runs."""
    if track is None:
        return
    if track not in TRACKERS:
        raise ConfigError(f"--track must be {' or '.join(TRACKERS)}, got {track!r}.")
    require("tensorboard", f"--track {track}")


@contextlib.contextmanager
def tracking(track: str | None, path: Path, callbacks: RunCallbacks) -> Iterator[RunCallbacks]:
    """Return callbacks that also write each round to `path`/tensorboard; without a tracker, the same callbacks."""
    if track is None:
        yield callbacks
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of what TensorBoard imports
        from torch.utils.tensorboard import SummaryWriter
    done = len(read_metrics(path))
    writer = SummaryWriter(str(path / "tensorboard"), purge_step=done or None)

    def each(record: Metrics) -> None:
        callbacks.round(record)
        for name, value in scalars(record).items():
            writer.add_scalar(name, value, record["round"] + 1)
        writer.flush()

    try:
        yield replace(callbacks, round=each)
    finally:
        writer.close()


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the single numbers of a round, by the names that TensorBoard groups them under."""
    found: dict[str, float | None] = {
        f"peers/{key}": record[key]["mean"]
        for key in ("mixed", "test_loss", "train_loss", "mask_change", "overlap")
        if record.get(key)
    }
    found |= {f"peers/{name}": scores["mean"] for name, scores in record["scores"].items()}
    found |= {f"busiest/{key}": record["busiest"][key] for key in ("paper_mb", "wire_mb")}
    found |= {f"cost/{key}": record[key] for key in ("flops_per_peer", "flops_total", "seconds")}
    found["peers/failures"] = len(record["failures"])
    return {name: float(value) for name, value in found.items() if value is not None}
