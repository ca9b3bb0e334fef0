"""Bytes of every link, and the node that a round loads most."""

import pytest
import torch

from dispfl.core.packed import PackedModel
from dispfl.costs.ledger import Busiest, Ledger
from dispfl.costs.traffic import paper_bytes, wire_bytes


def model(kept: int, size: int = 80) -> PackedModel:
    """A model of 80 weights, ten bytes of mask, that keeps so many."""
    return PackedModel.pack(torch.ones(size), torch.arange(size) < kept)


def test_twenty_kept_of_eighty_are_80_bytes_in_the_paper_and_90_with_their_mask() -> None:
    assert paper_bytes(model(20)) == 80
    assert wire_bytes(model(20)) == 90


def test_a_mask_of_nine_weights_takes_two_bytes() -> None:
    assert wire_bytes(model(1, size=9)) == 4 + 2


def test_each_directed_link_is_charged_for_what_it_carries() -> None:
    ledger = Ledger()
    ledger.carry("a", "b", model(20))
    ledger.carry("a", "b", model(5))
    ledger.carry("b", "a", model(1))
    assert ledger.paper == {("a", "b"): 80 + 20, ("b", "a"): 4}
    assert ledger.wire == {("a", "b"): 90 + 30, ("b", "a"): 14}


def test_the_busiest_node_may_be_busy_sending_while_the_paper_counts_downloads() -> None:
    ledger = Ledger()
    for receiver in ("b", "c", "d"):
        ledger.carry("a", receiver, model(10))
    ledger.carry("c", "b", model(15))
    # a sends 3 * 50; b receives 50 + 70. The paper's largest download is b's 40 + 60.
    assert ledger.busiest() == Busiest(paper=100, wire=150, peer="a")


def test_of_several_equally_busy_nodes_the_first_in_the_roster_is_named() -> None:
    ledger = Ledger()
    ledger.carry("c", "b", model(10))
    ledger.carry("b", "c", model(10))
    assert ledger.busiest().peer == "b"


def test_a_round_without_messages_has_no_busiest_node() -> None:
    assert Ledger().busiest() == Busiest(paper=0, wire=0, peer=None)


@pytest.mark.parametrize("kept", [0, 80])
def test_the_mask_is_charged_whatever_it_keeps(kept: int) -> None:
    assert wire_bytes(model(kept)) - paper_bytes(model(kept)) == 10
