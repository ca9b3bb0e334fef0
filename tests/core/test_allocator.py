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


STATES = """
import resource

import torch
from dispfl.core.samples import PeerData
from dispfl.data.batches import ResidentSamples
from dispfl.engines.inprocess import InProcess
from dispfl.experiment import Simulation
from dispfl.models.settings import Model
from dispfl.round.context import RunContext, RunData
from dispfl.topology import peer_names

def peak():
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

PEERS = 300
data = PeerData(*[ResidentSamples(torch.rand(4, 1, 28, 28), torch.arange(4) % 2)] * 2)
peers = RunData(dict.fromkeys(peer_names(PEERS), data))
network = lambda: Model(name="cnn").build(1, 10, 28)
engine = InProcess(RunContext(Simulation(peers=PEERS), peers, network), 2)
before = peak()
engine.restore(0)
needed = sum(s.model.values.nbytes + s.model.mask.bits.nbytes for s in engine.states.values())
print(100 * (peak() - before) // needed)
"""


def test_states_do_not_hold_the_memory_of_what_was_computed_between_them() -> None:
    """Drawing a mask takes several vectors of the model's size, before its few bytes are kept."""
    process = subprocess.run(
        [sys.executable, "-c", STATES], check=True, capture_output=True, timeout=300
    )
    assert int(process.stdout) < 200  # percent; without returning memory it is above 300
