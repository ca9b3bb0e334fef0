"""The sections: what each shows, and what it says where it has nothing to show."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dispfl.analysis.report.results import Results, read_results
from dispfl.analysis.report.sections.curves import curves_section
from dispfl.analysis.report.sections.labels import labels_section
from dispfl.analysis.report.sections.masks import masks_section
from dispfl.analysis.report.sections.peers import peers_section
from dispfl.analysis.report.sections.setting import headline, setting_section
from dispfl.analysis.report.sections.table import table_section
from dispfl.analysis.report.sections.topology import topology_section
from dispfl.analysis.report.sections.traffic import traffic_section

Write = Callable[..., Path]


def cells(html: str) -> list[list[str]]:
    """The text of a table's body, row by row."""
    rows = re.findall(r"<tr[^>]*>(.*?)</tr>", html.split("<tbody", 1)[1], re.DOTALL)
    found = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.DOTALL) for row in rows]
    return [[re.sub(r"<[^>]*>", "", cell) for cell in row] for row in found]


def test_the_table_has_scores_costs_rounds_and_seconds_best_first(write: Write) -> None:
    """Two peers at 0.4 and 0.8: mean 0.6, deviation 0.2; two rounds of 1.5 s."""
    results = read_results([write("a", [[0.1, 0.1]] * 2, "local", mb=0), write("b", [[0.4, 0.8]] * 2, mb=3, flops=5e8)])
    assert cells(table_section(results)) == [
        ["Dis-PFL", "0.600 ± 0.200", "0.40 to 0.80", "1.50", "3.00", "0.50", "2", "3.0"],
        ["Local", "0.100 ± 0.000", "0.10 to 0.10", "0.00", "0.00", "1.00", "2", "3.0"],
    ]


def test_the_spread_of_several_seeds_is_that_over_seeds(write: Write) -> None:
    """0.5 and 0.7: sample deviation 0.141."""
    results = read_results([write("a", [[0.4, 0.6]], seed=0), write("b", [[0.6, 0.8]], seed=1)])
    html = table_section(results)
    assert cells(html)[0][1:3] == ["0.600 ± 0.141", "0.40 to 0.80"]
    assert "Accuracy ± seeds" in html


def test_an_unfinished_rows_rounds_say_of_how_many(write: Write) -> None:
    assert cells(table_section(read_results([write("a", [[0.5]] * 2, rounds=9)])))[0][6] == "2 of 9"


def test_no_row_is_marked_best_where_rows_do_not_compare(write: Write) -> None:
    same = [write("a", [[0.5]]), write("b", [[0.4]], "local")]
    assert table_section(read_results(same)).count('class="best"') == 1
    other = [write("c", [[0.5]]), write("d", [[0.4]], "local", data={"name": "cifar10"})]
    assert 'class="best"' not in table_section(read_results(other))


def test_curves_are_drawn_against_rounds_and_megabytes_and_equal_traffic_is_told(write: Write) -> None:
    """FedAvg, at 2 MB a round, had its first round when Dis-PFL, at 1 MB, was at its end."""
    paths = [
        write("a", [[0.5], [0.8]], "dispfl", mb=1),
        write("b", [[0.3], [0.6]], "fedavg", mb=2),
        write("c", [[0.4], [0.4]], "local", mb=0),
    ]
    html = curves_section(read_results(paths))
    assert "After equal traffic, 2.00 MB: Dis-PFL 0.800, FedAvg 0.300. Dotted: Local, which sends nothing." in html
    assert "round 2\nDis-PFL: 0.800\nFedAvg: 0.600\nLocal: 0.400" in html
    assert "FedAvg: 0.600 at 4 MB" in html
    assert "line level s2" in html


def test_seeds_give_a_band(write: Write) -> None:
    html = curves_section(read_results([write("a", [[0.5]], seed=0), write("b", [[0.7]], seed=1)]))
    assert "round 1\nDis-PFL: 0.600 ± 0.141" in html
    assert "the band is one standard deviation over seeds" in html


def test_one_run_has_a_band_over_peers_and_the_score_after_mixing(write: Write) -> None:
    mixed = {"mean": 0.3, "std": 0.1, "per_peer": [0.2, 0.4]}
    html = curves_section(read_results([write("a", [[0.4, 0.8]], record={"accuracy_mixed": mixed})]))
    assert "Dis-PFL: 0.600 ± 0.200\nafter mixing, before training: 0.300" in html


def test_where_nobody_sends_there_is_no_curve_against_traffic(write: Write) -> None:
    html = curves_section(read_results([write("a", [[0.5]], "local", mb=0)]))
    assert "Nobody sends anything, so there is no curve against traffic." in html
    assert html.count("<figure>") == 1


