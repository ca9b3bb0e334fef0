"""Several processes run a grid together: each run is run once, and a killed process loses
nothing."""

import errno
import logging
import os
import signal
import threading
from multiprocessing import Pipe, active_children
from pathlib import Path
from typing import Any

import pytest
from messages import refused

from dispfl.errors import ConfigError, DispflError, RunError
from dispfl.runs import grid
from dispfl.runs.directory import RunDirectory, read_config, read_metrics, read_summary
from dispfl.runs.grid import GridCallbacks, GridRun, RunState, methods_grid, run_missing
from dispfl.runs.jobs import MessageSender, run_in_processes
from dispfl.runs.loop import RunObserver

TINY = [
    "peers=3",
    "rounds=3",
    "topology.degree=2",
    "partition.samples_per_peer=8",
    "partition.test_samples_per_peer=4",
    "train.epochs=1",
    "workers=2",
]


def weights(cells: list[GridRun]) -> list[list[str]]:
    return [(read_summary(cell.path) or {})["weights_sha256"] for cell in cells]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """The weights of Dis-PFL, Local and D-PSGD, run one after another in this process."""
    cells = methods_grid(
        ["dispfl", "local", "dpsgd", *TINY], {}, 1, tmp_path_factory.mktemp("expected")
    )
    run_missing(cells)
    return weights(cells)


class Watch(GridCallbacks):
    """Records the rounds and ends of all runs; kills one of the processes after the first round, if
    asked to."""

    def __init__(self, kill: bool = False) -> None:
        self.rounds: list[tuple[str, int]] = []
        self.ended: list[str] = []
        self._kill = kill
        super().__init__(run=self._watch, end=lambda run: self.ended.append(run.title))

    def _watch(self, run: GridRun) -> RunObserver:
        return RunObserver(round=lambda record: self._after(run.title, record["round"]))

    def _after(self, title: str, t: int) -> None:
        self.rounds.append((title, t))
        if self._kill:
            self._kill = False
            os.kill(active_children()[0].pid or 0, signal.SIGKILL)


def test_two_processes_run_each_run_once_and_give_the_same_weights(
    tmp_path: Path, expected: list[list[str]]
) -> None:
    cells, watch = methods_grid(["dispfl", "local", "dpsgd", *TINY], {}, 1, tmp_path), Watch()
    run_in_processes(cells, 2, watch)
    assert weights(cells) == expected
    assert sorted(watch.rounds) == [
        (f"{name} seed 0", t) for name in ("dispfl", "dpsgd", "local") for t in range(3)
    ]
    assert sorted(watch.ended) == ["dispfl seed 0", "dpsgd seed 0", "local seed 0"]
    assert {read_config(cell.path)["workers"] for cell in cells} == {1}  # two, divided by two jobs


