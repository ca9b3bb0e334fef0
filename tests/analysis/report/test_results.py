"""Finding runs, reading them, and laying them out in rows."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dispfl.analysis.report.reading import find_runs, read_run
from dispfl.analysis.report.results import by_density, read_results
from dispfl.errors import RunError
from dispfl.methods.base import spread_densities

Write = Callable[..., Path]


def test_a_comparisons_folder_gives_its_runs_with_seed_2_before_seed_10(write: Write, tmp_path: Path) -> None:
    paths = [write(f"out/{name}", [[0.5]]) for name in ("local/seed-10", "local/seed-2", "dispfl/seed-0")]
    assert find_runs([tmp_path / "out"]) == [paths[2], paths[1], paths[0]]


def test_a_run_that_is_named_twice_is_read_once(write: Write, tmp_path: Path) -> None:
    path = write("out/a", [[0.5]])
    assert find_runs([path, tmp_path / "out", path]) == [path]


def test_a_path_that_does_not_exist_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="nowhere does not exist; name a run directory, or a folder"):
        find_runs([tmp_path / "nowhere"])


def test_a_folder_without_runs_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"is not a run directory, and none is in it: there is no config\.toml\."):
        find_runs([tmp_path])


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"accuracy": {"mean": 0.5, "std": 0.0, "per_peer": [0.5]}}, "accuracy"),
        ({"accuracy": {"mean": None, "std": 0.0, "per_peer": [0.5, 0.5]}}, "accuracy"),
        ({"mask_change": 3}, "mask_change"),
        ({"busiest": {"paper_mb": 1.0}}, r"busiest\.wire_mb"),
        ({"busiest": None}, r"busiest\.paper_mb"),
        ({"flops_total": "many"}, "flops_total"),
        ({"seconds": float("nan")}, "seconds"),
        ({"failures": []}, "failures"),
        ({"traffic": {"000": [1, 2, 3]}}, "traffic"),
    ],
)
def test_a_broken_line_of_the_metrics_is_a_sentence(write: Write, change: dict[str, object], word: str) -> None:
    path = write("a", [[0.5, 0.5]], record=change)
    with pytest.raises(RunError, match=f"line 1: {word} is missing or not what it should be"):
        read_run(path)


@pytest.mark.parametrize(
    ("text", "word"),
    [("rounds = 3", "seed is not a whole number"), ("seed = 0\nrounds = 1\npeers = 1", r"method\.name is not a text")],
)
def test_a_config_that_is_no_runs_is_a_sentence(tmp_path: Path, text: str, word: str) -> None:
    (tmp_path / "config.toml").write_text(text)
    with pytest.raises(RunError, match=f"is not a run's config: {word} in it"):
        read_run(tmp_path)


def test_scores_are_those_of_the_last_scored_round_and_leave_out_who_has_none(write: Write) -> None:
    run = read_run(write("a", [[0.1, 0.2, 0.3], [0.4, None, 0.6], None]))
    assert run.scores == {"000": 0.4, "002": 0.6}


def test_densities_are_dealt_to_peers_as_methods_deal_them(write: Write) -> None:
    run = read_run(write("a", [[0.5] * 7], own={"density": [0.2, 0.5, 0.8]}))
    assert list((run.densities or {}).values()) == spread_densities((0.2, 0.5, 0.8), 7)


def test_one_density_makes_no_groups(write: Write) -> None:
    assert read_run(write("a", [[0.5]], own={"density": 0.5})).densities is None


def test_traffic_is_the_mean_over_rounds_in_megabytes(write: Write) -> None:
    path = write("a", [[0.5, 0.5], [0.5, 0.5]])
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    lines[0]["traffic"] = {"000": [2_000_000, 0], "server": [0, 2_000_000]}
    lines[1]["traffic"] = {"000": [4_000_000, 1_000_000]}
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_run(path).traffic == {"000": (3.0, 0.5), "001": (0.0, 0.0), "server": (0.0, 1.0)}


def test_a_run_whose_metrics_lack_traffic_has_none(write: Write) -> None:
    assert read_run(write("a", [[0.5]])).traffic is None


def test_label_counts_come_from_the_split(write: Write) -> None:
    assert read_run(write("a", [[0.5, 0.5]], labels=[[3, 0], [1, 2]])).label_counts() == [[3, 0], [1, 2]]
    assert read_run(write("b", [[0.5, 0.5]])).label_counts() is None


def test_a_split_of_other_peers_is_a_sentence(write: Write) -> None:
    path = write("a", [[0.5, 0.5]], labels=[[3, 0], [1, 2]])
    (path / "config.toml").write_text((path / "config.toml").read_text().replace("peers = 2", "peers = 1"))
    (path / "metrics.jsonl").write_text("")
    with pytest.raises(RunError, match="is not of 1 peers; restore it, or run again"):
        read_run(path).label_counts()


def test_runs_that_differ_in_their_seed_alone_are_one_row(write: Write) -> None:
    write("out/a", [[0.4]], seed=1, threads=8)
    write("out/b", [[0.6]], seed=0, threads=2)
    (series,) = read_results([write("out/c", [[0.5]], seed=2, threads=4).parent]).series
    assert [run.seed for run in series.runs] == [0, 1, 2]
    assert series.label == "Dis-PFL"
    assert series.row.accuracy == pytest.approx(0.5)


def test_of_rows_with_some_seeds_in_common_only_these_are_shown(write: Write) -> None:
    paths = [write(f"d{seed}", [[0.5 + seed / 10]], "dispfl", seed) for seed in (0, 1, 2)]
    results = read_results([*paths, write("l1", [[0.4]], "local", 1)])
    assert [(series.label, list(series.seeds)) for series in results.series] == [("Dis-PFL", [1]), ("Local", [1])]
    assert results.series[0].row.accuracy == pytest.approx(0.6)
    assert results.other_seeds == {"Dis-PFL": [0, 2]}


def test_rows_are_ordered_by_score_and_keep_their_colour(write: Write) -> None:
    paths = [write("a", [[0.4]], "fedavg"), write("b", [None, [0.9]], "local"), write("c", [[0.6]], "mine")]
    results = read_results(paths)
    assert [(series.label, series.place) for series in results.series] == [("Local", 1), ("mine", 2), ("FedAvg", 0)]


def test_rows_of_one_method_are_told_apart_by_what_differs(write: Write) -> None:
    paths = [
        write("a", [[0.5]], "dispfl", topology={"name": "ring"}),
        write("b", [[0.4]], "dispfl", topology={"name": "random", "degree": 4}),
        write("c", [[0.3]], "local", topology={"name": "ring"}),
    ]
    labels = [series.label for series in read_results(paths).series]
    assert labels == ["Dis-PFL ring", "Dis-PFL random", "Local"]


def test_no_more_settings_than_needed_tell_rows_apart(write: Write) -> None:
    """lr has three values and so tells all three apart; epochs, two of them, need not be said."""
    rates = [(0.1, 1), (0.2, 1), (0.3, 5)]
    paths = [write(f"r{lr}", [[lr]], train={"lr": lr, "epochs": epochs}) for lr, epochs in rates]
    labels = [series.label for series in read_results(paths).series]
    assert labels == ["Dis-PFL lr 0.3", "Dis-PFL lr 0.2", "Dis-PFL lr 0.1"]


def test_what_rows_differ_in_is_listed_with_their_values(write: Write) -> None:
    paths = [write("a", [[0.5]], "dispfl", train={"lr": 0.1}), write("b", [[0.4]], "local", train={"lr": 0.5})]
    results = read_results(paths)
    assert results.differing == {"train.lr": {"Dis-PFL": "0.1", "Local": "0.5"}}
    assert results.comparable


@pytest.mark.parametrize("change", [{"data": {"name": "cifar10"}}, {"partition": {"name": "iid"}}, {"metric": "mse"}])
def test_rows_with_other_data_or_another_metric_do_not_compare(write: Write, change: dict[str, object]) -> None:
    assert not read_results([write("a", [[0.5]]), write("b", [[0.4]], "local", **change)]).comparable


def test_a_run_without_a_round_is_left_out_beside_others_and_refused_alone(write: Write) -> None:
    begun, done = write("begun", [[0.5]], "local"), write("done", [[0.5]])
    (begun / "metrics.jsonl").unlink()
    assert read_results([begun, done]).left_out == [begun]
    with pytest.raises(RunError, match="begun has no finished round to report; run it first"):
        read_results([begun])


def test_scores_by_density_are_sorted_by_density(write: Write) -> None:
    path = write("a", [[0.8, 0.6, 0.4, None]], own={"density": [0.9, 0.1]})
    assert by_density(read_results([path]).series[0]) == {0.1: [0.4], 0.9: [0.8, 0.6]}


def test_a_damaged_split_is_a_sentence(write: Write) -> None:
    path = write("a", [[0.5]], labels=[[1]])
    (path / "split.safetensors").write_bytes(b"nonsense" + bytes(torch.arange(3).tolist()))
    with pytest.raises(RunError, match=r"split\.safetensors is damaged"):
        read_run(path).label_counts()


def test_a_method_of_ones_own_with_a_known_name_stays_a_row_of_its_own(write: Write) -> None:
    results = read_results([write("a", [[0.5]], "dispfl"), write("b", [[0.4]], "Dis-PFL")])
    assert [series.label for series in results.series] == ["Dis-PFL", "Dis-PFL (Dis-PFL)"]
