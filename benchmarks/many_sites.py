"""Many real sites on this machine with a tiny model: whether all finish, and what one of them costs.

`python benchmarks/many_sites.py 64`; each site needs up to 370 MB of memory.
"""

import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

from dispfl.config import compose
from dispfl.peer.local import PeerProcesses, create_run
from dispfl.peer.site import Site
from dispfl.peer.store import rounds_of
from dispfl.runs.files import RUN, SITES
from dispfl.topology import peer_names

ROUNDS, DEGREE = 10, 4
SETTINGS = [
    f"rounds={ROUNDS}",
    "topology=random",
    f"topology.degree={DEGREE}",
    "model=mlp",
    "train.epochs=1",
    "partition.samples_per_peer=40",
    "partition.test_samples_per_peer=20",
]


def resources(pid: int) -> tuple[float, int]:
    """Return the largest memory of a process so far in MB, and its open files; zeros if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM")), files
    except (OSError, StopIteration):
        return 0.0, 0


def main(sites: int) -> None:
    """Run the sites and print their costs; fail if one of them does not finish."""
    out = Path(tempfile.mkdtemp()) / "up"
    create_run(compose({}, [*SETTINGS, f"peers={sites}"]), out)
    processes = PeerProcesses(out, peer_names(sites))
    most: dict[str, tuple[float, int]] = {}
    try:
        for name in processes.names:
            processes.start(name)
        while len(processes.ended()) < sites:
            for name, process in processes.running.items():
                memory, files = resources(process.pid)
                before = most.get(name, (0.0, 0))
                most[name] = (max(memory, before[0]), max(files, before[1]))
            time.sleep(0.5)
    finally:
        processes.stop()
    assert set(processes.ended().values()) == {0}, processes.ended()
    ends = [[entry["time"] for entry in rounds_of(out / SITES / name / RUN).values()] for name in processes.names]
    seconds = statistics.median((times[-1] - times[0]) / (ROUNDS - 1) for times in ends)
    missed = sum(len(e["missed"]) for name in processes.names for e in rounds_of(out / SITES / name / RUN).values())
    sent = [(Site.open(out / SITES / name).status() or {})["sockets"]["sent"] for name in processes.names]
    print(f"{sites} sites, {ROUNDS} rounds: all finished, {missed} of {sites * ROUNDS * DEGREE} models missed")
    print(f"a round takes {seconds:.1f} s; a site sends {statistics.mean(sent) / ROUNDS / 1e6:.2f} MB per round,")
    print(
        f"and has at most {max(m for m, _ in most.values()):.0f} MB and {max(f for _, f in most.values())} open files"
    )
    shutil.rmtree(out.parent)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 64)
