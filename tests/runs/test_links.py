"""Who received whose model, as text."""

import random

import pytest

from dispfl.errors import RunError
from dispfl.runs.links import decode_links, decode_numbers, encode_links, encode_numbers
from dispfl.topology import Full, RandomRegular, peer_names

NODES = ["000", "001", "002", "003", "004"]


def test_runs_of_neighbours_are_ranges_and_who_took_no_part_has_a_dash() -> None:
    senders = {"000": ["003", "001", "002"], "001": ["000", "002", "004"], "002": [], "003": None}
    assert encode_links(senders, NODES) == "1-3;0 2 4;;-;-"


@pytest.mark.parametrize("topology", [Full(), RandomRegular(degree=3)])
def test_links_are_read_as_they_were_written(topology: Full | RandomRegular) -> None:
    nodes = peer_names(12)
    graph = topology.neighbours(0, 3, nodes)
    for absent in random.Random(0).sample(nodes, 4):
        del graph[absent]
    assert decode_links(encode_links(graph, nodes), nodes) == graph


def test_a_thousand_peers_that_receive_from_all_take_a_few_kilobytes() -> None:
    nodes = peer_names(1000)
    assert len(encode_links(Full().neighbours(0, 0, nodes), nodes)) < 16_000


@pytest.mark.parametrize("text", ["", "0;1", "1;2;3;4;5", "-1;;;;", "0-9999999999;;;;", "1  2;;;;"])
def test_a_text_of_other_nodes_is_refused(text: str) -> None:
    with pytest.raises(RunError):
        decode_links(text, NODES)


def test_numbers_of_links_are_in_their_order_in_hundredths() -> None:
    senders = {"000": ["003", "001", "002"], "001": ["000"], "002": [], "003": None}
    numbers = {"000": {"001": 0.934, "003": -0.2}, "001": {}}
    assert encode_numbers(numbers, senders, NODES) == "93 x -20;x;;;"


def test_numbers_of_links_are_read_as_they_were_written() -> None:
    nodes = peer_names(12)
    graph = RandomRegular(degree=3).neighbours(0, 3, nodes)
    graph["004"] = []
    del graph["007"]
    graph = decode_links(encode_links(graph, nodes), nodes)
    numbers = {node: {sender: int(sender) / 100 for sender in graph[node][1:]} for node in graph}
    del numbers["004"]
    assert decode_numbers(encode_numbers(numbers, graph, nodes), graph) == numbers


@pytest.mark.parametrize(
    "text", ["", "1;2", "1 2 3;4", "1 2;three;4", "1 2;1e3", "1 2;99999999999"]
)
def test_numbers_of_other_links_are_refused(text: str) -> None:
    with pytest.raises(RunError):
        decode_numbers(text, {"000": ["001", "002"], "001": ["000"], "002": []})
