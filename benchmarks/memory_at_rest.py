"""What a peer costs in memory between rounds, against its kept values x 4 bytes and two bits a
parameter; a ratio.

Measured as the growth of the process while many peers' states are made. `dense_mb_a_peer` is what
the obvious way needs: dense weights and two bool masks.
"""

import gc
import os
import subprocess
import sys

import torch

from dispfl import DisPFL
from dispfl.core.flat_module import FlatModule
from dispfl.core.packed import PackedModel, WeightMask
from dispfl.methods.base import PeerState
from dispfl.models.settings import Model
from measure import report

LIMIT = 1.05


def resident_bytes() -> int:
    """What this process has in memory now."""
    with open("/proc/self/statm") as file:  # noqa: PTH123
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure(name: str, peers: int) -> None:
    """So many peers with one model at density 0.5."""

    def settle(k: int) -> PeerState:
        """A peer as a step leaves it: its weights under one mask, and another mask that is its own
        too."""
        weights, mask = method.start(initial, layout, 0.5, seed=0, peer=f"{k:03d}").model.unpack()
        return PeerState(PackedModel.pack(weights, mask), WeightMask.pack(mask.roll(1)))

    method = DisPFL(density=0.5)
    network = FlatModule(Model(name=name).build(3, 10, 32))
    initial, layout = network.read(), network.layout
    settle(0)
    gc.collect()
    before = resident_bytes()
    states = [settle(k) for k in range(peers)]
    gc.collect()
    used = resident_bytes() - before
    size = layout.size
    needed = sum(4 * state.model.values.numel() + 2 * size / 8 for state in states)
    mb, dense_mb = round(used / peers / 1e6, 2), round(6 * size / 1e6, 2)
    report(
        "memory_at_rest",
        used / needed,
        LIMIT,
        model=name,
        peers=peers,
        mb_a_peer=mb,
        dense_mb_a_peer=dense_mb,
    )


if __name__ == "__main__":
    if len(sys.argv) == 3:
        torch.set_num_threads(1)
        measure(sys.argv[1], int(sys.argv[2]))
    else:
        # A process of its own for each, in which freed memory goes back at once: the states are
        # measured, not the heap.
        given_back = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
        for model, peers in (("resnet18", 20), ("cnn", 1000)):
            subprocess.run(
                [sys.executable, __file__, model, str(peers)],
                env={**os.environ, **given_back},
                check=True,
            )
