"""`.progress.json`: there while a run makes rounds, with the reason after an error."""

import json
from pathlib import Path
from typing import Any

import pytest

import dispfl
from dispfl.errors import RunError
from dispfl.runs.progress_file import PROGRESS, ProgressFile, read_progress


def test_it_is_there_while_a_run_makes_rounds_and_gone_at_its_end(tmp_path: Path) -> None:
    seen = []

    def note(run: dispfl.Run) -> None:
        seen.append(read_progress(tmp_path / "run"))

    dispfl.run(peers=2, rounds=2, workers=1, out=tmp_path / "run", callbacks=[note])
    assert [progress and progress.error for progress in seen] == [None, None]
    assert seen[0] is not None
    assert not (tmp_path / "run" / PROGRESS).exists()


def test_a_round_has_the_peers_that_finished_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dispfl.runs.progress_file.WRITE_INTERVAL", 0.0)
    file = ProgressFile(tmp_path)
    file.begin_round(3)
    file.add("001")
    progress = read_progress(tmp_path)
    assert progress is not None
    assert (progress.round, progress.finished, progress.error) == (3, ("001",), None)
    file.begin_round(4)
    assert read_progress(tmp_path).finished == ()


def test_an_error_stays_and_an_interruption_does_not(tmp_path: Path) -> None:
    with pytest.raises(RunError), ProgressFile(tmp_path).kept_after_error():
        raise RunError("The disk is full.")
    assert read_progress(tmp_path).error == "The disk is full."
    file = ProgressFile(tmp_path)
    file.begin_round(0)
    with pytest.raises(KeyboardInterrupt), file.kept_after_error():
        raise KeyboardInterrupt
    assert read_progress(tmp_path) is None


@pytest.mark.parametrize(
    "changes",
    [{"round": "1"}, {"began": None}, {"began": 10**400}, {"finished": [1]}, {"error": 5}],
)
def test_a_file_of_another_form_is_none(tmp_path: Path, changes: dict[str, Any]) -> None:
    valid = {"round": 1, "began": 1.0, "finished": [], "error": None}
    (tmp_path / PROGRESS).write_text(json.dumps(valid))
    assert read_progress(tmp_path) is not None
    (tmp_path / PROGRESS).write_text(json.dumps(valid | changes))
    assert read_progress(tmp_path) is None
