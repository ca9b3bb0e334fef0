"""Sections about communication."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dispfl.report.communication import topology_section, traffic_section
from dispfl.report.results import read_results

Write = Callable[..., Path]


def test_traffic_is_drawn_busiest_first_with_the_server_named(write: Write) -> None:
    traffic = {
        "000": [1_000_000, 500_000],
        "001": [250_000, 500_000],
        "server": [1_000_000, 1_250_000],
    }
    html = str(
        traffic_section(
            read_results([write("a", [[0.5, 0.5]], "fedavg", record={"traffic": traffic})])
        )
    )
    assert "Busiest: the server, 1.00 MB up, 1.25 MB down." in html
    assert re.findall(r"<title>([^<]*)</title>", html) == [
        "the server: 1.00 MB up, 1.25 MB down",
        "peer 000: 1.00 MB up, 0.50 MB down",
        "peer 001: 0.25 MB up, 0.50 MB down",
    ]


def test_without_traffic_in_the_metrics_a_sentence_says_so(write: Write) -> None:
    paths = [write("a", [[0.5]]), write("b", [[0.4]], "local", mb=0, record={"traffic": {}})]
    html = str(traffic_section(read_results(paths)))
    assert "Dis-PFL: the metrics do not record the traffic of each node." in html
    assert "Local: no node sends anything." in html
    assert "<svg" not in html


def topology_of(write: Write, *paths: Path) -> str:
    return str(topology_section(read_results(paths)))


def test_rows_with_the_same_graph_share_one_drawing(write: Write) -> None:
    paths = [
        write("a", [[0.9] * 4], "dispfl"),
        write("b", [[0.8] * 4], "dpsgd"),
        write("c", [[0.7] * 4], "local", mb=0),
    ]
    html = topology_of(write, *paths)
    assert "<strong>Dis-PFL and D-PSGD</strong>" in html
    note = (
        "Ring topology in round 1 of seed 0: every peer has 2 neighbours; highlighted: the"
        " neighbours of peer 000."
    )
    assert note in html
    assert "peer 000: receives from 001, 003; sends to 001, 003" in html
    assert "Local: no peer receives anything." in html


def test_the_cohort_is_highlighted_if_the_traffic_is_recorded(write: Write) -> None:
    traffic = {"001": [5, 5], "002": [0, 0], "server": [5, 5]}
    path = write("a", [[0.5] * 3], "fedavg", own={"cohort": 1}, record={"traffic": traffic})
    html = topology_of(write, path)
    assert (
        "A server selects at most 1 peer per round; highlighted: the cohort of round 1 of seed 0 (1"
        " peer)." in html
    )
    assert "peer 001: participated in the last round" in html


def test_offline_peers_are_hollow(write: Write) -> None:
    path = write(
        "a", [[0.5] * 4], topology={"name": "full", "offline_prob": 1.0, "offline": "train"}
    )
    html = topology_of(write, path)
    assert "hollow: 4 peers offline." in html
    assert html.count("node offline") == 4


@pytest.mark.parametrize(
    ("topology", "sentence"),
    [
        ({"name": "mine"}, "Dis-PFL: a custom topology, which cannot be drawn from the config."),
        ({"name": "ring", "offline_prob": 7}, "topology.offline_prob must be in [0, 1], got 7."),
        (
            {"name": "random", "degree": 9},
            "topology.degree must be below the number of peers (2), got 9.",
        ),
    ],
)
def test_a_topology_that_cannot_be_drawn_is_explained(
    write: Write, topology: dict[str, Any], sentence: str
) -> None:
    html = topology_of(write, write("a", [[0.5, 0.5]], topology=topology))
    assert sentence in html
    assert "<svg" not in html


def test_a_graph_of_too_many_links_is_not_drawn(write: Write) -> None:
    html = topology_of(write, write("a", [[0.5] * 100], topology={"name": "full"}))
    assert "9900 links in round 1 of seed 0, too many to draw." in html
