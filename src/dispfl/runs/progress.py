"""Progress of a run: a live bar on a terminal or in a notebook, one line per round elsewhere."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from html import escape
from importlib import import_module
from typing import Any

from rich.console import Console
from rich.logging import RichHandler
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as ProgressBar

from dispfl.runs.loop import RunObserver
from dispfl.runs.metrics import Metrics, main_scores, measure_of
from dispfl.terminal import SafeConsole, print_text

REFRESH_SECONDS = 0.25
"""Seconds between two updates in a notebook."""


@contextlib.contextmanager
def python_progress(shown: bool | None, title: str, rounds: int) -> Iterator[RunObserver]:
    """Yield the callbacks of a run that a Python program started.

    By default a bar is shown on a terminal (on stderr) and in a notebook; True shows progress
    anywhere, False never.
    """
    console = SafeConsole(stderr=True)
    if not _is_shown(shown, console):
        yield RunObserver()
    elif console.is_jupyter:
        notebook: Any = import_module("IPython.display")  # a notebook has it
        bar = notebook.display(notebook.HTML(""), display_id=True)
        yield _notebook_callbacks(title, rounds, lambda text: bar.update(notebook.HTML(text)))
    else:
        with show_progress(title, rounds, console) as callbacks:
            yield callbacks


def show_in_python(shown: bool | None, sentence: str) -> None:
    """Print a sentence where `python_progress` shows a bar."""
    console = SafeConsole(stderr=True)
    if _is_shown(shown, console):
        print_text(console, sentence)


def _is_shown(shown: bool | None, console: Console) -> bool:
    if shown is None:
        return console.is_terminal or console.is_jupyter
    return shown


@contextlib.contextmanager
def show_progress(title: str, rounds: int, console: Console) -> Iterator[RunObserver]:
    """Yield the callbacks of one run; its log messages are printed above the bar."""
    with log_to(console):
        if console.is_terminal:
            with _run_bar(console) as bar:
                yield _bar_callbacks(bar, title, rounds)
        else:
            yield _line_callbacks(title, rounds, console)


@contextlib.contextmanager
def log_to(console: Console) -> Iterator[None]:
    """Print the log messages of runs on a console, above a live bar if there is one."""
    log = logging.getLogger("dispfl")
    handler = RichHandler(console=console, show_time=False, show_path=False)
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)


def describe_round(record: Metrics) -> str:
    """`accuracy 0.512 · 3 peers failed`."""
    scores = main_scores(record)
    mean = scores["mean"] if scores else None
    text = f"{record['metric']} {measure_of([record]).text(mean)}"
    if record["failures"]:
        text += f" · {len(record['failures'])} peers failed"
    return text


def _run_bar(console: Console) -> ProgressBar:
    title = TextColumn("[bold]{task.description}")
    result = TextColumn("{task.fields[result]} ·")
    left = (TextColumn("left"), TimeRemainingColumn())
    if console.width < 80:  # the time left is worth more than the steps and the time so far
        return ProgressBar(title, BarColumn(4), result, *left, console=console)
    steps = (MofNCompleteColumn(), TextColumn("steps ·"))
    elapsed = (TimeElapsedColumn(), TextColumn("·"))
    return ProgressBar(title, BarColumn(), *steps, result, *elapsed, *left, console=console)


def _bar_callbacks(bar: ProgressBar, title: str, rounds: int) -> RunObserver:
    task = bar.add_task(f"{title} round 1/{rounds}", total=None, result="–")

    def begin(done: int, total: int) -> None:
        # Setting `completed` before the clock starts would include the steps of an earlier process
        # in the speed.
        bar.reset(task, total=total, completed=done)
        current = min(done * rounds // total + 1, rounds)
        bar.update(task, description=f"{title} round {current}/{rounds}")

    def after(record: Metrics) -> None:
        finished = record["round"] + 1
        description = f"{title} round {min(finished + 1, rounds)}/{rounds}"
        bar.update(task, description=description, result=describe_round(record))

    return RunObserver(begin=begin, step=lambda: bar.advance(task), round=after)


def _line_callbacks(title: str, rounds: int, console: Console) -> RunObserver:
    started: list[float] = []
    first: list[int] = []

    def begin(done: int, total: int) -> None:
        started.append(time.monotonic())
        first.append(done * rounds // total)

    def after(record: Metrics) -> None:
        finished = record["round"] + 1
        # A round whose peers had all finished before the last stop ends at once: no round counts,
        # so divide by 1.
        seconds_per_round = (time.monotonic() - started[0]) / max(1, finished - first[0])
        left = timedelta(seconds=round(seconds_per_round * (rounds - finished)))
        result = describe_round(record)
        print_text(console, f"{title} round {finished}/{rounds} · {result} · left {left}")

    return RunObserver(begin=begin, round=after)


def _notebook_callbacks(title: str, rounds: int, show: Callable[[str], None]) -> RunObserver:
    """Show a bar as HTML, at most a few times in a second.

    Rich's own bar needs ipywidgets, which may not be installed.
    """
    state = {"done": 0, "total": 1, "first": 0, "round": 1}
    result = ""
    began = time.monotonic()
    shown = 0.0

    def update() -> None:
        nonlocal shown
        shown = time.monotonic()
        finished_steps = state["done"] - state["first"]
        remaining_steps = state["total"] - state["done"]
        time_left = ""
        if finished_steps:
            seconds = (shown - began) / finished_steps * remaining_steps
            time_left = f" · left {timedelta(seconds=round(seconds))}"
        text = escape(f"{title} round {state['round']}/{rounds}{result}{time_left}")
        show(f'<progress value="{state["done"]}" max="{state["total"]}"></progress> {text}')

    def begin(done: int, total: int) -> None:
        nonlocal began
        began = time.monotonic()
        current = min(done * rounds // total + 1, rounds)
        state.update(done=done, first=done, total=total, round=current)
        update()

    def step() -> None:
        state["done"] += 1
        if time.monotonic() - shown >= REFRESH_SECONDS:
            update()

    def after(record: Metrics) -> None:
        nonlocal result
        finished = record["round"] + 1
        result = f" · {describe_round(record)}"
        finished_steps = finished * state["total"] // rounds
        state["round"] = min(finished + 1, rounds)
        state["done"] = max(state["done"], finished_steps)
        update()

    return RunObserver(begin=begin, step=step, round=after)
