"""Many real sites on this machine with a tiny model: whether all finish, and what one of them
costs.

`python benchmarks/many_sites.py 64`
"""

import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from dispfl.config import compose
from dispfl.files import RUN, SITES
from dispfl.peer.local_federation import PeerProcesses, create_run
from dispfl.peer.site import Site
from dispfl.peer.state.store import rounds_of
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


@dataclass
class Use:
    """The largest memory in MB and the most open files of a process so far."""

    resident: float = 0.0
    """All its pages, those of libraries that the processes share included."""
    proportional: float = 0.0
    """Shared pages counted in parts, so that the sum over all processes is what they need
    together."""
    private: float = 0.0
    files: int = 0

    def measure(self, pid: int) -> None:
        """Measure a process; nothing changes if it has ended."""
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
            kilobytes = {line.split(":")[0]: int(line.split()[1]) for line in lines}
            files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        except OSError:
            return
        private = kilobytes["Private_Clean"] + kilobytes["Private_Dirty"]
        self.resident = max(self.resident, kilobytes["Rss"] / 1024)
        self.proportional = max(self.proportional, kilobytes["Pss"] / 1024)
        self.private = max(self.private, private / 1024)
        self.files = max(self.files, files)


def main(sites: int) -> None:
    """Run the sites and print their costs; fail if one of them does not finish."""
    out = Path(tempfile.mkdtemp()) / "up"
    create_run(compose({}, [*SETTINGS, f"peers={sites}"]), out)
    processes = PeerProcesses(out, peer_names(sites))
    use = {name: Use() for name in processes.names}
    began = time.time()
    try:
        for name in processes.names:
            processes.start(name)
        while len(processes.ended()) < sites:
            for name in processes.names:
                use[name].measure(processes.pid(name))
            time.sleep(2)
    finally:
        processes.stop()
    assert set(processes.ended().values()) == {0}, processes.ended()
    rounds = {name: list(rounds_of(out / SITES / name / RUN).values()) for name in processes.names}
    seconds = statistics.median(
        (lines[-1]["time"] - lines[0]["time"]) / (ROUNDS - 1) for lines in rounds.values()
    )
    start = max(lines[0]["time"] for lines in rounds.values()) - began
    received, missed = (
        sum(len(line[key]) for lines in rounds.values() for line in lines)
        for key in ("received", "missed")
    )
    sent = [
        (Site.open(out / SITES / name).status() or {})["sockets"]["sent"]
        for name in processes.names
    ]
    print(
        f"{sites} sites, {ROUNDS} rounds: all finished; {received} models received, {missed} missed"
    )
    print(f"the first round ends after {start:.0f} s; then a round takes {seconds:.1f} s")
    print(f"a site sends {statistics.mean(sent) / ROUNDS / 1e6:.2f} MB per round")
    print(
        f"in a process at most {max(each.private for each in use.values()):.0f} MB of its own, "
        f"{max(each.resident for each in use.values()):.0f} MB with shared libraries, and "
        f"{max(each.files for each in use.values())} open files; "
        f"{sum(each.proportional for each in use.values()) / 1024:.1f} GB in all"
    )
    shutil.rmtree(out.parent)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 64)
