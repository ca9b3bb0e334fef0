"""Many real peers for many rounds: apart from connections, processes use no more resources than in
round 5.

Connections are kept open, so their number grows until all peers have connected to each other. They
are counted separately if they are established; a dead socket that is still open counts as a file.
"""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import fuzz
import pytest

from dispfl.config import compose
from dispfl.files import SITES
from dispfl.peer.local_federation import LOG, PeerProcesses, create_run
from dispfl.peer.state.store import rounds_of
from dispfl.peer.transport.http import Limits
from dispfl.topology import peer_names

PEERS, ROUNDS, EARLY = (32, 10_000, 5) if fuzz.SECONDS else (6, 20, 5)
"""`make fuzz` runs more peers, for as many rounds as there is time for."""
SETTINGS = ["topology=random", "topology.degree=4", "model=mlp", "train.epochs=5", "workers=1"]
SIZES = [
    "partition.samples_per_peer=40",
    "partition.test_samples_per_peer=20",
    f"peers={PEERS}",
    f"rounds={ROUNDS}",
]
TIMEOUT = 900.0
"""Seconds after which a federation that has not finished fails the test."""
MEASURED = 5
"""Measurements of each process that are needed."""
FILES = 4
"""Files that a process may open temporarily: a checkpoint, the status, a connection in progress."""
MEMORY = 11.0
"""MB that a process may grow by apart from connections, for the allocator in the first rounds: 8 on
one kind of machine. Keeping the data of each round (four responses and four models, about 1 MB)
would add 15 by the last round."""
CONNECTION_MB = 0.385
"""Memory of one connection at either end, measured with a hundred: 256 kB TLS buffers, the rest
HTTP."""
ESTABLISHED = "01"


@dataclass(frozen=True)
class Resources:
    """Resources of a process."""

    connections: int
    files: int
    """Open files other than connections."""
    memory: float


def established_connections() -> set[str]:
    """The established connections of this machine, named as in /proc/PID/fd."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {f"socket:[{row[9]}]" for row in rows if row[3] == ESTABLISHED}


def open_files(pid: int) -> list[str]:
    """Open files of a process; empty if it has ended."""
    found = []
    with contextlib.suppress(OSError):
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                found.append(str(file.readlink()))
    return found


def memory_of(pid: int) -> float:
    """Resident memory of a process in MB."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return sum(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))
    return 0.0


def measure(processes: PeerProcesses) -> dict[str, Resources]:
    """Current resources of each running process."""
    before = established_connections()
    opened = {name: open_files(processes.pid(name)) for name in processes.names}
    memory = {name: memory_of(processes.pid(name)) for name in processes.names}
    alive = (
        before | established_connections()
    )  # a connection that is just opened or closed does not count as a file
    found = {}
    for name, files in opened.items():
        if files and memory[name]:
            connections = sum(file in alive for file in files)
            found[name] = Resources(connections, len(files) - connections, memory[name])
    return found


def rounds_done(site: Path) -> int:
    """Number of rounds that a peer has written."""
    file = site / "run" / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def watch(processes: PeerProcesses) -> dict[str, list[Resources]]:
    """Resources of each process from its fifth round until the first process finishes and closes
    its connections."""
    found: dict[str, list[Resources]] = {name: [] for name in processes.names}
    began, is_over = time.monotonic(), False
    while len(processes.ended()) < len(processes.names):
        seconds = time.monotonic() - began
        if (
            fuzz.SECONDS
            and seconds > fuzz.SECONDS
            and all(len(each) >= MEASURED for each in found.values())
        ):
            break
        assert seconds < TIMEOUT + fuzz.SECONDS, "the processes do not finish in time"
        now = measure(processes)
        rounds = {name: rounds_done(processes.out / SITES / name) for name in processes.names}
        is_over = is_over or max(rounds.values()) == ROUNDS  # read after the measurement
        for name, resources in now.items():
            if rounds[name] >= EARLY and not is_over:
                found[name].append(resources)
        time.sleep(0.05)
    return found


def growth(found: list[Resources], of: Callable[[Resources], float]) -> float:
    """Difference between the maximum and the first measurement."""
    return max(map(of, found)) - of(found[0])


@pytest.mark.skipif(
    not Path("/proc/net/tcp").exists(), reason="needs /proc to inspect other processes"
)
def test_neither_open_files_nor_memory_grow_with_the_rounds(tmp_path: Path) -> None:
    create_run(compose({}, [*SETTINGS, *SIZES]), tmp_path / "up")
    processes = PeerProcesses(tmp_path / "up", peer_names(PEERS))
    try:
        for name in processes.names:
            processes.start(name)
        found = watch(processes)
    finally:
        processes.stop()
    if not fuzz.SECONDS:
        assert set(processes.ended().values()) == {0}, (
            processes.out / SITES / "000" / LOG
        ).read_text()
        for name in processes.names:
            assert max(rounds_of(processes.out / SITES / name / "run")) == ROUNDS - 1
    most = max(resources.connections for each in found.values() for resources in each)
    files = max(growth(each, lambda resources: resources.files) for each in found.values())
    memory = max(
        growth(each, lambda resources: resources.memory - CONNECTION_MB * resources.connections)
        for each in found.values()
    )
    highest = max(resources.memory for each in found.values() for resources in each)
    grown = max(growth(each, lambda resources: resources.memory) for each in found.values())
    print(
        f"{PEERS} peers: files +{files}, memory +{grown:.1f} MB (+{memory:.1f} without connections)"
        f" to {highest:.0f} MB"
    )
    print(f"connections {most} at most, of {4 * (PEERS - 1)}")
    assert all(len(each) >= MEASURED for each in found.values())
    assert most <= 2 * Limits().max_connections_to_peer * (PEERS - 1)  # outgoing and incoming
    assert files <= FILES
    assert memory < MEMORY
