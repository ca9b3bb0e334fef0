"""Many real peers for many rounds: beside their connections to each other, processes take no more than in round 5.

Connections are kept for the next round, so their number grows until everyone has talked to everyone, and no further:
that is counted apart, as those that are alive at both ends. One that is dead and still open counts as a file.
"""

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from dispfl.config import compose
from dispfl.peer.limits import Limits
from dispfl.peer.store import ROUNDS as ROUNDS_FILE
from dispfl.peer.store import rounds_of
from dispfl.roster import roster_names
from dispfl.up import LOG, SITES, Processes, set_up

MANY = os.environ.get("DISPFL_LEAKS") == "1"
PEERS, ROUNDS, EARLY = (32 if MANY else 8), 20, 5
SETTINGS = ["topology=random", "topology.degree=4", "model=mlp", "train.epochs=10", "threads=1"]
SIZES = ["partition.samples=40", "partition.test_samples=20", f"peers={PEERS}", f"rounds={ROUNDS}"]
PATIENCE = 900.0
"""Seconds after which a federation that does not end has failed."""
FILES = 4
"""Files that a process may have open for a moment: a checkpoint, the status, a connection that is being made."""
MEMORY = 8.0
"""MB that a process may grow by, beside its connections: what the allocator keeps for itself in the first rounds. If it
kept what a round brings (four answers and four models, about 1 MB), that would be more by the last round."""
A_CONNECTION = 0.385
"""MB, as measured at either end with a hundred of them: TLS has buffers of 256 kB for each, HTTP the rest."""
ESTABLISHED = "01"


@dataclass(frozen=True)
class Taken:
    """What a process has."""

    connections: int
    files: int
    """Everything open but the connections."""
    memory: float


def living_connections() -> set[str]:
    """The connections on this machine, called as in a process's list of open files."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {f"socket:[{row[9]}]" for row in rows if row[3] == ESTABLISHED}


def open_files(pid: int) -> list[str]:
    """What a process has open; nothing, if it has ended."""
    found = []
    with contextlib.suppress(OSError):
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed since
                found.append(str(file.readlink()))
    return found


def memory_of(pid: int) -> float:
    """A process's resident memory in MB."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return sum(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))
    return 0.0


def look_at(processes: Processes) -> dict[str, Taken]:
    """What each process has now that has not ended."""
    before = living_connections()
    opened = {name: open_files(process.pid) for name, process in processes.running.items()}
    memory = {name: memory_of(process.pid) for name, process in processes.running.items()}
    alive = before | living_connections()  # so that one that was just made, or just ended, is no file
    found = {}
    for name, files in opened.items():
        if files and memory[name]:
            connections = sum(file in alive for file in files)
            found[name] = Taken(connections, len(files) - connections, memory[name])
    return found


def rounds_done(site: Path) -> int:
    """So many lines has a peer written."""
    file = site / "run" / ROUNDS_FILE
    return file.read_bytes().count(b"\n") if file.exists() else 0


def watch(processes: Processes) -> dict[str, list[Taken]]:
    """What each process had from its fifth round on, until the first is done and hangs up on the others."""
    found: dict[str, list[Taken]] = {name: [] for name in processes.names}
    deadline, is_over = time.monotonic() + PATIENCE, False
    while len(processes.ended()) < len(processes.names):
        assert time.monotonic() < deadline, "they do not end"
        now = look_at(processes)
        rounds = {name: rounds_done(processes.out / SITES / name) for name in processes.names}
        is_over = is_over or max(rounds.values()) == ROUNDS  # looked at after the rest
        for name, taken in now.items():
            if rounds[name] >= EARLY and not is_over:
                found[name].append(taken)
        time.sleep(0.05)
    return found


def growth(found: list[Taken], of: Callable[[Taken], float]) -> float:
    """From the first look to the highest."""
    return max(map(of, found)) - of(found[0])


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs /proc to look into other processes")
def test_neither_open_files_nor_memory_grow_with_the_rounds(tmp_path: Path) -> None:
    set_up(compose({}, [*SETTINGS, *SIZES]), tmp_path / "up")
    processes = Processes(tmp_path / "up", roster_names(PEERS))
    try:
        for name in processes.names:
            processes.start(name)
        found = watch(processes)
    finally:
        processes.stop()
    assert set(processes.ended().values()) == {0}, (processes.out / SITES / "000" / LOG).read_text()
    for name in processes.names:
        assert max(rounds_of(processes.out / SITES / name / "run")) == ROUNDS - 1
    most = max(taken.connections for each in found.values() for taken in each)
    files = max(growth(each, lambda taken: taken.files) for each in found.values())
    memory = max(growth(each, lambda taken: taken.memory - A_CONNECTION * taken.connections) for each in found.values())
    highest = max(taken.memory for each in found.values() for taken in each)
    grown = max(growth(each, lambda taken: taken.memory) for each in found.values())
    print(
        f"{PEERS} peers: files +{files}, memory +{grown:.1f} MB (+{memory:.1f} beside connections) to {highest:.0f} MB"
    )
    print(f"connections {most} at most, of {4 * (PEERS - 1)}")
    assert all(len(each) >= 5 for each in found.values())
    assert most <= 2 * Limits().to_one * (PEERS - 1)  # those that a process makes, and those that others make
    assert files <= FILES
    assert memory < MEMORY
