"""`dispfl compare` and `dispfl sweep`, as a user types them."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from program import CommandResult, Dispfl

from dispfl.runs.directory import read_metrics, read_summary
from dispfl.runs.grid import methods_grid, run_missing

TINY = [
    "peers=3",
    "rounds=2",
    "topology.degree=2",
    "partition.samples_per_peer=8",
    "partition.test_samples_per_peer=4",
    "train.epochs=1",
    "workers=1",
]
FILES = [
    "comparison.csv",
    "comparison.json",
    "comparison.md",
    "comparison.tex",
    "learning-curves.png",
    "report.html",
]


def weights(path: Path) -> list[str]:
    summary = read_summary(path)
    assert summary is not None
    return list(summary["weights_sha256"])


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of Dis-PFL without interruption."""
    cells = methods_grid(
        ["dispfl", *TINY, "rounds=12"], {}, 1, tmp_path_factory.mktemp("uninterrupted")
    )
    run_missing(cells)
    return cells[0].path


def rounds_shown(result: CommandResult) -> list[str]:
    return [
        " · ".join(line.split(" · ")[:3])
        for line in result.out.splitlines()
        if line.startswith("run ")
    ]


def test_methods_and_seeds_are_run_and_written_as_tables_and_then_skipped(
    dispfl: Dispfl, tmp_path: Path
) -> None:
    arguments = [
        "compare",
        "dispfl",
        "local",
        *TINY,
        "method.density=0.4",
        "--seeds",
        "2",
        "--out",
        tmp_path / "grid",
    ]
    result = dispfl(*arguments, "--targets", "0.01")
    assert (result.code, result.err) == (0, "")
    lines = result.out.splitlines()
    assert lines[0] == "4 runs: 4 to start."
    assert rounds_shown(result) == [
        f"run {number}/4 · {title} · round {t}/2"
        for number, title in enumerate(
            ("dispfl seed 0", "local seed 0", "dispfl seed 1", "local seed 1"), start=1
        )
        for t in (1, 2)
    ]
    assert lines[-1].startswith(f"Written: {tmp_path / 'grid/comparison.md'}, .tex, .csv, .json; ")
    assert sorted(path.name for path in (tmp_path / "grid").iterdir() if path.is_file()) == FILES

    found = json.loads((tmp_path / "grid/comparison.json").read_text())
    for row in found["rows"]:
        for seed in row["seeds"]:
            records = read_metrics(tmp_path / "grid" / seed["run"])
            assert seed["score"] == records[-1]["scores"]["accuracy"]["mean"]
    assert [[seed["run"] for seed in row["seeds"]] for row in found["rows"]] == [
        ["dispfl/seed-0", "dispfl/seed-1"],
        ["local/seed-0", "local/seed-1"],
    ]

    result = dispfl(*arguments, "--budget", "flops")
    assert result.out.splitlines()[0] == "4 runs: 4 done."
    assert rounds_shown(result) == []
    assert "Compared at equal FLOPs: " in result.out
    assert json.loads((tmp_path / "grid/comparison.json").read_text())["budget"]["of"] == "flops"

    result = dispfl(*arguments, "train.lr=0.2")
    assert result.code == 1
    assert result.err == (
        f"dispfl: {tmp_path / 'grid/dispfl/seed-0'} was run with train.lr=0.1, got 0.2. "
        "Give the settings that it was run with, or another --out.\n"
    )


def test_a_variant_is_a_row_beside_its_method_everywhere(dispfl: Dispfl, tmp_path: Path) -> None:
    out = tmp_path / "grid"
    arguments = [
        "compare",
        "dispfl",
        "dispfl@method.structure=channels",
        "local",
        *TINY,
        "--out",
        out,
    ]
    result = dispfl(*arguments)
    assert (result.code, result.err) == (0, "")
    labels = ["Dis-PFL", "Dis-PFL (channels)", "Local"]
    found = json.loads((out / "comparison.json").read_text())
    assert [row["name"] for row in found["rows"]] == [{"method": label} for label in labels]
    assert [row["flops"]["kind"] for row in found["rows"]] == ["counted", "saved", "counted"]
    assert all(row["seconds_per_peer_round"] > 0 for row in found["rows"])
    assert found["rows"][1]["seeds"][0]["run"] == "dispfl@method.structure=channels/seed-0"
    assert "FLOPs of Dis-PFL (channels) are saved" in result.out
    for label in labels:
        assert f"<span>{label}</span>" in (out / "report.html").read_text()
    moved = (out / "dispfl@method.structure=channels").rename(tmp_path / "moved")
    assert "Dis-PFL (channels)" in dispfl("show", moved / "seed-0").out  # from the config
    moved.rename(out / "dispfl@method.structure=channels")
    (out / "dispfl@method.structure=channels/seed-0/summary.json").unlink()
    again = dispfl(*arguments)
    assert again.out.splitlines()[0] == "3 runs: 2 done, 1 to resume."
    assert json.loads((out / "comparison.json").read_text()) == found


