"""How far a grid of runs is: one bar over all of them on a terminal, a line a round elsewhere."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from dispfl.cli.progress import Record, logged_to, news
from dispfl.grid import Cell, State
from dispfl.runs.loop import Progress as Observer


class Pace:
    """Peer steps of a whole grid, and the time that is left of it."""

    def __init__(self, cells: Sequence[Cell], clock: Callable[[], float] = time.monotonic) -> None:
        self.steps = {cell.path: cell.steps for cell in cells}
        """How many steps each run takes: a guess until the run begins and says so itself."""
        self._finished = {cell.path for cell in cells if cell.state is State.DONE}
        self._clock, self._began = clock, clock()
        self._current, self._here, self._fresh = cells[0].path, 0, 0

    def begin(self, cell: Cell, done: int, total: int) -> None:
        """A run begins, with so many of its steps done in an earlier process."""
        self._current, self._here, self.steps[cell.path] = cell.path, done, total

    def step(self) -> None:
        """One more step is done."""
        self._here += 1
        self._fresh += 1

    def reach(self, done: int) -> None:
        """So many steps of the run are over: a server's cohort takes fewer than there are peers."""
        self._fresh += max(0, done - self._here)
        self._here = max(done, self._here)

    def end(self, cell: Cell) -> None:
        """A run is finished."""
        self._finished.add(cell.path)
        self._here = 0

    @property
    def total(self) -> int:
        """All steps of the grid."""
        return sum(self.steps.values())

    @property
    def done(self) -> int:
        """Those that are done, in whichever process."""
        return sum(self.steps[path] for path in self._finished) + self._here

    @property
    def left(self) -> str:
        """The time left at this process's pace: `0:01:10`, or `–` before its first step."""
        if not self._fresh:
            return "–" if self.done < self.total else str(timedelta(0))
        pace = (self._clock() - self._began) / self._fresh
        return str(timedelta(seconds=round(pace * max(0, self.total - self.done))))


class GridWatch:
    """Gives each run of a grid its observer, and shows where the grid stands."""

    def __init__(self, cells: Sequence[Cell], console: Console, bar: Progress | None) -> None:
        self._cells, self._console = cells, console
        self.bar = bar
        """None where there is no terminal: then a line a round."""
        self._pace = Pace(cells)
        self._running: Cell | None = None
        self._task = bar.add_task("", total=self._pace.total, completed=self._pace.done, left="–") if bar else None

    def __call__(self, cell: Cell) -> Observer:
        """The observer of the run that comes next."""
        self.end()
        self._running = cell
        title, rounds = f"run {self._cells.index(cell) + 1}/{len(self._cells)} · {cell.title}", cell.experiment.rounds
        self._show(title)

        def begin(done: int, total: int) -> None:
            self._pace.begin(cell, done, total)
            self._show(f"{title} · round {min(done * rounds // total + 1, rounds)}/{rounds}")

        def step() -> None:
            self._pace.step()
            self._show()

        def after(record: Record) -> None:
            finished = record["round"] + 1
            self._pace.reach(finished * self._pace.steps[cell.path] // rounds)
            self._show(f"{title} · round {min(finished + 1, rounds)}/{rounds}")
            if self.bar is None:
                line = f"{title} · round {finished}/{rounds} · {news(record)} · left {self._pace.left}"
                self._console.print(line, soft_wrap=True, highlight=False, markup=False)

        return Observer(begin=begin, step=step, round=after)

    def end(self) -> None:
        """The run that was given an observer last is finished."""
        if self._running:
            self._pace.end(self._running)
            self._show()

    def decoding(self, done: int, total: int) -> None:
        """Pictures are decoded for the first time, which takes long."""
        self._show(f"decoding pictures {done}/{total}")

    def _show(self, where: str | None = None) -> None:
        if self.bar is not None and self._task is not None:
            pace = self._pace
            self.bar.update(self._task, description=where, completed=pace.done, total=pace.total, left=pace.left)


@contextlib.contextmanager
def watching_grid(cells: Sequence[Cell], console: Console) -> Iterator[GridWatch]:
    """What shows how far a grid is; what its runs log is printed above the bar."""
    with logged_to(console):
        if not console.is_terminal:
            yield GridWatch(cells, console, None)
            return
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TextColumn("· left {task.fields[left]}"),
        )
        with Progress(*columns, console=console, expand=True) as bar:
            watch = GridWatch(cells, console, bar)
            yield watch
            watch.end()
