"""States beyond the memory limit are on the disk, and come back as they were."""

from pathlib import Path
from typing import Any

import pytest
import torch
from messages import refused
from torch import nn

from dispfl import DisPFL, FedAvg, Federation, Train
from dispfl.engines import checkpoint
from dispfl.engines.checkpoint import Checkpoints
from dispfl.engines.checkpoint_part import state_bytes
from dispfl.engines.inprocess import InProcess
from dispfl.errors import ConfigError
from dispfl.experiment import Simulation
from dispfl.methods.base import Method
from dispfl.methods.ditto import Ditto
from dispfl.runs.directory import read_summary

PEERS = 6
ROUNDS = 3


def federation(method: Method, **settings: Any) -> Federation:
    rng = torch.Generator().manual_seed(0)
    peers = []
    for _ in range(PEERS):
        inputs = torch.randn(12, 5, generator=rng)
        labels = torch.randint(2, (12,), generator=rng)
        peers.append(((inputs[:8], labels[:8]), (inputs[8:], labels[8:])))
    return Federation(
        lambda: nn.Sequential(nn.Linear(5, 40), nn.ReLU(), nn.Linear(40, 2)),
        peers,
        method,
        train=Train(epochs=1, batch_size=4),
        rounds=ROUNDS,
        workers=2,
        **settings,
    )


def digests(path: Path) -> list[str]:
    summary = read_summary(path)
    assert summary is not None
    weights: list[str] = summary["weights_sha256"]
    return weights


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every state is a part of its own, so that it can leave memory at once."""
    monkeypatch.setattr(checkpoint, "BYTES_IN_A_PART", 1)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("method", [DisPFL(), Ditto(cohort=2), FedAvg(cohort=2)])
def test_a_run_with_hardly_any_memory_for_states_gives_the_same_models(
    tmp_path: Path, method: Method
) -> None:
    federation(method).run(out=tmp_path / "whole")
    federation(method, memory_limit=1e-6).run(out=tmp_path / "limited")
    assert digests(tmp_path / "limited") == digests(tmp_path / "whole")


@pytest.mark.usefixtures("small_parts")
def test_an_engine_keeps_no_more_states_in_memory_than_the_limit_allows(tmp_path: Path) -> None:
    """A thousand bytes are room for one of the six states, and one may wait for the disk."""
    context = federation(DisPFL(), memory_limit=1e-6)._context
    engine = InProcess(context, 2, Checkpoints(tmp_path))
    engine.restore(0)
    states = engine._states.current
    assert len(states) == PEERS
    assert states.bytes <= 1000
    one = states["003"]
    assert 600 < state_bytes(one) < 1000
    engine.close()


def test_a_memory_limit_without_a_run_directory_is_refused() -> None:
    with refused(ConfigError, key="memory_limit"):
        federation(DisPFL(), memory_limit=2).run()


@pytest.mark.parametrize("interval", [0, -3, "often", "min", "10 hours"])
def test_an_interval_of_checkpoints_is_so_many_rounds_or_minutes(interval: int | str) -> None:
    with refused(ConfigError, key="checkpoint_every"):
        Simulation(checkpoint_every=interval)


def test_ray_saves_all_states_after_every_round() -> None:
    pytest.importorskip("ray")
    with refused(ConfigError, key="checkpoint_every"):
        Simulation(engine="ray", checkpoint_every="10min")
    with refused(ConfigError, key="memory_limit"):
        Simulation(engine="ray", memory_limit=1.5)
