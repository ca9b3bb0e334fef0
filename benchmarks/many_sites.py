"""Many real sites on this machine with a tiny model: whether all finish, and what a site costs.

python benchmarks/many_sites.py 64
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dispfl.config import compose
from dispfl.files import RUN, SITES
from dispfl.peer.local_federation import PeerProcesses, create_run
from dispfl.peer.site import Site
from dispfl.peer.state.store import rounds_of
from dispfl.topology import peer_names

ROUNDS = 10
DEGREE = 4
SETTINGS = [
    f"rounds={ROUNDS}",
    "topology=random",
    f"topology.degree={DEGREE}",
    "model=mlp",
    "train.epochs=1",
    "partition.samples_per_peer=40",
    "partition.test_samples_per_peer=20",
]
MEASURING_INTERVAL = 2.0


@dataclass
class Usage:
    """The largest memory in MB and the most open files of a process so far."""

    resident: float = 0.0
    """All its pages, those of libraries that the processes share included."""
    proportional: float = 0.0
    """Shared pages divided among processes, so that the sum over all is what they need together."""
    private: float = 0.0
    files: int = 0

    def measure(self, pid: int) -> None:
        """Measure a process; nothing changes if it has ended."""
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
            files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        except OSError:
            return
        megabytes = {line.split(":")[0]: int(line.split()[1]) / 1024 for line in lines}
        private = megabytes["Private_Clean"] + megabytes["Private_Dirty"]
        self.resident = max(self.resident, megabytes["Rss"])
        self.proportional = max(self.proportional, megabytes["Pss"])
        self.private = max(self.private, private)
        self.files = max(self.files, files)


def run_sites(run: Path, sites: int) -> dict[str, Usage]:
    """Run the sites, and return what each uses; fail if one of them does not finish."""
    processes = PeerProcesses(run, peer_names(sites))
    usages = {name: Usage() for name in processes.names}
    try:
        for name in processes.names:
            processes.start(name)
        while len(processes.ended()) < sites:
            for name, usage in usages.items():
                usage.measure(processes.pid(name))
            time.sleep(MEASURING_INTERVAL)
    finally:
        processes.stop()
    assert set(processes.ended().values()) == {0}, processes.ended()
    return usages


def print_rounds(run: Path, names: list[str], began: float) -> None:
    """Print how long rounds take, how many models are received, and what a site sends."""
    first_ends = []
    round_seconds = []
    sent_bytes = []
    received = 0
    missed = 0
    for name in names:
        folder = run / SITES / name
        rounds = list(rounds_of(folder / RUN).values())
        first_ends.append(rounds[0]["time"] - began)
        round_seconds.append((rounds[-1]["time"] - rounds[0]["time"]) / (ROUNDS - 1))
        received += sum(len(record["received"]) for record in rounds)
        missed += sum(len(record["missed"]) for record in rounds)
        status = Site.open(folder).status()
        assert status is not None
        sent_bytes.append(status["sockets"]["sent"])

    print(
        f"{len(names)} sites, {ROUNDS} rounds: all finished; {received} models received,"
        f" {missed} missed"
    )
    print(
        f"the first round ends after {max(first_ends):.0f} s;"
        f" then a round takes {statistics.median(round_seconds):.1f} s"
    )
    print(f"a site sends {statistics.mean(sent_bytes) / ROUNDS / 1e6:.2f} MB per round")


def print_usage(usages: Mapping[str, Usage]) -> None:
    """Print the memory and the open files of the largest process, and the memory of all."""
    private = max(usage.private for usage in usages.values())
    resident = max(usage.resident for usage in usages.values())
    files = max(usage.files for usage in usages.values())
    gigabytes = sum(usage.proportional for usage in usages.values()) / 1024
    print(
        f"in a process at most {private:.0f} MB of its own, {resident:.0f} MB with shared"
        f" libraries, and {files} open files; {gigabytes:.1f} GB in all"
    )


def main(sites: int) -> None:
    """Run the sites and print their costs."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "up"
        create_run(compose({}, [*SETTINGS, f"peers={sites}"]), run)
        began = time.time()
        usages = run_sites(run, sites)
        print_rounds(run, list(usages), began)
        print_usage(usages)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 64)
