"""Memory that steps take again and again is not mapped anew in every batch."""

import subprocess
import sys

import pytest

from dispfl.core import heap

ROUNDS = """
import resource, sys, torch
import dispfl.engines.inprocess as inprocess
from dispfl import DisPFL, RandomRegular, Train
from dispfl.core.train import Task
from dispfl.data.batches import ResidentSamples
from dispfl.models.registry import Model
from dispfl.round import play_round
from dispfl.work import PeerData, Setting

if sys.argv[1] == "let go":
    inprocess.keep_heap = lambda: None
data = PeerData(*[ResidentSamples(torch.rand(256, 1, 28, 28), torch.arange(256) % 10)] * 2)
setting = Setting(
    lambda: Model(name="cnn").build(1, 10, 28), {"000": data, "001": data}, DisPFL(), RandomRegular(degree=1),
    Train(epochs=1), Task(), seed=0, rounds=9,
)
engine = inprocess.InProcess(setting, threads=2)
engine.recall(0)
faults = []
for t in range(4):
    play_round(setting, None, t, engine)
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
engine.close()
print(faults[-1] - faults[0])
"""


@pytest.mark.skipif(heap._mallopt is None, reason="another C library than glibc")
def test_the_next_batch_gets_the_pages_of_the_last_one() -> None:
    faults = [
        int(subprocess.run([sys.executable, "-c", ROUNDS, how], check=True, capture_output=True, timeout=300).stdout)
        for how in ("keep", "let go")
    ]
    assert 2 * faults[0] < faults[1]
