"""Real processes with real certificates on loopback, compared with the simulation."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dispfl.cli.up import message_bytes
from dispfl.config import compose
from dispfl.errors import ConfigError, RunError
from dispfl.experiment import Experiment
from dispfl.files import SITES
from dispfl.methods.base import GossipMethod
from dispfl.peer.local_federation import (
    PeerProcesses,
    collect_results,
    create_run,
    deadlines_for,
    prepare_resume,
    setup_of_peer,
)
from dispfl.peer.site import Site, SiteInfo
from dispfl.peer.state.store import PeerStore, rounds_of
from dispfl.report.runs import read_run
from dispfl.runs.directory import read_config, read_metrics, read_summary
from dispfl.runs.execute import ExperimentRun
from dispfl.runs.links import decode_links
from dispfl.topology import peer_names

TINY = [
    "topology=full",
    "partition.samples_per_peer=40",
    "partition.test_samples_per_peer=20",
    "train.epochs=1",
    "workers=1",
    "model=mlp",
]
SAME = (
    "weights_sha256",
    "scores",
    "test_loss",
    "groups",
    "busiest",
    "flops_per_peer_round",
    "rounds",
    "failures",
)
"""What the summaries of a real and of a simulated run have in common."""
EIGHT = peer_names(8)
PATIENCE = 240.0
"""Seconds after which a test fails; generous for a loaded machine."""


def until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not happened():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[int], PeerProcesses]]:
    """`start(8)`: create 8 peers, not started yet; all processes are stopped at the end."""
    made: list[PeerProcesses] = []

    def make(peers: int) -> PeerProcesses:
        made.append(PeerProcesses(tmp_path / "up", peer_names(peers)))
        return made[-1]

    yield make
    for processes in made:
        processes.stop()


def rounds_done(processes: PeerProcesses, name: str) -> list[int]:
    return sorted(rounds_of(processes.out / SITES / name / "run"))


def summary_of(path: Path) -> dict[str, Any]:
    summary = read_summary(path)
    assert summary is not None
    for group in summary["groups"]:
        group.pop("seconds")
    return summary


def test_eight_real_peers_get_the_models_and_byte_counts_of_the_simulation(
    tmp_path: Path, start: Callable[[int], PeerProcesses]
) -> None:
    """With the small CNN, whose messages have about 300 kB: headers and handshakes dominate those
    of smaller models."""
    experiment = compose(
        {}, [*TINY, "model=cnn", "peers=8", "rounds=3", "method.density=[0.6,0.9]"]
    )
    ExperimentRun.create(experiment, tmp_path / "simulated").run()
    processes = start(8)
    create_run(experiment, processes.out)
    for name in processes.names:
        processes.start(name)
    until(lambda: len(processes.ended()) == 8)
    assert set(processes.ended().values()) == {0}, (
        processes.out / SITES / "000/log.txt"
    ).read_text()
    collect_results(processes.out)
    simulated, real = summary_of(tmp_path / "simulated"), summary_of(processes.out)
    for key in SAME:
        assert real[key] == simulated[key], key
    records = read_metrics(processes.out)
    for one, other in zip(records, read_metrics(tmp_path / "simulated"), strict=True):
        assert one["traffic"] == other["traffic"]
        assert one["links"] == other["links"]
        assert one["overlap"] == other["overlap"]

    status = {
        name: json.loads((processes.out / SITES / name / "run/status.json").read_bytes())
        for name in EIGHT
    }
    up_and_down = [
        sum(counts)
        for counts in zip(*(record["traffic"][EIGHT[3]] for record in records), strict=True)
    ]
    assert message_bytes(status)[EIGHT[3]] == tuple(
        reversed(up_and_down)
    )  # the live table shows the ledger's bytes
    network = real["network"]
    assert network["ledger_mb"] * 1e6 == sum(
        up for record in records for up, _ in record["traffic"].values()
    )
    assert 0 < network["overhead_percent"] < 3, network
    received = sum(found["sockets"]["received"] for found in status.values())
    assert received == pytest.approx(
        network["socket_mb"] * 1e6, rel=0.01
    )  # the last TLS alerts may not be received
    assert "network" not in simulated


@pytest.mark.parametrize(
    "wire", [[], ["wire.exchange=push", "wire.values=int8", "wire.coding=zstd"]]
)
def test_real_peers_with_masks_of_channels_get_the_models_of_the_simulation(
    start: Callable[[int], PeerProcesses], wire: list[str]
) -> None:
    channels = ["model=cnn", "method.structure=channels", "method.density=[0.3,0.8]", *wire]
    check_agreement(start(4), compose({}, [*TINY, *channels, "peers=4", "rounds=3"]))


def test_real_peers_with_channels_last_get_the_models_of_the_simulation(
    start: Callable[[int], PeerProcesses],
) -> None:
    settings = ["model=cnn", "memory_format=channels_last"]
    check_agreement(start(3), compose({}, [*TINY, *settings, "peers=3", "rounds=2"]))


def test_real_peers_with_a_private_head_get_the_models_and_bytes_of_the_simulation(
    start: Callable[[int], PeerProcesses],
) -> None:
    settings = ["method.private=head", "method.density=[0.4,0.8]", "wire.values=int8"]
    check_agreement(start(3), compose({}, [*TINY, *settings, "peers=3", "rounds=2"]))


@pytest.mark.parametrize(
    "settings",
    [
        ["method=dfedpgp", "topology=file", "wire.values=int8"],
        ["method.density=[0.4,0.8,1]", "topology=file"],
        ["method=da-dpfl", "method.threshold=10", "rounds=4"],
        ["method=ssfl", "rounds=3"],
    ],
)
def test_real_peers_agree_on_push_sum_weights_votes_scores_and_graphs_from_files(
    start: Callable[[int], PeerProcesses], tmp_path: Path, settings: list[str]
) -> None:
    graph = tmp_path / "graph.csv"
    graph.write_text("receiver,sender,weight\n0,1,0.5\n1,0,0.2\n1,2,0.3\n2,0,0.9\n")
    if "topology=file" in settings:
        settings = [*settings, f"topology.path={graph}"]
    experiment = compose({}, [*TINY, "peers=3", "rounds=2", *settings])
    check_agreement(start(3), experiment)


@pytest.mark.parametrize(
    "settings",
    [
        ["method=own_methods:PushSum", "wire.values=float16", "topology=ring"],
        ["method=own_methods:Prototypes", "wire.coding=zstd"],
        ["method=own_methods:LargestWeights"],
        ["method=own_methods:LargestUnderMask"],
    ],
    ids=lambda settings: settings[0],
)
def test_real_peers_send_and_count_what_a_method_of_ones_own_publishes(
    start: Callable[[int], PeerProcesses], settings: list[str]
) -> None:
    """Tensors beside the model, and a part of it: both as in the simulation."""
    check_agreement(start(3), compose({}, [*TINY, *settings, "peers=3", "rounds=2"]))


@pytest.mark.parametrize(
    "settings",
    [
        ["method.affinity=head", "method.affinity_chosen=0.5", "method.density=[0.4,0.8]"],
        ["method=fedfomo", "method.explore=0.3"],
    ],
    ids=lambda settings: settings[0],
)
def test_real_peers_that_choose_each_other_or_decline_agree_with_the_simulation(
    start: Callable[[int], PeerProcesses], settings: list[str]
) -> None:
    run = ["peers=6", "rounds=6", "topology=random", "topology.degree=4", "partition=pathological"]
    processes = start(6)
    experiment = compose({}, [*TINY, *run, *settings])
    check_agreement(processes, experiment)
    assert isinstance(experiment.method, GossipMethod)
    chosen = 0
    for t, record in enumerate(read_metrics(processes.out)):
        links = decode_links(record["links"], processes.names)
        assert max(map(len, links.values())) <= 4
        neighbours = 4 - experiment.method.choices(4, t, 6)
        chosen += sum(map(len, links.values())) - 6 * neighbours
    if "method.affinity=head" in settings:
        assert chosen > 0  # some chose each other


def test_a_real_peer_whose_method_sends_what_it_does_not_declare_says_so(
    start: Callable[[int], PeerProcesses],
) -> None:
    processes = start(2)
    settings = [*TINY, "method=own_methods:Undeclared", "peers=2", "rounds=1"]
    create_run(compose({}, settings), processes.out)
    processes.start("000")
    until(lambda: bool(processes.ended()))
    assert processes.ended()["000"] == 1
    log = (processes.out / SITES / "000/log.txt").read_text()
    assert "Undeclared.publish returns a model with the tensor secret, which" in log


def check_agreement(processes: PeerProcesses, experiment: Experiment) -> None:
    """Check that the real peers get the models and count the bytes of the simulation."""
    simulation = processes.out.with_name("simulated")
    ExperimentRun.create(experiment, simulation).run()
    create_run(experiment, processes.out)
    for name in processes.names:
        processes.start(name)
    until(lambda: len(processes.ended()) == len(processes.names))
    log = (processes.out / SITES / "000/log.txt").read_text()
    assert set(processes.ended().values()) == {0}, log
    collect_results(processes.out)
    simulated, real = summary_of(simulation), summary_of(processes.out)
    for key in SAME:
        assert real[key] == simulated[key], key
    for one, other in zip(read_metrics(processes.out), read_metrics(simulation), strict=True):
        assert one["traffic"] == other["traffic"]
        assert one["links"] == other["links"]
        assert one["overlap"] == other["overlap"]


def test_the_others_finish_without_a_killed_peer_which_rejoins_after_a_restart(
    start: Callable[[int], PeerProcesses],
) -> None:
    processes = start(4)
    create_run(compose({}, [*TINY, "peers=4", "rounds=40"]), processes.out)
    for name in processes.names:
        processes.start(name)
    until(lambda: len(rounds_done(processes, "002")) >= 2)
    processes.running["002"].kill()
    processes.running["002"].join()
    killed_after = rounds_done(processes, "002")[-1]
    until(lambda: rounds_done(processes, "000")[-1] >= killed_after + 3)  # they continue without it
    processes.start("002")
    until(lambda: len(processes.ended()) == 4)
    assert set(processes.ended().values()) == {0}
    for name in ("000", "001", "003"):
        assert rounds_done(processes, name) == list(range(40))
    assert rounds_done(processes, "002")[-1] == 39
    status = json.loads((processes.out / SITES / "000/run/status.json").read_bytes())
    assert status["peers"]["002"]["missed"] > 0
    assert status["state"] == "finished"
    collect_results(processes.out)  # from the rounds that were finished
    summary = read_summary(processes.out)
    assert summary is not None
    assert summary["rounds"] == 40
    without_killed_peer = read_run(processes.out).links(killed_after + 2)
    assert without_killed_peer is not None
    assert "002" not in without_killed_peer.received
    assert all("002" not in senders for senders in without_killed_peer.received.values())


@contextlib.contextmanager
def slowed(processes: PeerProcesses, name: str) -> Iterator[None]:
    """Let a peer's process run for a tenth of the time, until it ends."""
    process = processes.running[name]
    pid = processes.pid(name)
    stop = threading.Event()

    def alternate() -> None:
        with contextlib.suppress(ProcessLookupError):
            while process.is_alive() and not stop.is_set():
                os.kill(pid, signal.SIGSTOP)
                stop.wait(0.45)
                os.kill(pid, signal.SIGCONT)
                stop.wait(0.05)

    duty = threading.Thread(target=alternate)
    duty.start()
    try:
        yield
    finally:
        stop.set()
        duty.join()


