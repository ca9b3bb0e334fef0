"""Runs in TensorBoard, Weights & Biases and MLflow, all offline: what they have is what the metrics
have."""

import contextlib
import importlib.util
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import cast

import pytest
from messages import refused

from dispfl.errors import ConfigError
from dispfl.runs.directory import RunDirectory
from dispfl.runs.loop import RunObserver
from dispfl.runs.metrics import Metrics
from dispfl.runs.tracking import TRACKERS, LogNumbers, check_tracker, scalars, tracking

RECORD = {
    "round": 0,
    "metric": "accuracy",
    "scores": {"accuracy": {"mean": 0.5, "std": 0.1, "per_peer": [0.4, 0.6]}, "f1": {"mean": 0.25}},
    "mixed": None,
    "test_loss": {"mean": 2.5, "std": 0.0, "per_peer": [2.5, 2.5]},
    "train_loss": {"mean": 1.5, "std": 0.0, "per_peer": [1.5, 1.5]},
    "mask_change": None,
    "overlap": None,
    "logged": {"similarity": {"mean": 0.75, "std": 0.0, "per_peer": [0.75, None]}},
    "busiest": {"paper_mb": 2.0, "wire_mb": 1.5, "peer": "000"},
    "flops_per_peer": 10.0,
    "flops_total": 20,
    "failures": {"001": "It broke."},
    "seconds": 0.5,
}


def extra(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not importlib.util.find_spec(name), reason=f"{name} is an extra")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory with a config."""
    RunDirectory.create(tmp_path / "run", {"rounds": 3, "method": {"name": "local"}}).close()
    return tmp_path / "run"


def test_scalars_have_names_and_unmeasured_values_are_omitted() -> None:
    assert scalars(RECORD) == {
        "peers/accuracy": 0.5,
        "peers/f1": 0.25,
        "peers/test_loss": 2.5,
        "peers/train_loss": 1.5,
        "peers/similarity": 0.75,
        "peers/failures": 1.0,
        "busiest/paper_mb": 2.0,
        "busiest/wire_mb": 1.5,
        "cost/flops_per_peer": 10.0,
        "cost/flops_total": 20.0,
        "cost/seconds": 0.5,
    }


def test_another_tracker_is_refused() -> None:
    with refused(ConfigError, key="--track"):
        check_tracker("excel")


def test_without_tracking_the_callbacks_are_unchanged(tmp_path: Path) -> None:
    callbacks = RunObserver()
    with tracking(None, tmp_path, callbacks) as tracked:
        assert tracked is callbacks
    assert not list(tmp_path.iterdir())


@extra("tensorboard")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_reads_the_metrics_of_each_round(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    records: list[Metrics] = []
    with tracking("tensorboard", tmp_path, RunObserver(round=records.append)) as callbacks:
        for t in range(3):
            callbacks.round(RECORD | {"round": t})
    assert len(records) == 3
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("busiest/wire_mb")] == [
        (1, 1.5),
        (2, 1.5),
        (3, 1.5),
    ]
    assert [event.value for event in events.Scalars("peers/similarity")] == [0.75] * 3


@extra("tensorboard")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("first", [2, 1], ids=["the next round", "the last round again"])
def test_tensorboard_has_every_round_of_a_resumed_run_once(run: Path, first: int) -> None:
    """Two rounds, then a resumed run that begins with the third, or with the second because its
    checkpoint is lost."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with contextlib.closing(RunDirectory.open(run)) as directory:
        for seconds, rounds in ((1.0, range(2)), (2.0, range(first, 4))):
            with tracking("tensorboard", run, RunObserver(round=directory.append)) as callbacks:
                for t in rounds:
                    callbacks.round(RECORD | {"round": t, "seconds": seconds})
    events = EventAccumulator(str(run / "tensorboard")).Reload()
    expected = [(t + 1, 1.0 if t < first else 2.0) for t in range(4)]
    assert [(event.step, event.value) for event in events.Scalars("cost/seconds")] == expected


@extra("mlflow")
@pytest.mark.filterwarnings("ignore")
def test_mlflow_has_the_rounds_of_a_stopped_and_resumed_run_in_one_place(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (run.parent / "mlruns").as_uri())
    for rounds in ([0, 1], [2]):
        with tracking("mlflow", run, RunObserver()) as callbacks:
            for t in rounds:
                callbacks.round(RECORD | {"round": t})
    from mlflow import MlflowClient

    client = MlflowClient((run.parent / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("dispfl")
    assert experiment is not None
    [found] = client.search_runs([experiment.experiment_id])
    assert (found.info.run_name, found.info.status) == ("run", "FINISHED")
    assert found.data.params == {"rounds": "3", "method.name": "local"}
    assert found.data.metrics["peers/similarity"] == 0.75
    history = client.get_metric_history(found.info.run_id, "busiest/wire_mb")
    assert [(metric.step, metric.value) for metric in history] == [(1, 1.5), (2, 1.5), (3, 1.5)]


@extra("wandb")
@pytest.mark.filterwarnings("ignore")
def test_wandb_writes_an_offline_run_with_the_same_id_after_a_resume(
    run: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    for t in range(2):
        with tracking("wandb", run, RunObserver()) as callbacks:
            callbacks.round(RECORD | {"round": t})
    identity = (run / ".wandb-id").read_text()
    files = sorted((run / "wandb").glob("offline-run-*/run-*.wandb"))
    assert {file.name for file in files} == {f"run-{identity}.wandb"}
    assert any(b"busiest/wire_mb" in file.read_bytes() for file in files)
    assert any(b"peers/similarity" in file.read_bytes() for file in files)
    assert capfd.readouterr() == ("", "")  # nothing is printed into the progress bar


def test_a_tracker_that_fails_is_named_once_and_the_run_goes_on(
    run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    @contextlib.contextmanager
    def broken(path: Path) -> Iterator[LogNumbers]:
        def log(numbers: Mapping[str, float], step: int) -> None:
            raise ConnectionError("no route to host")

        yield log

    monkeypatch.setitem(cast(dict, TRACKERS), "broken", broken)
    records: list[Metrics] = []
    with (
        caplog.at_level(logging.WARNING, "dispfl"),
        tracking("broken", run, RunObserver(round=records.append)) as own,
    ):
        for t in range(2):
            own.round(RECORD | {"round": t})
    assert len(records) == 2
    assert caplog.messages == [
        "--track broken failed (no route to host); the run goes on without it."
    ]
