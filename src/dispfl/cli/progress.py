"""Progress of a grid of runs, and of decoding: a live bar on a terminal, one line per round elsewhere."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta

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

from dispfl.runs.grid import GridRun, RunState
from dispfl.runs.loop import RunCallbacks
from dispfl.runs.metrics import Metrics
from dispfl.runs.progress import describe_round, log_to


@contextlib.contextmanager
def show_grid_progress(cells: Sequence[GridRun], console: Console) -> Iterator["GridDisplay"]:
    """Yield the display of a grid's progress; the log messages of its runs are printed above the bar."""
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
            display = GridDisplay(cells, console, bar)
            yield display
            display.end()


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
    with ProgressBar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", visible=False)
        yield lambda done, total: bar.update(task, completed=done, total=total, visible=True)


class GridProgress:
    """The peer steps of a whole grid, and the time left."""

    def __init__(self, cells: Sequence[GridRun], clock: Callable[[], float] = time.monotonic) -> None:
        self.steps = {cell.path: cell.steps for cell in cells}
        """The steps of each run: an estimate until the run begins and reports them."""
        self._finished = {cell.path for cell in cells if cell.state is RunState.DONE}
        self._clock, self._started = clock, clock()
        self._current_steps, self._steps_here = 0, 0

    def begin(self, cell: GridRun, done: int, total: int) -> None:
        """Start a run, of which an earlier process has done some steps."""
        self._current_steps, self.steps[cell.path] = done, total

    def step(self) -> None:
        """Count one step."""
        self._current_steps += 1
        self._steps_here += 1

    def reach(self, done: int) -> None:
        """Raise the number of finished steps of the run: a server's cohort takes fewer steps than there are peers."""
        self._steps_here += max(0, done - self._current_steps)
        self._current_steps = max(done, self._current_steps)

    def end(self, cell: GridRun) -> None:
        """Finish a run."""
        self._finished.add(cell.path)
        self._current_steps = 0

    @property
    def total(self) -> int:
        """All steps of the grid."""
        return sum(self.steps.values())

    @property
    def done(self) -> int:
        """The finished steps, including those of earlier processes."""
        return sum(self.steps[path] for path in self._finished) + self._current_steps

    @property
    def left(self) -> str:
        """The time left at the speed of this process: `0:01:10`, or `–` before its first step."""
        if not self._steps_here:
            return "–" if self.done < self.total else str(timedelta(0))
        seconds_per_step = (self._clock() - self._started) / self._steps_here
        return str(timedelta(seconds=round(seconds_per_step * max(0, self.total - self.done))))


class GridDisplay:
    """Creates the callbacks of each run of a grid, and shows the progress of the grid."""

    def __init__(self, cells: Sequence[GridRun], console: Console, bar: ProgressBar | None) -> None:
        self._cells, self._console = cells, console
        self.bar = bar
        """None without a terminal: then one line per round is printed."""
        self._progress = GridProgress(cells)
        self._running: GridRun | None = None
        total, done = self._progress.total, self._progress.done
        self._task = bar.add_task("", total=total, completed=done, left="–") if bar else None

    def __call__(self, cell: GridRun) -> RunCallbacks:
        """Return the callbacks of the next run."""
        self.end()
        self._running = cell
        title, rounds = f"run {self._cells.index(cell) + 1}/{len(self._cells)} · {cell.title}", cell.experiment.rounds
        self._update(title)

        def begin(done: int, total: int) -> None:
            self._progress.begin(cell, done, total)
            self._update(f"{title} · round {min(done * rounds // total + 1, rounds)}/{rounds}")

        def step() -> None:
            self._progress.step()
            self._update()

        def after(record: Metrics) -> None:
            finished = record["round"] + 1
            self._progress.reach(finished * self._progress.steps[cell.path] // rounds)
            self._update(f"{title} · round {min(finished + 1, rounds)}/{rounds}")
            if self.bar is None:
                result = f"{describe_round(record)} · left {self._progress.left}"
                line = f"{title} · round {finished}/{rounds} · {result}"
                self._console.print(line, soft_wrap=True, highlight=False, markup=False)

        return RunCallbacks(begin=begin, step=step, round=after)

    def end(self) -> None:
        """Finish the current run."""
        if self._running:
            self._progress.end(self._running)
            self._update()

    def decoding(self, done: int, total: int) -> None:
        """Show that images are decoded for the first time."""
        self._update(f"decoding images {done}/{total}")

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
