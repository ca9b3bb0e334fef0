"""Run directories: made once, locked while in use, read by anyone."""

import fcntl
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from messages import refused

from dispfl.errors import RunError, TakenError
from dispfl.runs.directory import RunDirectory, read_config, read_metrics, read_summary

CONFIG: dict[str, Any] = {"rounds": 2, "method": {"name": "dispfl", "density": (0.2, 0.5)}}


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDirectory]:
    directory = RunDirectory.create(tmp_path / "run", CONFIG)
    yield directory
    directory.close()


def refusal(path: Path) -> str:
    with pytest.raises(RunError) as caught:
        RunDirectory.create(path, CONFIG)
    return str(caught.value)


def test_a_new_directory_has_its_config_and_no_other_visible_file(run: RunDirectory) -> None:
    assert sorted(entry.name for entry in run.path.iterdir()) == [".lock", "config.toml"]
    assert read_config(run.path) == {
        "rounds": 2,
        "method": {"name": "dispfl", "density": [0.2, 0.5]},
    }
    assert read_metrics(run.path) == []
    assert read_summary(run.path) is None


def test_missing_parents_are_created_and_hidden_files_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "run"
    path.mkdir(parents=True)
    (path / ".lock").touch()  # left by a run that was killed before it wrote its config
    RunDirectory.create(path, CONFIG).close()
    assert read_config(path)["rounds"] == 2


def test_an_existing_run_is_refused_with_how_to_resume_it(run: RunDirectory) -> None:
    (run.path / "metrics.jsonl").write_text("{}\n")
    assert (
        refusal(run.path)
        == f"The run directory {run.path} exists already. Resume it (--resume {run.path}; in"
        " Python, resume=True), or choose another (--out; in Python, out=...)."
    )


def test_a_folder_with_other_files_and_a_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    expected = "The run directory {} exists already. Choose another (--out; in Python, out=...)."
    assert refusal(tmp_path) == expected.format(tmp_path)
    assert refusal(tmp_path / "thesis.tex") == expected.format(tmp_path / "thesis.tex")
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_path_below_a_file_cannot_be_a_run_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "run"
    assert refusal(path) == f"{path} could not be written: Not a directory."


