"""Peers that choose whom to receive from: both must choose each other, and degrees are limited."""

from collections import Counter
from collections.abc import Callable, Sequence

import pytest
import torch
from messages import refused

from dispfl.errors import ConfigError
from dispfl.methods.base import Neighbourhood, PeerState
from dispfl.methods.dispfl import DisPFL
from dispfl.methods.fedfomo import FedFOMO
from dispfl.round.context import RunContext
from dispfl.round.exchange import (
    agreed_choices,
    exchange_graph,
    round_senders,
    spare_neighbours,
)
from dispfl.testing.rounds import FinishedRound
from dispfl.topology import RandomRegular, Ring

MakeContext = Callable[..., RunContext]
RunAll = Callable[[RunContext], list[FinishedRound]]


class Admirers(DisPFL):
    """Every peer wants the models of 000 and of its own fan, which is the next peer."""

    def choices(self, neighbours: int, t: int, T: int) -> int:
        return 2

    def choose(
        self, state: PeerState, neighbourhood: Neighbourhood, *, rng: torch.Generator
    ) -> Sequence[str]:
        wanted = [name for name in ("000", "001") if name in neighbourhood.reachable]
        others = [name for name in wanted if name not in neighbourhood.neighbours]
        return [*neighbourhood.neighbours, *others]


def test_others_agree_if_both_choose_each_other() -> None:
    graph = {"a": ["b"], "b": ["c"], "c": ["d"], "d": ["a"]}
    choices = {"a": ["b", "c"], "b": ["c", "d"], "c": ["d", "a"], "d": ["a"]}
    assert agreed_choices(graph, choices, "a") == ["c"]  # c chooses a
    assert agreed_choices(graph, choices, "b") == []  # d does not choose b
    assert agreed_choices(graph, choices, "d") == []


def test_a_neighbour_is_not_a_choice_that_obliges_it_to_respond() -> None:
    """a receives from b anyway, so that it does not choose b, and sends it nothing."""
    graph = {"a": ["b"], "b": ["c"], "c": ["a"]}
    choices = {"a": ["b"], "b": ["c", "a"], "c": ["a"]}
    assert agreed_choices(graph, choices, "b") == []


def test_spare_neighbours_are_what_the_whole_topology_has_beyond_the_certain_ones(
    make_context: MakeContext,
) -> None:
    context = make_context(peers=12, method=Admirers(), topology=RandomRegular(degree=4))
    certain = exchange_graph(context, 0)
    spares = spare_neighbours(context, 0)
    whole = RandomRegular(degree=4).online_neighbours(0, 0, context.roster)
    assert len(spares) == 2
    for peer in context.roster:
        places = [senders[peer] for senders in spares]
        assert sorted([*certain[peer], *places]) == whole[peer]


def test_the_places_of_choices_that_decline_are_filled(make_context: MakeContext) -> None:
    """Two spare places each: place 0 is free where no choice agrees, place 1 where one does.

    a and b choose each other, and so may some others. A place is used if it is free for the
    receiver and for the sender.
    """
    context = make_context(peers=12, method=Admirers(), topology=RandomRegular(degree=4))
    graph = exchange_graph(context, 0)
    spares = spare_neighbours(context, 0)
    whole = RandomRegular(degree=4).online_neighbours(0, 0, context.roster)
    strangers = {peer: sorted(set(context.roster) - {peer, *graph[peer]}) for peer in graph}
    a, b = next((k, j) for k in graph for j in strangers[k] if k in strangers[j] and k < j)
    choices = {}
    for peer in graph:
        chosen = [name for name in strangers[peer] if name not in (a, b)][:2]
        choices[peer] = [*graph[peer], *chosen]
    choices[a] = [*graph[a], b, next(name for name in strangers[a] if name != b)]
    choices[b] = [*graph[b], a, next(name for name in strangers[b] if name != a)]

    agreed = {peer: agreed_choices(graph, choices, peer) for peer in graph}
    assert b in agreed[a]
    assert a in agreed[b]
    senders = round_senders(context, 0, graph, choices)
    for peer in graph:
        for place in (0, 1):
            sender = spares[place][peer]
            is_used = sender in senders[peer]
            both_free = len(agreed[peer]) <= place and len(agreed[sender]) <= place
            assert is_used == (both_free or sender in agreed[peer])
        received_from = [name for name in graph if peer in senders[name]]
        assert len(senders[peer]) <= len(whole[peer])
        assert len(received_from) <= len(whole[peer])


