"""Sections with curves over the rounds."""

from collections.abc import Callable
from pathlib import Path

from dispfl.report.curves import curves_section, masks_section
from dispfl.report.results import read_results

Write = Callable[..., Path]


def test_curves_are_drawn_against_rounds_and_megabytes_with_scores_at_equal_traffic(
    write: Write,
) -> None:
    """FedAvg, at 2 MB a round, had its first round when Dis-PFL, at 1 MB, was at its end."""
    paths = [
        write("a", [[0.5], [0.8]], "dispfl", mb=1),
        write("b", [[0.3], [0.6]], "fedavg", mb=2),
        write("c", [[0.4], [0.4]], "local", mb=0),
    ]
    html = str(curves_section(read_results(paths)))
    assert (
        "After equal traffic, 2.00 MB: Dis-PFL 0.800, FedAvg 0.300. Dotted: Local, which sends"
        " nothing." in html
    )
    assert "round 2\nDis-PFL: 0.800\nFedAvg: 0.600\nLocal: 0.400" in html
    assert "FedAvg: 0.600 at 4 MB" in html
    assert "line constant s2" in html


def test_seeds_give_a_band(write: Write) -> None:
    html = str(
        curves_section(read_results([write("a", [[0.5]], seed=0), write("b", [[0.7]], seed=1)]))
    )
    assert "round 1\nDis-PFL: 0.600 ± 0.141" in html
    assert "the band is one standard deviation over seeds" in html


def test_one_run_has_a_band_over_peers_and_the_score_after_mixing(write: Write) -> None:
    mixed = {"mean": 0.3, "std": 0.1, "per_peer": [0.2, 0.4]}
    html = str(curves_section(read_results([write("a", [[0.4, 0.8]], record={"mixed": mixed})])))
    assert "Dis-PFL: 0.600 ± 0.200\nafter mixing, before training: 0.300" in html


def test_without_traffic_there_is_no_curve_against_traffic(write: Write) -> None:
    html = str(curves_section(read_results([write("a", [[0.5]], "local", mb=0)])))
    assert "No peer sends anything, so there is no curve against traffic." in html
    assert html.count("<figure>") == 1


def test_a_quantity_that_a_method_logs_is_drawn_for_the_rows_that_have_it(write: Write) -> None:
    similarity = {"mean": 0.25, "std": 0.05, "per_peer": [0.2, 0.3]}
    logging = write("a", [[0.5, 0.5]], record={"logged": {"similarity": similarity}})
    html = str(curves_section(read_results([logging, write("b", [[0.4, 0.4]], "local")])))
    assert html.count("<figure>") == 3  # by round, by traffic, and the quantity
    assert "round 1\nDis-PFL: 0.250 ± 0.050" in html


def test_mask_changes_and_overlap_are_drawn_if_they_were_recorded(write: Write) -> None:
    change = {"mean": 0.25, "std": 0.05, "per_peer": [0.2, 0.3]}
    overlap = {"mean": 0.5, "std": 0.0, "per_peer": [0.5, 0.5]}
    sparse = write("a", [[0.5, 0.5]], record={"mask_change": change, "overlap": overlap})
    html = str(masks_section(read_results([sparse, write("b", [[0.4, 0.4]], "local")])))
    assert "round 1\nDis-PFL: 0.250 ± 0.050" in html
    assert "round 1\nDis-PFL: 0.500 ± 0.000" in html
    assert "Not recorded for Local: no pruning and regrowing in every round." in html


def test_without_masks_a_sentence_says_so(write: Write) -> None:
    html = str(masks_section(read_results([write("a", [[0.5]], "local")])))
    assert "No method here prunes and regrows weights in every round." in html
    assert "<svg" not in html


def test_curves_are_drawn_against_the_seconds_that_a_peer_has_computed(write: Write) -> None:
    """2 and 4 s: 3 s a round over the peers. An idle peer computes nothing: 4 s of one of two peers
    are 2 s."""
    busy = write("a", [[0.5, 0.7], [0.8, 0.8]], record={"peer_seconds": seconds(2.0, 4.0)})
    idle = write(
        "b", [[0.2, 0.4], [0.4, 0.4]], "fedavg", record={"peer_seconds": seconds(None, 4.0)}
    )
    html = str(curves_section(read_results([busy, idle])))
    assert "By seconds of computing" in html
    assert "Dis-PFL: 0.800 at 6 s" in html
    assert "FedAvg: 0.300 at 2 s" in html
    unmeasured = write("c", [[0.1, 0.1], [0.1, 0.1]], "local")
    assert "By seconds of computing" not in str(curves_section(read_results([busy, unmeasured])))


def seconds(*per_peer: float | None) -> dict[str, object]:
    known = [value for value in per_peer if value is not None]
    return {"mean": sum(known) / len(known), "std": 0.0, "per_peer": list(per_peer)}