def test_a_slow_process_ends_with_those_that_do_not_wait_also_after_a_stop(
    start: Callable[[int], PeerProcesses],
) -> None:
    processes = start(4)
    settings = [*TINY, "peers=4", "rounds=400", "schedule=async", "eval_every=100"]
    create_run(compose({}, settings), processes.out)
    for name in processes.names:
        processes.start(name)
    until(lambda: all(rounds_done(processes, name) for name in processes.names))
    with slowed(processes, "003"):
        until(lambda: rounds_done(processes, "000")[-1] >= 100)
    processes.stop()
    before = {name: rounds_done(processes, name) for name in processes.names}
    prepare_resume(processes.out)
    for name in processes.names:  # nobody goes back to the slowest
        assert rounds_done(processes, name) == before[name]

    resumed = PeerProcesses(processes.out, processes.names, simultaneous=True)
    try:
        for name in resumed.names:
            resumed.start(name)
        with slowed(resumed, "003"):
            until(lambda: len(set(resumed.ended()) & {"000", "001", "002"}) == 3)
            until(lambda: len(resumed.ended()) == 4)
    finally:
        resumed.stop()
    assert set(resumed.ended().values()) == {0}
    steps = {name: rounds_done(processes, name) for name in processes.names}
    for name in processes.names:
        assert steps[name][-1] == 399
    assert len(steps["003"]) < len(steps["000"]) / 2
    last_line = rounds_of(processes.out / SITES / "003" / "run")[399]
    assert last_line["received"]
    collect_results(processes.out)
    summary = read_summary(processes.out)
    assert summary is not None
    assert summary["rounds"] == 400


