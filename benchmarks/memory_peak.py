"""A round of Dis-PFL with 100 ResNet-18 peers and 10 neighbours in one process: peak resident
memory.

One batch of 16 images a peer, checkpoint included. The ratio is against the limit, 7 GB for masks
of single weights at density 0.5 and 2.5 GB for masks of channels at density 0.25; `states_gb` is
what one set of all peers' states takes, `obvious_gb` what two dense models and four bool masks a
peer would (this round's and the next one's).
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

PEERS = 100
METHODS = {"weights": DisPFL(density=0.5), "channels": DisPFL(structure="channels", density=0.25)}
LIMITS_GB = {"weights": 7.0, "channels": 2.5}


def main(structure: str) -> bool | None:
    """One round, written to the disk as any run's."""
    rng = torch.Generator().manual_seed(0)
    images = torch.randn(16 * PEERS, 3, 32, 32, generator=rng).to(memory_format=torch.channels_last)
    labels = torch.randint(10, (16 * PEERS,), generator=rng)
    peers = [
        ((x, y), (x[:4], y[:4])) for x, y in zip(images.split(16), labels.split(16), strict=True)
    ]
    federation = Federation(
        lambda: Model(name="resnet18").build(3, 10, 32),
        peers,
        METHODS[structure],
        RandomRegular(degree=10),
        train=Train(epochs=1, batch_size=16),
        eval_every=2,
        rounds=1,
    )
    with tempfile.TemporaryDirectory() as folder:
        run = federation.run(out=Path(folder) / "run")
        size = run.states["000"].model.mask.size
        states = sum(
            4 * state.model.values.numel()
            + state.model.mask.bits.numel()
            + state.next_mask.bits.numel()
            for state in run.states.values()
        )
        seconds = run.metrics[0]["seconds"]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    more = {"peak_gb": peak / 1e9, "states_gb": states / 1e9, "obvious_gb": PEERS * 12 * size / 1e9}
    more = {name: round(value, 2) for name, value in more.items()}
    ratio, density = peak / 1e9 / LIMITS_GB[structure], METHODS[structure].density
    return report(
        "memory_peak",
        ratio,
        1.0,
        model="resnet18",
        structure=structure,
        density=density,
        peers=PEERS,
        seconds=seconds,
        **more,
    )


if __name__ == "__main__":
    if "--here" in sys.argv:
        sys.exit(main(sys.argv[-1]) is False)
    # A process of its own for each, whose peak is the round's.
    ended = [
        subprocess.run([sys.executable, __file__, "--here", structure]).returncode
        for structure in METHODS
    ]
    sys.exit(max(ended))
