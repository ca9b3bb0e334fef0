"""The state of a run, which its lock and its files tell."""

import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dispfl.errors import RunError
from dispfl.runs.directory import RunDirectory
from dispfl.runs.progress_file import ProgressFile
from dispfl.view.overview import (
    Activity,
    RunOverview,
    overview,
    quick_overview,
    run_signature,
)

Write = Callable[..., Path]


def test_a_run_is_running_while_a_process_has_it_locked_and_stopped_afterwards(
    write: Write,
) -> None:
    path = write("a", [[0.5], [0.7]], rounds=4)
    before = run_signature(path)
    with contextlib.closing(RunDirectory.open(path)):
        running = overview(path)
        assert (running.activity, running.rounds, running.all_rounds) == (Activity.RUNNING, 2, 4)
        assert running.curve == [0.5, 0.7]
        assert running.score == "0.700"
        assert running.seconds_left == pytest.approx(3.0, abs=0.5)  # two rounds of 1.5 s
        assert run_signature(path) != before
    stopped = overview(path)
    assert (stopped.activity, stopped.seconds_left) == (Activity.STOPPED, None)


def test_the_time_since_the_present_round_began_is_not_left(write: Write) -> None:
    path = write("a", [[0.5], [0.7]], rounds=4)
    content = {"round": 2, "began": time.time() - 1, "finished": [], "error": None}
    (path / ".progress.json").write_text(json.dumps(content))
    with contextlib.closing(RunDirectory.open(path)):
        assert overview(path).seconds_left == pytest.approx(2.0, abs=0.5)


def test_a_run_of_real_peers_has_the_progress_of_the_slowest_and_their_mean_score(
    write: Write,
) -> None:
    """Peer 001 has 3 of 9 rounds to make, of 1.5 s each; (0.5 + 0.7) / 2 is 0.6."""
    path = write("up", [], rounds=9)
    for name, rounds, score in (("000", 8, 0.5), ("001", 6, 0.7)):
        record = write(f"up/sites/{name}/run", [[score]] * rounds, rounds=9)
        (record.parent / "site.toml").touch()
        status = {"round": rounds, "score": score, "peers": {}}
        (record / "status.json").write_text(json.dumps(status))
    before = run_signature(path)
    with contextlib.closing(RunDirectory.open(path)):
        shown = overview(path)
    assert (shown.rounds, shown.all_rounds, shown.score) == (6, 9, "0.600")
    assert shown.seconds_left == pytest.approx(4.5, abs=0.5)
    (path / "sites/000/run/status.json").write_text("{}")
    assert run_signature(path) != before


def test_a_finished_run_is_known_by_its_summary_alone(write: Write) -> None:
    path = write("a", [[0.5, 0.7]])
    (path / "metrics.jsonl").unlink()
    shown = quick_overview(path)
    assert (shown.activity, shown.score, shown.method) == (Activity.FINISHED, "0.600", "Dis-PFL")
    assert shown.curve is None  # not read yet


def test_a_run_that_ended_with_an_error_has_failed_until_it_is_resumed(write: Write) -> None:
    path = write("a", [[0.5]], rounds=4)
    with pytest.raises(RunError), ProgressFile(path).kept_after_error():
        raise RunError("The disk is full.")
    assert (overview(path).activity, overview(path).detail) == (
        Activity.FAILED,
        "The disk is full.",
    )
    with contextlib.closing(RunDirectory.open(path)):
        assert overview(path).activity is Activity.RUNNING


def test_a_finished_run_of_which_peers_have_learned_nothing_has_failed(write: Write) -> None:
    path = write("a", [[0.5, 0.7]])
    summary = json.loads((path / "summary.json").read_text())
    (path / "summary.json").write_text(json.dumps(summary | {"failed_peers": ["001"]}))
    shown = quick_overview(path)
    assert shown.activity is Activity.FAILED
    assert shown.detail == "Every step of 1 of its peers failed."


def test_a_reason_is_shown_up_to_400_characters(write: Write) -> None:
    path = write("a", [[0.5]], rounds=4)
    content = {"round": 1, "began": 1.0, "finished": [], "error": "x" * 500}
    (path / ".progress.json").write_text(json.dumps(content))
    assert overview(path).detail == "x" * 400 + "…"


@pytest.mark.parametrize("read", [overview, quick_overview])
@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.toml", "rounds = ["),
        ("config.toml", 'seed = 1\nrounds = "x"\npeers = 2'),
        ("metrics.jsonl", '{"round": 0, "metric": 5}\n'),
        ("metrics.jsonl", '{"round": 0, "scores": {"accuracy": {"mean": 1e999}}}\n'),
        ("summary.json", "[1]"),
        ("summary.json", '{"rounds": 1e999, "method": "dispfl", "metric": "f1", "peers": 2}'),
        ("summary.json", '{"rounds": {}, "method": [], "scores": 7, "metric": {}}'),
    ],
)
def test_damaged_files_are_a_failed_run_and_no_error(
    write: Write, file: str, content: str, read: Callable[[Path], RunOverview]
) -> None:
    path = write("a", [[0.5, 0.7]])
    (path / file).write_text(content)
    shown = read(path)
    assert shown.activity in (Activity.FAILED, Activity.FINISHED)


def test_looking_at_the_lock_does_not_keep_a_run_from_starting(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run finds the lock held, as by another process that just looks, and tries again."""
    import fcntl

    path = write("a", [[0.5]], rounds=4)
    with (path / ".lock").open("wb") as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        pauses = []

        def release(seconds: float) -> None:
            pauses.append(seconds)
            fcntl.flock(looking, fcntl.LOCK_UN)

        monkeypatch.setattr("dispfl.runs.directory.time.sleep", release)
        RunDirectory.open(path).close()
        assert len(pauses) == 1


def test_a_folder_that_cannot_be_written_is_read(write: Write) -> None:
    path = write("a", [[0.5]], rounds=4)
    names = sorted(entry.name for entry in path.iterdir())
    path.chmod(0o500)
    try:
        assert overview(path).activity is Activity.STOPPED
    finally:
        path.chmod(0o700)
    assert sorted(entry.name for entry in path.iterdir()) == names  # no lock was made
