"""Bytes of every link, and the node that a round loads most."""

from dispfl.round.ledger import Busiest, Ledger, MessageCost


def test_each_directed_link_is_charged_for_what_it_carries() -> None:
    ledger = Ledger.of(
        [MessageCost("a", "b", 80, 90), MessageCost("a", "b", 20, 30), MessageCost("b", "a", 4, 14)]
    )
    assert ledger.paper == {("a", "b"): 100, ("b", "a"): 4}
    assert ledger.wire == {("a", "b"): 120, ("b", "a"): 14}


def test_the_busiest_node_may_be_busy_sending_while_the_paper_counts_downloads() -> None:
    messages = [MessageCost("a", receiver, 40, 50) for receiver in ("b", "c", "d")]
    ledger = Ledger.of([*messages, MessageCost("c", "b", 60, 70)])
    # a sends 3 * 50; b receives 50 + 70, from a and c. The paper's largest download is b's 40 + 60.
    assert ledger.busiest() == Busiest(paper=100, up=150, down=120, peer="a", connections=2)
    assert ledger.busiest().wire == 150


def test_a_request_is_no_connection_of_its_own() -> None:
    """The server receives from two peers; whoever asks them for nothing but a model is received by
    neither."""
    models = [MessageCost(peer, "server", 40, 50) for peer in ("a", "b")]
    requests = [MessageCost(peer, "a", 0, 5) for peer in ("b", "c", "server")]
    assert Ledger.of([*models, *requests]).busiest().connections == 2


def test_every_node_has_its_bytes_up_and_down() -> None:
    ledger = Ledger.of([MessageCost("b", "a", 0, 5), MessageCost("a", "b", 40, 50)])
    assert ledger.traffic() == {"a": (50, 5), "b": (5, 50)}


def test_of_several_equally_busy_nodes_the_first_in_the_roster_is_named() -> None:
    assert (
        Ledger.of([MessageCost("c", "b", 40, 50), MessageCost("b", "c", 40, 50)]).busiest().peer
        == "b"
    )


def test_a_round_without_messages_has_no_busiest_node() -> None:
    assert Ledger().busiest() == Busiest(paper=0, up=0, down=0, peer=None)
    assert Ledger().traffic() == {}
