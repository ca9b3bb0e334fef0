"""Which worker gets which peers."""

from hypothesis import given
from hypothesis import strategies as st

from dispfl.engines.ray_driver import rebalance
from dispfl.engines.ray_pool import assign

SECONDS = st.dictionaries(st.integers(0, 99).map("{:03d}".format), st.floats(0, 100), min_size=1, max_size=20)


def longest(loads: dict[str, float], places: dict[str, int]) -> float:
    return max(sum(loads[peer] for peer in places if places[peer] == worker) for worker in set(places.values()))


def test_the_slowest_peers_are_assigned_first_each_to_the_least_loaded_worker() -> None:
    assert assign({"000": 1.0, "001": 5.0, "002": 4.0, "003": 2.0}, 2) == {"001": 0, "002": 1, "003": 1, "000": 0}


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


@given(SECONDS, st.integers(1, 4), st.integers(0, 999))
def test_moving_never_makes_the_round_longer(loads: dict[str, float], workers: int, shift: int) -> None:
    places = {peer: (int(peer) * 7 + shift) % workers for peer in loads}
    found = rebalance(loads, places, workers)
    assert found.keys() == places.keys()
    assert set(found.values()) <= set(range(workers))
    assert longest(loads, found) <= longest(loads, places) + 1e-9