def test_a_folder_without_config_is_not_a_run_directory(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(RunError) as caught:
            RunDirectory.open(path)
        assert str(caught.value) == f"{path} is not a run directory: it has no config.toml."
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_not_a_run_directory(run: RunDirectory) -> None:
    file = run.path / "config.toml"
    with pytest.raises(RunError) as caught:
        read_config(file)
    assert str(caught.value) == f"{file} is a file; name the run directory, such as {run.path}."


def test_a_config_that_is_not_toml_is_a_sentence(run: RunDirectory) -> None:
    (run.path / "config.toml").write_text("rounds = \n")
    with refused(RunError):
        read_config(run.path)


def test_a_directory_is_locked_until_it_is_closed(run: RunDirectory) -> None:
    with pytest.raises(RunError) as caught:
        RunDirectory.open(run.path)
    assert (
        str(caught.value) == f"Another process is using {run.path}; wait for it or stop it first."
    )
    run.close()
    RunDirectory.open(run.path).close()


def test_a_claimed_directory_is_locked_and_removed_again_without_a_config(tmp_path: Path) -> None:
    claimed = RunDirectory.claim(tmp_path / "a/b/run")
    with refused(TakenError):
        RunDirectory.claim(tmp_path / "a/b/run")
    claimed.close()
    assert list(tmp_path.iterdir()) == []
    RunDirectory.create(tmp_path / "a/b/run", {"rounds": 2}).close()
    RunDirectory.create(tmp_path / "a/b/run", {"rounds": 3}).close()  # the first has no results
    (tmp_path / "a/b/run/metrics.jsonl").write_text("{}\n")
    with refused(RunError):
        RunDirectory.claim(tmp_path / "a/b/run")
    assert read_config(tmp_path / "a/b/run") == {"rounds": 3}


def test_a_lock_on_a_file_that_was_removed_meanwhile_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process gives the directory up between our opening of its lock file and our locking
    of it."""
    flock, moments = fcntl.flock, iter([True])

    def remove_then_lock(file: Any, how: int) -> None:
        if next(moments, False):
            (tmp_path / ".lock").unlink()
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", remove_then_lock)
    claimed = RunDirectory.claim(tmp_path)
    with pytest.raises(TakenError):
        RunDirectory.claim(tmp_path)
    claimed.close()


def test_a_killed_process_releases_its_lock(run: RunDirectory) -> None:
    run.close()
    program = (
        "import os, sys, pathlib\n"
        "from dispfl.runs.directory import RunDirectory\n"
        "held = RunDirectory.open(pathlib.Path(sys.argv[1]))\n"
        "print('locked', flush=True)\n"
        "sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", program, str(run.path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"locked\n"
        with refused(RunError):
            RunDirectory.open(run.path)
        other.kill()
    RunDirectory.open(run.path).close()


def test_appended_records_are_read_in_order(run: RunDirectory) -> None:
    for t in range(3):
        run.append({"round": t, "loss": t / 3})
    assert (run.path / "metrics.jsonl").read_bytes().count(b"\n") == 3
    assert read_metrics(run.path) == [{"round": t, "loss": t / 3} for t in range(3)]


def test_a_truncated_last_line_is_ignored(run: RunDirectory) -> None:
    run.append({"round": 0})
    whole = json.dumps({"round": 1, "loss": 0.25}).encode()
    file = run.path / "metrics.jsonl"
    first = file.read_bytes()
    for length in range(len(whole)):
        file.write_bytes(first + whole[:length])
        assert read_metrics(run.path) == [{"round": 0}]
    file.write_bytes(first + whole)  # only the line's end is missing: nothing is lost
    assert len(read_metrics(run.path)) == 2


@pytest.mark.parametrize(
    "odd", [b'{"round": 0}', b"[]", b"3", b"\xff\xfe", b'{"loss": 1}', b'{"round": "2"}']
)
def test_lines_that_are_not_a_later_round_are_skipped(run: RunDirectory, odd: bytes) -> None:
    (run.path / "metrics.jsonl").write_bytes(b'{"round": 0}\n' + odd + b'\n{"round": 1}\n')
    assert read_metrics(run.path) == [{"round": 0}, {"round": 1}]


def test_only_a_site_may_have_missed_rounds(run: RunDirectory) -> None:
    (run.path / "metrics.jsonl").write_bytes(b'{"round": 0}\n{"round": 3}\n{"round": 2}\n')
    assert read_metrics(run.path) == [{"round": 0}, {"round": 3}]
    with refused(RunError):
        run.truncate_metrics(4)
    assert run.truncate_metrics(4, gaps=True) == [{"round": 0}, {"round": 3}]


def test_lines_after_the_checkpoint_are_removed(run: RunDirectory) -> None:
    for t in range(3):
        run.append({"round": t})
    assert run.truncate_metrics(2) == [{"round": 0}, {"round": 1}]
    run.append({"round": 2})
    assert [record["round"] for record in read_metrics(run.path)] == [0, 1, 2]
    assert run.truncate_metrics(0) == []
    assert (run.path / "metrics.jsonl").read_bytes() == b""


def test_lost_lines_are_refused_and_nothing_is_changed(run: RunDirectory) -> None:
    run.append({"round": 0})
    before = (run.path / "metrics.jsonl").read_bytes()
    with pytest.raises(RunError) as caught:
        run.truncate_metrics(2)
    assert (
        str(caught.value)
        == f"{run.path / 'metrics.jsonl'} has 1 lines, but 2 rounds are finished: lines were lost. "
        "Restore the file, or start the run again."
    )
    assert (run.path / "metrics.jsonl").read_bytes() == before


def test_a_value_that_json_cannot_represent_is_not_written(run: RunDirectory) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        run.append({"round": 0, "loss": math.nan})
    assert read_metrics(run.path) == []


def test_the_summary_is_read_as_written(run: RunDirectory) -> None:
    run.write_summary({"accuracy": {"mean": 0.1}})
    assert read_summary(run.path) == {"accuracy": {"mean": 0.1}}
    (run.path / "summary.json").write_text("{")
    with refused(RunError):
        read_summary(run.path)
