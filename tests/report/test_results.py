"""Grouping runs into the rows of a report."""

from collections.abc import Callable
from pathlib import Path

import pytest
from messages import refused

from dispfl.errors import RunError
from dispfl.report.results import count_wins, read_results, scores_by_density

Write = Callable[..., Path]


def test_runs_that_differ_in_their_seed_alone_are_one_row(write: Write) -> None:
    write("out/a", [[0.4]], seed=1, workers=8)
    write("out/b", [[0.6]], seed=0, workers=2)
    (row,) = read_results([write("out/c", [[0.5]], seed=2, workers=4).parent]).rows
    assert [run.seed for run in row.runs] == [0, 1, 2]
    assert row.label == "Dis-PFL"
    assert row.score == pytest.approx(0.5)


def test_only_seeds_that_all_rows_have_are_shown(write: Write) -> None:
    paths = [write(f"d{seed}", [[0.5 + seed / 10]], "dispfl", seed) for seed in (0, 1, 2)]
    results = read_results([*paths, write("l1", [[0.4]], "local", 1)])
    assert [(row.label, list(row.by_seed)) for row in results.rows] == [
        ("Dis-PFL", [1]),
        ("Local", [1]),
    ]
    assert results.rows[0].score == pytest.approx(0.6)
    assert results.omitted_seeds == {"Dis-PFL": [0, 2]}


def test_rows_are_ordered_by_score_and_keep_their_colour(write: Write) -> None:
    paths = [
        write("a", [[0.4]], "fedavg"),
        write("b", [None, [0.9]], "local"),
        write("c", [[0.6]], "mine"),
    ]
    results = read_results(paths)
    assert [(row.label, row.position) for row in results.rows] == [
        ("Local", 1),
        ("mine", 2),
        ("FedAvg", 0),
    ]


def test_rows_of_one_method_are_labelled_by_what_differs(write: Write) -> None:
    paths = [
        write("a", [[0.5]], "dispfl", topology={"name": "ring"}),
        write("b", [[0.4]], "dispfl", topology={"name": "random", "degree": 4}),
        write("c", [[0.3]], "local", topology={"name": "ring"}),
    ]
    labels = [row.label for row in read_results(paths).rows]
    assert labels == ["Dis-PFL (ring)", "Dis-PFL (random)", "Local"]


def test_labels_contain_no_more_settings_than_needed(write: Write) -> None:
    """lr has three values and so distinguishes all three; epochs, with two values, is not
    needed."""
    rates = [(0.1, 1), (0.2, 1), (0.3, 5)]
    paths = [write(f"r{lr}", [[lr]], train={"lr": lr, "epochs": epochs}) for lr, epochs in rates]
    labels = [row.label for row in read_results(paths).rows]
    assert labels == ["Dis-PFL (lr 0.3)", "Dis-PFL (lr 0.2)", "Dis-PFL (lr 0.1)"]


def test_what_rows_differ_in_is_listed_with_their_values(write: Write) -> None:
    paths = [
        write("a", [[0.5]], "dispfl", train={"lr": 0.1}),
        write("b", [[0.4]], "local", train={"lr": 0.5}),
    ]
    results = read_results(paths)
    assert results.differing == {"train.lr": {"Dis-PFL": "0.1", "Local": "0.5"}}
    assert results.comparable


@pytest.mark.parametrize(
    "change", [{"data": {"name": "cifar10"}}, {"partition": {"name": "iid"}}, {"metric": "mse"}]
)
def test_rows_with_other_data_or_another_metric_are_not_comparable(
    write: Write, change: dict[str, object]
) -> None:
    assert not read_results(
        [write("a", [[0.5]]), write("b", [[0.4]], "local", **change)]
    ).comparable


def test_a_run_without_a_round_is_omitted_beside_others_and_rejected_alone(write: Write) -> None:
    begun, done = write("begun", [[0.5]], "local"), write("done", [[0.5]])
    (begun / "metrics.jsonl").unlink()
    assert read_results([begun, done]).omitted == [begun]
    with refused(RunError):
        read_results([begun])


def test_scores_by_density_are_sorted_scores_by_density(write: Write) -> None:
    path = write("a", [[0.8, 0.6, 0.4, None]], own={"density": [0.9, 0.1]})
    assert scores_by_density(read_results([path]).rows[0]) == {0.1: [0.4], 0.9: [0.8, 0.6]}


def test_a_custom_method_with_a_known_name_stays_a_separate_row(write: Write) -> None:
    results = read_results([write("a", [[0.5]], "dispfl"), write("b", [[0.4]], "Dis-PFL")])
    assert [row.label for row in results.rows] == ["Dis-PFL", "Dis-PFL (Dis-PFL)"]


def test_a_peer_without_a_score_somewhere_is_not_counted(write: Write) -> None:
    found = count_wins(
        read_results([write("a", [[0.6, 0.9]], "dispfl"), write("b", [[0.4, None]], "local")])
    )
    assert {label: (count.wins, count.peers) for label, count in found.items()} == {
        "Dis-PFL": (1, 1),
        "Local": (0, 1),
    }
