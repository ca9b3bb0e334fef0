"""Peers' models stacked and trained at once against two threads that train one peer each; ratio of times.

Equal work on both sides: batches drawn, forward, backward, mask, clip, SGD step. Both may use two threads: the stacked
side as it likes best, one stack on two threads or two stacks on one each. Stacking is to be 1.5 times as fast for the
network of a table; for pictures it is measured only.
"""

import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import torch
from torch import Tensor

from dispfl import Train
from dispfl.core.batched import learn_together
from dispfl.core.live import LiveModel
from dispfl.core.train import Task, Trainer
from dispfl.data.batches import ResidentSamples
from dispfl.models.registry import Model
from measure import best_times, report

LIMIT = 1 / 1.5


def measure(name: str, shape: tuple[int, ...], batch: int, peers: int, steps: int, limit: float | None) -> None:
    """One epoch of so many steps, on random samples."""
    rng = torch.Generator().manual_seed(0)
    count = steps * batch
    data = [
        ResidentSamples(torch.randn(count, *shape, generator=rng), torch.randint(10, (count,), generator=rng))
        for _ in range(peers)
    ]
    settings = Train(epochs=1, batch=batch)
    lives = [LiveModel(Model(name=name).network(shape, 10)) for _ in range(2)]
    mask = torch.rand(lives[0].layout.size, generator=rng) < 0.5
    weights = lives[0].read().where(mask, 0.0)
    idle: SimpleQueue[LiveModel] = SimpleQueue()
    for live in lives:
        idle.put(live)

    def trainers(live: LiveModel, which: Sequence[int]) -> list[Trainer]:
        return [Trainer(live, data[k], data[k], settings, Task(), 0, f"{k:03}", 0, 1) for k in which]

    def one(k: int) -> Tensor:
        live = idle.get()
        learned = trainers(live, [k])[0].learn(weights, mask)
        idle.put(live)
        return learned

    def stack(which: Sequence[int]) -> None:
        live = idle.get()
        learn_together(trainers(live, which), [weights] * len(which), [mask] * len(which))
        idle.put(live)

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


if __name__ == "__main__":
    for batch in (32, 128):
        for peers in (8, 16):
            measure("mlp", (30,), batch, peers, steps=16, limit=LIMIT if peers == 16 else None)
            if "--quick" not in sys.argv:
                measure("cnn", (1, 28, 28), batch, peers, steps=4, limit=None)
