"""Stacked models trained at once against two threads that train one peer each; ratio of times.

Equal work on both sides: batches drawn, forward, backward, mask, clip, SGD step. Both may use two
threads: the stacked side in its faster form, one stack on two threads or two stacks on one each.
The target is a stack that is 1.5 times as fast for the network of a table; for images the ratio is
measured only.

Then whole rounds of 64 Dis-PFL peers in the in-process engine with two threads, `vmap_peers` 16 or
32 against 1: mixing with 10 neighbours, scoring twice, evolving masks and bookkeeping are done peer
by peer on both sides. The limit is for 500 samples per peer in batches of 32; where a round has
fewer steps, the other work weighs more, and the ratio is measured only.
"""

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from itertools import count
from queue import SimpleQueue

import torch

from dispfl import DisPFL, RandomRegular, Train
from dispfl.core.flat_module import FlatModule
from dispfl.core.samples import PeerData
from dispfl.core.task import Task
from dispfl.core.train import Trainer, TrainingRun
from dispfl.core.trained_part import TrainedPart
from dispfl.data.batches import ResidentSamples
from dispfl.engines.inprocess import InProcess
from dispfl.engines.vmap_peers import learn_stacked
from dispfl.models.settings import Model
from dispfl.round.context import RunContext
from dispfl.testing.rounds import run_round, simulated_context
from dispfl.topology import peer_names
from measure import best_times, report
from synthetic import PAPER_DEGREE, ROUNDS

LIMIT = 1 / 1.5
COLUMNS = 30
VMAP_PEERS = (16, 32)


def random_samples(samples: int, shape: Sequence[int], rng: torch.Generator) -> ResidentSamples:
    """Return random inputs of ten classes."""
    inputs = torch.randn(samples, *shape, generator=rng)
    return ResidentSamples(inputs, torch.randint(10, (samples,), generator=rng))


class Workers:
    """Peers with random samples, and two networks that train them for one epoch."""

    def __init__(
        self, model: str, shape: tuple[int, ...], batch: int, peers: int, steps: int
    ) -> None:
        rng = torch.Generator().manual_seed(0)
        self.data = {}
        for peer in peer_names(peers):
            samples = random_samples(steps * batch, shape, rng)
            self.data[peer] = PeerData(samples, samples)
        train = Train(epochs=1, batch_size=batch)
        self.run = TrainingRun(train, Task(), seed=0, rounds=1)

        self.idle: SimpleQueue[FlatModule] = SimpleQueue()
        for _ in range(2):
            network = FlatModule(Model(name=model).network(shape, 10))
            self.idle.put(network)
        self.mask = torch.rand(network.layout.size, generator=rng) < 0.5
        self.weights = network.read().where(self.mask, 0.0)

    def trainer(self, network: FlatModule, peer: str) -> Trainer:
        return Trainer(network, self.data[peer], self.run, peer, 0)

    def train_alone(self, peer: str) -> None:
        network = self.idle.get()
        self.trainer(network, peer).learn(self.weights, self.mask)
        self.idle.put(network)

    def train_stack(self, peers: Sequence[str]) -> None:
        network = self.idle.get()
        trainers = [self.trainer(network, peer) for peer in peers]
        part = TrainedPart.of(self.mask, None, network.layout)
        steps = trainers[0].settings.local_steps(len(trainers[0].train))
        lr = trainers[0].settings.lr
        learn_stacked(trainers, [self.weights] * len(peers), [part] * len(peers), steps, lr)
        self.idle.put(network)


def measure(
    model: str, shape: tuple[int, ...], batch: int, peers: int, steps: int, limit: float | None
) -> None:
    """One epoch of this many steps, on random samples."""
    workers = Workers(model, shape, batch, peers, steps)
    roster = list(workers.data)
    halves = [roster[: peers // 2], roster[peers // 2 :]]

    with ThreadPoolExecutor(2, initializer=torch.set_num_threads, initargs=(1,)) as threads:

        def side_by_side() -> None:
            torch.set_num_threads(1)
            list(threads.map(workers.train_alone, roster))

        def two_stacks() -> None:
            torch.set_num_threads(1)
            list(threads.map(workers.train_stack, halves))

        def one_stack() -> None:
            torch.set_num_threads(2)
            workers.train_stack(roster)

        alone_time, two_stacks_time, one_stack_time = best_times(
            side_by_side, two_stacks, one_stack, repeats=5
        )
    report(
        "batched_peers",
        min(two_stacks_time, one_stack_time) / alone_time,
        limit,
        model=model,
        batch=batch,
        peers=peers,
        best="one stack" if one_stack_time < two_stacks_time else "two stacks",
        milliseconds_a_step=round(alone_time / steps / peers * 1e3, 3),
    )


def table_federation(samples: int, batch: int, peers: int) -> RunContext:
    """Return peers with so many random rows as training data, and a fifth of that as test data."""
    rng = torch.Generator().manual_seed(0)
    data = {}
    for peer in peer_names(peers):
        train_rows = random_samples(samples, (COLUMNS,), rng)
        test_rows = random_samples(samples // 5, (COLUMNS,), rng)
        data[peer] = PeerData(train_rows, test_rows)
    return simulated_context(
        data,
        model=lambda: Model(name="mlp").network((COLUMNS,), 10),
        method=DisPFL(),
        topology=RandomRegular(degree=PAPER_DEGREE),
        train=Train(epochs=5, batch_size=batch),
        rounds=ROUNDS,
    )


def measure_rounds(samples: int, batch: int, limit: float | None, peers: int = 64) -> None:
    """Real rounds, one after another, of a federation for each `vmap_peers`."""
    context = table_federation(samples, batch, peers)
    with ExitStack() as engines:

        def rounds_with(vmap_peers: int) -> Callable[[], object]:
            engine = InProcess(context.changed(vmap_peers=vmap_peers), 2)
            engines.enter_context(closing(engine))
            engine.restore(0)
            rounds = count()
            return lambda: run_round(engine.context, None, next(rounds), engine)

        sides = [rounds_with(vmap_peers) for vmap_peers in (1, *VMAP_PEERS)]
        alone_time, *stacked_times = best_times(*sides, repeats=3)
    for vmap_peers, stacked_time in zip(VMAP_PEERS, stacked_times, strict=True):
        report(
            "batched_peers",
            stacked_time / alone_time,
            limit,
            model="mlp",
            whole_round=True,
            peers=peers,
            vmap_peers=vmap_peers,
            samples=samples,
            batch=batch,
            seconds=round(stacked_time, 3),
            seconds_one_by_one=round(alone_time, 3),
        )


if __name__ == "__main__":
    for batch in (32, 128):
        for peers in (8, 16):
            limit = LIMIT if peers == 16 else None
            measure("mlp", (COLUMNS,), batch, peers, steps=16, limit=limit)
            if "--quick" not in sys.argv:
                measure("cnn", (1, 28, 28), batch, peers, steps=4, limit=None)
    for samples, batch in ((500, 32), (500, 128), (100, 32), (100, 128)):
        limit = LIMIT if (samples, batch) == (500, 32) else None
        measure_rounds(samples, batch, limit)