def test_peers_are_sorted_and_the_leaders_gains_are_told_peer_by_peer(write: Write) -> None:
    paths = [write("a", [[0.9, 0.7, 0.5]]), write("b", [[0.5, 0.7, 0.6]], "local")]
    html = peers_section(read_results(paths))
    assert "place 1\nDis-PFL: 0.500\nLocal: 0.500" in html
    assert "Higher for 1 of 3 peers, lower for 1." in html
    assert re.findall(r"<title>(peer \d+: [+-]\S+)</title>", html) == [
        "peer 000: +0.400",
        "peer 001: +0.000",
        "peer 002: -0.100",
    ]
    assert cells(html) == [["000", "0.900", "0.500"], ["001", "0.700", "0.700"], ["002", "0.500", "0.600"]]


def test_the_share_of_peers_each_is_best_for_adds_up(write: Write) -> None:
    html = peers_section(read_results([write("a", [[0.9, 0.7]]), write("b", [[0.5, 0.7]], "local")]))
    assert re.findall(r'class="count">([^<]*)<', html) == ["1 + 1 shared", "0 + 1 shared"]
    assert "--share:0.5000" in html


def test_density_groups_are_columns_with_their_means(write: Write) -> None:
    html = peers_section(read_results([write("a", [[0.4, 0.6, 0.8, 1.0]], own={"density": [0.2, 0.8]})]))
    assert "A dot is a peer, a line the group’s mean: 0.500 at 0.2, 0.900 at 0.8." in html


def test_one_run_shows_its_best_median_and_worst_peer_by_round(write: Write) -> None:
    html = peers_section(read_results([write("a", [[0.1, 0.2, 0.6], [0.3, 0.5, 0.9]])]))
    assert "round 1\nbest peer: 0.600\nmedian: 0.200\nworst peer: 0.100" in html


def test_mask_drift_and_overlap_are_drawn_where_they_were_recorded(write: Write) -> None:
    change = {"mean": 0.25, "std": 0.05, "per_peer": [0.2, 0.3]}
    overlap = {"mean": 0.5, "std": 0.0, "per_peer": [0.5, 0.5]}
    sparse = write("a", [[0.5, 0.5]], record={"mask_change": change, "overlap": overlap})
    html = masks_section(read_results([sparse, write("b", [[0.4, 0.4]], "local")]))
    assert "round 1\nDis-PFL: 0.250 ± 0.050" in html
    assert "round 1\nDis-PFL: 0.500 ± 0.000" in html
    assert "Not recorded for Local, which do not prune and regrow in every round." in html


def test_without_masks_there_is_a_sentence(write: Write) -> None:
    html = masks_section(read_results([write("a", [[0.5]], "local")]))
    assert "No method here prunes and regrows in every round." in html
    assert "<svg" not in html


def test_traffic_is_drawn_busiest_first_with_the_server_named(write: Write) -> None:
    traffic = {"000": [1_000_000, 500_000], "001": [250_000, 500_000], "server": [1_000_000, 1_250_000]}
    html = traffic_section(read_results([write("a", [[0.5, 0.5]], "fedavg", record={"traffic": traffic})]))
    assert "Busiest: the server, 1.00 MB up and 1.25 down." in html
    assert re.findall(r"<title>([^<]*)</title>", html) == [
        "the server: 1.00 MB up, 1.25 down",
        "peer 000: 1.00 MB up, 0.50 down",
        "peer 001: 0.25 MB up, 0.50 down",
    ]


def test_without_traffic_in_the_metrics_there_is_a_sentence(write: Write) -> None:
    paths = [write("a", [[0.5]]), write("b", [[0.4]], "local", mb=0, record={"traffic": {}})]
    html = traffic_section(read_results(paths))
    assert "Dis-PFL: the metrics do not say what each node sent." in html
    assert "Local: nobody sends anything." in html
    assert "<svg" not in html


def test_labels_are_a_map_for_every_25_peers(write: Write) -> None:
    labels = [[k % 3, 2] for k in range(30)]
    html = labels_section(read_results([write("a", [[0.5] * 30], labels=labels)]))
    assert re.findall(r"<strong>([^<]*)</strong>", html) == ["Peers 000 to 024", "Peers 025 to 029"]
    assert "peer 002: 4 samples\nclass 0: 2\nclass 1: 2" in html


