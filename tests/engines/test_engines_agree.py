"""Ray workers give the bits of the in-process engine, also when workers are killed. A real Ray on
this machine."""

import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from messages import refused
from torch import Tensor

from dispfl import DisPFL, Federation, Full, Train, extras
from dispfl.config import compose
from dispfl.data.datasets import load_dataset
from dispfl.engines.checkpoint import Checkpoints
from dispfl.engines.inprocess import InProcess
from dispfl.errors import ConfigError, RunError
from dispfl.experiment import Experiment
from dispfl.round.context import PeerTask, RunContext
from dispfl.runs.directory import read_metrics
from dispfl.runs.execute import ExperimentRun
from dispfl.runs.loop import RunObserver
from dispfl.runs.metrics import weights_sha256
from dispfl.runs.prepare import experiment_context, split_dataset
from dispfl.testing.rounds import run_round

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning")

TINY = [
    "peers=5",
    "rounds=3",
    "workers=2",
    "model=mlp",
    "partition.samples_per_peer=40",
    "partition.test_samples_per_peer=20",
]
TINY += ["train.epochs=1", "topology.degree=2"]
TWO_SPEEDS = ["schedule=async", "classes.a={share=0.4, speed=1e9}", "classes.b={speed=3e8}"]

LATE = ["deadline=0.1", "classes.a={share=0.6, speed=1e9}", "classes.b={speed=1e9, up=8}"]


@pytest.fixture(scope="module", autouse=True)
def _one_ray_for_all() -> Iterator[None]:
    """Starting Ray takes seconds; the engine uses an existing connection and keeps it open."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAY_USAGE_STATS_ENABLED", "0")
        environment.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        options = {"include_dashboard": False, "log_to_driver": False}
        ray.init(num_cpus=2, logging_level=logging.ERROR, **options)
    yield
    ray.shutdown()


def tiny(*overrides: str) -> Experiment:
    return compose({}, [*TINY, *overrides])


def metrics_of(path: Path) -> list[dict[str, Any]]:
    """Return the metrics of all rounds, without their duration."""
    return [
        {key: value for key, value in record.items() if key not in ("seconds", "peer_seconds")}
        for record in read_metrics(path)
    ]


def run(experiment: Experiment, path: Path, progress: RunObserver | None = None) -> list[str]:
    digests: list[str] = (
        ExperimentRun.create(experiment, path)
        .run(progress or RunObserver())
        .summary["weights_sha256"]
    )
    return digests


def a_context(experiment: Experiment) -> RunContext:
    data = load_dataset(experiment.data)
    return experiment_context(experiment, data, split_dataset(experiment, data))


@pytest.mark.parametrize(
    "overrides",
    [
        [
            "method.structure=channels",
            "method.density=[0.3,0.8]",
            "wire.values=int8",
            "wire.coding=zstd",
        ],
        [*TWO_SPEEDS, "wire.values=int8"],
        [*TWO_SPEEDS, "method=dpsgd-ft", "staleness.reuse=true"],
        ["method=fedfomo", "topology.offline_prob=0.2"],
        ["method=own_methods:Prototypes", "wire.values=int8"],
        ["method=fedavg-ft", "method.private=head", "method.cohort=3", "wire.coding=zstd"],
        ["method=dfedpgp", "topology.offline_prob=0.2", "wire.values=int8"],
        [
            "memory_format=channels_last",
            "model=cnn",
            "attack=noise",
            "byzantine=0.2",
            "method.robust=clip",
            "method.byzantine=1",
            "topology.degree=4",
        ],
        [
            "method=subfedavg",
            "train.epochs=2",
            "method.cohort=3",
            "method.min_accuracy=0",
            "method.min_change=0",
            "wire.values=int8",
        ],
    ],
    ids=" ".join,
)
def test_two_ray_workers_give_the_weights_scores_and_bytes_of_two_threads(
    overrides: list[str], tmp_path: Path
) -> None:
    here = run(tiny(*overrides), tmp_path / "here")
    there = run(tiny(*overrides, "engine=ray"), tmp_path / "there")
    assert here == there
    assert len(set(here)) > 1
    assert metrics_of(tmp_path / "here") == metrics_of(tmp_path / "there")


@pytest.mark.parametrize("name", ["Undeclared", "ForgottenUpload"])
def test_a_method_whose_tensors_are_wrong_gets_the_same_sentence_from_both_engines(
    name: str, tmp_path: Path
) -> None:
    sentences = []
    for engine in ("inprocess", "ray"):
        with pytest.raises(RunError) as problem:
            run(tiny(f"method=own_methods:{name}", f"engine={engine}"), tmp_path / engine)
        sentences.append(str(problem.value))
    assert sentences[0] == sentences[1]
    assert sentences[0].startswith(f"{name}.")


def call_in_worker(engine: Any, slot: int, function: Callable[[Any], Any]) -> Any:
    """Call a function with the worker in its own process."""
    return engine.pool.call(slot, "__ray_call__", function)


def kill(engine: Any, slot: int) -> None:
    """Kill a worker's process, as the kernel does when memory runs out."""
    os.kill(call_in_worker(engine, slot, lambda worker: os.getpid()), signal.SIGKILL)


