"""`dispfl audit`, as a user types it."""

import json
from pathlib import Path

import pytest
from program import Dispfl

from dispfl.files import write_atomically
from dispfl.runs.directory import read_config

TINY = [
    "peers=4",
    "rounds=2",
    "model=mlp",
    "workers=1",
    "partition.samples_per_peer=12",
    "train.epochs=1",
]


@pytest.fixture
def run(dispfl: Dispfl, tmp_path: Path) -> Path:
    assert dispfl("run", *TINY, "--out", tmp_path / "run").code == 0
    return tmp_path / "run"


def test_an_audit_prints_three_answers_writes_them_and_trains_nothing_twice(
    dispfl: Dispfl, run: Path
) -> None:
    result = dispfl("audit", run, "--shadows", "2", "--canaries", "3")
    assert (result.code, result.err) == (0, "")
    lines = result.out.splitlines()
    assert any(line.startswith("run 3/3 · canaries-12 · round 2/2") for line in lines)
    answers = result.out.partition(
        "Can an attacker tell whether a record was in a peer's training data?"
    )[2]
    assert "personal model  what a neighbour received" in answers
    assert "found at 1 % false alarms" in answers
    assert "too few records" in answers
    assert "at most   no bound: this run is not private" in answers
    assert "similar masks" in answers
    assert answers.endswith(f"Written: {run / 'audit.json'}\n")
    found = json.loads((run / "audit.json").read_text())
    assert (found["shadows"], found["pairs"], found["canaries"]["canaries"]) == (2, 48, 12)
    assert found["membership"][0]["per_peer"].keys() == {"000", "001", "002", "003"}
    again = dispfl("audit", run, "--shadows", "2", "--canaries", "3", "--json")
    assert again.code == 0
    assert json.loads(again.out) == found  # and no line about a round
    assert "round" not in again.err
    assert (
        dispfl("report", run.parent, "--out", run.parent / "report.html").code == 0
    )  # shadows are no runs of a report


def test_nothing_is_trained_without_shadows_and_canaries(dispfl: Dispfl, run: Path) -> None:
    result = dispfl("audit", run, "--shadows", "0", "--canaries", "0")
    assert result.code == 0
    assert "By the confidence alone; 48 records" in result.out
    assert "at least  not measured: no canaries" in result.out
    assert not (run / "audit").exists()


def test_the_answers_are_printed_even_if_they_cannot_be_written(dispfl: Dispfl, run: Path) -> None:
    (run / "audit.json").mkdir()  # stands for a disk that refuses
    result = dispfl("audit", run, "--shadows", "0", "--canaries", "0")
    assert result.code == 1
    assert result.err.startswith(f"dispfl: {run / 'audit.json'} could not be written")
    assert "at most   no bound: this run is not private" in result.out
    assert "Written" not in result.out


def test_what_cannot_be_audited_is_refused_in_a_sentence(
    dispfl: Dispfl, run: Path, tmp_path: Path
) -> None:
    def refusal(*arguments: str | Path) -> str:
        result = dispfl("audit", *arguments)
        assert result.code == 1
        assert len(result.err.splitlines()) == 1
        return result.err

    assert f"{tmp_path / 'nowhere'} does not exist; name the directory" in refusal(
        tmp_path / "nowhere"
    )
    assert "it has no config.toml" in refusal(tmp_path)
    assert "--shadows must be an even number, because shadows come in twos, got 3." in refusal(
        run, "--shadows", "3"
    )
    site = tmp_path / "alice"
    site.mkdir()
    (site / "site.toml").touch()
    assert "is a run of real sites, each of which has only its own data and model" in refusal(site)
    summary = (run / "summary.json").read_bytes()
    (run / "summary.json").unlink()
    assert f"is not complete yet. Finish it first: dispfl run --resume {run}" in refusal(run)
    write_atomically(run / "summary.json", summary)
    config = (run / "config.toml").read_text()
    for old, new, sentence in (
        ("byzantine = 0.0", "byzantine = 0.5", "has Byzantine peers"),
        ('attack = "none"', 'attack = "noise"\nmade_in_python = true', "was made in Python"),
    ):
        assert old in config
        changed = config.replace(old, new).replace('attack = "none"', 'attack = "noise"')
        (run / "config.toml").write_text(changed)
        assert sentence in refusal(run)
    (run / "config.toml").write_text(config)
    for checkpoint in (run / "checkpoints").iterdir():
        (checkpoint / "complete.json").unlink()
    assert "has no complete checkpoint" in refusal(run, "--shadows", "0", "--canaries", "0")
    assert read_config(run)["byzantine"] == 0
