"""How far a run is: a live bar with the time left on a terminal, a line a round elsewhere."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from dispfl.runs.loop import Progress as Observer

Record = dict[str, Any]


@contextlib.contextmanager
def watching(title: str, rounds: int, console: Console) -> Iterator[Observer]:
    """An observer for one run; what the run logs is printed above the bar."""
    with logged_to(console):
        if console.is_terminal:
            with _bar(console) as bar:
                yield _on_a_bar(bar, title, rounds)
        else:
            yield _line_by_line(title, rounds, console)


@contextlib.contextmanager
def logged_to(console: Console) -> Iterator[None]:
    """Print what runs log on a console, above a live bar if there is one."""
    log, handler = logging.getLogger("dispfl"), RichHandler(console=console, show_time=False, show_path=False)
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)


@contextlib.contextmanager
def decoding(console: Console) -> Iterator[Callable[[int, int], None]]:
    """A bar for pictures that are decoded for the first time; nothing is shown where none are."""
    columns = (
        TextColumn("decoding pictures"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", visible=False)
        yield lambda done, total: bar.update(task, completed=done, total=total, visible=True)


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("[bold]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("steps · {task.fields[news]} ·"),
        TimeElapsedColumn(),
        TextColumn("· left"),
        TimeRemainingColumn(),
        console=console,
    )


def _on_a_bar(bar: Progress, title: str, rounds: int) -> Observer:
    task = bar.add_task(f"{title} round 1/{rounds}", total=None, news="accuracy –")

    def begin(done: int, total: int) -> None:
        # `completed` before the clock starts would count work of an earlier process into the speed.
        bar.reset(task, total=total, completed=done)
        bar.update(task, description=f"{title} round {min(done * rounds // total + 1, rounds)}/{rounds}")

    def after(record: Record) -> None:
        finished = record["round"] + 1
        bar.update(task, description=f"{title} round {min(finished + 1, rounds)}/{rounds}", news=news(record))

    return Observer(begin=begin, step=lambda: bar.advance(task), round=after)


def _line_by_line(title: str, rounds: int, console: Console) -> Observer:
    began: list[float] = []
    first: list[int] = []

    def begin(done: int, total: int) -> None:
        began.append(time.monotonic())
        first.append(done * rounds // total)

    def after(record: Record) -> None:
        finished = record["round"] + 1
        # A round whose peers had all finished before the last stop is written down at once: no time, no division by 0.
        pace = (time.monotonic() - began[0]) / max(1, finished - first[0])
        left = round(pace * (rounds - finished))
        clock = str(timedelta(seconds=left))
        console.print(f"{title} round {finished}/{rounds} · {news(record)} · left {clock}", highlight=False)

    return Observer(begin=begin, round=after)


def news(record: Record) -> str:
    """What a round brought, in a few words."""
    accuracy = record["accuracy"]
    text = f"accuracy {accuracy['mean']:.3f}" if accuracy else "accuracy –"
    if record["failures"]:
        text += f" · {len(record['failures'])} peers failed"
    return text
