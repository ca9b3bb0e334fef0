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
from dispfl.round.exchange import agreed_senders, exchange_graph
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


def test_neighbours_send_and_others_do_if_both_choose_each_other() -> None:
    graph = {"a": ["b"], "b": ["c"], "c": ["d"], "d": ["a"]}
    choices = {"a": ["b", "c"], "b": ["c", "d"], "c": ["d", "a"], "d": ["a"]}
    assert agreed_senders(graph, choices, "a") == (["b", "c"], [])  # c chooses a
    assert agreed_senders(graph, choices, "b") == (["c"], ["d"])  # d does not choose b
    assert agreed_senders(graph, choices, "d") == (["a"], [])


def test_a_neighbour_is_not_a_choice_that_obliges_it_to_respond() -> None:
    """a receives from b anyway, so that it does not choose b, and sends it nothing."""
    graph = {"a": ["b"], "b": ["c"], "c": ["a"]}
    choices = {"a": ["b"], "b": ["c", "a"], "c": ["a"]}
    assert agreed_senders(graph, choices, "b") == (["c"], ["a"])


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


def test_a_request_that_is_declined_costs_its_bytes_and_brings_no_model(
    make_context: MakeContext, run_all: RunAll
) -> None:
    context = make_context(peers=12, method=Admirers(), topology=RandomRegular(degree=4), rounds=1)
    [finished] = run_all(context)
    neighbours = exchange_graph(context, 0)
    declined = [
        name
        for name in context.roster[2:]
        if "000" not in neighbours[name] and name not in neighbours["000"]
    ]
    assert declined
    request = context.codec.request_size()
    for name in declined:
        assert ("000", name) not in finished.ledger.paper
        assert finished.ledger.wire[name, "000"] == request
        assert "000" not in finished.steps[name].report.missed


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
