"""Who receives whose models: by hand for the fixed graphs, by counting for the random one."""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, cast

import pytest

from dispfl.errors import ConfigError, RunError
from dispfl.experiment import Experiment
from dispfl.methods.dispfl import DisPFL
from dispfl.registry import TOPOLOGIES
from dispfl.topology import Exponential, Full, Grid, RandomRegular, Ring, Topology, peer_names

FIVE = peer_names(5)
TEN = peer_names(10)
BUILT_IN = [name for name in TOPOLOGIES if name != "file"]


def test_in_a_ring_of_five_each_hears_the_one_before_and_the_one_after() -> None:
    assert Ring().neighbours(0, 0, FIVE) == {
        "000": ["001", "004"],
        "001": ["000", "002"],
        "002": ["001", "003"],
        "003": ["002", "004"],
        "004": ["000", "003"],
    }


def test_a_ring_of_one_hears_nobody_and_in_a_ring_of_two_each_hears_the_other_once() -> None:
    assert Ring().neighbours(0, 0, ["000"]) == {"000": []}
    assert Ring().neighbours(0, 0, ["000", "001"]) == {"000": ["001"], "001": ["000"]}


def test_in_the_full_graph_everyone_hears_everyone_else() -> None:
    assert Full().neighbours(0, 0, ["000", "001", "002"]) == {
        "000": ["001", "002"],
        "001": ["000", "002"],
        "002": ["000", "001"],
    }
    assert Full().neighbours(0, 0, ["000"]) == {"000": []}


def test_in_a_grid_of_twelve_each_hears_the_four_around_it_across_the_edges_too() -> None:
    """
    0  1  2  3
    4  5  6  7
    8  9 10 11
    """
    graph = Grid().neighbours(0, 0, peer_names(12))
    assert graph["005"] == ["001", "004", "006", "009"]
    assert graph["000"] == ["001", "003", "004", "008"]
    assert graph["011"] == ["003", "007", "008", "010"]
    assert all(peer in graph[sender] for peer, received in graph.items() for sender in received)


def test_small_grids_by_hand() -> None:
    assert Grid().neighbours(0, 0, ["000"]) == {"000": []}
    assert Grid().neighbours(0, 0, ["000", "001"]) == {"000": ["001"], "001": ["000"]}
    assert Grid().neighbours(0, 0, peer_names(4)) == {  # above is below, left is right
        "000": ["001", "002"],
        "001": ["000", "003"],
        "002": ["000", "003"],
        "003": ["001", "002"],
    }


@pytest.mark.parametrize("peers", [3, 5, 7])
def test_a_grid_of_a_prime_number_of_peers_is_a_ring(peers: int) -> None:
    roster = peer_names(peers)
    assert Grid().neighbours(0, 0, roster) == Ring().neighbours(0, 0, roster)


def test_in_the_exponential_graph_each_hears_the_peers_1_2_4_and_8_positions_ahead() -> None:
    graph = Exponential().neighbours(0, 0, TEN)
    assert graph["000"] == ["001", "002", "004", "008"]
    assert graph["007"] == ["001", "005", "008", "009"]  # 8, 9, 11 and 15, less 10
    assert Counter(sender for received in graph.values() for sender in received) == dict.fromkeys(
        TEN, 4
    )


@pytest.mark.parametrize(
    ("peers", "received"),
    [(1, []), (2, ["001"]), (3, ["001", "002"]), (4, ["001", "002"]), (5, ["001", "002", "004"])],
)
def test_small_exponential_graphs_by_hand(peers: int, received: list[str]) -> None:
    assert Exponential().neighbours(0, 0, peer_names(peers))["000"] == received


def test_fixed_graphs_are_the_same_in_every_round_and_for_every_seed() -> None:
    for topology in (Ring(), Full(), Grid(), Exponential()):
        assert topology.neighbours(0, 0, TEN) == topology.neighbours(5, 7, TEN)


def test_only_random_graphs_give_up_neighbours_for_a_choice() -> None:
    for topology in (Ring(), Full(), Grid(), Exponential()):
        assert not topology.offers_choice
    thinned = RandomRegular(degree=4).thinned(3)
    assert RandomRegular(degree=4).offers_choice
    assert all(len(senders) == 1 for senders in thinned.neighbours(0, 0, TEN).values())


