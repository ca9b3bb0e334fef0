"""Sections about single peers."""

import re
from collections.abc import Callable
from pathlib import Path

from html_cells import cells

from dispfl.report.peers import labels_section, peers_section
from dispfl.report.results import read_results

Write = Callable[..., Path]


def test_peers_are_sorted_and_the_leader_is_compared_peer_by_peer(write: Write) -> None:
    paths = [write("a", [[0.9, 0.7, 0.5]]), write("b", [[0.5, 0.7, 0.6]], "local")]
    html = str(peers_section(read_results(paths)))
    assert "rank 1\nDis-PFL: 0.500\nLocal: 0.500" in html
    assert "Better for 1 of 3 peers, worse for 1." in html
    assert re.findall(r"<title>(peer \d+: [+-]\S+)</title>", html) == [
        "peer 000: +0.400",
        "peer 001: +0.000",
        "peer 002: -0.100",
    ]
    assert cells(html) == [
        ["000", "0.900", "0.500"],
        ["001", "0.700", "0.700"],
        ["002", "0.500", "0.600"],
    ]


def test_wins_and_ties_are_counted_for_each_row(write: Write) -> None:
    html = str(
        peers_section(read_results([write("a", [[0.9, 0.7]]), write("b", [[0.5, 0.7]], "local")]))
    )
    assert re.findall(r'class="count">([^<]*)<', html) == ["1 + 1 tied", "0 + 1 tied"]
    assert "--share:0.5000" in html


def test_density_groups_are_columns_with_their_means(write: Write) -> None:
    html = str(
        peers_section(
            read_results([write("a", [[0.4, 0.6, 0.8, 1.0]], own={"density": [0.2, 0.8]})])
        )
    )
    assert "Dots are peers, lines are group means: 0.500 at 0.2, 0.900 at 0.8." in html


def test_one_run_shows_its_best_median_and_worst_peer_by_round(write: Write) -> None:
    html = str(peers_section(read_results([write("a", [[0.1, 0.2, 0.6], [0.3, 0.5, 0.9]])])))
    assert "round 1\nbest peer: 0.600\nmedian: 0.200\nworst peer: 0.100" in html


def test_a_row_whose_first_seed_was_never_evaluated_shows_the_next(write: Write) -> None:
    begun = write("a", [[0.5, 0.6]], seed=0, rounds=9, record={"scores": {}})
    (row,) = (results := read_results([begun, write("b", [[0.7, 0.8]], seed=1, rounds=9)])).rows
    assert [run.seed for run in row.runs] == [0, 1]
    html = str(peers_section(results))
    assert "peer 000: 0.700" in html
    assert "Seed 1." in html


def test_there_is_one_label_map_for_every_25_peers(write: Write) -> None:
    labels = [[k % 3, 2] for k in range(30)]
    html = str(labels_section(read_results([write("a", [[0.5] * 30], labels=labels)])))
    assert re.findall(r"<strong>([^<]*)</strong>", html) == ["Peers 000 to 024", "Peers 025 to 029"]
    assert "peer 002: 4 samples\nclass 0: 2\nclass 1: 2" in html


def test_rows_with_the_same_split_share_one_map(write: Write) -> None:
    labels = [[1, 2], [2, 1]]
    same = [
        write(name, [[0.5, 0.5]], method, labels=labels)
        for name, method in (("a", "dispfl"), ("b", "local"))
    ]
    assert str(labels_section(read_results(same))).count("<figure>") == 1
    other = write("c", [[0.5, 0.5]], "local", labels=labels, partition={"name": "iid"})
    html = str(labels_section(read_results([same[0], other])))
    assert html.count("<figure>") == 2
    assert "partition.name iid" in html


def test_a_federation_made_in_python_says_why_it_has_no_labels(write: Write) -> None:
    html = str(labels_section(read_results([write("a", [[0.5]], made_in_python=True)])))
    assert (
        "No split was saved, because the federation was made in Python with its own data." in html
    )


def test_density_groups_have_a_table_of_scores_and_seconds(write: Write) -> None:
    times = {"mean": 1.0, "std": 0.0, "per_peer": [0.5, 0.7, 2.0, 2.0]}
    own = {"density": [0.2, 0.8], "structure": "channels"}
    html = str(
        peers_section(
            read_results(
                [write("a", [[0.4, 0.6, 0.8, 1.0]] * 2, own=own, record={"peer_seconds": times})]
            )
        )
    )
    assert "Dis-PFL (channels): computing time by density" in html
    assert cells(html)[:2] == [
        ["0.2", "2", "0.500", "0.600", "0.30"],
        ["0.8", "2", "0.900", "2.000", "1.00"],
    ]
