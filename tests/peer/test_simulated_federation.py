"""Whole federations on a virtual clock, in bad weather; the world itself is in tests/shared/simulated_world.py."""

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor

import pytest
import torch
from simulated_world import ROUNDS, check, good_weather, simulate

SEEDS = int(os.environ.get("DISPFL_SIMULATIONS", "100"))
"""`make fuzz` asks for many more."""


@pytest.fixture(scope="module")
def runs() -> Iterator[list[Future[str]]]:
    """A run for each seed, on all cores."""
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(mp_context=context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        yield [pool.submit(check, seed) for seed in range(SEEDS)]
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("block", range(10))
def test_whatever_happens_nobody_mixes_rounds_or_counts_twice_and_everyone_reaches_the_end(
    block: int, runs: list[Future[str]]
) -> None:
    """Also: finite, no weight too many, no round of twice its deadline, and back within two rounds of the others."""
    failed = {seed: problem for seed in range(block, SEEDS, 10) if (problem := runs[seed].exception())}
    assert not failed, f"seeds {sorted(failed)}" + "".join(f"\n{seed}: {failed[seed]!r}" for seed in failed)


def test_the_same_seed_gives_the_same_trace_also_in_another_process_and_another_seed_another(
    runs: list[Future[str]],
) -> None:
    for seed in (3, 14, 15):
        assert check(seed) == runs[seed].result()
    assert len({run.result() for run in runs}) == SEEDS


def test_in_good_weather_everyone_hears_every_neighbour_in_every_round() -> None:
    for seed in range(5):
        world = simulate(seed, troubled=False, fate=good_weather)
        for name, store in world.stores.items():
            assert store.rounds == list(range(ROUNDS))
            for t in range(ROUNDS):
                graph = world.setting.topology.heard(seed, t, world.names)
                assert store.heard[t] == graph[name]
        assert not any(event in ("late", "behind", "refusing") for _, _, event, _ in world.trace)
