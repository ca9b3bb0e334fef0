"""Runs that are started in Python show a bar on a terminal and in a notebook, and nothing
elsewhere."""

import os
import pty
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor, nn

from dispfl import Federation, Train
from dispfl.runs import progress

PROGRAM = """
import torch
from dispfl import Federation

points = torch.arange(64.0).view(16, 4), torch.arange(16) % 3
settings = {"method": "local", "train": {"epochs": 1}, "workers": 1}
fed = Federation(lambda: torch.nn.Linear(4, 3), [(points, points)] * 2, rounds=3, **settings)
run = fed.run()
print(len(run.metrics))
"""
QUIET = """
longer = Federation(lambda: torch.nn.Linear(4, 3), [(points, points)] * 2, rounds=4, **settings)
longer.run(progress=False)
"""


def on_a_terminal(program: str) -> tuple[str, str]:
    """Run a program whose stderr alone is a terminal; return its output and all that was drawn."""
    ours, theirs = pty.openpty()
    unset = {
        name: value
        for name, value in os.environ.items()
        if name not in ("NO_COLOR", "FORCE_COLOR", "TERM")
    }
    environment = {**unset, "COLUMNS": "100", "TERM": "xterm"}
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=theirs,
        env=environment,
        text=True,
    )
    os.close(theirs)
    drawn = b""
    try:
        while piece := os.read(ours, 65536):
            drawn += piece
    except OSError:  # the other side is closed
        pass
    os.close(ours)
    printed = process.communicate(timeout=60)[0]
    return printed, re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", drawn.decode())


def test_on_a_terminal_there_is_a_bar_on_stderr_and_it_can_be_switched_off() -> None:
    printed, drawn = on_a_terminal(f"{PROGRAM}{QUIET}")
    assert printed == "3\n"
    assert re.search(r"local round 3/3 ━+ 6/6 steps · accuracy [01]\.\d{3} · ", drawn), drawn
    assert "/4" not in drawn


def test_elsewhere_nothing_is_printed_unless_requested(
    net: Callable[[], nn.Module],
    points: Callable[[int, int], tuple[Tensor, Tensor]],
    capfd: pytest.CaptureFixture[str],
) -> None:
    fed = Federation(
        net, [(points(20, 0), points(10, 1))], train=Train(epochs=1), workers=1, rounds=2
    )
    fed.run()
    assert capfd.readouterr() == ("", "")
    fed.run(progress=True)
    out, lines = capfd.readouterr()
    assert out == ""
    assert [line.split(" · ")[0] for line in lines.splitlines()] == [
        "dispfl round 1/2",
        "dispfl round 2/2",
    ]


def test_the_bar_of_a_notebook_counts_steps_and_shows_the_time_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of four peers and three rounds, one round was done before; a step takes 10 s, and eight are
    left at first."""
    now, shown = [1000.0], list[str]()
    half = {"mean": 0.5, "higher_is_better": True, "format": ".3f"}
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    callbacks = progress._notebook_callbacks("a <b>", 3, shown.append)
    callbacks.begin(4, 12)
    for _ in range(2):
        now[0] += 10
        callbacks.step()
    callbacks.round(
        {"round": 1, "metric": "accuracy", "scores": {"accuracy": half}, "failures": {}}
    )
    assert shown == [
        '<progress value="4" max="12"></progress> a &lt;b&gt; round 2/3',
        '<progress value="5" max="12"></progress> a &lt;b&gt; round 2/3 · left 0:01:10',
        '<progress value="6" max="12"></progress> a &lt;b&gt; round 2/3 · left 0:01:00',
        (
            '<progress value="8" max="12"></progress> a &lt;b&gt; round 3/3 · accuracy 0.500 · left'
            " 0:00:20"
        ),
    ]


def test_in_a_notebook_there_is_a_bar_and_a_run_is_shown_with_its_curve(tmp_path: Path) -> None:
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    cell = nbformat.v4.new_code_cell(PROGRAM.replace("print(len(run.metrics))", "run"))
    notebook = nbformat.v4.new_notebook(cells=[cell])
    nbclient.NotebookClient(
        notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    bar, result = cell.outputs
    assert bar["output_type"] == "display_data"
    assert bar["data"]["text/html"].startswith(
        '<progress value="6" max="6"></progress> local round 3/3 · accuracy '
    )
    assert result["data"]["text/plain"].startswith("Run(local, 2 peers, 3 rounds, accuracy ")
    assert "<svg" in result["data"]["text/html"]
