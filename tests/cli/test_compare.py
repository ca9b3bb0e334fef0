"""`dispfl compare` and `dispfl sweep`, as a user types them."""

import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from program import Dispfl, Said
from rich.console import Console

from dispfl.cli.grid_progress import GridWatch, Pace, watching_grid
from dispfl.grid import Cell, methods_grid, run_missing
from dispfl.runs.directory import read_metrics, read_summary
from dispfl.runs.loop import Progress

TINY = [
    "peers=3",
    "rounds=2",
    "topology.degree=2",
    "partition.samples=8",
    "partition.test_samples=4",
    "train.epochs=1",
    "threads=1",
]
FILES = ["comparison.csv", "comparison.json", "comparison.md", "comparison.tex", "learning-curves.png", "report.html"]


def weights(path: Path) -> list[str]:
    summary = read_summary(path)
    assert summary is not None
    return list(summary["weights_sha256"])


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Dis-PFL alone, run to the end at once."""
    cells = methods_grid(["dispfl", *TINY, "rounds=12"], {}, 1, tmp_path_factory.mktemp("uninterrupted"))
    run_missing(cells, lambda cell: Progress())
    return cells[0].path


def rounds_shown(said: Said) -> list[str]:
    return [" · ".join(line.split(" · ")[:3]) for line in said.out.splitlines() if line.startswith("run ")]


def test_methods_and_seeds_are_run_tabled_and_written_and_then_skipped(dispfl: Dispfl, tmp_path: Path) -> None:
    words = ["compare", "dispfl", "local", *TINY, "method.density=0.4", "--seeds", "2", "--out", tmp_path / "grid"]
    said = dispfl(*words, "--targets", "0.01")
    assert (said.code, said.err) == (0, "")
    lines = said.out.splitlines()
    assert lines[0] == "4 runs: 4 to begin."
    assert rounds_shown(said) == [
        f"run {number}/4 · {title} · round {t}/2"
        for number, title in enumerate(("dispfl seed 0", "local seed 0", "dispfl seed 1", "local seed 1"), start=1)
        for t in (1, 2)
    ]
    assert lines[-1].startswith(f"Written: {tmp_path / 'grid/comparison.md'}, .tex, .csv, .json; ")
    assert sorted(path.name for path in (tmp_path / "grid").iterdir() if path.is_file()) == FILES

    found = json.loads((tmp_path / "grid/comparison.json").read_text())
    for row in found["rows"]:
        for seed in row["seeds"]:
            records = read_metrics(tmp_path / "grid" / seed["run"])
            assert seed["accuracy"] == records[-1]["accuracy"]["mean"]
    assert [[seed["run"] for seed in row["seeds"]] for row in found["rows"]] == [
        ["dispfl/seed-0", "dispfl/seed-1"],
        ["local/seed-0", "local/seed-1"],
    ]

    said = dispfl(*words, "--budget", "flops")
    assert said.out.splitlines()[0] == "4 runs: 4 done."
    assert rounds_shown(said) == []
    assert "Compared at equal FLOPs: " in said.out
    assert json.loads((tmp_path / "grid/comparison.json").read_text())["budget"]["of"] == "flops"

    said = dispfl(*words, "train.lr=0.2")
    assert said.code == 1
    assert said.err == (
        f"dispfl: {tmp_path / 'grid/dispfl/seed-0'} was run with train.lr=0.1, got 0.2. "
        "Give the settings that it was run with, or another --out.\n"
    )


def test_a_sweep_has_a_row_for_each_value(dispfl: Dispfl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said = dispfl("sweep", "method.density=[0.2,0.4],[0.5]", *TINY, "rounds=1")
    assert (said.code, said.err) == (0, "")
    assert rounds_shown(said) == [
        f"run {number}/2 · method.density={value} seed 0 · round 1/1"
        for number, value in ((1, "[0.2,0.4]"), (2, "[0.5]"))
    ]
    assert sorted(path.name for path in Path("runs/sweep").iterdir() if path.is_file()) == FILES
    markdown = Path("runs/sweep/comparison.md").read_text().splitlines()
    assert [line.split("|")[1].strip() for line in markdown[:4]] == ["method.density", "-" * 14, "[0.2,0.4]", "[0.5]"]


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_after_a_stop_the_same_command_goes_on_to_the_same_weights(
    dispfl: Dispfl, tmp_path: Path, uninterrupted: Path, how: signal.Signals
) -> None:
    words = ["compare", "dispfl", "local", *TINY, "rounds=12"]
    program = Path(sys.executable).with_name("dispfl")
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        [program, *words],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background job ignores it
    ) as process:
        assert process.stdout is not None
        next(line for line in process.stdout if line.startswith("run 1/2 · dispfl seed 0 · round 3/12"))
        process.send_signal(how)
        rest, problems = process.communicate(timeout=60)
    out = tmp_path / "runs/compare"
    assert not (out / "comparison.md").exists()
    if how is signal.SIGINT:
        assert (process.returncode, problems) == (130, "")
        command = f"dispfl {shlex.join(words)} --out runs/compare"
        assert rest.splitlines()[-1] == f"Stopped; nothing that was finished is lost. Go on with: {command}"
    assert 3 <= len(read_metrics(out / "dispfl/seed-0")) <= 12

    said = dispfl(*words, "--out", out)
    assert (said.code, said.err) == (0, "")
    assert re.fullmatch(r"2 runs: .*(to go on with|to begin)\.", said.out.splitlines()[0])
    assert "run 1/2 · dispfl seed 0 · round 3/12" not in rounds_shown(said)
    assert weights(out / "dispfl/seed-0") == weights(uninterrupted)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["compare", "dispfl", "locl"], "method 'locl' does not exist. Did you mean local?"),
        (["compare", "dispfl", "--targets", "60"], "--targets must be in (0, 1], got 60. For 60% write 0.6."),
        (
            ["compare", "dispfl", "--targets", "0.6;0.7"],
            "--targets must be numbers with commas between them, such as 0.6,0.7; got '0.6;0.7'.",
        ),
        (["compare", "dispfl", "-c", "none.toml"], "The config file none.toml does not exist."),
        (["sweep", "rounds=3"], "Nothing to sweep: give a key several values, such as method.density=0.2,0.5."),
    ],
)
def test_a_refusal_is_one_sentence_on_stderr_and_nothing_is_made(
    dispfl: Dispfl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert dispfl(*words) == Said(1, "", f"dispfl: {sentence}\n")
    assert list(tmp_path.iterdir()) == []


def two_runs(out: Path) -> list[Cell]:
    """Two runs of 4 rounds with 5 peers: 20 steps each."""
    return methods_grid(["dispfl", "local", "peers=5", "rounds=4"], {}, 1, out)


def test_ten_steps_in_five_seconds_leave_fifteen_seconds_for_thirty_steps(tmp_path: Path) -> None:
    now = [0.0]
    first, second = two_runs(tmp_path)
    pace = Pace([first, second], clock=lambda: now[0])
    assert pace.left == "–"
    pace.begin(first, 0, 20)
    for _ in range(10):
        now[0] += 0.5
        pace.step()
    assert (pace.done, pace.total, pace.left) == (10, 40, "0:00:15")
    pace.end(first)
    assert pace.done == 20
    pace.begin(second, 0, 30)
    assert (pace.done, pace.total, pace.left) == (20, 50, "0:00:15")


def test_steps_of_an_earlier_process_do_not_count_for_the_pace(tmp_path: Path) -> None:
    """16 of 20 steps were done before; two more in 8 s leave 2 + 20 steps at 4 s: 88 s."""
    now = [0.0]
    first, second = two_runs(tmp_path)
    pace = Pace([first, second], clock=lambda: now[0])
    pace.begin(first, 16, 20)
    assert pace.left == "–"
    for _ in range(2):
        now[0] += 4
        pace.step()
    assert (pace.done, pace.left) == (18, "0:01:28")


def test_a_round_of_a_small_cohort_counts_as_a_round(tmp_path: Path) -> None:
    """Two of five peers took a step in 10 s, but a quarter of the run is over: 35 of 40 steps are left, at 2 s each."""
    now = [0.0]
    first, second = two_runs(tmp_path)
    pace = Pace([first, second], clock=lambda: now[0])
    pace.begin(first, 0, 20)
    now[0] = 10
    pace.step()
    pace.step()
    pace.reach(5)
    assert (pace.done, pace.left) == (5, "0:01:10")
    pace.reach(4)
    assert pace.done == 5


def test_a_terminal_has_one_bar_over_the_whole_grid(tmp_path: Path) -> None:
    cells = two_runs(tmp_path)
    text = io.StringIO()
    console = Console(file=text, width=90, force_terminal=True, color_system=None)
    record = {"round": 0, "accuracy": {"mean": 0.5}, "failures": {}}
    with watching_grid(cells, console) as watch:
        for cell in cells:
            progress = watch(cell)
            progress.begin(0, 20)
            for _ in range(5):
                progress.step()
            progress.round(record)
            assert bar_line(watch) == f"run {cells.index(cell) + 1}/2 · {cell.title} · round 2/4"
    assert "run 2/2 · local seed 0 · round 2/4" in text.getvalue()
    assert "100%" in text.getvalue()
    assert "accuracy 0.500" not in text.getvalue()  # that is for lines


def bar_line(watch: GridWatch) -> str:
    assert watch.bar is not None
    return watch.bar.tasks[0].description


def test_decoding_is_shown_on_the_same_bar(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=90, force_terminal=True)
    with watching_grid(two_runs(tmp_path), console) as watch:
        watch.decoding(3, 10)
        assert bar_line(watch) == "decoding pictures 3/10"


@pytest.mark.parametrize("command", ["compare", "sweep"])
def test_the_help_has_an_example(dispfl: Dispfl, command: str) -> None:
    said = dispfl(command, "--help")
    assert said.code == 0
    assert f"Example: dispfl {command} " in said.out
