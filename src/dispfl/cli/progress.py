"""Progress of a grid of runs and of decoding: a bar on a terminal, one line per round elsewhere."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as ProgressBar

from dispfl.runs.grid import GridCallbacks, GridRun, RunState
from dispfl.runs.loop import RunObserver
from dispfl.runs.metrics import Metrics
from dispfl.runs.progress import describe_round, log_to
from dispfl.terminal import print_text


@contextlib.contextmanager
def show_grid_progress(cells: Sequence[GridRun], console: Console) -> Iterator["GridDisplay"]:
    """Yield the display of a grid's progress; its runs' log messages are printed above the bar."""
    with log_to(console):
        if not console.is_terminal:
            yield GridDisplay(cells, console, None)
            return
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TextColumn("· left {task.fields[left]}"),
        )
        with ProgressBar(*columns, console=console, expand=True) as bar:
            yield GridDisplay(cells, console, bar)


@contextlib.contextmanager
def show_decoding(console: Console) -> Iterator[Callable[[int, int], None]]:
    """Yield a callback that shows a bar while images are decoded for the first time."""
    columns = (
        TextColumn("decoding images"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    hidden = not console.is_terminal
    with ProgressBar(*columns, console=console, transient=True, disable=hidden) as bar:
        task = bar.add_task("", visible=False)
        yield lambda done, total: bar.update(task, completed=done, total=total, visible=True)


class GridProgress:
    """The peer steps of a whole grid, and the time left."""

    def __init__(
        self, cells: Sequence[GridRun], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.steps: dict[Path, int] = {}
        """The steps of each run: an estimate until the run begins and reports them. Of runs that
        share a training, only the first has some."""
        self._done: dict[Path, int] = {}
        trainings: set[str] = set()
        for cell in cells:
            self.steps[cell.path] = 0 if cell.training in trainings else cell.steps
            trainings.add(cell.training)
            if cell.state is RunState.DONE:
                self._done[cell.path] = self.steps[cell.path]
        self._clock = clock
        self._started = clock()
        self._steps_here = 0

    def begin(self, cell: GridRun, done: int, total: int) -> None:
        """Start a run, of which an earlier process has done some steps."""
        self._done[cell.path] = done
        self.steps[cell.path] = total

    def step(self, cell: GridRun) -> None:
        """Count one step of a run."""
        self.reach(cell, self._done[cell.path] + 1)

    def reach(self, cell: GridRun, done: int) -> None:
        """Raise the number of finished steps of a run.

        A server's cohort takes fewer steps than there are peers.
        """
        self._steps_here += max(0, done - self._done[cell.path])
        self._done[cell.path] = max(done, self._done[cell.path])

    def end(self, cell: GridRun) -> None:
        """Finish a run, here or in another process."""
        self._done[cell.path] = self.steps[cell.path]

    @property
    def total(self) -> int:
        """All steps of the grid."""
        return sum(self.steps.values())

    @property
    def done(self) -> int:
        """The finished steps, including those of earlier processes."""
        return sum(self._done.values())

    @property
    def left(self) -> str:
        """The time left at the speed of this process: `0:01:10`, or `–` before its first step."""
        if not self._steps_here:
            return "–" if self.done < self.total else str(timedelta(0))
        seconds_per_step = (self._clock() - self._started) / self._steps_here
        return str(timedelta(seconds=round(seconds_per_step * max(0, self.total - self.done))))


class GridDisplay(GridCallbacks):
    """Shows the progress of a grid, of which several runs may run at the same time."""

    def __init__(self, cells: Sequence[GridRun], console: Console, bar: ProgressBar | None) -> None:
        self._cells = cells
        self._console = console
        self.bar = bar
        """None without a terminal: then one line per round is printed."""
        self._progress = GridProgress(cells)
        self._running: dict[Path, str] = {}
        """The rounds of each run that runs now: `3/12`."""
        self._waiting: list[GridRun] = []
        super().__init__(self._run, self._end, self._wait, self._decoding)
        self._task = None
        if bar:
            total = self._progress.total
            self._task = bar.add_task("", total=total, completed=self._progress.done, left="–")

    def _run(self, cell: GridRun) -> RunObserver:
        """Return the callbacks of the next run."""
        rounds = cell.experiment.rounds
        self._running[cell.path] = f"1/{rounds}"
        self._update(self._description())

        def begin(done: int, total: int) -> None:
            self._progress.begin(cell, done, total)
            self._running[cell.path] = f"{min(done * rounds // total + 1, rounds)}/{rounds}"
            self._update(self._description())

        def step() -> None:
            self._progress.step(cell)
            self._update()

        def after(record: Metrics) -> None:
            finished = record["round"] + 1
            self._progress.reach(cell, finished * self._progress.steps[cell.path] // rounds)
            self._running[cell.path] = f"{min(finished + 1, rounds)}/{rounds}"
            self._update(self._description())
            if self.bar is None:
                result = f"{describe_round(record)} · left {self._progress.left}"
                self._print(f"{self._title(cell)} · round {finished}/{rounds} · {result}")

        return RunObserver(begin=begin, step=step, round=after)

    def _end(self, cell: GridRun) -> None:
        self._running.pop(cell.path, None)
        self._progress.end(cell)
        self._update(self._description() if self._running else None)

    def _wait(self, cells: Sequence[GridRun]) -> None:
        """Say once which runs other processes still have; those that run here are not meant."""
        waiting = [cell for cell in cells if cell.path not in self._running]
        if waiting and waiting != self._waiting:
            self._waiting = waiting
            titles = ", ".join(cell.title for cell in waiting)
            self._print(f"Waiting for other processes, which run {titles}.")

    def _decoding(self, done: int, total: int) -> None:
        self._update(f"decoding images {done}/{total}")

    def _title(self, cell: GridRun) -> str:
        return f"run {self._cells.index(cell) + 1}/{len(self._cells)} · {cell.title}"

    def _description(self) -> str:
        """`run 1/4 · dispfl seed 0 · round 2/12`, or `2 running · dispfl seed 0 2/12 · ...`."""
        running = [cell for cell in self._cells if cell.path in self._running]
        if len(running) == 1:
            [cell] = running
            return f"{self._title(cell)} · round {self._running[cell.path]}"
        parts = [f"{len(running)} running"]
        for cell in running:
            parts.append(f"{cell.title} {self._running[cell.path]}")
        return " · ".join(parts)

    def _print(self, line: str) -> None:
        print_text(self._console, line)

    def _update(self, description: str | None = None) -> None:
        if self.bar is not None and self._task is not None:
            progress = self._progress
            self.bar.update(
                self._task,
                description=description,
                completed=progress.done,
                total=progress.total,
                left=progress.left,
            )