def test_the_other_process_takes_up_the_run_of_a_killed_one(
    tmp_path: Path, expected: list[list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    cells, watch = (
        methods_grid(["dispfl", "local", "dpsgd", *TINY], {}, 1, tmp_path),
        Watch(kill=True),
    )
    with caplog.at_level(logging.WARNING, "dispfl"):
        run_in_processes(cells, 2, watch)
    assert weights(cells) == expected
    assert caplog.messages == [
        "1 of 2 jobs ended early (exit code -9); the others have done its work."
    ]


def test_if_the_last_process_is_killed_the_unfinished_runs_are_named_and_resume(
    tmp_path: Path, expected: list[list[str]]
) -> None:
    cells = methods_grid(["dispfl", "local", "dpsgd", *TINY], {}, 1, tmp_path)
    with pytest.raises(RunError) as caught:
        run_in_processes(cells, 1, Watch(kill=True))
    sentence = str(caught.value)
    assert sentence.startswith("1 of 1 jobs ended early (exit code -9); not finished: ")
    assert sentence.endswith("dpsgd seed 0. Repeat the command to resume.")
    assert len(read_metrics(cells[0].path)) >= 1
    run_missing(cells)
    assert weights(cells) == expected


def test_an_error_in_one_process_is_the_error_of_all(tmp_path: Path) -> None:
    cells = methods_grid(
        ["dispfl", "local", *TINY, "data=mnist", f"data.dir={tmp_path}/none"], {}, 1, tmp_path
    )
    with refused(DispflError):
        run_in_processes(cells, 2)
    assert list(tmp_path.iterdir()) == []


STOPPED = """
import logging, time
from dispfl import Local

class LogsWhenStopped(Local):
    def step(self, trainer, state, received):
        try:
            while trainer.peer != "000":
                trainer.before_batch()
                time.sleep(0.01)
        except InterruptedError:
            logging.getLogger("dispfl").warning("x" * 1_000_000)
            raise
        return state
"""
"""A method whose second peer waits until the run is stopped, and then logs more than a pipe
holds."""


def test_an_oserror_of_a_callback_ends_the_processes_and_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stopped.py").write_text(STOPPED)
    monkeypatch.syspath_prepend(tmp_path)
    hung: list[int | None] = []

    def print_progress() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def end_hung() -> None:
        for child in active_children():
            hung.append(child.pid)
            child.kill()

    watchdog = threading.Timer(120, end_hung)
    watchdog.start()
    runs = methods_grid(["stopped:LogsWhenStopped", *TINY], {}, 1, tmp_path / "out")
    try:
        with pytest.raises(OSError, match="No space left on device"):
            run_in_processes(
                runs, 1, GridCallbacks(run=lambda run: RunObserver(step=print_progress))
            )
    finally:
        watchdog.cancel()
    assert not hung
    assert not active_children()


def test_messages_of_several_threads_arrive_whole() -> None:
    ours, theirs = Pipe(duplex=False)
    send, long = MessageSender(theirs), "x" * 100_000  # more than a pipe takes at once

    def log() -> None:
        for _ in range(50):
            send("log", long)

    for _ in range(2):
        threading.Thread(target=log, daemon=True).start()
    assert [ours.recv() for _ in range(100)] == [("log", long)] * 100


def test_ray_has_processes_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dispfl.experiment.require", lambda *names: None)
    with refused(ConfigError, key="--jobs"):
        run_in_processes(methods_grid(["local", *TINY, "engine=ray"], {}, 1, tmp_path), 2)


def test_a_run_of_another_process_is_passed_over_then_awaited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: list[list[str]]
) -> None:
    monkeypatch.setattr(grid, "POLL_INTERVAL", 0.01)
    cells = methods_grid(["dispfl", "local", "dpsgd", *TINY], {}, 1, tmp_path)
    other = RunDirectory.claim(cells[0].path)  # of another process
    order: list[str] = []
    waited = threading.Event()

    def run(cell: GridRun) -> RunObserver:
        order.append(cell.row["method"])
        return RunObserver()

    def wait(left: Any) -> None:
        assert [cell.row["method"] for cell in left] == ["dispfl"]
        if not waited.is_set():
            waited.set()
            other.close()  # it dies

    run_missing(cells, GridCallbacks(run=run, wait=wait))
    assert order == ["local", "dpsgd", "dispfl"]
    assert waited.is_set()
    assert weights(cells) == expected


def test_a_run_that_another_process_finishes_is_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grid, "POLL_INTERVAL", 0.01)
    [cell] = methods_grid(["local", *TINY], {}, 1, tmp_path)
    other = RunDirectory.claim(cell.path)

    def finish(left: Any) -> None:
        other.write_config(cell.experiment.to_toml())
        other.write_summary({"rounds": cell.experiment.rounds})
        other.close()

    run_missing(
        [cell], GridCallbacks(run=lambda cell: pytest.fail("it was run again"), wait=finish)
    )
    assert cell.state is RunState.DONE


def test_a_foreign_folder_in_the_place_of_a_run_is_refused(tmp_path: Path) -> None:
    [cell] = methods_grid(["local", *TINY], {}, 1, tmp_path)
    cell.path.mkdir(parents=True)
    (cell.path / "thesis.tex").touch()
    with refused(RunError):
        run_missing([cell])
