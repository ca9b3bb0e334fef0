"""Which worker gets which peers."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispfl.engines.ray_driver import MeasuredLoads, rebalance
from dispfl.engines.ray_pool import assign
from dispfl.round.context import PeerTask

SECONDS = st.dictionaries(
    st.integers(0, 99).map("{:03d}".format), st.floats(0, 100), min_size=1, max_size=20
)


def longest(loads: dict[str, float], places: dict[str, int]) -> float:
    return max(
        sum(loads[peer] for peer in places if places[peer] == worker)
        for worker in set(places.values())
    )


def test_the_slowest_peers_are_assigned_first_each_to_the_least_loaded_worker() -> None:
    assert assign({"000": 1.0, "001": 5.0, "002": 4.0, "003": 2.0}, 2) == {
        "001": 0,
        "002": 1,
        "003": 1,
        "000": 0,
    }


def test_equal_peers_are_assigned_evenly() -> None:
    places = assign({f"{k:03d}": 1.0 for k in range(9)}, 3)
    assert sorted(places.values()) == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_one_of_three_peers_moves_if_one_worker_has_them_all() -> None:
    loads = {"000": 3.0, "001": 2.0, "002": 1.0}
    assert rebalance(loads, {"000": 0, "001": 0, "002": 0}, 2) == {"000": 1, "001": 0, "002": 0}


def test_no_peer_moves_for_a_gain_of_a_few_percent() -> None:
    loads = {"000": 1.00, "001": 0.04, "002": 1.00}
    places = {"000": 0, "001": 0, "002": 1}
    assert rebalance(loads, places, 2) == places


def test_a_peers_load_is_its_mean_where_it_trained_and_until_then_follows_from_its_samples() -> (
    None
):
    """Peers 000 and 001 take (3 + 5) / 2 = 4 s for 10 samples and 2 s for 20: 6 s for 30, so 50
    samples take 10 s."""
    loads = MeasuredLoads({"000": 10, "001": 20, "002": 50})
    assert loads.estimate() == {"000": 0.0, "001": 0.0, "002": 0.0}
    for peer, seconds in (("000", 3.0), ("000", 5.0), ("001", 2.0)):
        loads.add(PeerTask(peer, 0), seconds)
    for peer in ("000", "002"):
        loads.add(PeerTask(peer, 0, idle=True), 0.1)
    assert loads.estimate() == pytest.approx({"000": 4.0, "001": 2.0, "002": 10.0})


def test_no_peer_moves_because_others_are_selected_in_the_next_round() -> None:
    """100 equal peers on 8 workers, ten of which train in each of 50 rounds."""
    samples = {f"{k:03d}": 20 for k in range(100)}
    loads, places, rng = MeasuredLoads(samples), assign(samples, 8), random.Random(0)
    for t in range(50):
        cohort = rng.sample(sorted(samples), 10)
        for peer in samples:
            loads.add(PeerTask(peer, t, idle=peer not in cohort), 1.0 if peer in cohort else 0.001)
        assert rebalance(loads.estimate(), places, 8) == places


@given(SECONDS, st.integers(1, 4), st.integers(0, 999))
def test_moving_never_makes_the_round_longer(
    loads: dict[str, float], workers: int, shift: int
) -> None:
    places = {peer: (int(peer) * 7 + shift) % workers for peer in loads}
    found = rebalance(loads, places, workers)
    assert found.keys() == places.keys()
    assert set(found.values()) <= set(range(workers))
    assert longest(loads, found) <= longest(loads, places) + 1e-9