class Killer:
    """Kills the second worker's process at certain moments of a run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, when: set[str]) -> None:
        from dispfl.engines.ray_driver import RayEngine

        self.left = set(when)
        self.engines: list[Any] = []
        killer, original = self, RayEngine.__init__

        def remember(engine: Any, *args: Any) -> None:
            original(engine, *args)
            killer.engines.append(engine)

        monkeypatch.setattr(RayEngine, "__init__", remember)
        self.moments = {"step": 0, "round": 0}

    def __call__(self, kind: str) -> None:
        self.moments[kind] += 1
        moment = f"{kind} {self.moments[kind]}"
        if moment in self.left:
            self.left.remove(moment)
            kill(self.engines[0], 1)


@pytest.mark.parametrize("settings", [["method.structure=channels"], TWO_SPEEDS, LATE])
def test_workers_killed_during_and_between_rounds_are_replaced_and_nothing_changes(
    settings: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    here = run(tiny(*settings), tmp_path / "here")
    killer = Killer(monkeypatch, {"step 2", "step 8", "round 2"})
    progress = RunObserver(step=lambda: killer("step"), round=lambda record: killer("round"))
    there = run(tiny(*settings, "engine=ray"), tmp_path / "there", progress)
    assert here == there
    assert metrics_of(tmp_path / "here") == metrics_of(tmp_path / "there")
    assert not killer.left
    assert caplog.text.count("A Ray worker was lost") == 3


def test_workers_killed_before_any_call_are_replaced_and_nothing_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """D-PSGD: after its round the average of all models is evaluated; a lost worker loses these
    states too."""
    from dispfl.engines.ray_driver import RayEngine
    from dispfl.engines.ray_pool import WorkerPool

    context, original, started = (
        a_context(tiny("method=dpsgd", "rounds=1")),
        WorkerPool._new_worker,
        [],
    )

    def third_dies_at_start(pool: WorkerPool) -> Any:
        started.append(original(pool))
        if len(started) == 3:
            ray.kill(started[-1])
        return started[-1]

    monkeypatch.setattr(WorkerPool, "_new_worker", third_dies_at_start)
    with closing(RayEngine(context, 2, Checkpoints(tmp_path / "there"))) as engine:
        kill(engine, 0)
        kill(engine, 1)
        engine.restore(0)  # by the fourth and the fifth worker
        result = run_round(context, None, 0, engine)
        scores = {peer: result.report.score for peer, result in result.results.items()}
        known = engine.evaluated
        kill(engine, 0)
        evaluated_digests = [weights_sha256(state.model) for state in known.values()]
        states = [weights_sha256(state.model) for state in engine.states.values()]
    assert len(started) == 6
    assert caplog.text.count("A Ray worker was lost") == 4
    with closing(InProcess(context, 2, Checkpoints(tmp_path / "here"))) as here:
        here.restore(0)
        expected = run_round(context, None, 0, here)
        assert scores == {peer: result.report.score for peer, result in expected.results.items()}
        assert evaluated_digests == [
            weights_sha256(state.model) for state in here.evaluated.values()
        ]
        assert states == [weights_sha256(state.model) for state in here.states.values()]


def test_a_step_saved_before_its_worker_is_lost_is_reported_and_counts_once(tmp_path: Path) -> None:
    from dispfl.engines.ray_driver import RayEngine

    class LosesWorkers(RayEngine):
        """The second worker saves its two steps and is lost before one is reported; the first at
        the end."""

        def _receive(self, task: PeerTask, remote: Any) -> Any:
            if self.pool.assignment[task.peer] == 1 and not lost:
                lost.append(task.peer)
                deadline = time.monotonic() + 60
                while len(call_in_worker(self, 1, lambda worker: list(worker._states.next))) < 2:
                    assert time.monotonic() < deadline, "the other step is never finished"
                    time.sleep(0.02)
                self.pool.call(1, "flush", 0)
                kill(self, 1)
                self.pool.announce_workers()
            return super()._receive(task, remote)

        def end_round(self) -> None:
            kill(self, 0)
            super().end_round()

    lost: list[str] = []
    context = a_context(tiny("rounds=1"))
    with closing(LosesWorkers(context, 2, Checkpoints(tmp_path))) as engine:
        engine.restore(0)
        results = run_round(context, None, 0, engine).results
        found = [weights_sha256(state.model) for state in engine.states.values()]
    assert lost
    assert list(results) == context.roster
    assert found == run(tiny("rounds=1"), tmp_path / "here")


def test_workers_that_are_lost_repeatedly_stop_the_run_with_a_sentence_and_keep_its_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dispfl.engines.ray_pool import WorkerPool, WorkersLostError

    def stop(record: dict[str, Any]) -> None:
        raise KeyboardInterrupt

    path, original = tmp_path / "run", WorkerPool._new_worker
    with pytest.raises(KeyboardInterrupt):
        run(tiny(), path, RunObserver(round=stop))

    def dies_at_start(pool: WorkerPool) -> Any:
        worker = original(pool)
        ray.kill(worker)
        return worker

    monkeypatch.setattr(WorkerPool, "_new_worker", dies_at_start)
    sentence = (
        rf"4 Ray workers were lost without finishing a round, .* for 1 workers\? .* in {path}; "
        "resume there with --resume"
    )
    with pytest.raises(WorkersLostError, match=sentence):
        ExperimentRun.resume(path, ["engine=ray", "workers=1"]).run()
    assert Checkpoints(path / "checkpoints").finished_rounds() == [1]


def test_a_model_that_no_worker_can_build_is_a_sentence_with_the_reason(tmp_path: Path) -> None:
    from dispfl.engines.ray_driver import RayEngine
    from dispfl.engines.ray_pool import WorkersLostError

    driver = os.getpid()

    def only_here() -> torch.nn.Module:
        if os.getpid() != driver:
            raise ImportError("not on this machine")
        return torch.nn.Linear(4, 3)

    context = replace(a_context(tiny()), model=only_here)
    sentence = (
        r"could not start: .*only_here \(.*\) raised ImportError: not on this machine\. Does every"
    )
    with (
        closing(RayEngine(context, 1, Checkpoints(tmp_path))) as engine,
        pytest.raises(WorkersLostError, match=sentence),
    ):
        engine.restore(0)


def test_a_run_stopped_under_ray_is_resumed_in_process_and_vice_versa(tmp_path: Path) -> None:
    def stop(record: dict[str, Any]) -> None:
        raise KeyboardInterrupt

    whole = run(tiny(), tmp_path / "whole")
    for first, second in (("ray", "inprocess"), ("inprocess", "ray")):
        path = tmp_path / first
        with pytest.raises(KeyboardInterrupt):
            run(tiny(f"engine={first}"), path, RunObserver(round=stop))
        assert len(metrics_of(path)) == 1
        finished = ExperimentRun.resume(path, [f"engine={second}"]).run()
        assert finished.summary["weights_sha256"] == whole
        assert [weights_sha256(state.model) for state in finished.states.values()] == whole
    assert (
        metrics_of(tmp_path / "ray")
        == metrics_of(tmp_path / "whole")
        == metrics_of(tmp_path / "inprocess")
    )


def test_slow_peers_move_to_the_other_worker_and_nothing_changes(tmp_path: Path) -> None:
    from dispfl.engines.ray_driver import RayEngine

    class Uneven(RayEngine):
        """Reports all peers of the first worker as slow."""

        def _receive(self, task: PeerTask, remote: Any) -> Any:
            return super()._receive(
                task, replace(remote, seconds=9.0 if before[task.peer] == 0 else 1.0)
            )

    context = a_context(tiny())
    with closing(Uneven(context, 2, Checkpoints(tmp_path))) as engine:
        before = engine.pool.assignment
        engine.restore(0)
        for t in range(context.settings.rounds):
            run_round(context, None, t, engine)
        after = engine.pool.assignment
        found = [weights_sha256(state.model) for state in engine.states.values()]
    assert any(before[peer] != after[peer] for peer in before)
    assert found == run(tiny(), tmp_path / "here")


def test_a_federation_runs_on_ray_and_an_exception_in_its_loss_is_a_sentence(
    points: Callable[[int, int], tuple[Tensor, Tensor]],
) -> None:
    peers = [(points(20, which), points(10, 9 + which)) for which in range(3)]
    made: dict[str, Any] = {
        "method": DisPFL(),
        "topology": Full(),
        "train": Train(epochs=1, batch_size=8),
        "workers": 2,
    }

    def failing(outputs: Tensor, labels: Tensor) -> Tensor:
        if len(labels) == 2:  # as before the first round
            return torch.nn.functional.cross_entropy(outputs, labels)
        raise ZeroDivisionError("not mine")

    def network() -> torch.nn.Module:
        return torch.nn.Linear(4, 3)

    here, there = (
        Federation(network, peers, engine=e, **made, rounds=2).run() for e in ("inprocess", "ray")
    )  # type: ignore[arg-type]
    assert here.summary["weights_sha256"] == there.summary["weights_sha256"]
    assert there.out is None
    with pytest.raises(
        RunError, match=r"Peer 00\d, round 0: failing .* ZeroDivisionError: not mine"
    ):
        Federation(
            network, peers, engine="ray", loss=failing, metric="accuracy", **made, rounds=1
        ).run()


def test_a_run_directory_that_workers_cannot_see_is_one_sentence(tmp_path: Path) -> None:
    from dispfl.engines.ray_driver import RayEngine

    with closing(RayEngine(a_context(tiny()), 1, Checkpoints(tmp_path / "here"))) as engine:
        shutil.rmtree(tmp_path / "here")
        with refused(ConfigError):
            engine.restore(0)


def test_more_workers_than_cores_cause_a_warning_that_they_wait(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from dispfl.engines.ray_driver import RayEngine

    RayEngine(a_context(tiny()), 3, Checkpoints(tmp_path)).close()
    assert "workers is 3, but Ray has 2 cores: waiting for more machines to join." in caplog.text


def test_missing_ray_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    with refused(ConfigError):
        tiny("engine=ray")
