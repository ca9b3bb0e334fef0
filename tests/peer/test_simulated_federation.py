"""Federations on a virtual clock with crashes, partitions and an unreliable network (simulated_world.py)."""

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor

import pytest
import torch
from simulated_world import ROUNDS, check, reliable, simulate

SEEDS = int(os.environ.get("DISPFL_SIMULATIONS", "100"))
"""`make fuzz` runs many more."""


@pytest.fixture(scope="module")
def runs() -> Iterator[list[Future[str]]]:
    """Run a federation for each seed, on all cores."""
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(mp_context=context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        yield [pool.submit(check, seed) for seed in range(SEEDS)]
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("block", range(10))
def test_all_peers_finish_and_never_mix_rounds_or_count_a_model_twice(block: int, runs: list[Future[str]]) -> None:
    """Also: finite weights, exact densities, no round beyond twice its deadline, fast recovery after a restart."""
    failed = {seed: problem for seed in range(block, SEEDS, 10) if (problem := runs[seed].exception())}
    assert not failed, f"seeds {sorted(failed)}" + "".join(f"\n{seed}: {failed[seed]!r}" for seed in failed)


def test_the_seed_alone_determines_the_trace(
    runs: list[Future[str]],
) -> None:
    for seed in (3, 14, 15):
        assert check(seed) == runs[seed].result()
    assert len({run.result() for run in runs}) == SEEDS


def test_without_faults_every_peer_hears_every_neighbour_in_every_round() -> None:
    for seed in range(5):
        world = simulate(seed, faulty=False, delivery_model=reliable)
        for name, store in world.stores.items():
            assert store.rounds == list(range(ROUNDS))
            for t in range(ROUNDS):
                graph = world.context.topology.heard(seed, t, world.names)
                assert store.heard[t] == graph[name]
        assert not any(event in ("late", "behind", "refused request") for _, _, event, _ in world.trace)