@pytest.mark.parametrize(
    ("peers", "degree"), [(2, 1), (5, 1), (5, 4), (10, 3), (11, 10), (101, 10)]
)
def test_random_regular_in_degree_and_out_degree_are_exactly_the_degree(
    peers: int, degree: int
) -> None:
    for t in range(3):
        graph = RandomRegular(degree=degree).neighbours(0, t, peer_names(peers))
        assert sorted(graph) == peer_names(peers)
        for peer, received in graph.items():
            assert len(set(received)) == len(received) == degree
            assert peer not in received
            assert received == sorted(received)
        heard_by = Counter(sender for received in graph.values() for sender in received)
        assert set(heard_by.values()) == {degree}


def test_random_regular_of_degree_2_among_three_is_the_full_graph() -> None:
    three = peer_names(3)
    assert RandomRegular(degree=2).neighbours(0, 0, three) == Full().neighbours(0, 0, three)


def test_random_regular_graphs_differ_between_rounds_and_seeds() -> None:
    topology = RandomRegular(degree=3)
    graphs = [topology.neighbours(0, t, TEN) for t in range(20)]
    assert all(before != after for before, after in pairwise(graphs))
    assert topology.neighbours(1, 0, TEN) != graphs[0]


def test_random_regular_depends_on_seed_and_round_only() -> None:
    late_first = {t: RandomRegular(degree=3).neighbours(7, t, TEN) for t in (5, 0, 3)}
    topology = RandomRegular(degree=3)
    ordered = [topology.neighbours(7, t, TEN) for t in range(6)]
    assert all(ordered[t] == graph for t, graph in late_first.items())


def test_random_regular_makes_every_pair_neighbours_about_equally_often() -> None:
    often = Counter(
        (peer, sender)
        for t in range(300)
        for peer, received in RandomRegular(degree=3).neighbours(0, t, TEN).items()
        for sender in received
    )
    assert len(often) == 90  # every ordered pair
    assert min(often.values()) > 60  # 300 * 3 / 9 = 100 expected, standard deviation 8
    assert max(often.values()) < 140


@pytest.mark.parametrize(
    ("peers", "degree", "fix"), [(5, 5, "at most 4"), (5, 10, "at most 4"), (1, 1, "topology=full")]
)
def test_a_degree_of_at_least_the_number_of_peers_is_refused_with_the_fix(
    peers: int, degree: int, fix: str
) -> None:
    problem = (
        rf"topology\.degree must be below the number of peers \({peers}\), got {degree}\. Use {fix}"
    )
    with pytest.raises(ConfigError, match=problem):
        RandomRegular(degree=degree).check(peers)


@pytest.mark.parametrize(("peers", "degree"), [(100, 4), (5, 4), (4, 3), (2, 1)])
def test_the_default_degree_is_reduced_for_few_peers(peers: int, degree: int) -> None:
    assert RandomRegular(offline_prob=0.5).resolved(peers) == RandomRegular(
        degree=degree, offline_prob=0.5
    )


def test_a_single_peer_hears_nobody_and_keeps_its_offline_settings() -> None:
    assert RandomRegular(offline_prob=0.5, offline="skip").resolved(1) == Full(
        offline_prob=0.5, offline="skip"
    )


def test_a_given_degree_is_kept() -> None:
    assert RandomRegular(degree=10).resolved(4) == RandomRegular(degree=10)
    assert Ring().resolved(1) == Ring()


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("peers", [1, 2, 3, 4, 7, 12])
def test_every_number_of_peers_has_a_graph_whatever_the_degree(name: str, peers: int) -> None:
    """Sites leave and are revoked during a run; with as many peers as the degree or fewer, all
    receive from each other."""
    topology = TOPOLOGIES[name](name=name)  # the default degree is 4
    graph = topology.online_neighbours(0, 5, peer_names(peers))
    assert sorted(graph) == peer_names(peers)
    if name == "random" and peers < 5:
        assert graph == Full().online_neighbours(0, 5, peer_names(peers))


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_row_of_a_peer_is_that_of_the_whole_graph(name: str) -> None:
    for peers in (1, 2, 3, 8, 25):
        topology, roster = topology_with_offline(name, 0.2), peer_names(peers)
        for t in range(3):
            graph = topology.online_neighbours(3, t, roster)
            for peer in roster:
                listeners = [name for name in roster if peer in graph.get(name, [])]
                assert topology.row(3, t, roster, peer) == (graph.get(peer, []), listeners)


