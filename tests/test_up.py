"""Real processes with real certificates on loopback: the models of the simulation, and no peer that others need."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dispfl.config import compose
from dispfl.errors import ConfigError
from dispfl.launch import Launch
from dispfl.peer.store import rounds_of
from dispfl.roster import roster_names
from dispfl.runs.directory import read_metrics, read_summary
from dispfl.runs.loop import Progress
from dispfl.up import SITES, Processes, gather_up, set_up

TINY = [
    "topology=full",
    "partition.samples=40",
    "partition.test_samples=20",
    "train.epochs=1",
    "threads=1",
    "model=mlp",
]
PATIENCE = 240.0
"""Seconds after which a federation that does not end has failed; a busy machine takes its time."""


def until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not happened():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    """Four peers, not started yet; whatever happens, none is left running."""
    started = Processes(tmp_path / "up", roster_names(4))
    yield started
    started.stop()


def rounds_done(processes: Processes, name: str) -> list[int]:
    return sorted(rounds_of(processes.out / SITES / name / "run"))


def test_real_peers_end_with_the_models_of_the_simulation_bit_for_bit_and_with_its_bytes(
    tmp_path: Path, processes: Processes
) -> None:
    experiment = compose({}, [*TINY, "peers=4", "rounds=3", "method.density=[0.3,0.6]"])
    Launch.begin(experiment, tmp_path / "simulated").run(Progress())
    set_up(experiment, processes.out)
    for name in processes.names:
        processes.start(name)
    until(lambda: len(processes.ended()) == 4)
    assert set(processes.ended().values()) == {0}, (processes.out / SITES / "000/log.txt").read_text()
    gather_up(processes.out)
    simulated, real = read_summary(tmp_path / "simulated"), read_summary(processes.out)
    assert simulated is not None
    assert real is not None
    for key in ("weights_sha256", "accuracy", "groups", "busiest", "flops_per_peer_round", "rounds", "failures"):
        assert real[key] == simulated[key], key
    for one, other in zip(read_metrics(processes.out), read_metrics(tmp_path / "simulated"), strict=True):
        assert one["traffic"] == other["traffic"]
        assert one["overlap"] == other["overlap"]


def test_a_killed_peer_does_not_keep_the_others_from_finishing_and_started_again_it_rejoins(
    processes: Processes,
) -> None:
    set_up(compose({}, [*TINY, "peers=4", "rounds=40"]), processes.out)
    for name in processes.names:
        processes.start(name)
    until(lambda: len(rounds_done(processes, "002")) >= 2)
    os.kill(processes.running["002"].pid, signal.SIGKILL)
    processes.running["002"].wait()
    killed_after = rounds_done(processes, "002")[-1]
    until(lambda: rounds_done(processes, "000")[-1] >= killed_after + 3)  # they go on without it
    processes.start("002")
    until(lambda: len(processes.ended()) == 4)
    assert set(processes.ended().values()) == {0}
    for name in ("000", "001", "003"):
        assert rounds_done(processes, name) == list(range(40))
    assert rounds_done(processes, "002")[-1] == 39
    status = json.loads((processes.out / SITES / "000/run/status.json").read_bytes())
    assert status["peers"]["002"]["missed"] > 0
    assert status["state"] == "finished"
    gather_up(processes.out)  # the run directory is made of whatever was done
    summary = read_summary(processes.out)
    assert summary is not None
    assert summary["rounds"] == 40


def test_a_method_with_a_server_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="method fedavg needs a server, and here is none"):
        set_up(compose({}, [*TINY, "peers=2", "rounds=1", "method=fedavg"]), tmp_path / "up")
    assert not (tmp_path / "up").exists()
