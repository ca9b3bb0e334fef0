"""Ray's processes give the bits of the in-process engine, whatever happens to them. A real Ray on this machine."""

import logging
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dispfl import DisPFL, Federation, Full, Train
from dispfl.config import Experiment, compose
from dispfl.data.datasets import load
from dispfl.engines import choice
from dispfl.errors import ConfigError, RunError
from dispfl.launch import Launch
from dispfl.round import Setting, play_round
from dispfl.runs.checkpoint import Checkpoints
from dispfl.runs.directory import read_metrics
from dispfl.runs.loop import Progress
from dispfl.runs.records import weights_sha256

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning")

TINY = ["peers=5", "rounds=3", "threads=2", "model=mlp", "partition.samples=40", "partition.test_samples=20"]
TINY += ["train.epochs=1", "topology.degree=2"]


@pytest.fixture(scope="module", autouse=True)
def _one_ray_for_all() -> Iterator[None]:
    """Starting Ray takes seconds; the engine uses one that is there already, and leaves it."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    yield
    ray.shutdown()


def tiny(*words: str) -> Experiment:
    return compose({}, [*TINY, *words])


def told(path: Path) -> list[dict[str, Any]]:
    """All that is written down of the rounds, but the time they took."""
    return [{key: value for key, value in record.items() if key != "seconds"} for record in read_metrics(path)]


def run(experiment: Experiment, path: Path, progress: Progress | None = None) -> list[str]:
    digests: list[str] = Launch.begin(experiment, path).run(progress or Progress()).summary["weights_sha256"]
    return digests


@pytest.mark.parametrize(
    "words",
    [
        ["wire.values=int8", "wire.coding=zstd"],
        ["method=fedfomo", "topology.drop=0.2"],
        ["method=dpsgd-ft", "wire.values=float16"],
        [
            "method=subfedavg",
            "train.epochs=2",
            "method.cohort=3",
            "method.min_accuracy=0",
            "method.min_change=0",
            "wire.values=int8",
        ],
    ],
    ids=lambda words: words[0],
)
def test_two_ray_workers_end_with_the_weights_scores_and_bytes_of_two_threads(words: list[str], tmp_path: Path) -> None:
    here = run(tiny(*words), tmp_path / "here")
    there = run(tiny(*words, "engine=ray"), tmp_path / "there")
    assert here == there
    assert len(set(here)) > 1
    assert told(tmp_path / "here") == told(tmp_path / "there")


class Killer:
    """Kills a worker's process when so many steps are done."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
        self.left, self.engines = after, []
        from dispfl.engines import ray_engine

        killer, original = self, ray_engine.RayEngine.__init__

        def remember(engine: Any, *given: Any) -> None:
            original(engine, *given)
            killer.engines.append(engine)

        monkeypatch.setattr(ray_engine.RayEngine, "__init__", remember)

    def __call__(self) -> None:
        self.left -= 1
        if self.left == 0:
            worker = self.engines[0].worker(1)
            os.kill(ray.get(worker.__ray_call__.remote(lambda _: os.getpid())), signal.SIGKILL)


@pytest.mark.parametrize("after", [2, 8], ids=["in the first round", "in the second round"])
def test_a_worker_killed_in_mid_round_is_replaced_and_nothing_changes(
    after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    here = run(tiny(), tmp_path / "here")
    killer = Killer(monkeypatch, after)
    there = run(tiny("engine=ray"), tmp_path / "there", Progress(step=killer))
    assert here == there
    assert told(tmp_path / "here") == told(tmp_path / "there")
    assert killer.left <= 0
    assert "A Ray worker was lost" in caplog.text


def test_a_run_stopped_under_ray_goes_on_in_process_and_the_other_way_round(tmp_path: Path) -> None:
    def stop(record: dict[str, Any]) -> None:
        raise KeyboardInterrupt

    whole = run(tiny(), tmp_path / "whole")
    for first, second in (("ray", "inprocess"), ("inprocess", "ray")):
        path = tmp_path / first
        with pytest.raises(KeyboardInterrupt):
            run(tiny(f"engine={first}"), path, Progress(round=stop))
        assert len(told(path)) == 1
        finished = Launch.go_on(path, [f"engine={second}"]).run(Progress())
        assert finished.summary["weights_sha256"] == whole
        assert [weights_sha256(state.model) for state in finished.states.values()] == whole
    assert told(tmp_path / "ray") == told(tmp_path / "whole") == told(tmp_path / "inprocess")


def a_setting(experiment: Experiment) -> Setting:
    data = load(experiment.data)
    return experiment.setting(data, experiment.split(data))


def test_peers_that_take_long_move_to_the_other_worker_and_nothing_changes(tmp_path: Path) -> None:
    from dispfl.engines.ray_engine import RayEngine

    class Uneven(RayEngine):
        """In which all the first worker's peers are slow."""

        def take(self, peer: str, told: Any) -> Any:
            return super().take(peer, replace(told, seconds=9.0 if places[peer] == 0 else 1.0))

    setting = a_setting(tiny())
    with closing(Uneven(setting, 2, Checkpoints(tmp_path))) as engine:
        places = {peer: place for place, peers in engine.places().items() for peer in peers}
        engine.recall(0)
        for t in range(setting.rounds):
            play_round(setting, None, t, engine)
        after = {peer: place for place, peers in engine.places().items() for peer in peers}
        found = [weights_sha256(state.model) for state in engine.states.values()]
    assert any(places[peer] != after[peer] for peer in places)
    assert found == run(tiny(), tmp_path / "here")


def test_a_federation_of_ones_own_runs_on_ray_and_a_loss_that_fails_comes_out_as_itself(
    points: Callable[[int, int], tuple[Tensor, Tensor]],
) -> None:
    peers = [(points(20, which), points(10, 9 + which)) for which in range(3)]
    made: dict[str, Any] = {"method": DisPFL(), "topology": Full(), "train": Train(epochs=1, batch=8), "threads": 2}

    def failing(outputs: Tensor, labels: Tensor) -> Tensor:
        raise ZeroDivisionError("not mine")

    def network() -> torch.nn.Module:
        return torch.nn.Linear(4, 3)

    here, there = (Federation(network, peers, engine=e, **made).run(2) for e in ("inprocess", "ray"))  # type: ignore[arg-type]
    assert here.summary["weights_sha256"] == there.summary["weights_sha256"]
    assert there.out is None
    with pytest.raises(ZeroDivisionError, match="not mine"):
        Federation(network, peers, engine="ray", loss=failing, **made).run(1)


def test_a_run_directory_that_the_workers_do_not_see_is_one_sentence(tmp_path: Path) -> None:
    from dispfl.engines.ray_engine import RayEngine

    with closing(RayEngine(a_setting(tiny()), 1, Checkpoints(tmp_path / "here"))) as engine:
        shutil.rmtree(tmp_path / "here")
        with pytest.raises(RunError, match=r"does not see .*here. On a cluster the run directory \(--out\) must be on"):
            engine.recall(0)


def test_ray_that_is_not_installed_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"engine is 'ray', but Ray is not installed; .* pip install 'dispfl\[ray\]'"):
        tiny("engine=ray")
