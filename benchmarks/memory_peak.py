"""A round of Dis-PFL with 100 ResNet-18 peers and 10 neighbours in one process: peak memory.

One batch of 16 images a peer, checkpoint included. The ratio is of resident memory against the
limit, 7 GB for masks of single weights at density 0.5 and 2.5 GB for masks of channels at density
0.25; `states_gb` is what one set of all peers' states takes, `obvious_gb` what two dense models and
four bool masks a peer would (this round's and the next one's).
"""

import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from dispfl import DisPFL, Federation, RandomRegular, Train
from dispfl.methods.base import PeerState
from dispfl.models.settings import Model
from measure import report

PEERS = 100
IMAGES = 16
METHODS = {"weights": DisPFL(density=0.5), "channels": DisPFL(structure="channels", density=0.25)}
LIMITS_GB = {"weights": 7.0, "channels": 2.5}
GIGABYTE = 1e9


def federation(method: DisPFL) -> Federation:
    """Return peers with random images, which are trained for one batch and one round."""
    rng = torch.Generator().manual_seed(0)
    images = torch.randn(IMAGES * PEERS, 3, 32, 32, generator=rng)
    images = images.to(memory_format=torch.channels_last)
    labels = torch.randint(10, (IMAGES * PEERS,), generator=rng)
    peers = []
    for begin in range(0, len(images), IMAGES):
        x = images[begin : begin + IMAGES]
        y = labels[begin : begin + IMAGES]
        peers.append(((x, y), (x[:4], y[:4])))
    return Federation(
        lambda: Model(name="resnet18").build(3, 10, 32),
        peers,
        method,
        RandomRegular(degree=10),
        train=Train(epochs=1, batch_size=IMAGES),
        eval_every=2,
        rounds=1,
    )


def state_bytes(state: PeerState) -> int:
    """Return the bytes of a peer's values and masks."""
    mask_bytes = state.model.mask.bits.numel() + state.next_mask.bits.numel()
    return 4 * state.model.values.numel() + mask_bytes


def main(structure: str) -> bool | None:
    """One round, written to the disk like that of any run."""
    method = METHODS[structure]
    with tempfile.TemporaryDirectory() as folder:
        run = federation(method).run(out=Path(folder) / "run")
        size = run.states["000"].model.mask.size
        states = sum(state_bytes(state) for state in run.states.values())
        seconds = run.metrics[0]["seconds"]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return report(
        "memory_peak",
        peak / GIGABYTE / LIMITS_GB[structure],
        1.0,
        model="resnet18",
        structure=structure,
        density=method.density,
        peers=PEERS,
        seconds=seconds,
        peak_gb=round(peak / GIGABYTE, 2),
        states_gb=round(states / GIGABYTE, 2),
        obvious_gb=round(PEERS * 12 * size / GIGABYTE, 2),
    )


if __name__ == "__main__":
    if "--here" in sys.argv:
        sys.exit(main(sys.argv[-1]) is False)
    exit_codes = []
    for structure in METHODS:  # each in a process of its own, whose peak is the round's
        process = subprocess.run([sys.executable, __file__, "--here", structure])
        exit_codes.append(process.returncode)
    sys.exit(max(exit_codes))
