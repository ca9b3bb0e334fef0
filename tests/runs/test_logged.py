"""Quantities that a method logs: in metrics, data frames and history; what is refused."""

from collections.abc import Callable, Mapping
from math import inf, nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from messages import refused
from torch import Tensor, nn

from dispfl import Federation, GossipMethod, PackedModel, PeerState, Run, Train, Trainer
from dispfl.errors import ConfigError

Points = Callable[[int, int], tuple[Tensor, Tensor]]


class Logging(GossipMethod):
    """Logs the round to the power of the peer, `late` in round 1 and `odd` for peer 001 only."""

    def step(
        self, trainer: Trainer, state: PeerState, received: Mapping[str, PackedModel]
    ) -> PeerState:
        number = int(trainer.peer)
        trainer.log("power", torch.tensor([float((trainer.t + 1) ** number)]))
        if trainer.t == 1:
            trainer.log("late", np.float32(0.5))
        if number == 1:
            trainer.log("odd", 7)
        return state


def federation(points: Points, method: GossipMethod, **settings: Any) -> Federation:
    peers = [(points(8, k), points(4, 9 + k)) for k in range(3)]
    made = {"train": Train(epochs=1), "rounds": 2, **settings}
    return Federation(lambda: nn.Linear(4, 3), peers, method, **made)


def test_what_a_method_logs_is_in_metrics_frames_history_and_the_saved_run(
    points: Points, tmp_path: Path
) -> None:
    run = federation(points, Logging()).run(tmp_path / "run")
    assert run.metrics[1]["logged"] == {
        "power": {"mean": 7 / 3, "std": pytest.approx(14**0.5 / 3), "per_peer": [1.0, 2.0, 4.0]},
        "late": {"mean": 0.5, "std": 0.0, "per_peer": [0.5, 0.5, 0.5]},
        "odd": {"mean": 7.0, "std": 0.0, "per_peer": [None, 7.0, None]},
    }
    assert run.history["power"] == [1.0, 7 / 3]
    assert run.history["late"] == [None, 0.5]
    saved = Run.load(tmp_path / "run", model=lambda: nn.Linear(4, 3), method=Logging())
    assert list(saved.metrics) == list(run.metrics)
    assert saved.summary["logged"] == run.metrics[1]["logged"]
    pandas = pytest.importorskip("pandas")
    frame = saved.metrics.frame(per_peer=True)
    assert list(frame["power"]) == [1, 1, 1, 1, 2, 4]
    assert list(pandas.isna(frame["odd"])) == [True, False, True] * 2


class LoggingOnce(GossipMethod):
    """Logs what it is given."""

    quantity: Any = "similarity"
    value: Any = 1.0
    times: int = 1

    def step(
        self, trainer: Trainer, state: PeerState, received: Mapping[str, PackedModel]
    ) -> PeerState:
        for _ in range(self.times):
            trainer.log(self.quantity, self.value)
        return state


@pytest.mark.parametrize(
    "logged",
    [
        {"value": nan},
        {"value": inf},
        {"value": "0.5"},
        {"value": None},
        {"value": [0.5]},
        {"quantity": "train_loss"},
        {"quantity": "busiest.paper_mb"},
        {"quantity": "peer"},
        {"quantity": "accuracy"},
        {"quantity": "similarity_std"},
        {"quantity": "my quantity"},
        {"quantity": ""},
        {"quantity": 3},
        {"quantity": "x" * 65},
        {"times": 2},
    ],
    ids=str,
)
def test_what_cannot_be_recorded_is_refused(points: Points, logged: dict[str, Any]) -> None:
    with refused(ConfigError, key="trainer.log"):
        federation(points, LoggingOnce(**logged), workers=1).run()


KEPT: list[Trainer] = []


class Keeping(GossipMethod):
    """Keeps its trainer, and logs in the next step."""

    def step(
        self, trainer: Trainer, state: PeerState, received: Mapping[str, PackedModel]
    ) -> PeerState:
        if KEPT:
            KEPT.pop().log("late", 1.0)
        KEPT.append(trainer)
        return state


def test_a_number_that_is_logged_after_the_step_is_refused(points: Points) -> None:
    with refused(ConfigError, key="trainer.log"):
        federation(points, Keeping(), workers=1).run()
