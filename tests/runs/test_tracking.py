"""Runs in TensorBoard: the written scalars are those of the metrics."""

import importlib.util
from pathlib import Path

import pytest

from dispfl.errors import ConfigError
from dispfl.runs.loop import RunCallbacks
from dispfl.runs.metrics import Metrics
from dispfl.runs.tracking import check_tracker, scalars, tracking

RECORD = {
    "round": 0,
    "metric": "accuracy",
    "scores": {"accuracy": {"mean": 0.5, "std": 0.1, "per_peer": [0.4, 0.6]}, "f1": {"mean": 0.25}},
    "mixed": None,
    "test_loss": {"mean": 2.5, "std": 0.0, "per_peer": [2.5, 2.5]},
    "train_loss": {"mean": 1.5, "std": 0.0, "per_peer": [1.5, 1.5]},
    "mask_change": None,
    "overlap": None,
    "busiest": {"paper_mb": 2.0, "wire_mb": 1.5, "peer": "000"},
    "flops_per_peer": 10.0,
    "flops_total": 20,
    "failures": {"001": "It broke."},
    "seconds": 0.5,
}
with_tensorboard = pytest.mark.skipif(not importlib.util.find_spec("tensorboard"), reason="TensorBoard is an extra")


def test_scalars_have_names_and_unmeasured_values_are_omitted() -> None:
    assert scalars(RECORD) == {
        "peers/accuracy": 0.5,
        "peers/f1": 0.25,
        "peers/test_loss": 2.5,
        "peers/train_loss": 1.5,
        "peers/failures": 1.0,
        "busiest/paper_mb": 2.0,
        "busiest/wire_mb": 1.5,
        "cost/flops_per_peer": 10.0,
        "cost/flops_total": 20.0,
        "cost/seconds": 0.5,
    }


def test_another_tracker_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--track must be tensorboard, got 'wandb'\."):
        check_tracker("wandb")


def test_without_tracking_the_callbacks_are_unchanged(tmp_path: Path) -> None:
    callbacks = RunCallbacks()
    with tracking(None, tmp_path, callbacks) as tracked:
        assert tracked is callbacks
    assert not list(tmp_path.iterdir())


@with_tensorboard
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_reads_the_metrics_of_each_round(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    records: list[Metrics] = []
    with tracking("tensorboard", tmp_path, RunCallbacks(round=records.append)) as callbacks:
        for t in range(3):
            callbacks.round(RECORD | {"round": t})
    assert len(records) == 3
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("busiest/wire_mb")] == [(1, 1.5), (2, 1.5), (3, 1.5)]