def test_a_table_for_a_paper(dispfl: Dispfl, tmp_path: Path) -> None:
    out = tmp_path / "runs"
    rows = ["dispfl@label=ours & <more>", "local", *TINY, "rounds=1"]
    shown = ["--against", "local", "--percent", "--columns", "score,against"]
    printed = dispfl("compare", *rows, *shown, "--out", out).out
    assert "accuracy (%)" in printed
    assert re.search(r"ours & <more> +\d\d\.\d +untested", printed)
    assert r"ours \& $<$more$>$ &" in (out / "comparison.tex").read_text()
    assert "Difference to Local" in (out / "report.html").read_text()
    assert "ours &amp; &lt;more&gt;" in (out / "report.html").read_text()
    assert read_summary(out / "dispfl" / "seed-0") is not None  # a label is no setting

    refusal = dispfl("compare", *rows, "--columns", "bites", "--out", tmp_path / "no")
    assert "--columns has no 'bites'. There are: score, std" in refusal.err
    assert not (tmp_path / "no").exists()

    again = dispfl("table", out, "--columns", "score", "--out", tmp_path / "t.md").out
    assert "ours & <more>" in again
    assert (tmp_path / "t.md").read_text().startswith("| method ")
    dispfl("report", out, "--against", "local", "-o", tmp_path / "page.html")
    assert "Difference to Local" in (tmp_path / "page.html").read_text()
    assert "none of the rows" in dispfl("table", out, "--against", "me").err


def test_a_sweep_has_a_row_for_each_value(
    dispfl: Dispfl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = dispfl("sweep", "method.density=[0.2,0.4],[0.5]", *TINY, "rounds=1")
    assert (result.code, result.err) == (0, "")
    assert rounds_shown(result) == [
        f"run {number}/2 · method.density={value} seed 0 · round 1/1"
        for number, value in ((1, "[0.2,0.4]"), (2, "[0.5]"))
    ]
    assert sorted(path.name for path in Path("runs/sweep").iterdir() if path.is_file()) == FILES
    markdown = Path("runs/sweep/comparison.md").read_text().splitlines()
    assert [line.split("|")[1].strip() for line in markdown[:4]] == [
        "method.density",
        "-" * 14,
        "[0.2,0.4]",
        "[0.5]",
    ]


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_after_a_stop_the_same_command_resumes_to_the_same_weights(
    dispfl: Dispfl, tmp_path: Path, uninterrupted: Path, how: signal.Signals
) -> None:
    arguments = ["compare", "dispfl", "local", *TINY, "rounds=12"]
    program = Path(sys.executable).with_name("dispfl")
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        [program, *arguments],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(
            signal.SIGINT, signal.SIG_DFL
        ),  # a shell's background job ignores it
    ) as process:
        assert process.stdout is not None
        next(
            line
            for line in process.stdout
            if line.startswith("run 1/2 · dispfl seed 0 · round 3/12")
        )
        process.send_signal(how)
        rest, problems = process.communicate(timeout=60)
    out = tmp_path / "runs/compare"
    assert not (out / "comparison.md").exists()
    if how is signal.SIGINT:
        assert (process.returncode, problems) == (130, "")
        command = f"dispfl {shlex.join(arguments)} --out runs/compare"
        assert (
            rest.splitlines()[-1]
            == f"Stopped; all finished rounds are saved. Resume with: {command}"
        )
    assert 3 <= len(read_metrics(out / "dispfl/seed-0")) <= 12

    result = dispfl(*arguments, "--out", out)
    assert (result.code, result.err) == (0, "")
    assert re.fullmatch(
        r"2 runs: 1 (done|to resume), 1 to start\.|2 runs: 1 done, 1 to resume\.",
        result.out.splitlines()[0],
    )
    assert "run 1/2 · dispfl seed 0 · round 3/12" not in rounds_shown(result)
    assert weights(out / "dispfl/seed-0") == weights(uninterrupted)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["compare", "dispfl", "locl"], "method 'locl' does not exist. Did you mean local?"),
        (
            ["compare", "dispfl", "--targets", "60"],
            "--targets must be in (0, 1], got 60. For 60% write 0.6.",
        ),
        (
            ["compare", "dispfl", "--targets", "0.6;0.7"],
            "--targets must be numbers separated by commas, such as 0.6,0.7; got '0.6;0.7'.",
        ),
        (
            ["compare", "dispfl", "--budget", "hours"],
            "--budget is hours, but a run of dispfl has no devices by whose times they are"
            " counted; name them: fleet=phones.",
        ),
        (["compare", "dispfl", "-c", "none.toml"], "The config file none.toml does not exist."),
        (
            ["sweep", "rounds=3"],
            "Nothing to sweep: give a key several values, such as method.density=0.2,0.5.",
        ),
    ],
)
def test_an_error_is_one_sentence_on_stderr_and_nothing_is_created(
    dispfl: Dispfl,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    sentence: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert dispfl(*arguments) == CommandResult(1, "", f"dispfl: {sentence}\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["compare", "sweep"])
def test_the_help_has_an_example(dispfl: Dispfl, command: str) -> None:
    result = dispfl(command, "--help")
    assert result.code == 0
    assert f"Example: dispfl {command} " in result.out
