"""Heat maps and graphs as text."""

import re

import pytest

from dispfl.report.diagrams import HeatMap, circle_positions, peer_graph, server_star
from dispfl.report.runs import Links


def titles(chart: str) -> list[str]:
    return re.findall(r"<title>(.*?)</title>", chart, re.DOTALL)


def test_the_largest_count_has_the_full_colour_and_an_empty_cell_none() -> None:
    counts = [[8, 0], [1, 4]]
    chart = HeatMap(counts, ["000", "001"], ["first", "second"], 8, 2).svg("label")
    paths = re.findall(r'd="([^"]*)" class="cell" style="--intensity:([^"]*)"', chart)
    cells = {style: path.count("M") for path, style in paths}
    assert {style: count for style, count in cells.items() if count} == {
        "1": 1,
        "0.125": 1,
        "0.5": 1,
    }
    assert titles(chart) == ["first", "second"]


def test_peers_are_placed_clockwise_from_the_top() -> None:
    positions = circle_positions(["000", "001", "002", "003"], radius=100)
    assert positions["000"] == pytest.approx((230, 130))
    assert positions["001"] == pytest.approx((330, 230))


def test_a_graph_has_a_link_for_every_neighbour_and_highlights_those_of_one_peer() -> None:
    links = Links({"000": ["001"], "001": ["000", "002"]}, {"000": ["002"]})
    chart = peer_graph({1: links}, ["000", "001", "002"], ["002"], "001", "label")
    (others,) = re.findall(r'd="([^"]*)" class="links" ', chart)
    (highlighted,) = re.findall(r'd="([^"]*)" class="links highlighted"', chart)
    (missed,) = re.findall(r'd="([^"]*)" class="links missed"', chart)
    counts = (others.count("M"), highlighted.count("M"), missed.count("M"))
    assert counts == (2, 4, 2)  # a line and an arrow head each
    assert titles(chart)[0] == "peer 000: received from 001; sent to 001; missed 002"
    assert titles(chart)[2] == "peer 002: offline"


def test_the_graphs_of_earlier_rounds_are_there_and_hidden() -> None:
    earlier = Links({"000": ["001"]}, {})
    newest = Links({"001": ["000"]}, {})
    chart = peer_graph({3: earlier, 4: newest}, ["000", "001"], [], "001", "label")
    assert re.findall(r'class="round" data-round="(\d)"( display="none")?', chart) == [
        ("3", ' display="none"'),
        ("4", ""),
    ]
    assert titles(chart)[0] == "peer 000: received from none; sent to 001"  # in the last round


def test_a_star_highlights_the_cohort() -> None:
    chart = server_star("server", ["000", "001", "002"], ["001"], "label")
    (highlighted,) = re.findall(r'd="([^"]*)" class="links highlighted"', chart)
    assert highlighted.count("M") == 1
    assert "peer 001: participated in the last round" in chart
    assert "peer 002: idle in the last round" in chart