def dispfl(*words: str | Path) -> subprocess.Popen[str]:
    """Start the command line in a process."""
    command = [sys.executable, "-c", "from dispfl.cli import main; main()", *map(str, words)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_a_run_resumed_after_ctrl_c_gives_the_models_of_an_uninterrupted_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    words = [*TINY, "rounds=20"]
    ExperimentRun.create(compose({}, [*words, "peers=3"]), tmp_path / "simulated").run()
    out = tmp_path / "up run"
    first = dispfl("up", "--peers", "3", *words, "--out", out)
    try:
        until(lambda: len(rounds_of(out / SITES / "001/run")) >= 3 or first.poll() is not None)
    finally:
        first.send_signal(signal.SIGINT)
    said, _ = first.communicate(timeout=PATIENCE)
    assert first.returncode == 130, said
    assert f"Stopped; finished rounds are saved. Resume with: dispfl up --resume '{out}'" in said
    assert read_summary(out) is None
    stopped_at = json.loads((out / SITES / "001/run/status.json").read_bytes())["round"]
    assert 2 <= stopped_at < 20

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
    assert len(rounds_of(out / SITES / "001/run")) == 20


def test_peers_end_when_dispfl_up_is_killed_and_can_be_resumed(tmp_path: Path) -> None:
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
            prepare_resume(out)
            return True
        return False

    until(nobody_works_on_it)
    for name in peer_names(3):
        assert len(rounds_of(out / SITES / name / "run")) < 300
        assert "the parent process has ended" in (out / SITES / name / "log.txt").read_text()


def test_a_run_interrupted_during_its_creation_is_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, make = tmp_path / "up", Site.create

    def interrupted(folder: Path, where: SiteInfo, config: Any) -> Site:
        site = make(folder, where, config)
        if folder.name == "001":
            (folder / "site.toml").unlink()  # site.toml is written last
            raise KeyboardInterrupt
        return site

    with monkeypatch.context() as patched:
        patched.setattr(Site, "create", interrupted)
        with pytest.raises(KeyboardInterrupt):
            create_run(compose({}, [*TINY, "peers=3", "rounds=1"]), out)
    (out / "split.safetensors").unlink()
    prepare_resume(out)
    for name in peer_names(3):
        assert Site.open(out / SITES / name).members.participants(0) == peer_names(3)
    assert setup_of_peer(out, "001").spec == setup_of_peer(out, "002").spec


def test_resume_accepts_another_data_folder(tmp_path: Path) -> None:
    out = tmp_path / "up"
    create_run(compose({}, [*TINY, "peers=2", "rounds=1"]), out)
    prepare_resume(out, compose(read_config(out), ["data.dir=/moved"]))
    assert compose(read_config(out)).data.dir == "/moved"


def test_a_run_of_real_peers_is_not_resumed_by_a_simulation(tmp_path: Path) -> None:
    experiment = compose({}, [*TINY, "peers=2", "rounds=1", "workers=1"])
    create_run(experiment, tmp_path / "run")
    with pytest.raises(
        RunError, match=r"was run by `dispfl up`\. Resume it with: dispfl up --resume"
    ):
        ExperimentRun.resume(tmp_path / "run")


def test_a_simulated_run_is_not_resumed_by_real_peers(tmp_path: Path) -> None:
    ExperimentRun.create(compose({}, [*TINY, "peers=2", "rounds=1"]), tmp_path / "run").run()
    with pytest.raises(
        RunError, match=r"was not run by `dispfl up`\. Resume it with: dispfl run --resume"
    ):
        prepare_resume(tmp_path / "run")


def test_a_run_locked_by_another_process_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "up"
    create_run(compose({}, [*TINY, "peers=2", "rounds=1"]), out)
    port = Site.open(out / SITES / "000").info.listen
    with (
        contextlib.closing(
            PeerStore(out / SITES / "001/run", "001", setup_of_peer(out, "001").spec)
        ),
        pytest.raises(RunError, match="Another process is using"),
    ):
        prepare_resume(out)
    assert Site.open(out / SITES / "000").info.listen == port


def test_the_startup_period_is_long_enough_for_many_processes_on_few_cores() -> None:
    assert deadlines_for(8, 2).startup == 120
    assert deadlines_for(64, 2).startup == 320
    assert deadlines_for(64, 32).startup == 120


def test_a_method_with_a_server_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="method fedavg needs a server, which `dispfl up` does not have"
    ):
        create_run(compose({}, [*TINY, "peers=2", "rounds=1", "method=fedavg"]), tmp_path / "up")
    assert not (tmp_path / "up").exists()
