"""Real processes with real certificates on loopback: the models of the simulation, and no peer that others need."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dispfl.cli.up import messages
from dispfl.config import compose
from dispfl.errors import ConfigError, RunError
from dispfl.launch import Launch
from dispfl.peer.site import Site, Whereabouts
from dispfl.peer.store import PeerStore, rounds_of
from dispfl.roster import roster_names
from dispfl.runs.directory import read_config, read_metrics, read_summary
from dispfl.runs.loop import Progress
from dispfl.up import SITES, Processes, gather_up, go_on, set_up, share_in

TINY = [
    "topology=full",
    "partition.samples=40",
    "partition.test_samples=20",
    "train.epochs=1",
    "threads=1",
    "model=mlp",
]
EIGHT = roster_names(8)
PATIENCE = 240.0
"""Seconds after which a federation that does not end has failed; a busy machine takes its time."""


def until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not happened():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[int], Processes]]:
    """`start(8)`: so many peers, not started yet; whatever happens, none is left running."""
    made: list[Processes] = []

    def make(peers: int) -> Processes:
        made.append(Processes(tmp_path / "up", roster_names(peers)))
        return made[-1]

    yield make
    for processes in made:
        processes.stop()


def rounds_done(processes: Processes, name: str) -> list[int]:
    return sorted(rounds_of(processes.out / SITES / name / "run"))


def summary_of(path: Path) -> dict[str, Any]:
    summary = read_summary(path)
    assert summary is not None
    return summary


def test_eight_real_peers_end_with_the_models_of_the_simulation_bit_for_bit_and_with_its_bytes(
    tmp_path: Path, start: Callable[[int], Processes]
) -> None:
    """With the small CNN, whose messages are some 300 kB: the heads and handshakes of a tiny model weigh more."""
    experiment = compose({}, [*TINY, "model=cnn", "peers=8", "rounds=3", "method.density=[0.6,0.9]"])
    Launch.begin(experiment, tmp_path / "simulated").run(Progress())
    processes = start(8)
    set_up(experiment, processes.out)
    for name in processes.names:
        processes.start(name)
    until(lambda: len(processes.ended()) == 8)
    assert set(processes.ended().values()) == {0}, (processes.out / SITES / "000/log.txt").read_text()
    gather_up(processes.out)
    simulated, real = summary_of(tmp_path / "simulated"), summary_of(processes.out)
    for key in ("weights_sha256", "accuracy", "groups", "busiest", "flops_per_peer_round", "rounds", "failures"):
        assert real[key] == simulated[key], key
    records = read_metrics(processes.out)
    for one, other in zip(records, read_metrics(tmp_path / "simulated"), strict=True):
        assert one["traffic"] == other["traffic"]
        assert one["overlap"] == other["overlap"]

    status = {name: json.loads((processes.out / SITES / name / "run/status.json").read_bytes()) for name in EIGHT}
    up_and_down = [sum(counts) for counts in zip(*(record["traffic"][EIGHT[3]] for record in records), strict=True)]
    assert messages(status)[EIGHT[3]] == tuple(reversed(up_and_down))  # what the live table shows is the ledger's
    network = real["network"]
    assert network["ledger_mb"] * 1e6 == sum(up for record in records for up, _ in record["traffic"].values())
    assert 0 < network["overhead_percent"] < 3, network
    received = sum(found["sockets"]["received"] for found in status.values())
    assert received == pytest.approx(network["socket_mb"] * 1e6, rel=0.01)  # a last farewell may find nobody
    assert "network" not in simulated


def test_a_killed_peer_does_not_keep_the_others_from_finishing_and_started_again_it_rejoins(
    start: Callable[[int], Processes],
) -> None:
    processes = start(4)
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


def dispfl(*words: str | Path) -> subprocess.Popen[str]:
    """The command line, in a process of its own."""
    command = [sys.executable, "-c", "from dispfl.cli import main; main()", *map(str, words)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_after_ctrl_c_the_rest_is_run_by_resume_and_the_models_are_those_of_a_run_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    words = [*TINY, "rounds=30"]
    Launch.begin(compose({}, [*words, "peers=3"]), tmp_path / "simulated").run(Progress())
    out = tmp_path / "up run"
    first = dispfl("up", "--peers", "3", *words, "--out", out)
    try:
        until(lambda: len(rounds_of(out / SITES / "001/run")) >= 2 or first.poll() is not None)
    finally:
        first.send_signal(signal.SIGINT)
    said, _ = first.communicate(timeout=PATIENCE)
    assert first.returncode == 130, said
    assert f"Stopped; no finished round is lost. Go on with: dispfl up --resume '{out}'" in said
    assert read_summary(out) is None
    stopped_at = json.loads((out / SITES / "001/run/status.json").read_bytes())["round"]
    assert 2 <= stopped_at < 30

    other = dispfl("up", "--resume", out, "train.lr=0.5")
    refused, _ = other.communicate(timeout=PATIENCE)
    assert other.returncode == 1
    assert "was run with train.lr=0.1, got 0.5" in refused

    second = dispfl("up", "--resume", out)
    said, _ = second.communicate(timeout=PATIENCE)
    assert second.returncode == 0, said
    assert re.search(r"Messages \d+\.\d\d MB, on the sockets \d+\.\d\d MB: \d+\.\d % more", said)
    real, simulated = summary_of(out), summary_of(tmp_path / "simulated")
    assert real["weights_sha256"] == simulated["weights_sha256"]
    assert [record["traffic"] for record in read_metrics(out)] == [
        record["traffic"] for record in read_metrics(tmp_path / "simulated")
    ]
    lines = (out / SITES / "001/run/rounds.jsonl").read_bytes().count(b"\n")
    assert 30 <= lines <= 31  # at most one round was done again


def test_when_dispfl_up_is_killed_its_peers_end_too_and_can_be_gone_on_with(tmp_path: Path) -> None:
    out = tmp_path / "up"
    killed = dispfl("up", "--peers", "3", *TINY, "rounds=300", "--out", out)
    try:
        until(lambda: len(rounds_of(out / SITES / "001/run")) >= 2 or killed.poll() is not None)
    finally:
        killed.kill()
    said, _ = killed.communicate(timeout=PATIENCE)
    assert killed.returncode == -signal.SIGKILL, said

    def nobody_works_on_it() -> bool:
        with contextlib.suppress(RunError):
            go_on(out)
            return True
        return False

    until(nobody_works_on_it)
    for name in roster_names(3):
        assert len(rounds_of(out / SITES / name / "run")) < 300
        assert "the process that started this one is gone" in (out / SITES / name / "log.txt").read_text()


def test_a_run_that_stopped_while_it_was_set_up_is_made_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, make = tmp_path / "up", Site.create

    def interrupted(folder: Path, where: Whereabouts, plan: Any) -> Site:
        site = make(folder, where, plan)
        if folder.name == "001":
            (folder / "site.toml").unlink()  # which is written last
            raise KeyboardInterrupt
        return site

    with monkeypatch.context() as patched:
        patched.setattr(Site, "create", interrupted)
        with pytest.raises(KeyboardInterrupt):
            set_up(compose({}, [*TINY, "peers=3", "rounds=1"]), out)
    (out / "split.safetensors").unlink()
    go_on(out)
    for name in roster_names(3):
        assert Site.open(out / SITES / name).members.roster(0) == roster_names(3)
    assert share_in(out, "001").terms == share_in(out, "002").terms


def test_data_that_have_moved_are_looked_for_where_they_are_now(tmp_path: Path) -> None:
    out = tmp_path / "up"
    set_up(compose({}, [*TINY, "peers=2", "rounds=1"]), out)
    go_on(out, compose(read_config(out), ["data.dir=/moved"]))
    assert compose(read_config(out)).data.dir == "/moved"


def test_a_simulated_run_is_not_gone_on_with_by_real_peers(tmp_path: Path) -> None:
    Launch.begin(compose({}, [*TINY, "peers=2", "rounds=1"]), tmp_path / "run").run(Progress())
    with pytest.raises(RunError, match=r"was not run by `dispfl up`\. Go on with it: dispfl run --resume"):
        go_on(tmp_path / "run")


def test_a_run_that_somebody_still_works_on_is_left_alone(tmp_path: Path) -> None:
    out = tmp_path / "up"
    set_up(compose({}, [*TINY, "peers=2", "rounds=1"]), out)
    port = Site.open(out / SITES / "000").where.listen
    with (
        contextlib.closing(PeerStore(out / SITES / "001/run", "001", share_in(out, "001").terms)),
        pytest.raises(RunError, match="Another process is working on"),
    ):
        go_on(out)
    assert Site.open(out / SITES / "000").where.listen == port


def test_a_method_with_a_server_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="method fedavg needs a server, and here is none"):
        set_up(compose({}, [*TINY, "peers=2", "rounds=1", "method=fedavg"]), tmp_path / "up")
    assert not (tmp_path / "up").exists()
