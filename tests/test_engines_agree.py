"""Ray's processes give the bits of the in-process engine, whatever happens to them. A real Ray on this machine."""

import logging
import os
import shutil
import signal
import time
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
from dispfl.engines.inprocess import InProcess
from dispfl.errors import ConfigError
from dispfl.launch import Launch
from dispfl.round import play_round
from dispfl.runs.checkpoint import Checkpoints
from dispfl.runs.directory import read_metrics
from dispfl.runs.loop import Progress
from dispfl.runs.records import weights_sha256
from dispfl.work import Setting

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


def a_setting(experiment: Experiment) -> Setting:
    data = load(experiment.data)
    return experiment.setting(data, experiment.split(data))


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


def of_one(engine: Any, place: int, what: Callable[[Any], Any]) -> Any:
    """Something found out in a worker's own process."""
    return engine.crew.ask(place, "__ray_call__", what)


def kill(engine: Any, place: int) -> None:
    """Kill a worker's process, as the kernel does when memory runs out."""
    os.kill(of_one(engine, place, lambda worker: os.getpid()), signal.SIGKILL)


class Killer:
    """Kills the second worker's process at certain moments of a run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, when: set[str]) -> None:
        self.left, self.engines = set(when), []
        from dispfl.engines import ray_engine

        killer, original = self, ray_engine.RayEngine.__init__

        def remember(engine: Any, *given: Any) -> None:
            original(engine, *given)
            killer.engines.append(engine)

        monkeypatch.setattr(ray_engine.RayEngine, "__init__", remember)
        self.moments = {"step": 0, "round": 0}

    def __call__(self, kind: str) -> None:
        self.moments[kind] += 1
        moment = f"{kind} {self.moments[kind]}"
        if moment in self.left:
            self.left.remove(moment)
            kill(self.engines[0], 1)


def test_a_worker_killed_in_the_middle_of_rounds_and_between_them_is_replaced_and_nothing_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    here = run(tiny(), tmp_path / "here")
    killer = Killer(monkeypatch, {"step 2", "step 8", "round 2"})
    progress = Progress(step=lambda: killer("step"), round=lambda record: killer("round"))
    there = run(tiny("engine=ray"), tmp_path / "there", progress)
    assert here == there
    assert told(tmp_path / "here") == told(tmp_path / "there")
    assert not killer.left
    assert caplog.text.count("A Ray worker was lost") == 3


def test_workers_killed_before_whatever_they_are_asked_next_are_replaced_and_nothing_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """D-PSGD: after its round, the average of all is judged; so a lost worker takes with it what it had judged, too."""
    from dispfl.engines.ray_crew import Crew
    from dispfl.engines.ray_engine import RayEngine

    setting, original, born = a_setting(tiny("method=dpsgd", "rounds=1")), Crew._new_worker, []

    def third_dies_at_birth(crew: Crew) -> Any:
        born.append(original(crew))
        if len(born) == 3:
            ray.kill(born[-1])
        return born[-1]

    monkeypatch.setattr(Crew, "_new_worker", third_dies_at_birth)
    with closing(RayEngine(setting, 2, Checkpoints(tmp_path / "there"))) as engine:
        kill(engine, 0)
        kill(engine, 1)
        engine.recall(0)  # by the fourth and the fifth worker
        result = play_round(setting, None, 0, engine)
        scores = {peer: outcome.report.score for peer, outcome in result.outcomes.items()}
        known = engine.judged
        kill(engine, 0)
        judged = [weights_sha256(state.model) for state in known.values()]
        states = [weights_sha256(state.model) for state in engine.states.values()]
    assert len(born) == 6
    assert caplog.text.count("A Ray worker was lost") == 4
    with closing(InProcess(setting, 2, Checkpoints(tmp_path / "here"))) as engine:
        engine.recall(0)
        expected = play_round(setting, None, 0, engine)
        assert scores == {peer: outcome.report.score for peer, outcome in expected.outcomes.items()}
        assert judged == [weights_sha256(state.model) for state in engine.judged.values()]
        assert states == [weights_sha256(state.model) for state in engine.states.values()]


def test_a_step_that_is_written_down_before_a_worker_is_lost_is_told_and_counts_once(tmp_path: Path) -> None:
    from dispfl.engines.ray_engine import RayEngine

    class Careless(RayEngine):
        """The second worker writes down both its steps and is gone before one is told; the first when all is done."""

        def take(self, peer: str, told: Any) -> Any:
            if self.crew.places[peer] == 1 and not lost:
                lost.append(peer)
                deadline = time.monotonic() + 60
                while len(of_one(self, 1, lambda worker: list(worker._states.next))) < 2:
                    assert time.monotonic() < deadline, "the other step is never finished"
                    time.sleep(0.02)
                self.crew.ask(1, "flush", 0)
                kill(self, 1)
                self.crew.introduce()
            return super().take(peer, told)

        def turn(self) -> None:
            kill(self, 0)
            super().turn()

    lost: list[str] = []
    setting = a_setting(tiny("rounds=1"))
    with closing(Careless(setting, 2, Checkpoints(tmp_path))) as engine:
        engine.recall(0)
        outcomes = play_round(setting, None, 0, engine).outcomes
        found = [weights_sha256(state.model) for state in engine.states.values()]
    assert lost
    assert list(outcomes) == setting.roster
    assert found == run(tiny("rounds=1"), tmp_path / "here")


def test_workers_that_are_lost_again_and_again_end_the_run_in_a_sentence_and_leave_its_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dispfl.engines.ray_crew import Crew, WorkersLostError

    def stop(record: dict[str, Any]) -> None:
        raise KeyboardInterrupt

    path, original = tmp_path / "run", Crew._new_worker
    with pytest.raises(KeyboardInterrupt):
        run(tiny(), path, Progress(round=stop))

    def dies_at_birth(crew: Crew) -> Any:
        worker = original(crew)
        ray.kill(worker)
        return worker

    monkeypatch.setattr(Crew, "_new_worker", dies_at_birth)
    sentence = rf"4 Ray workers were lost without a round .* for 1 threads\? .* in {path}; go on there with --resume"
    with pytest.raises(WorkersLostError, match=sentence):
        Launch.go_on(path, ["engine=ray", "threads=1"]).run(Progress())
    assert Checkpoints(path / "checkpoints").finished_rounds() == [1]


def test_a_model_that_no_worker_can_make_is_a_sentence_with_its_reason(tmp_path: Path) -> None:
    from dispfl.engines.ray_crew import WorkersLostError
    from dispfl.engines.ray_engine import RayEngine

    driver = os.getpid()

    def only_here() -> torch.nn.Module:
        if os.getpid() != driver:
            raise ImportError("not on this machine")
        return torch.nn.Linear(4, 3)

    setting, sentence = replace(a_setting(tiny()), model=only_here), "could not start: ImportError: not on this machine"
    with (
        closing(RayEngine(setting, 1, Checkpoints(tmp_path))) as engine,
        pytest.raises(WorkersLostError, match=sentence),
    ):
        engine.recall(0)


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


def test_peers_that_take_long_move_to_the_other_worker_and_nothing_changes(tmp_path: Path) -> None:
    from dispfl.engines.ray_engine import RayEngine

    class Uneven(RayEngine):
        """In which all the first worker's peers are slow."""

        def take(self, peer: str, told: Any) -> Any:
            return super().take(peer, replace(told, seconds=9.0 if places[peer] == 0 else 1.0))

    setting = a_setting(tiny())
    with closing(Uneven(setting, 2, Checkpoints(tmp_path))) as engine:
        places = engine.crew.places
        engine.recall(0)
        for t in range(setting.rounds):
            play_round(setting, None, t, engine)
        after = engine.crew.places
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
        with pytest.raises(ConfigError, match=r"does not see .*here. On a cluster the run directory \(--out\) must be"):
            engine.recall(0)


def test_more_workers_than_cores_are_announced_to_be_waiting(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from dispfl.engines.ray_engine import RayEngine

    RayEngine(a_setting(tiny()), 3, Checkpoints(tmp_path)).close()
    assert "threads is 3, but Ray has 2 cores: waiting for more machines to join." in caplog.text


def test_ray_that_is_not_installed_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"engine is 'ray', but Ray is not installed; .* pip install 'dispfl\[ray\]'"):
        tiny("engine=ray")