def test_the_model_that_everybody_wants_is_sent_to_no_more_peers_than_the_degree(
    make_context: MakeContext, run_all: RunAll
) -> None:
    context = make_context(peers=12, method=Admirers(), topology=RandomRegular(degree=4), rounds=4)
    for t, finished in enumerate(run_all(context)):
        receivers = Counter(sender for sender, _ in finished.ledger.paper)
        senders = Counter(receiver for _, receiver in finished.ledger.paper)
        assert max(receivers.values()) <= 4
        assert max(senders.values()) <= 4
        neighbours = exchange_graph(context, t)
        if "001" not in neighbours["000"] and "000" not in neighbours["001"]:
            assert ("001", "000") in finished.ledger.paper
            assert ("000", "001") in finished.ledger.paper
    assert all(len(senders) == 2 for senders in exchange_graph(context, 0).values())


def test_a_peer_whose_choices_all_decline_receives_from_all_neighbours_of_the_topology(
    make_context: MakeContext, run_all: RunAll
) -> None:
    context = make_context(peers=12, method=Admirers(), topology=RandomRegular(degree=4), rounds=1)
    [finished] = run_all(context)
    certain = exchange_graph(context, 0)
    spares = spare_neighbours(context, 0)
    declined = [peer for peer in context.roster[2:] if "000" not in certain[peer]]
    assert declined
    for peer in declined:
        received = finished.steps[peer].report.received or []
        assert set(certain[peer]) <= set(received)
        last_spare = spares[1][peer]  # free unless both choices of its sender agree
        assert last_spare in received
        assert finished.steps[peer].report.missed == []
        is_sender = peer in (finished.steps["000"].report.received or [])
        if "000" not in received and not is_sender:  # a choice that declines costs nothing
            assert (peer, "000") not in finished.ledger.wire


def test_fedfomo_keeps_the_degrees_of_its_topology(
    make_context: MakeContext, run_all: RunAll
) -> None:
    context = make_context(peers=12, method=FedFOMO(), topology=RandomRegular(degree=4), rounds=6)
    rounds = run_all(context)
    for finished in rounds:
        receivers = Counter(sender for sender, _ in finished.ledger.paper)
        senders = Counter(receiver for _, receiver in finished.ledger.paper)
        assert max(receivers.values()) <= 4
        assert max(senders.values()) <= 4
    assert any(len(finished.ledger.paper) > 12 * 2 for finished in rounds)  # some choose each other


def test_on_a_fixed_graph_there_is_nothing_to_choose(make_context: MakeContext) -> None:
    context = make_context(peers=6, method=FedFOMO(), topology=Ring())
    assert context.choices(0) == 0
    assert context.topology(0) == Ring()


def test_a_method_that_chooses_more_peers_than_it_says_is_refused(
    make_context: MakeContext, run_all: RunAll
) -> None:
    class Greedy(Admirers):
        def choices(self, neighbours: int, t: int, T: int) -> int:
            return 1

    context = make_context(peers=12, method=Greedy(), topology=RandomRegular(degree=2))
    with refused(ConfigError, key="method"):
        run_all(context)


@pytest.mark.parametrize("degree", [1, 2, 5])
def test_choices_and_neighbours_together_are_the_degree(
    degree: int, make_context: MakeContext
) -> None:
    context = make_context(peers=8, method=FedFOMO(), topology=RandomRegular(degree=degree))
    neighbours = exchange_graph(context, 0)["000"]
    assert len(neighbours) + context.choices(0) == degree
    assert neighbours
