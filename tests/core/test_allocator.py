"""Memory that every step needs is kept, not mapped again in every batch."""

import subprocess
import sys

import pytest

from dispfl.core import allocator

PIECES = """
import ctypes, resource, sys
import torch
from dispfl.core.samples import PeerData
from dispfl.data.batches import ResidentSamples
from dispfl.engines.inprocess import InProcess
from dispfl.experiment import Simulation
from dispfl.round.context import RunContext, RunData

if sys.argv[1] == "with an engine":
    data = PeerData(*[ResidentSamples(torch.rand(4, 3), torch.arange(4) % 2)] * 2)
    peers = RunData({"000": data, "001": data})
    InProcess(RunContext(Simulation(peers=2), peers, lambda: torch.nn.Linear(3, 2)))
c = ctypes.CDLL(None)
c.malloc.restype = ctypes.c_void_p
pieces = (ctypes.c_void_p * 2000)()
for _ in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for k in range(2000):  # 200 MB in small pieces, freed together
        pieces[k] = c.malloc(100_000)
        ctypes.memset(pieces[k], 1, 100_000)
    for k in reversed(range(2000)):
        c.free(ctypes.c_void_p(pieces[k]))
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(faults * resource.getpagesize() // 1_000_000)
"""


@pytest.mark.skipif(allocator._mallopt is None, reason="another C library than glibc")
def test_freed_memory_is_kept_for_the_next_batch_once_an_engine_exists() -> None:
    with_engine, without = (
        int(
            subprocess.run(
                [sys.executable, "-c", PIECES, how], check=True, capture_output=True, timeout=300
            ).stdout
        )
        for how in ("with an engine", "without")
    )
    assert with_engine < 20  # megabytes that were new the second time
    assert without > 100
