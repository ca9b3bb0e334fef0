"""A round on two Ray workers: processor time a peer against the same round in this process.

100 peers with the small CNN and 10 neighbours, one batch of 32 images and an evaluation on 20 each:
training is short, so that what Ray adds shows. All processes of Ray on this machine count.
"""

import os
import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import torch

from dispfl import Train
from dispfl.engines.checkpoint import Checkpoints
from dispfl.engines.inprocess import InProcess
from dispfl.engines.ray_driver import RayEngine
from dispfl.round.context import Engine, RunContext
from dispfl.testing.rounds import run_round
from measure import report
from synthetic import federation

LIMIT = 1.5
PEERS = 100
ROUNDS = 6


def processor_seconds() -> float:
    """Return the processor time of this process and all its descendants so far."""
    parents = {}
    seconds = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text().rsplit(")", 1)[1].split()
            except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
                continue
            parents[int(folder.name)] = int(fields[1])
            seconds[int(folder.name)] = (int(fields[11]) + int(fields[12])) / os.sysconf(
                "SC_CLK_TCK"
            )
    total = 0.0
    for process, used in seconds.items():
        ancestor = process
        while ancestor in parents and ancestor != os.getpid():
            ancestor = parents[ancestor]
        if ancestor == os.getpid():
            total += used
    return total


def seconds_a_peer(context: RunContext, start: Callable[[Checkpoints], Engine]) -> float:
    """Return the processor time of a peer in the cheapest round; the first one only warms up."""
    used = []
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(start(Checkpoints(Path(folder)))) as engine,
    ):
        engine.restore(0)
        for t in range(ROUNDS):
            began = processor_seconds()
            run_round(context, None, t, engine)
            engine.flush(t)
            used.append((processor_seconds() - began) / PEERS)
    return min(used[1:])


def main() -> None:
    """In process first, because Ray's processes may still end after their engine is closed."""
    train = Train(epochs=1, batch_size=32)
    context = federation("cnn", 1, 28, 32, 20, train, peers=PEERS, degree=10)
    here = seconds_a_peer(context, lambda checkpoints: InProcess(context, 2, checkpoints))
    ray = seconds_a_peer(context, lambda checkpoints: RayEngine(context, 2, checkpoints))
    report(
        "ray_overhead",
        ray / here,
        LIMIT,
        ms_a_peer=round(1000 * ray, 1),
        more_than_in_process_ms=round(1000 * (ray - here), 1),
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