def test_rows_of_one_split_share_its_map_and_other_splits_have_their_own(write: Write) -> None:
    labels = [[1, 2], [2, 1]]
    same = [write(name, [[0.5, 0.5]], method, labels=labels) for name, method in (("a", "dispfl"), ("b", "local"))]
    assert labels_section(read_results(same)).count("<figure>") == 1
    other = write("c", [[0.5, 0.5]], "local", labels=labels, partition={"name": "iid"})
    html = labels_section(read_results([same[0], other]))
    assert html.count("<figure>") == 2
    assert "partition.name iid" in html


def test_a_federation_made_in_python_says_why_it_has_no_labels(write: Write) -> None:
    html = labels_section(read_results([write("a", [[0.5]], made_in_python=True)]))
    assert "The federation was made in Python, and its data is the script’s own: no split was saved." in html


def topology_of(write: Write, *paths: Path) -> str:
    return topology_section(read_results(paths))


def test_rows_with_the_same_graph_share_its_drawing_and_silence_is_said(write: Write) -> None:
    paths = [
        write("a", [[0.9] * 4], "dispfl"),
        write("b", [[0.8] * 4], "dpsgd"),
        write("c", [[0.7] * 4], "local", mb=0),
    ]
    html = topology_of(write, *paths)
    assert "<strong>Dis-PFL and D-PSGD</strong>" in html
    assert "Ring topology in round 1 of seed 0: everyone hears 2; picked out: whom peer 000 hears." in html
    assert "peer 000: hears 001, 003; is heard by 001, 003" in html
    assert "Local: nobody hears anybody." in html


def test_a_servers_cohort_is_picked_out_where_the_traffic_tells_it(write: Write) -> None:
    traffic = {"001": [5, 5], "002": [0, 0], "server": [5, 5]}
    path = write("a", [[0.5] * 3], "fedavg", own={"cohort": 1}, record={"traffic": traffic})
    html = topology_of(write, path)
    assert "A server works with at most 1 peer a round; picked out: the 1 of round 1 of seed 0." in html
    assert "peer 001: took part in the last round" in html


def test_offline_peers_are_hollow(write: Write) -> None:
    path = write("a", [[0.5] * 4], topology={"name": "full", "drop": 1.0, "offline": "train"})
    html = topology_of(write, path)
    assert "hollow: 4 peers offline." in html
    assert html.count("node away") == 4


@pytest.mark.parametrize(
    ("topology", "sentence"),
    [
        ({"name": "mine"}, "Dis-PFL: a topology of its own, which cannot be drawn from the config."),
        ({"name": "ring", "drop": 7}, "topology.drop must be in [0, 1], got 7."),
        ({"name": "random", "degree": 9}, "topology.degree must be below the number of peers (2), got 9."),
    ],
)
def test_a_topology_that_cannot_be_drawn_is_a_sentence(write: Write, topology: dict[str, Any], sentence: str) -> None:
    html = topology_of(write, write("a", [[0.5, 0.5]], topology=topology))
    assert sentence in html
    assert "<svg" not in html


def test_a_graph_of_too_many_links_is_not_drawn(write: Write) -> None:
    html = topology_of(write, write("a", [[0.5] * 100], topology={"name": "full"}))
    assert "9900 links in round 1 of seed 0, too many to draw." in html


def both(write: Write) -> Results:
    paths = [
        write("runs/a", [[0.5]], "dispfl", own={"density": 0.5}, topology={"name": "random", "degree": 4}),
        write("runs/b", [[0.4]], "local", train={"lr": 0.1}, topology={"name": "random", "degree": 4}),
    ]
    return read_results(paths)


def test_the_headline_is_what_all_rows_have_in_common(write: Write) -> None:
    assert headline(both(write)) == "1 peer · mnist · dirichlet 0.3 · random topology of degree 4 · 1 round · 1 seed"


def test_the_setting_lists_what_is_common_and_each_rows_own(write: Write, tmp_path: Path) -> None:
    html = setting_section(both(write), tmp_path / "report.html")
    pairs = re.findall(r"<dt>([^<]*)</dt><dd>([^<]*)</dd>", html)
    assert ("alpha", "0.3") in pairs
    assert ("density", "0.5") in pairs
    assert [value for key, value in pairs if key == "train.lr"] == ["not set", "0.1"]
    assert cells(html)[0] == ["runs/a", "Dis-PFL", "0", "1 of 1", "dispfl 0.1.0"]


def test_a_row_whose_first_seed_was_never_scored_shows_the_next(write: Write) -> None:
    begun = write("a", [[0.5, 0.6]], seed=0, rounds=9, record={"accuracy": None})
    (series,) = (results := read_results([begun, write("b", [[0.7, 0.8]], seed=1, rounds=9)])).series
    assert [run.seed for run in series.runs] == [0, 1]
    html = peers_section(results)
    assert "peer 000: 0.700" in html
    assert "Seed 1." in html
