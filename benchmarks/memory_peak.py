"""A round of Dis-PFL with 100 ResNet-18 peers at density 0.5 and 10 neighbours in one process: peak resident memory.

One batch of 16 images a peer, checkpoint included. The ratio is against the limit of 7 GB; `states_gb` is what one
set of all peers' states takes, `obvious_gb` what two dense models and four bool masks a peer would (this round's and
the next one's).
"""

import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from dispfl import DisPFL, Federation, RandomRegular, Train
from dispfl.models.settings import Model
from measure import report

LIMIT_GB = 7.0
PEERS = 100


def main() -> None:
    """One round, written to the disk as any run's."""
    rng = torch.Generator().manual_seed(0)
    images = torch.randn(16 * PEERS, 3, 32, 32, generator=rng).to(memory_format=torch.channels_last)
    labels = torch.randint(10, (16 * PEERS,), generator=rng)
    peers = [((x, y), (x[:4], y[:4])) for x, y in zip(images.split(16), labels.split(16), strict=True)]
    federation = Federation(
        lambda: Model(name="resnet18").build(3, 10, 32),
        peers,
        DisPFL(density=0.5),
        RandomRegular(degree=10),
        train=Train(epochs=1, batch_size=16),
        eval_every=2,
    )
    with tempfile.TemporaryDirectory() as folder:
        run = federation.run(1, out=Path(folder) / "run")
        size = run.states["000"].model.mask.size
        states = sum(4 * state.model.values.numel() + 2 * size / 8 for state in run.states.values())
        seconds = run.history[0]["seconds"]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    more = {"peak_gb": peak / 1e9, "states_gb": states / 1e9, "obvious_gb": PEERS * 12 * size / 1e9}
    more = {name: round(value, 2) for name, value in more.items()}
    report("memory_peak", peak / 1e9 / LIMIT_GB, 1.0, model="resnet18", peers=PEERS, seconds=seconds, **more)


if __name__ == "__main__":
    if "--here" in sys.argv:
        main()
    else:  # a process of its own, whose peak is the round's
        subprocess.run([sys.executable, __file__, "--here"], check=True)
