"""Trackers: show a run in another program while it runs: TensorBoard, Weights & Biases or MLflow.

Each is a function that yields where to log the numbers of a round. A run that is resumed continues
its curves.
"""

import contextlib
import logging
import os
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from dispfl.config import dotted_keys
from dispfl.core.report import QUANTITIES
from dispfl.errors import ConfigError
from dispfl.extras import require
from dispfl.files import write_atomically
from dispfl.runs.directory import read_config
from dispfl.runs.loop import RunObserver
from dispfl.runs.metrics import Metrics

log = logging.getLogger("dispfl")
LogNumbers = Callable[[Mapping[str, float], int], None]
"""Logs the numbers of a round, by name, and which round it was, counted from 1."""
PROJECT = "dispfl"
"""The project (Weights & Biases) or experiment (MLflow) of all runs."""


def check_tracker(track: str | None) -> None:
    """Refuse a tracker that does not exist or is not installed, before anything runs."""
    if track is None:
        return
    if track not in TRACKERS:
        *names, last = TRACKERS
        raise ConfigError(
            f"--track must be {', '.join(names)} or {last}, got {track!r}.", key="--track"
        )
    require(track, f"--track {track}")


@contextlib.contextmanager
def tracking(track: str | None, path: Path, observer: RunObserver) -> Iterator[RunObserver]:
    """Yield an observer that also logs each round to a tracker; without one, the same observer."""
    if track is None:
        yield observer
        return
    with TRACKERS[track](path) as log_numbers:
        failed = False

        def log_round(record: Metrics) -> None:
            nonlocal failed
            observer.round(record)
            try:
                if not failed:
                    log_numbers(scalars(record), record["round"] + 1)
            except Exception as problem:  # a tracker that fails does not end a run of hours
                failed = True
                log.warning("--track %s failed (%s); the run goes on without it.", track, problem)

        yield replace(observer, round=log_round)


@contextlib.contextmanager
def _tensorboard(path: Path) -> Iterator[LogNumbers]:
    """Write to the folder `tensorboard` of the run directory.

    From the first round on that is logged, what was logged before is hidden: a resumed run may
    repeat its last rounds.
    """
    with _quiet():
        from torch.utils.tensorboard import SummaryWriter
    writer: SummaryWriter | None = None

    def log_numbers(numbers: Mapping[str, float], step: int) -> None:
        nonlocal writer
        writer = writer or SummaryWriter(str(path / "tensorboard"), purge_step=step)
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    try:
        yield log_numbers
    finally:
        if writer:
            writer.close()


@contextlib.contextmanager
def _wandb(path: Path) -> Iterator[LogNumbers]:
    """Write to the folder `wandb` of the run directory and to the server, if not offline."""
    with _quiet():
        import wandb

        try:
            run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", PROJECT),
                name=_name(path),
                config=read_config(path),
                dir=str(path),
                id=_saved_id(path, "wandb", lambda: uuid.uuid4().hex[:8]),
                resume="allow",
                reinit="create_new",  # runs that are trained together are tracked at the same time
                settings=wandb.Settings(silent=True),
            )
        except wandb.Error as problem:
            raise ConfigError(
                f"--track wandb failed: {problem}. Log in (wandb login), or set"
                " WANDB_MODE=offline.",
                key="--track",
            ) from None
    try:
        yield lambda numbers, step: run.log(dict(numbers), step=step)
    finally:
        run.finish()


@contextlib.contextmanager
def _mlflow(path: Path) -> Iterator[LogNumbers]:
    """Write to the server at MLFLOW_TRACKING_URI, or to `mlruns` in the working directory."""
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    with _quiet():
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param
        from mlflow.exceptions import MlflowException

        try:
            local_folder = (Path.cwd() / "mlruns").as_uri()
            client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI", local_folder))
            experiment = client.get_experiment_by_name(PROJECT)
            experiment_id = (
                experiment.experiment_id if experiment else client.create_experiment(PROJECT)
            )

            def create_run() -> str:
                return str(client.create_run(experiment_id, run_name=_name(path)).info.run_id)

            run_id = _saved_id(path, "mlflow", create_run)
            settings = dotted_keys(read_config(path))
            params = [Param(key, str(value)) for key, value in settings.items()]
            client.log_batch(run_id, params=params)
        except MlflowException as problem:
            raise ConfigError(f"--track mlflow failed: {problem}", key="--track") from None

    def log_numbers(numbers: Mapping[str, float], step: int) -> None:
        milliseconds = int(1000 * time.time())
        metrics = [Metric(name, value, milliseconds, step) for name, value in numbers.items()]
        client.log_batch(run_id, metrics=metrics)

    try:
        yield log_numbers
    finally:
        client.set_terminated(run_id)


TRACKERS: Mapping[str, Callable[[Path], AbstractContextManager[LogNumbers]]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "mlflow": _mlflow,
}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide warnings of what trackers import."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _name(path: Path) -> str:
    """`dispfl seed-0` for compare/dispfl/seed-0, and the folder's name otherwise."""
    path = path.resolve()
    if path.name.startswith("seed-"):
        return f"{path.parent.name} {path.name}"
    return path.name


def _saved_id(path: Path, track: str, create: Callable[[], str]) -> str:
    """Return the tracker's id of a run, which a resumed run continues; a new one is saved."""
    file = path / f".{track}-id"
    if not file.exists():
        write_atomically(file, create().encode())
    return file.read_text()


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the single numbers of a round, by the names that trackers group them under."""
    grouped: dict[str, float] = {}
    for quantity in QUANTITIES:
        for name, number in quantity.numbers(record).items():
            grouped[f"{quantity.group}/{name.removeprefix('busiest.')}"] = float(number)
    return grouped
