"""`dispfl show`, on finished and unfinished runs and on other folders."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dispfl.cli import app
from dispfl.errors import RunError
from dispfl.runs.directory import RunDirectory

SPREAD = {
    "higher_is_better": True,
    "format": ".3f",
    "mean": 0.5,
    "std": 0.1,
    "per_peer": [0.4, 0.6] * 3,
}


def a_record(t: int, evaluated: bool = True) -> dict[str, Any]:
    return {
        "round": t,
        "metric": "accuracy",
        "scores": {"accuracy": SPREAD} if evaluated else {},
        "test_loss": None,
        "busiest": {"paper_mb": 1.0 + t, "wire_mb": 2.0 + t, "peer": "000", "connections": 4},
        "flops_per_peer": 3e9,
        "flops_total": 6e9,
        "failures": {},
        "seconds": 1.5,
    }


def a_summary(method: str) -> dict[str, Any]:
    return {
        "method": method,
        "rounds": 4,
        "metric": "accuracy",
        "scores": {"accuracy": SPREAD},
        "test_loss": None,
        "busiest": {"paper_mb_per_round": 1.25, "wire_mb_per_round": 1.5},
        "flops_per_peer_round": 2e9,
        "failures": 0,
        "seconds": 12.0,
    }


def make(path: Path, method: str = "dispfl", rounds: int = 0, finished: bool = False) -> Path:
    """A run directory with this many of four rounds."""
    directory = RunDirectory.create(
        path, {"seed": 0, "peers": 6, "rounds": 4, "method": {"name": method}}
    )
    for t in range(rounds):
        directory.append(a_record(t, evaluated=t % 2 == 0))
    if finished:
        directory.write_summary(a_summary(method))
    directory.close()
    return path


def show(*arguments: str | Path) -> str:
    result = CliRunner().invoke(app, ["show", *map(str, arguments)])
    assert result.exit_code == 0, result.exception
    return result.stdout


def rows(text: str) -> list[list[str]]:
    """The table's rows, cell by cell."""
    return [
        line.split() for line in text.splitlines() if line.split()[:1] in (["Dis-PFL"], ["Local"])
    ]


def test_a_finished_run_is_a_row_and_its_directory(tmp_path: Path) -> None:
    text = show(make(tmp_path / "run", rounds=4, finished=True))
    assert rows(text) == [
        ["Dis-PFL", "4", "0.500", "±", "0.100", "0.40,", "0.60", "1.25", "1.50", "2.00", "12.0"]
    ]
    assert text.splitlines()[-1] == f"Run directory: {tmp_path / 'run'}"


def test_an_unfinished_run_shows_its_rounds_so_far_and_how_to_resume(tmp_path: Path) -> None:
    """Three of four rounds: traffic 1, 2, 3 MB, mean 2; the last evaluated round is the third."""
    path = make(tmp_path / "run", rounds=3)
    text = show(path)
    assert rows(text)[0] == [
        "Dis-PFL",
        "3",
        "0.500",
        "±",
        "0.100",
        "0.40,",
        "0.60",
        "2.00",
        "3.00",
        "3.00",
        "4.5",
    ]
    assert (
        text.splitlines()[-1] == f"Dis-PFL: 3 of 4 rounds; resume with: dispfl run --resume {path}"
    )


def test_a_run_that_was_stopped_before_its_first_round_has_dashes(tmp_path: Path) -> None:
    text = show(make(tmp_path / "run"))
    assert rows(text)[0] == ["Dis-PFL", "0", "–", "–", "0", "0", "0", "0.0"]
    assert "0 of 4 rounds" in text


def test_several_runs_are_rows_of_one_table_in_the_order_given(tmp_path: Path) -> None:
    paths = [make(tmp_path / "b", "local", 4, finished=True), make(tmp_path / "a", "dispfl", 1)]
    text = show(*paths)
    assert [row[:2] for row in rows(text)[:2]] == [["Local", "4"], ["Dis-PFL", "1"]]
    assert text.count("MB/round  MB/round") == 1
    assert text.splitlines()[-2:] == [
        f"Run directory: {paths[0]}",
        f"Dis-PFL: 1 of 4 rounds; resume with: dispfl run --resume {paths[1]}",
    ]


def test_several_methods_are_compared_with_dispfl_peer_by_peer_and_at_equal_connections(
    tmp_path: Path,
) -> None:
    """The same scores: a difference of 0 for each of the six peers."""
    text = show(
        make(tmp_path / "b", "local", 4, finished=True),
        make(tmp_path / "a", "dispfl", 4, finished=True),
    )
    assert (
        "Against Dis-PFL in accuracy: Local level, +0.000 [+0.000, +0.000] (paired difference over"
        " 6 pairs" in text
    )
    assert "Compared at equal connections: no node receives more than 4 models in a round." in text


def test_a_folder_is_all_runs_below_it_named_by_their_paths(tmp_path: Path) -> None:
    paths = [
        make(tmp_path / "grid" / name, method, 4, finished=True) for name, method in FOUR.items()
    ]
    make(paths[0] / "sites" / "000" / "run")  # of `dispfl up`: part of that run
    text = show(tmp_path / "grid")
    assert [(row[0], row[-1]) for row in rows(text)] == [
        ("Dis-PFL", "dispfl/seed-0"),
        ("Dis-PFL", "dispfl/seed-1"),
        ("Local", "local/seed-0"),
        ("Local", "local/seed-1"),
    ]
    assert "Run directory" not in text
    assert len(json.loads(show("--json", tmp_path / "grid"))) == 4


FOUR = {
    "dispfl/seed-0": "dispfl",
    "dispfl/seed-1": "dispfl",
    "local/seed-0": "local",
    "local/seed-1": "local",
}


def test_json_of_one_run_is_its_summary(tmp_path: Path) -> None:
    path = make(tmp_path / "run", rounds=4, finished=True)
    assert json.loads(show("--json", path)) == a_summary("dispfl")


def test_json_of_several_runs_is_a_list_and_says_which_are_unfinished(tmp_path: Path) -> None:
    done, unfinished = make(tmp_path / "a", finished=True), make(tmp_path / "b", "local", 2)
    one, two = json.loads(show(done, unfinished, "--json"))
    assert one == a_summary("dispfl")
    assert two == {
        "method": "local",
        "logged": None,
        "rounds": 2,
        "unfinished": f"2 of 4 rounds; resume with: dispfl run --resume {unfinished}",
        "metric": "accuracy",
        "scores": {"accuracy": SPREAD},
        "test_loss": None,
        "train_score": None,
        "validation": None,
        "global_test": None,
        "busiest": {"paper_mb_per_round": 1.5, "wire_mb_per_round": 2.5, "connections": 4},
        "flops_per_peer_round": 3e9,
        "flops_total_round": 6e9,
        "failures": 0,
        "seconds": 3.0,
        "seconds_per_peer_round": None,
    }


def test_a_folder_without_a_run_is_rejected(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["show", str(tmp_path)])
    assert isinstance(result.exception, RunError)
    assert (
        str(result.exception)
        == f"{tmp_path} neither is nor contains a run directory: there is no config.toml."
    )


@pytest.mark.parametrize("content", ["", "{", "\x00"])
def test_a_damaged_summary_is_rejected(tmp_path: Path, content: str) -> None:
    path = make(tmp_path / "run", rounds=4, finished=True)
    (path / "summary.json").write_text(content)
    result = CliRunner().invoke(app, ["show", str(path)])
    assert isinstance(result.exception, RunError)
    assert str(result.exception).startswith(f"{path / 'summary.json'} cannot be read: ")