def topology_with_offline(name: str, offline_prob: float) -> Topology:
    """A topology by name, degree 3 where it has one."""
    return (
        RandomRegular(degree=3, offline_prob=offline_prob)
        if name == "random"
        else TOPOLOGIES[name](name=name, offline_prob=offline_prob)
    )


@pytest.mark.parametrize("name", BUILT_IN)
def test_offline_peers_neither_send_nor_are_heard(name: str) -> None:
    topology = topology_with_offline(name, 0.4)
    seen_offline = False
    for t in range(10):
        online = topology.online(0, t, TEN)
        received = topology.online_neighbours(0, t, TEN)
        graph = topology.neighbours(0, t, TEN)
        assert set(received) == online
        for peer in online:
            assert received[peer] == [sender for sender in graph[peer] if sender in online]
        seen_offline |= len(online) < 10
    assert seen_offline


@pytest.mark.parametrize("name", BUILT_IN)
def test_with_offline_prob_0_everyone_is_online_and_with_1_nobody(name: str) -> None:
    assert topology_with_offline(name, 0.0).online_neighbours(0, 0, TEN) == topology_with_offline(
        name, 0.0
    ).neighbours(0, 0, TEN)
    assert topology_with_offline(name, 1.0).online_neighbours(0, 0, TEN) == {}


def test_an_offline_prob_of_0_3_takes_each_peer_offline_in_about_three_rounds_of_ten() -> None:
    topology = Full(offline_prob=0.3)
    rounds = [topology.online(0, t, TEN) for t in range(500)]
    for peer in TEN:
        assert (
            0.2 < sum(peer not in online for online in rounds) / 500 < 0.4
        )  # five standard deviations either side
    assert 0.27 < sum(10 - len(online) for online in rounds) / 5000 < 0.33


def test_which_peers_are_offline_does_not_depend_on_the_topology() -> None:
    assert Ring(offline_prob=0.5).online(3, 4, TEN) == Full(offline_prob=0.5).online(3, 4, TEN)


@pytest.mark.parametrize("offline_prob", [-0.1, 1.5])
def test_an_offline_prob_outside_0_to_1_is_refused(offline_prob: float) -> None:
    with pytest.raises(
        ConfigError, match=rf"topology\.offline_prob must be in \[0, 1\], got {offline_prob}"
    ):
        Ring(offline_prob=offline_prob)


class WithGaps(Topology):
    """A user's topology with a mistake."""

    graph: Any

    def neighbours(self, seed: int, t: int, roster: Sequence[str]) -> dict[str, list[str]]:
        return cast(dict[str, list[str]], self.graph)


@pytest.mark.parametrize(
    ("graph", "sentence"),
    [
        ({"000": ["001"]}, "has no entry for peer 001; give every peer a list"),
        ({"000": ["zzz"], "001": []}, "names the neighbour 'zzz', which is not a peer"),
        ({"000": ["000", "001"], "001": ["000"]}, "names peer 000 as its own neighbour; omit it"),
        ({"000": ["001"], "001": ["000", "000"]}, "names a neighbour of peer 001 twice"),
        (None, "must return a dict from each peer to a list of its neighbours, got None"),
        ({"000": ["001"], "001": None}, "must give peer 001 a list of neighbours, got None"),
        ({"000": "001", "001": []}, "must give peer 000 a list of neighbours, got a str"),
    ],
)
def test_an_incomplete_graph_is_refused_with_a_sentence(graph: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        WithGaps(graph=graph).online_neighbours(0, 0, ["000", "001"])
    with pytest.raises(ConfigError, match=sentence):
        WithGaps(graph=graph).connections(2)


class Broken(Topology):
    """A user's topology that raises an exception."""

    def neighbours(self, seed: int, t: int, roster: Sequence[str]) -> dict[str, list[str]]:
        raise KeyError("hub")


def test_an_exception_of_a_topology_is_a_sentence_also_before_the_first_round() -> None:
    sentence = r"topology Broken, round 0: Broken\.neighbours .* raised KeyError: 'hub'"
    with pytest.raises(RunError, match=sentence):
        Broken().online_neighbours(0, 0, ["000", "001"])
    with pytest.raises(RunError, match=sentence):
        Experiment(peers=4, method=DisPFL(robust="clip"), topology=Broken())
