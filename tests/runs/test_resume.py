"""Real processes that are killed, interrupted or out of disk space resume to the same result."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dispfl.runs.directory import read_metrics, read_summary
from dispfl.runs.execute import ExperimentRun
from dispfl.runs.loop import RunObserver

SMALL = ["peers=3", "rounds=3", "topology.degree=2", "partition.test_samples_per_peer=4"]
QUICK = [*SMALL, "partition.samples_per_peer=8", "train.epochs=1", "workers=1"]
"""About 50 ms a round."""
SLOW = [*SMALL, "partition.samples_per_peer=96", "train.epochs=10"]
"""Half a second a round or more: long enough to be interrupted from outside."""
ASYNC = ["schedule=async", "classes.a={share=0.6, speed=1e9}", "classes.b={speed=3e8}"]
LATE = ["deadline=0.1", "classes.a={share=0.6, speed=1e9}", "classes.b={speed=1e9, up=8}"]
TIMEOUT_SECONDS = 60.0
Outcome = tuple[list[str], list[dict[str, Any]]]
"""The digest of everyone's weights, and all rounds' metrics without their seconds."""

FORKER = """
import contextlib, gc, json, os, resource, signal, sys, traceback
import dispfl.report.plots, dispfl.report.result_tables
import dispfl.cli, dispfl.cli.progress, dispfl.runs.execute
import matplotlib.backends.backend_agg
from dispfl.engines import checkpoint
from dispfl.runs import progress_file

progress_file.WRITE_INTERVAL = float("inf")  # the number of these writes depends on the time

def die_before(moment):
    changes = 0
    def watch(event, args):
        nonlocal changes
        flags = args[2] if event == "open" else None
        writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR)
        if writes or event in ("os.mkdir", "os.link", "os.rename", "os.remove", "os.rmdir"):
            changes += 1
            if moment == changes or (isinstance(moment, str) and moment in str(args[0])):
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(watch)

def run(order):
    signal.alarm(60)
    os.chdir(order["folder"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    out = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1), os.dup2(out, 2)
    if order["largest_file"]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (order["largest_file"], resource.RLIM_INFINITY))
    if order["part_a_peer"]:
        checkpoint.SECONDS_BETWEEN_PARTS = 0.0
    die_before(order["die_before"])
    sys.argv = ["dispfl", "run", *order["arguments"]]
    try:
        dispfl.cli.main()
    except SystemExit as exit:
        sys.stdout.flush()
        # At once: cleaning up a copy of all imports takes longer than the run.
        os._exit(exit.code or 0)
    except BaseException:
        traceback.print_exc()
    os._exit(1)

# A first run imports what runs import late, and draws a first figure.
sys.argv = ["dispfl", "run", *sys.argv[1:]]
with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
    with contextlib.suppress(SystemExit):
        dispfl.cli.main()
gc.collect()
gc.freeze()  # a collection would copy all pages that a child shares

for line in sys.stdin:
    order = json.loads(line)
    if isinstance(order, int):
        print(os.waitstatus_to_exitcode(os.waitpid(order, 0)[1]), flush=True)
    elif (pid := os.fork()) != 0:
        print(pid, flush=True)
    else:
        run(order)
"""
"""Imports everything and runs once, then forks a process for each `dispfl run`: real ones that
need not import torch again.

