"""Peers' models stacked and trained at once against two threads that train one peer each; ratio of
times.

Equal work on both sides: batches drawn, forward, backward, mask, clip, SGD step. Both may use two
threads: the stacked side in its faster form, one stack on two threads or two stacks on one each.
Stacking is to be 1.5 times as fast for the network of a table; for images it is measured only.

Then whole rounds of 64 Dis-PFL peers in the in-process engine with two threads, `vmap_peers` 16 or
32 against 1: mixing with 10 neighbours, scoring twice, evolving masks and bookkeeping are done peer
by peer on both sides. The limit is for 500 samples per peer in batches of 32; where a round has
fewer steps, the rest weighs more, and it is measured only.
"""

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from itertools import count
from queue import SimpleQueue

import torch
from torch import Tensor

from dispfl import DisPFL, RandomRegular, Train
from dispfl.core.flat_module import FlatModule
from dispfl.core.samples import PeerData
from dispfl.core.stacked import learn_stacked
from dispfl.core.task import Task
from dispfl.core.train import Trainer
from dispfl.data.batches import ResidentSamples
from dispfl.engines.inprocess import InProcess
from dispfl.models.settings import Model
from dispfl.round.context import RunContext
from dispfl.testing.rounds import run_round
from measure import best_times, report

LIMIT = 1 / 1.5


def measure(
    name: str, shape: tuple[int, ...], batch: int, peers: int, steps: int, limit: float | None
) -> None:
    """One epoch of this many steps, on random samples."""
    rng = torch.Generator().manual_seed(0)
    count = steps * batch
    data = [
        ResidentSamples(
            torch.randn(count, *shape, generator=rng), torch.randint(10, (count,), generator=rng)
        )
        for _ in range(peers)
    ]
    settings = Train(epochs=1, batch_size=batch)
    networks = [FlatModule(Model(name=name).network(shape, 10)) for _ in range(2)]
    mask = torch.rand(networks[0].layout.size, generator=rng) < 0.5
    weights = networks[0].read().where(mask, 0.0)
    idle: SimpleQueue[FlatModule] = SimpleQueue()
    for network in networks:
        idle.put(network)

    def trainers(network: FlatModule, which: Sequence[int]) -> list[Trainer]:
        return [
            Trainer(network, data[k], data[k], settings, Task(), 0, f"{k:03}", 0, 1) for k in which
        ]

    def one(k: int) -> Tensor:
        network = idle.get()
        learned = trainers(network, [k])[0].learn(weights, mask)
        idle.put(network)
        return learned

    def stack(which: Sequence[int]) -> None:
        network = idle.get()
        learn_stacked(trainers(network, which), [weights] * len(which), [mask] * len(which))
        idle.put(network)

    with ThreadPoolExecutor(2, initializer=torch.set_num_threads, initargs=(1,)) as threads:

        def side_by_side() -> None:
            torch.set_num_threads(1)
            list(threads.map(one, range(peers)))

        def two_stacks() -> None:
            torch.set_num_threads(1)
            list(threads.map(stack, [range(peers // 2), range(peers // 2, peers)]))

        def one_stack() -> None:
            torch.set_num_threads(2)
            stack(range(peers))

        ours, two, whole = best_times(side_by_side, two_stacks, one_stack, repeats=5)
    report(
        "batched_peers",
        min(two, whole) / ours,
        limit,
        model=name,
        batch=batch,
        peers=peers,
        best="one stack" if whole < two else "two stacks",
        milliseconds_a_step=round(ours / steps / peers * 1e3, 3),
    )


def table_federation(samples: int, batch: int, peers: int) -> RunContext:
    """Peers with this many random rows of 30 columns as training data, and a fifth of that as test
    data."""
    rng = torch.Generator().manual_seed(0)

    def rows(count: int) -> ResidentSamples:
        return ResidentSamples(
            torch.randn(count, 30, generator=rng), torch.randint(10, (count,), generator=rng)
        )

    data = {f"{k:03}": PeerData(rows(samples), rows(samples // 5)) for k in range(peers)}
    train = Train(epochs=5, batch_size=batch)
    return RunContext(
        lambda: Model(name="mlp").network((30,), 10),
        data,
        DisPFL(),
        RandomRegular(),
        train,
        Task(),
        seed=0,
        rounds=500,
    )


def measure_rounds(samples: int, batch: int, limit: float | None, peers: int = 64) -> None:
    """Real rounds, one after another, of a federation for each `vmap_peers`."""
    context = table_federation(samples, batch, peers)
    sizes = (1, 16, 32)
    with ExitStack() as engines:

        def side(vmap_peers: int) -> Callable[[], object]:
            engine = engines.enter_context(
                closing(InProcess(context.changed(vmap_peers=vmap_peers), 2))
            )
            engine.restore(0)
            rounds = count()
            return lambda: run_round(engine.context, None, next(rounds), engine)

        alone, *stacked = best_times(*(side(vmap_peers) for vmap_peers in sizes), repeats=3)
    for vmap_peers, taken in zip(sizes[1:], stacked, strict=True):
        report(
            "batched_peers",
            taken / alone,
            limit,
            model="mlp",
            whole_round=True,
            peers=peers,
            vmap_peers=vmap_peers,
            samples=samples,
            batch=batch,
            seconds=round(taken, 3),
            seconds_one_by_one=round(alone, 3),
        )


if __name__ == "__main__":
    for batch in (32, 128):
        for peers in (8, 16):
            measure("mlp", (30,), batch, peers, steps=16, limit=LIMIT if peers == 16 else None)
            if "--quick" not in sys.argv:
                measure("cnn", (1, 28, 28), batch, peers, steps=4, limit=None)
    for samples, batch in ((500, 32), (500, 128), (100, 32), (100, 128)):
        measure_rounds(samples, batch, limit=LIMIT if (samples, batch) == (500, 32) else None)
