"""Finding and reading run directories for a report."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from messages import refused

from dispfl.errors import RunError
from dispfl.methods.base import spread_densities
from dispfl.report.runs import find_runs, read_run

Write = Callable[..., Path]
HIGHER = {"higher_is_better": True, "format": ".3f"}


def test_runs_in_a_folder_are_found_with_seed_2_before_seed_10(
    write: Write, tmp_path: Path
) -> None:
    paths = [
        write(f"out/{name}", [[0.5]]) for name in ("local/seed-10", "local/seed-2", "dispfl/seed-0")
    ]
    assert find_runs([tmp_path / "out"]) == [paths[2], paths[1], paths[0]]


def test_a_run_that_is_given_twice_is_read_once(write: Write, tmp_path: Path) -> None:
    path = write("out/a", [[0.5]])
    assert find_runs([path, tmp_path / "out", path]) == [path]


def test_a_missing_path_is_rejected(tmp_path: Path) -> None:
    with refused(RunError):
        find_runs([tmp_path / "nowhere"])


def test_a_folder_without_runs_is_rejected(tmp_path: Path) -> None:
    with refused(RunError):
        find_runs([tmp_path])


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"metric": 3}, "metric"),
        ({"scores": None}, "scores"),
        ({"scores": {"f1": {**HIGHER, "mean": 0.5, "std": 0.0, "per_peer": [0.5]}}}, "scores"),
        (
            {"scores": {"f1": {**HIGHER, "mean": None, "std": 0.0, "per_peer": [0.5, 0.5]}}},
            "scores",
        ),
        ({"scores": {"f1": {"mean": 0.5, "std": 0.0, "per_peer": [0.5, 0.5]}}}, "scores"),
        (
            {
                "scores": {
                    "f1": {**HIGHER, "format": "s", "mean": 0.5, "std": 0.0, "per_peer": [0.5, 0.5]}
                }
            },
            "scores",
        ),
        ({"mask_change": 3}, "mask_change"),
        ({"busiest": {"paper_mb": 1.0}}, r"busiest\.wire_mb"),
        ({"busiest": None}, r"busiest\.paper_mb"),
        ({"flops_total": "many"}, "flops_total"),
        ({"seconds": float("nan")}, "seconds"),
        ({"failures": []}, "failures"),
        ({"traffic": {"000": [1, 2, 3]}}, "traffic"),
    ],
)
def test_an_invalid_line_of_the_metrics_is_rejected(
    write: Write, change: dict[str, object], word: str
) -> None:
    path = write("a", [[0.5, 0.5]], record=change)
    with pytest.raises(RunError, match=f"line 1: {word} is missing or invalid"):
        read_run(path)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("rounds = 3", "seed must be an integer"),
        ("seed = 0\nrounds = 1\npeers = 1", r"method\.name must be a string"),
    ],
)
def test_a_config_of_something_else_is_rejected(tmp_path: Path, text: str, word: str) -> None:
    (tmp_path / "config.toml").write_text(text)
    with pytest.raises(RunError, match=f"is not the config of a run: {word}"):
        read_run(tmp_path)


def test_scores_are_those_of_the_last_evaluated_round_without_missing_ones(write: Write) -> None:
    run = read_run(write("a", [[0.1, 0.2, 0.3], [0.4, None, 0.6], None]))
    assert run.scores == {"000": 0.4, "002": 0.6}


def test_densities_are_assigned_to_peers_as_methods_assign_them(write: Write) -> None:
    run = read_run(write("a", [[0.5] * 7], own={"density": [0.2, 0.5, 0.8]}))
    assert list((run.densities or {}).values()) == spread_densities((0.2, 0.5, 0.8), 7)


def test_one_density_makes_no_groups(write: Write) -> None:
    assert read_run(write("a", [[0.5]], own={"density": 0.5})).densities is None


def test_traffic_is_the_mean_over_rounds(write: Write) -> None:
    path = write("a", [[0.5, 0.5], [0.5, 0.5]])
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    lines[0]["traffic"] = {"000": [2_000_000, 0], "server": [0, 2_000_000]}
    lines[1]["traffic"] = {"000": [4_000_000, 1_000_000]}
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_run(path).traffic == {"000": (3e6, 0.5e6), "001": (0, 0), "server": (0, 1e6)}


def test_a_run_whose_metrics_lack_traffic_has_none(write: Write) -> None:
    assert read_run(write("a", [[0.5]])).traffic is None


def test_label_counts_come_from_the_split(write: Write) -> None:
    assert read_run(write("a", [[0.5, 0.5]], labels=[[3, 0], [1, 2]])).label_counts() == [
        [3, 0],
        [1, 2],
    ]
    assert read_run(write("b", [[0.5, 0.5]])).label_counts() is None


def test_a_split_with_another_number_of_peers_is_rejected(write: Write) -> None:
    path = write("a", [[0.5, 0.5]], labels=[[3, 0], [1, 2]])
    (path / "config.toml").write_text(
        (path / "config.toml").read_text().replace("peers = 2", "peers = 1")
    )
    (path / "metrics.jsonl").write_text("")
    with refused(RunError):
        read_run(path).label_counts()


def test_a_damaged_split_is_rejected(write: Write) -> None:
    path = write("a", [[0.5]], labels=[[1]])
    (path / "split.safetensors").write_bytes(b"nonsense" + bytes(torch.arange(3).tolist()))
    with refused(RunError):
        read_run(path).label_counts()
