"""What a peer costs in memory between rounds, against its kept values and two bits a parameter.

Measured as the growth of the process while many peers' states are made; a kept value has 4 bytes.
`dense_mb_a_peer` is what the obvious way needs: dense weights and two bool masks.
"""

import gc
import os
import subprocess
import sys
from pathlib import Path

import torch

from dispfl import DisPFL
from dispfl.core.flat_module import FlatModule
from dispfl.core.packed import PackedModel, WeightMask
from dispfl.methods.base import PeerState
from dispfl.models.settings import Model
from dispfl.topology import peer_names
from measure import report

LIMIT = 1.05
DENSITY = 0.5


def resident_bytes() -> int:
    """Return what this process has in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def measure(model: str, peers: int) -> None:
    """So many peers with one model at density 0.5."""
    method = DisPFL(density=DENSITY)
    network = FlatModule(Model(name=model).build(3, 10, 32))
    layout = network.layout
    first_weights = network.read()

    def settled_state(peer: str) -> PeerState:
        """Return a peer as a step leaves it: with weights under one mask, and with a next mask."""
        state = method.start(first_weights, layout, DENSITY, seed=0, peer=peer)
        weights, mask = state.model.unpack()
        return PeerState(PackedModel.pack(weights, mask), WeightMask.pack(mask.roll(1)))

    settled_state("000")
    gc.collect()
    before = resident_bytes()
    states = [settled_state(peer) for peer in peer_names(peers)]
    gc.collect()
    used = resident_bytes() - before

    needed = sum(4 * state.model.values.numel() + 2 * layout.size / 8 for state in states)
    report(
        "memory_at_rest",
        used / needed,
        LIMIT,
        model=model,
        peers=peers,
        mb_a_peer=round(used / peers / 1e6, 2),
        dense_mb_a_peer=round(6 * layout.size / 1e6, 2),
    )


def measure_in_process(model: str, peers: int) -> None:
    """Measure in a process that returns freed memory at once: the states, not the heap."""
    returns_memory = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
    command = [sys.executable, __file__, model, str(peers)]
    subprocess.run(command, env=os.environ | returns_memory, check=True)


if __name__ == "__main__":
    if len(sys.argv) == 3:
        torch.set_num_threads(1)
        measure(sys.argv[1], int(sys.argv[2]))
    else:
        measure_in_process("resnet18", 20)
        measure_in_process("cnn", 1000)
