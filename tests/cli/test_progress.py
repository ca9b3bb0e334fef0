"""Progress of runs and grids: a bar on a terminal, one line per round elsewhere."""

import io
import logging
import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dispfl.cli.progress import GridDisplay, GridProgress, show_grid_progress
from dispfl.runs.grid import GridRun, methods_grid
from dispfl.runs.progress import show_progress

TINY = [
    "peers=3",
    "rounds=3",
    "topology.degree=2",
    "partition.samples_per_peer=20",
    "partition.test_samples_per_peer=10",
]


def record(t: int, mean: float | None = 0.5, failures: int = 0) -> dict[str, Any]:
    return {
        "round": t,
        "metric": "accuracy",
        "scores": {"accuracy": {"higher_is_better": True, "format": ".3f", "mean": mean}}
        if mean is not None
        else {},
        "failures": {f"{k:03d}": "It broke." for k in range(failures)},
    }


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that only the test advances."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def piped() -> tuple[Console, io.StringIO]:
    text = io.StringIO()
    return Console(file=text, width=80), text


def test_ten_seconds_a_round_leave_twenty_seconds_for_two_rounds(clock: list[float]) -> None:
    console, text = piped()
    with show_progress("dispfl", 3, console) as progress:
        progress.begin(0, 12)
        for t in range(3):
            clock[0] += 10
            progress.round(record(t))
    assert text.getvalue().splitlines() == [
        "dispfl round 1/3 · accuracy 0.500 · left 0:00:20",
        "dispfl round 2/3 · accuracy 0.500 · left 0:00:10",
        "dispfl round 3/3 · accuracy 0.500 · left 0:00:00",
    ]


def test_after_a_resume_only_rounds_of_this_process_count_for_the_speed(clock: list[float]) -> None:
    """Ninety of a hundred rounds were done before: one round in 10 s leaves nine, 90 s."""
    console, text = piped()
    with show_progress("local", 100, console) as progress:
        progress.begin(90 * 4, 100 * 4)
        clock[0] += 10
        progress.round(record(90))
    assert text.getvalue() == "local round 91/100 · accuracy 0.500 · left 0:01:30\n"


def test_a_round_whose_peers_had_all_finished_before_the_stop_is_printed_at_once(
    clock: list[float],
) -> None:
    console, text = piped()
    with show_progress("dispfl", 3, console) as progress:
        progress.begin(8, 12)  # both rounds' steps are done, but the second was not written down
        progress.round(record(1))
        clock[0] += 10
        progress.round(record(2))
    assert [line.split(" · ")[0] for line in text.getvalue().splitlines()] == [
        "dispfl round 2/3",
        "dispfl round 3/3",
    ]


def test_a_round_without_evaluation_has_a_dash_and_failed_peers_are_counted(
    clock: list[float],
) -> None:
    console, text = piped()
    with show_progress("dispfl", 1, console) as progress:
        progress.begin(0, 4)
        progress.round(record(0, mean=None, failures=3))
    assert text.getvalue() == "dispfl round 1/1 · accuracy – · 3 peers failed · left 0:00:00\n"


def test_log_messages_are_printed_during_the_run_and_not_after() -> None:
    console, text = piped()
    log = logging.getLogger("dispfl")
    with show_progress("dispfl", 1, console):
        log.warning("Peer 003 failed [/b].")
    handlers = len(log.handlers)
    assert "Peer 003 failed [/b]." in text.getvalue()
    with pytest.raises(KeyboardInterrupt), show_progress("dispfl", 1, console):
        raise KeyboardInterrupt
    assert len(log.handlers) == handlers


def on_a_terminal(*arguments: str | Path) -> tuple[int, str]:
    """Run the program on a pseudo-terminal of 100 columns: its exit code and all that was drawn."""
    ours, theirs = pty.openpty()
    program = "import sys; from dispfl.cli import main; sys.argv[0] = 'dispfl'; main()"
    command = [sys.executable, "-c", program, *map(str, arguments)]
    unset = {
        name: value
        for name, value in os.environ.items()
        if name not in ("NO_COLOR", "FORCE_COLOR", "TERM")
    }
    process = subprocess.Popen(
        command,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**unset, "COLUMNS": "100", "TERM": "xterm"},
    )
    os.close(theirs)
    drawn = b""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if select.select([ours], [], [], 0.1)[0]:
            try:
                piece = os.read(ours, 65536)
            except OSError:  # the other side is closed
                break
            if not piece:
                break
            drawn += piece
    os.close(ours)
    return process.wait(timeout=60), drawn.decode()


def test_on_a_terminal_there_is_a_bar_with_steps_rounds_and_the_time_left(tmp_path: Path) -> None:
    code, drawn = on_a_terminal("run", *TINY, "train.epochs=5", "--out", tmp_path / "run")
    assert code == 0, drawn
    text = without_colours(drawn)
    assert "━" in text
    assert re.search(
        r"dispfl round 3/3 ━+ 9/9 steps · accuracy 0\.\d{3} · 0:00:\d\d · left 0:00:00", text
    ), text
    assert "dispfl round 3/3 · accuracy" not in text  # no lines in addition to the bar
    assert f"Run directory: {tmp_path / 'run'}" in text


