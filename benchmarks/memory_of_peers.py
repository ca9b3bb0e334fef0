"""Peak memory of a run with 4,000 peers above that of a run with 50, for each peer.

Small CNN, 10 neighbours, 10 images a peer that all peers share, one round without evaluation, each
run in a process of its own. The ratio is of what a peer adds against the limit, 0.35 MB;
`states_mb` is what its state has. Processor time of the round, for each peer of both, is beside it.
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

from dispfl import DisPFL, Federation, RandomRegular, Run, Train
from dispfl.models.settings import Model
from measure import report
from synthetic import peers_with_shared_images

FEW = 50
MANY = 4000
IMAGES = 2000
TRAIN_IMAGES = 10
TEST_IMAGES = 10
LIMIT_MB = 0.35
MEGABYTE = 1e6


@dataclass(frozen=True)
class Usage:
    """What one run uses."""

    peak_mb: float
    state_mb: float
    cpu_ms_a_peer: float


def federation(peers: int) -> Federation:
    """Return peers that index the same random images."""
    return Federation(
        lambda: Model(name="cnn").build(1, 10, 28),
        peers_with_shared_images(peers, IMAGES, TRAIN_IMAGES, TEST_IMAGES),
        DisPFL(),
        RandomRegular(degree=10),
        train=Train(epochs=1, batch_size=32),
        eval_every=2,
        rounds=1,
    )


def state_bytes(run: Run) -> int:
    """Return the bytes of one peer's values and masks."""
    state = next(iter(run.states.values()))
    return state.model.values.nbytes + state.model.mask.bits.nbytes + state.next_mask.bits.nbytes


def measure(peers: int) -> Usage:
    """Return what a run with its checkpoint uses, after its data are made."""
    many = federation(peers)
    began = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        run = many.run(out=Path(folder) / "run")
        cpu_seconds = time.process_time() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Usage(peak / MEGABYTE, state_bytes(run) / MEGABYTE, 1000 * cpu_seconds / peers)


def measure_in_process(peers: int) -> Usage:
    """Return what a run uses in a process of its own."""
    command = [sys.executable, __file__, str(peers)]
    process = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    return Usage(**json.loads(process.stdout))


def main() -> bool | None:
    """The small run has the memory that does not depend on the number of peers."""
    few = measure_in_process(FEW)
    many = measure_in_process(MANY)
    mb_a_peer = (many.peak_mb - few.peak_mb) / (MANY - FEW)
    return report(
        "memory_of_peers",
        mb_a_peer / LIMIT_MB,
        1.0,
        peers=MANY,
        mb_a_peer=round(mb_a_peer, 3),
        state_mb=round(many.state_mb, 3),
        peak_mb=[round(few.peak_mb), round(many.peak_mb)],
        cpu_ms_a_peer=[round(few.cpu_ms_a_peer, 1), round(many.cpu_ms_a_peer, 1)],
    )


if __name__ == "__main__":
    if len(sys.argv) == 2:
        torch.set_num_threads(1)
        print(json.dumps(asdict(measure(int(sys.argv[1])))))
    else:
        sys.exit(main() is False)
