"""Whole federations on a virtual clock, in bad weather; the world itself is in tests/shared/simulated_world.py."""

import os

import pytest
from simulated_world import PEERS, ROUNDS, good_weather, simulate

SEEDS = int(os.environ.get("DISPFL_SIMULATIONS", "100"))
"""`make fuzz` asks for many more."""


@pytest.mark.parametrize("block", range(10))
def test_whatever_happens_nobody_mixes_rounds_or_counts_twice_and_everyone_reaches_the_end(block: int) -> None:
    for seed in range(block, SEEDS, 10):
        world = simulate(seed)
        assert set(world.finished) == set(world.names), seed
        assert all(store.last is not None and store.last[0] == ROUNDS for store in world.stores.values()), seed


def test_the_same_seed_gives_the_same_trace_and_another_seed_another() -> None:
    one, again, other = simulate(3), simulate(3), simulate(4)
    assert one.trace == again.trace
    assert len(one.trace) > PEERS * ROUNDS / 2
    assert one.trace != other.trace


def test_in_good_weather_everyone_hears_every_neighbour_in_every_round() -> None:
    for seed in range(5):
        world = simulate(seed, troubled=False, fate=good_weather)
        for name, store in world.stores.items():
            assert store.rounds == list(range(ROUNDS))
            for t in range(ROUNDS):
                graph = world.setting.topology.heard(seed, t, world.names)
                assert store.heard[t] == graph[name]
        assert not any(event in ("late", "behind", "refusing") for _, _, event, _ in world.trace)
