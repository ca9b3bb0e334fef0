"""Sections about communication."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from dispfl.core.train import Train
from dispfl.errors import RunError
from dispfl.federation import Federation
from dispfl.methods.base import Neighbourhood, PeerState
from dispfl.methods.dpsgd import DPSGD
from dispfl.report.communication import topology_section, traffic_section
from dispfl.report.results import read_results
from dispfl.topology import Full

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


def topology_of(*paths: Path) -> str:
    return str(topology_section(read_results(paths)))


def test_rows_with_the_same_graph_share_one_drawing(write: Write) -> None:
    paths = [
        write("a", [[0.9] * 4], "dispfl"),
        write("b", [[0.8] * 4], "dpsgd"),
        write("c", [[0.7] * 4], "local", mb=0),
    ]
    html = topology_of(*paths)
    assert "<strong>Dis-PFL and D-PSGD</strong>" in html
    note = (
        "Ring topology in round 1 of seed 0: every peer received 2 models; highlighted: what peer"
        " 000 received."
    )
    assert note in html
    assert "peer 000: received from 001, 003; sent to 001, 003" in html
    assert "Local: no peer receives anything." in html


def test_the_cohort_is_highlighted(write: Write) -> None:
    path = write("a", [[0.5] * 3], "fedavg", own={"cohort": 1}, record={"links": "-;3;-;1"})
    html = topology_of(path)
    assert "Highlighted: the server’s cohort of round 1 of seed 0 (1 peer)." in html
    assert "peer 001: participated in the last round" in html


def test_offline_peers_are_hollow_and_missed_models_dashed(write: Write) -> None:
    links = {"links": "1;;-;-", "missed_links": "-;0;-;-"}
    html = topology_of(write("a", [[0.5] * 4], record=links))
    assert "peers received 0 to 1 models" in html
    assert "dashed: 1 model requested, but not received; hollow: 2 peers offline." in html
    assert html.count("node offline") == 2
    assert "peer 001: received from none; sent to 000; missed 000" in html


def test_a_peer_that_still_computes_is_not_called_offline(write: Write) -> None:
    links = {"links": "1;;-;-", "missed_links": "-;0;-;-"}
    html = topology_of(write("a", [[0.5] * 4], record=links, schedule="async"))
    assert "dashed: 1 model not averaged; hollow: 2 peers without a finished step." in html
    assert "peer 002: without a finished step" in html


def test_links_that_are_not_recorded_or_too_many_are_explained(write: Write) -> None:
    html = topology_of(write("a", [[0.5, 0.5]], record={"links": None}))
    assert "Dis-PFL: the metrics do not record who received whose model." in html
    full = ";".join(["0-99"] * 100)
    html = topology_of(write("b", [[0.5] * 100], record={"links": full}))
    assert "10000 links in round 1 of seed 0, too many to draw." in html
    assert "<svg" not in html


@pytest.mark.parametrize("links", ["1", "1;2", "1;0;2;3;4", "1;x", "1;1-0", "1;0 0", "1;0-99"])
def test_links_of_another_run_are_refused(write: Write, links: str) -> None:
    path = write("a", [[0.5, 0.5]], record={"links": links})
    with pytest.raises(RunError, match=r"metrics.jsonl, round 0: .* Restore the file"):
        topology_of(path)


class FirstNeighbour(DPSGD):
    """Receives from the first of its neighbours alone."""

    def choose(
        self, state: PeerState, neighbourhood: Neighbourhood, *, rng: torch.Generator
    ) -> Sequence[str]:
        return neighbourhood.neighbours[:1]


def test_the_graph_of_a_method_that_chooses_is_what_its_peers_received(tmp_path: Path) -> None:
    points = (torch.randn(8, 4), torch.arange(8) % 2)
    federation = Federation(
        lambda: nn.Linear(4, 2),
        [(points, points)] * 4,
        FirstNeighbour(),
        topology=Full(),
        train=Train(epochs=1),
        rounds=1,
    )
    federation.run(out=tmp_path / "run")

    html = topology_of(tmp_path / "run")
    assert "Full topology in round 1 of seed 0: every peer received 1 model" in html
    assert "peer 000: received from 001; sent to 001, 002, 003" in html
    assert "peer 003: received from 000; sent to none" in html
