"""How far a run is: a bar on a terminal, a line a round elsewhere."""

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

from dispfl.cli.progress import watching

TINY = ["peers=3", "rounds=3", "topology.degree=2", "partition.samples=20", "partition.test_samples=10"]


def record(t: int, mean: float | None = 0.5, failures: int = 0) -> dict[str, Any]:
    return {
        "round": t,
        "accuracy": None if mean is None else {"mean": mean},
        "failures": {f"{k:03d}": "It broke." for k in range(failures)},
    }


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that stands until a test moves it."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def piped() -> tuple[Console, io.StringIO]:
    text = io.StringIO()
    return Console(file=text, width=80), text


def test_ten_seconds_a_round_leave_twenty_seconds_for_two_rounds(clock: list[float]) -> None:
    console, text = piped()
    with watching("dispfl", 3, console) as progress:
        progress.begin(0, 12)
        for t in range(3):
            clock[0] += 10
            progress.round(record(t))
    assert text.getvalue().splitlines() == [
        "dispfl round 1/3 · accuracy 0.500 · left 0:00:20",
        "dispfl round 2/3 · accuracy 0.500 · left 0:00:10",
        "dispfl round 3/3 · accuracy 0.500 · left 0:00:00",
    ]


def test_after_a_resume_only_this_processs_rounds_count_for_the_pace(clock: list[float]) -> None:
    """Ninety of a hundred rounds were done before: one round in 10 s leaves nine, 90 s."""
    console, text = piped()
    with watching("local", 100, console) as progress:
        progress.begin(90 * 4, 100 * 4)
        clock[0] += 10
        progress.round(record(90))
    assert text.getvalue() == "local round 91/100 · accuracy 0.500 · left 0:01:30\n"


def test_a_round_whose_peers_had_all_finished_before_the_stop_is_told_at_once(clock: list[float]) -> None:
    console, text = piped()
    with watching("dispfl", 3, console) as progress:
        progress.begin(8, 12)  # both rounds' steps are done, but the second was not written down
        progress.round(record(1))
        clock[0] += 10
        progress.round(record(2))
    assert [line.split(" · ")[0] for line in text.getvalue().splitlines()] == ["dispfl round 2/3", "dispfl round 3/3"]


def test_a_round_that_was_not_scored_has_a_dash_and_failed_peers_are_counted(clock: list[float]) -> None:
    console, text = piped()
    with watching("dispfl", 1, console) as progress:
        progress.begin(0, 4)
        progress.round(record(0, mean=None, failures=3))
    assert text.getvalue() == "dispfl round 1/1 · accuracy – · 3 peers failed · left 0:00:00\n"


def test_what_the_run_logs_is_printed_while_it_is_watched_and_not_after() -> None:
    console, text = piped()
    log = logging.getLogger("dispfl")
    with watching("dispfl", 1, console):
        log.warning("Peer 003 failed [/b].")
    handlers = len(log.handlers)
    assert "Peer 003 failed [/b]." in text.getvalue()
    with pytest.raises(KeyboardInterrupt), watching("dispfl", 1, console):
        raise KeyboardInterrupt
    assert len(log.handlers) == handlers


def on_a_terminal(*words: str | Path) -> tuple[int, str]:
    """Run the program on a pseudo-terminal of 100 columns: its exit code and all that was drawn."""
    ours, theirs = pty.openpty()
    program = "import sys; from dispfl.cli import main; sys.argv[0] = 'dispfl'; main()"
    command = [sys.executable, "-c", program, *map(str, words)]
    unset = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR", "TERM")}
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env={**unset, "COLUMNS": "100", "TERM": "xterm"}
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
    assert re.search(r"dispfl round 3/3 ━+ 9/9 steps · accuracy 0\.\d{3} · 0:00:\d\d · left 0:00:00", text), text
    assert "dispfl round 3/3 · accuracy" not in text  # no lines beside the bar
    assert f"Run directory: {tmp_path / 'run'}" in text


def test_on_a_terminal_a_resumed_bar_begins_where_the_run_stopped() -> None:
    """Of two peers and five rounds, three rounds and one step of the fourth were done before."""
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    with watching("dispfl", 5, console) as progress:
        progress.begin(7, 10)
    assert re.search(r"dispfl round 4/5 [━╺╸]+ +7/10 steps · accuracy –", plain(console))
    with watching("dispfl", 5, console) as progress:
        progress.begin(7, 10)
        progress.step()
        progress.round(record(3, 0.25))
    assert re.search(r"dispfl round 5/5 [━╺╸]+ +8/10 steps · accuracy 0\.250", plain(console))


def plain(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return without_colours(console.file.getvalue())


def without_colours(drawn: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", drawn)
