"""A run of 10,000 peers with 1 GB for their states: processor time a peer-round against 100 peers.

Small CNN, 10 neighbours, 10 images a peer that all peers share, three rounds with a checkpoint
each, an evaluation after the last; each run in a process of its own. `peak_mb` is to stay below
2,000, and `show_seconds` and `report_seconds` are the processor time of `dispfl show` and `dispfl
report` on the run's directory. `cohort_ratio` is that of a round of FedAvg with a cohort of 100, of
10,000 peers against 100, without evaluation.
"""

import json
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from dispfl import DisPFL, FedAvg, Federation, RandomRegular, Train
from dispfl.methods.base import Method
from dispfl.models.settings import Model
from measure import report
from synthetic import peers_with_shared_images

FEW = 100
MANY = 10_000
ROUNDS = 3
IMAGES = 2000
TRAIN_IMAGES = 10
TEST_IMAGES = 10
STATES_GB = 1.0
LIMIT = 1.2
METHODS: dict[str, Method] = {"gossip": DisPFL(), "cohort": FedAvg(cohort=FEW)}


@dataclass(frozen=True)
class Usage:
    """What one run uses; the time is that of a round after the first."""

    peak_mb: float
    round_cpu_seconds: float
    whole_cpu_seconds: float


def federation(peers: int, method: str) -> Federation:
    """Return peers that index the same random images."""
    return Federation(
        lambda: Model(name="cnn").build(1, 10, 28),
        peers_with_shared_images(peers, IMAGES, TRAIN_IMAGES, TEST_IMAGES),
        METHODS[method],
        RandomRegular(degree=10),
        train=Train(epochs=1, batch_size=32),
        eval_every=ROUNDS + 1,
        rounds=ROUNDS,
        memory_limit=STATES_GB,
    )


def measure(peers: int, method: str, out: Path) -> Usage:
    """Return what a run uses, after its data are made."""
    many = federation(peers, method)
    began = time.process_time()
    ends: list[float] = []
    many.run(out=out, callbacks=[lambda run: ends.append(time.process_time())])
    whole = time.process_time() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return Usage(peak, min(ends[1] - ends[0], ends[2] - ends[1]), whole)


def measure_in_process(peers: int, method: str, out: Path) -> Usage:
    """Return what a run uses in a process of its own."""
    command = [sys.executable, __file__, str(peers), method, str(out)]
    process = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    return Usage(**json.loads(process.stdout))


def cpu_seconds_of(*arguments: str) -> float:
    """Return the processor time of a command of dispfl."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    code = "from dispfl.cli import main; main()"
    subprocess.run([sys.executable, "-c", code, *arguments], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> bool | None:
    """The small runs come first: what a machine needs to warm up counts for them."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        few = measure_in_process(FEW, "gossip", out / "few")
        many = measure_in_process(MANY, "gossip", out / "many")
        few_cohort = measure_in_process(FEW, "cohort", out / "few-cohort")
        many_cohort = measure_in_process(MANY, "cohort", out / "many-cohort")
        show = cpu_seconds_of("show", str(out / "many"))
        page = cpu_seconds_of("report", str(out / "many"), "--out", str(out / "report.html"))
    return report(
        "states_on_disk",
        (many.round_cpu_seconds / MANY) / (few.round_cpu_seconds / FEW),
        LIMIT,
        peers=MANY,
        ms_a_peer=[
            round(1000 * usage.round_cpu_seconds / peers, 1)
            for usage, peers in ((few, FEW), (many, MANY))
        ],
        peak_mb=round(many.peak_mb),
        show_seconds=round(show, 1),
        report_seconds=round(page, 1),
        cohort_ratio=round(many_cohort.round_cpu_seconds / few_cohort.round_cpu_seconds, 2),
        cohort_round_seconds=round(many_cohort.round_cpu_seconds, 2),
    )


if __name__ == "__main__":
    if len(sys.argv) == 4:
        torch.set_num_threads(1)
        peers, method, out = sys.argv[1:]
        print(json.dumps(asdict(measure(int(peers), method, Path(out)))))
    else:
        sys.exit(main() is False)