A process can be made to kill itself (SIGKILL) before a change of the disk, given by number or by
part of a path.
"""


class Forker:
    def __init__(self, logs: Path) -> None:
        first_run = [*QUICK, "--out", str(logs / "first-run")]
        command = [sys.executable, "-c", FORKER, *first_run]
        quiet = {**os.environ, "OMP_NUM_THREADS": "1"}  # two runs at a time share the cores
        self._process = subprocess.Popen(
            command, env=quiet, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._logs = logs

    def start(
        self,
        *arguments: str,
        die_before: int | str = 0,
        part_a_peer: bool = False,
        largest_file: int = 0,
        folder: Path = Path(),
    ) -> "Child":
        order = {
            "folder": str(folder),
            "arguments": arguments,
            "die_before": die_before,
            "part_a_peer": part_a_peer,
            "largest_file": largest_file,
            "log": str(self._logs / f"{time.monotonic_ns()}.log"),
        }
        return Child(self, self.ask(order), Path(str(order["log"])))

    def ask(self, order: object) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate(timeout=TIMEOUT_SECONDS)


class Child:
    """One `dispfl run`. Its process id is not reused until `end` has been called."""

    def __init__(self, forker: Forker, pid: int, log: Path) -> None:
        self._forker, self.pid, self._log = forker, pid, log

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        os.kill(self.pid, number)

    def end(self) -> int:
        return self._forker.ask(self.pid)

    @property
    def output(self) -> str:
        return " ".join(self._log.read_text().split())


@pytest.fixture(scope="module")
def forker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forker]:
    forker = Forker(tmp_path_factory.mktemp("logs"))
    yield forker
    forker.close()


@pytest.fixture(scope="module")
def quick(forker: Forker, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    return uninterrupted(forker, QUICK, tmp_path_factory.mktemp("quick") / "run")


@pytest.fixture(scope="module")
def slow(forker: Forker, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    return uninterrupted(forker, SLOW, tmp_path_factory.mktemp("slow") / "run")


def uninterrupted(forker: Forker, arguments: list[str], path: Path) -> tuple[Path, Outcome]:
    child = forker.start(*arguments, "--out", str(path))
    assert child.end() == 0, child.output
    return path, result(path)


def result(path: Path) -> Outcome:
    summary = read_summary(path)
    assert summary is not None
    records = [
        {k: v for k, v in record.items() if k not in ("seconds", "peer_seconds")}
        for record in read_metrics(path)
    ]
    return summary["weights_sha256"], records


def resumed(forker: Forker, path: Path) -> Outcome:
    child = forker.start("--resume", str(path))
    assert child.end() == 0, child.output
    return result(path)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.002)


def leftovers(path: Path) -> list[str]:
    """Files that a finished run does not need: temporary files, and checkpoints but the last
    two."""
    kept = {path / "checkpoints" / f"round-00000{rounds}" for rounds in (2, 3)}
    old = {folder for folder in path.glob("checkpoints/*") if folder not in kept}
    return sorted(str(entry) for entry in {*path.rglob("*.partial"), *old})


@pytest.mark.parametrize(("part_a_peer", "gap"), [(False, 3), (True, 5)])
def test_a_run_killed_before_any_change_of_the_disk_resumes_to_the_same_result(
    forker: Forker, quick: tuple[Path, Outcome], tmp_path: Path, part_a_peer: bool, gap: int
) -> None:
    """A change is a mkdir, open for writing, rename or deletion. Every third is in turn the last
    thing that does not happen: each of the ten changes of a round in one of three rounds.

    Two runs at a time. Where each peer makes a part, every fifth change is enough.
    """
    killed_and_resumed(forker, QUICK, quick[1], tmp_path, part_a_peer, gap)


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        (["method=ditto", "method.cohort=1"], []),
        (["method=ditto", "method.cohort=1"], ["memory_limit=1e-6"]),
        (["method=dispfl"], ["checkpoint_every=2"]),
        (ASYNC, []),
        (LATE, []),
        (LATE, ["memory_limit=1e-6"]),
    ],
)
def test_a_run_whose_checkpoints_lack_unchanged_states_or_rounds_resumes_to_the_same_result(
    forker: Forker, tmp_path: Path, method: list[str], settings: list[str]
) -> None:
    """A cohort of one leaves two of three states as they are; without memory for any state, all are
    read from the disk."""
    _, expected = uninterrupted(forker, [*QUICK, *method], tmp_path / "whole")
    arguments = [*QUICK, *method, *settings]
    killed_and_resumed(forker, arguments, expected, tmp_path, part_a_peer=True, gap=11)


def killed_and_resumed(
    forker: Forker,
    arguments: list[str],
    expected: Outcome,
    tmp_path: Path,
    part_a_peer: bool,
    gap: int,
) -> None:
    """Kill runs before their changes of the disk, and compare what the resumed ones give."""
    for moment in range(1, 100, 2 * gap):
        paths = {number: tmp_path / f"{number}" for number in (moment, moment + gap)}
        children = [
            forker.start(*arguments, "--out", str(path), die_before=number, part_a_peer=part_a_peer)
            for number, path in paths.items()
        ]
        killed = [child.end() == -signal.SIGKILL for child in children]
        started = [(path / "config.toml").exists() for path in paths.values()]
        again = [
            forker.start(
                *(["--resume"] if config else [*arguments, "--out"]),
                str(path),
                part_a_peer=part_a_peer,
            )
            for path, config in zip(paths.values(), started, strict=True)
        ]
        for number, child in zip(paths, again, strict=True):
            assert child.end() == 0, (number, child.output)
            assert result(paths[number]) == expected, number
            assert leftovers(paths[number]) == [], number
        if not all(killed):
            break
    assert moment > 30  # config, split and curve are two changes each, a round six or more
    assert not killed[-1]


@pytest.mark.parametrize(
    "survivors",
    [
        ["config.toml"],
        ["config.toml", "split.safetensors"],
        ["config.toml", "split.safetensors", "metrics.jsonl"],
        ["config.toml", "split.safetensors", "metrics.jsonl", "checkpoints"],
        ["config.toml", "metrics.jsonl", "checkpoints"],
    ],
)
def test_a_run_with_files_missing_resumes_to_the_same_result(
    forker: Forker, quick: tuple[Path, Outcome], tmp_path: Path, survivors: list[str]
) -> None:
    path = shutil.copytree(quick[0], tmp_path / "run")
    for entry in path.iterdir():
        if entry.name not in survivors:
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    assert resumed(forker, path) == quick[1]


def test_a_round_without_its_completion_is_completed(
    forker: Forker, quick: tuple[Path, Outcome], tmp_path: Path
) -> None:
    path = shutil.copytree(quick[0], tmp_path / "run")
    (path / "summary.json").unlink()
    (path / "checkpoints/round-000003/complete.json").unlink()
    assert resumed(forker, path) == quick[1]


def test_peers_that_finished_before_the_kill_are_not_retrained(
    forker: Forker, quick: tuple[Path, Outcome], tmp_path: Path
) -> None:
    """Killed in round 1 (the second) with two of three parts written: 3 + 2 steps are done, 4 are
    left."""
    path = tmp_path / "run"
    child = forker.start(
        *QUICK, "--out", str(path), die_before="round-000002/.part-002", part_a_peer=True
    )
    assert child.end() == -signal.SIGKILL
    assert [part.name for part in sorted((path / "checkpoints/round-000002").glob("part-*"))] == [
        "part-000.safetensors",
        "part-001.safetensors",
    ]
    started: list[tuple[int, int]] = []
    steps: list[None] = []
    callbacks = RunObserver(
        begin=lambda *numbers: started.append(numbers), step=lambda: steps.append(None)
    )
    ExperimentRun.resume(path).run(callbacks)
    assert (started, len(steps)) == ([(5, 9)], 4)
    assert result(path) == quick[1]


def test_a_run_killed_right_after_its_config_is_written_resumes(
    forker: Forker, slow: tuple[Path, Outcome], tmp_path: Path
) -> None:
    path = tmp_path / "run"
    child = forker.start(*SLOW, "--out", str(path))
    wait_for((path / "config.toml").exists)
    child.kill()
    assert child.end() == -signal.SIGKILL
    assert resumed(forker, path) == slow[1]


def test_a_run_killed_repeatedly_at_random_moments_resumes(
    forker: Forker, slow: tuple[Path, Outcome], tmp_path: Path
) -> None:
    path = tmp_path / "run"
    rng = random.Random(2022)
    arguments = [*SLOW, "--out", str(path)]
    for _ in range(4):
        child = forker.start(*arguments, part_a_peer=rng.random() < 0.5)
        wait_for((path / "config.toml").exists)
        time.sleep(rng.uniform(0, 0.8))
        child.kill()
        child.end()  # killed or, on a quick machine, finished
        arguments = ["--resume", str(path)]
    assert resumed(forker, path) == slow[1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_sigint_and_sigterm_print_how_to_resume(
    forker: Forker, slow: tuple[Path, Outcome], tmp_path: Path, number: signal.Signals
) -> None:
    path = tmp_path / "run"
    child = forker.start(*SLOW, "--out", str(path))
    wait_for((path / "checkpoints/round-000001/complete.json").exists)
    child.kill(number)
    assert child.end() == 130
    assert child.output.endswith(
        f"Stopped; all finished work is saved. Resume with: dispfl run --resume {path}"
    ), child.output
    assert "Traceback" not in child.output
    assert read_summary(path) is None
    assert resumed(forker, path) == slow[1]


def test_a_second_process_is_refused_while_the_first_runs(
    forker: Forker, slow: tuple[Path, Outcome], tmp_path: Path
) -> None:
    path = tmp_path / "run"
    first = forker.start(*SLOW, "--out", str(path))
    wait_for((path / "config.toml").exists)
    second = forker.start("--resume", str(path))
    assert second.end() == 1
    assert (
        second.output == f"dispfl: Another process is using {path}; wait for it or stop it first."
    )
    assert first.end() == 0
    assert result(path) == slow[1]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk with room for one checkpoint of about 700 kB, but not for three."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1500k", "none", disk], capture_output=True
    )
    if mounted.returncode != 0:
        pytest.skip("mounting a small disk is not permitted here")
    yield disk
    subprocess.run(["umount", disk], check=True)


def test_a_full_disk_is_a_sentence_and_the_run_resumes_with_more_space(
    forker: Forker, quick: tuple[Path, Outcome], small_disk: Path
) -> None:
    path = small_disk / "run"
    child = forker.start(*QUICK, "--out", str(path))
    assert child.end() == 1
    assert "dispfl: The disk is full: " in child.output
    assert "Traceback" not in child.output
    stuck = forker.start("--resume", str(path))
    assert stuck.end() == 1
    assert "dispfl: The disk is full: " in stuck.output
    subprocess.run(["mount", "-o", "remount,size=8m", small_disk], check=True)
    assert resumed(forker, path) == quick[1]
    assert leftovers(path) == []


@pytest.mark.parametrize("largest_file", [100, 100_000])
def test_a_limit_on_file_size_is_a_sentence_and_the_run_resumes_without_it(
    forker: Forker, quick: tuple[Path, Outcome], tmp_path: Path, largest_file: int
) -> None:
    """The config has about 500 bytes, a checkpoint 700,000."""
    path = tmp_path / "run"
    child = forker.start(*QUICK, "--out", str(path), largest_file=largest_file)
    assert child.end() == 1
    assert "dispfl: The disk is full: " in child.output
    assert "Traceback" not in child.output
    if (path / "config.toml").exists():
        assert resumed(forker, path) == quick[1]
    else:
        assert uninterrupted(forker, QUICK, path)[1] == quick[1]


NETWORK = """
from torch import nn

def network(shape, classes):
    block = (nn.Conv2d(1, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.2))
    end = [nn.Conv2d(8, 16, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(576, classes)]
    return nn.Sequential(*block, *end)
"""


@pytest.mark.parametrize(
    "moment", ["round-000002/.part-002", "round-000002/.complete", "round-000003"]
)
def test_channels_with_buffers_and_dropout_resume_after_a_kill_in_a_round_and_between_rounds(
    forker: Forker, tmp_path: Path, moment: str
) -> None:
    (tmp_path / "mine.py").write_text(NETWORK)
    channels = [
        *QUICK,
        "method.structure=channels",
        "method.density=[0.4,0.8]",
        "model.factory=mine:network",
    ]
    whole = forker.start(*channels, "--out", "whole", folder=tmp_path)
    killed = forker.start(
        *channels, "--out", "run", die_before=moment, part_a_peer=True, folder=tmp_path
    )
    assert whole.end() == 0, whole.output
    assert killed.end() == -signal.SIGKILL, killed.output
    again = forker.start("--resume", "run", folder=tmp_path)
    assert again.end() == 0, again.output
    assert result(tmp_path / "run") == result(tmp_path / "whole")