def test_on_a_terminal_a_resumed_bar_starts_where_the_run_stopped() -> None:
    """Of two peers and five rounds, three rounds and one step of the fourth were done before."""
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    with show_progress("dispfl", 5, console) as progress:
        progress.begin(7, 10)
    assert re.search(r"dispfl round 4/5 [━╺╸]+ +7/10 steps · –", plain(console))
    with show_progress("dispfl", 5, console) as progress:
        progress.begin(7, 10)
        progress.step()
        progress.round(record(3, 0.25))
    assert re.search(r"dispfl round 5/5 [━╺╸]+ +8/10 steps · accuracy 0\.250", plain(console))


def test_a_narrow_terminal_shows_the_score_and_the_time_left() -> None:
    console = Console(file=io.StringIO(), width=60, force_terminal=True)
    with show_progress("dispfl", 500, console) as progress:
        progress.begin(498, 1000)
        progress.step()
        progress.step()
        progress.round(record(249, 0.25))
    assert re.search(
        r"dispfl round 251/500 [━╺╸]+ accuracy 0\.250 · left \d:\d\d:\d\d", plain(console)
    ), plain(console)


def plain(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return without_colours(console.file.getvalue())


def without_colours(drawn: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", drawn)


def two_runs(out: Path) -> list[GridRun]:
    """Two runs of 4 rounds with 5 peers: 20 steps each."""
    return methods_grid(["dispfl", "local", "peers=5", "rounds=4"], {}, 1, out)


def test_ten_steps_in_five_seconds_leave_fifteen_seconds_for_thirty_steps(tmp_path: Path) -> None:
    now = [0.0]
    first, second = two_runs(tmp_path)
    progress = GridProgress([first, second], clock=lambda: now[0])
    assert progress.left == "–"
    progress.begin(first, 0, 20)
    for _ in range(10):
        now[0] += 0.5
        progress.step(first)
    assert (progress.done, progress.total, progress.left) == (10, 40, "0:00:15")
    progress.end(first)
    assert progress.done == 20
    progress.begin(second, 0, 30)
    assert (progress.done, progress.total, progress.left) == (20, 50, "0:00:15")


def test_steps_of_an_earlier_process_do_not_count_for_the_speed(tmp_path: Path) -> None:
    """16 of 20 steps were done before; two more in 8 s leave 2 + 20 steps at 4 s: 88 s."""
    now = [0.0]
    first, second = two_runs(tmp_path)
    progress = GridProgress([first, second], clock=lambda: now[0])
    progress.begin(first, 16, 20)
    assert progress.left == "–"
    for _ in range(2):
        now[0] += 4
        progress.step(first)
    assert (progress.done, progress.left) == (18, "0:01:28")


def test_a_round_of_a_small_cohort_counts_as_a_round(tmp_path: Path) -> None:
    """Two of five peers took a step in 10 s, but a quarter of the run is over: 35 of 40 steps are
    left, at 2 s each."""
    now = [0.0]
    first, second = two_runs(tmp_path)
    progress = GridProgress([first, second], clock=lambda: now[0])
    progress.begin(first, 0, 20)
    now[0] = 10
    progress.step(first)
    progress.step(first)
    progress.reach(first, 5)
    assert (progress.done, progress.left) == (5, "0:01:10")
    progress.reach(first, 4)
    assert progress.done == 5


def test_a_terminal_has_one_bar_over_the_whole_grid(tmp_path: Path) -> None:
    cells = two_runs(tmp_path)
    text = io.StringIO()
    console = Console(file=text, width=90, force_terminal=True, color_system=None)
    with show_grid_progress(cells, console) as display:
        for cell in cells:
            observer = display.run(cell)
            observer.begin(0, 20)
            for _ in range(5):
                observer.step()
            observer.round(record(0))
            assert bar_line(display) == f"run {cells.index(cell) + 1}/2 · {cell.title} · round 2/4"
            display.end(cell)
    assert "run 2/2 · local seed 0 · round 2/4" in text.getvalue()
    assert "100%" in text.getvalue()
    assert "accuracy 0.500" not in text.getvalue()  # that is for lines


def bar_line(display: GridDisplay) -> str:
    assert display.bar is not None
    return display.bar.tasks[0].description


def test_decoding_is_shown_on_the_same_bar(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=90, force_terminal=True)
    with show_grid_progress(two_runs(tmp_path), console) as display:
        assert display.decoding is not None
        display.decoding(3, 10)
        assert bar_line(display) == "decoding images 3/10"


def test_runs_at_the_same_time_share_the_bar(tmp_path: Path) -> None:
    first, second = cells = two_runs(tmp_path)
    console = Console(file=io.StringIO(), width=90, force_terminal=True)
    with show_grid_progress(cells, console) as display:
        one, other = display.run(first), display.run(second)
        one.begin(0, 20)
        other.begin(10, 20)
        one.step()
        assert display.bar is not None
        assert bar_line(display) == "2 running · dispfl seed 0 1/4 · local seed 0 3/4"
        assert display.bar.tasks[0].completed == 11
        display.end(second)
        assert bar_line(display) == "run 1/2 · dispfl seed 0 · round 1/4"
        assert display.bar.tasks[0].completed == 21


def test_runs_of_other_processes_are_named_once(tmp_path: Path) -> None:
    first, second = cells = two_runs(tmp_path)
    console, text = piped()
    with show_grid_progress(cells, console) as display:
        display.run(first)
        for _ in range(3):
            display.wait([first, second])
    assert text.getvalue() == "Waiting for other processes, which run local seed 0.\n"
