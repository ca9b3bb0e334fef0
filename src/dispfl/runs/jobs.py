"""Several processes that run a grid together.

Each takes the next run that no other has, and reports to the process that started it. A process
that is killed loses nothing: its lock ends with it, and another one takes up its run. Each has a
pipe of its own, because a killed process may leave a shared queue locked.
"""

import contextlib
import logging
import signal
import threading
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any

from dispfl.config import compose
from dispfl.errors import ConfigError, DispflError, RunError
from dispfl.processes import training_processes
from dispfl.runs.grid import GridCallbacks, GridRun, RunState, run_missing
from dispfl.runs.loop import RunObserver

log = logging.getLogger("dispfl")
Order = tuple[dict[str, Any], str]
"""The config of a run and its directory."""


def run_in_processes(
    runs: Sequence[GridRun],
    jobs: int,
    callbacks: GridCallbacks | None = None,
    track: str | None = None,
) -> None:
    """Run the missing and interrupted runs in several processes, which divide the workers."""
    for run in runs:
        if run.experiment.engine == "ray":
            raise ConfigError(
                f"--jobs is {jobs}, but {run.title} has engine=ray, which has processes of its own;"
                " omit it.",
                key="--jobs",
            )
    remaining = _unfinished(runs)
    orders = [_order(run, jobs) for run in remaining]
    processes = _Processes(runs, callbacks or GridCallbacks())
    try:
        for _ in range(min(jobs, len(orders))):
            processes.start(orders, track)
        processes.receive()
    finally:
        processes.stop()

    if processes.problem:
        raise processes.problem
    unfinished = _unfinished(remaining)
    if unfinished:
        names = ", ".join(run.title for run in unfinished)
        raise RunError(f"{processes.ended()}; not finished: {names}. Repeat the command to resume.")
    if processes.killed:
        log.warning("%s; the others have done its work.", processes.ended())


def _unfinished(runs: Sequence[GridRun]) -> list[GridRun]:
    return [run for run in runs if run.state is not RunState.DONE]


def _order(run: GridRun, jobs: int) -> Order:
    workers = max(1, run.experiment.workers // jobs)
    experiment = run.experiment.model_copy(update={"workers": workers})
    return experiment.to_toml(), str(run.path)


class _Processes:
    """The processes, seen from the one that started them."""

    def __init__(self, runs: Sequence[GridRun], callbacks: GridCallbacks) -> None:
        self._runs = {str(run.path): run for run in runs}
        self._callbacks = callbacks
        self._running: dict[str, RunObserver] = {}
        self._started: dict[Connection, BaseProcess] = {}
        self._count = 0
        self.killed: list[int] = []
        """The exit codes of processes that did not end by themselves."""
        self.problem: DispflError | None = None
        """An error that ended one of them."""

    def start(self, orders: Sequence[Order], track: str | None) -> None:
        context = training_processes()
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_work, args=(sender, orders, track))
        process.start()
        sender.close()
        self._started[receiver] = process
        self._count += 1

    def receive(self) -> None:
        """Pass messages on to the callbacks, until all processes have ended or one has failed."""
        while self._started and self.problem is None:
            for connection in wait(list(self._started)):
                assert isinstance(connection, Connection)
                try:
                    message = connection.recv()
                except (EOFError, OSError):
                    process = self._started.pop(connection)
                    process.join()
                    if process.exitcode:
                        self.killed.append(process.exitcode)
                else:
                    self._pass_on(*message)

    def _pass_on(self, event: str, *values: Any) -> None:
        callbacks = self._callbacks
        match event:
            case "run":
                self._running[values[0]] = callbacks.run(self._runs[values[0]])
            case "begin" | "step" | "round":
                getattr(self._running[values[0]], event)(*values[1:])
            case "end":
                callbacks.end(self._runs[values[0]])
            case "wait":
                callbacks.wait([self._runs[path] for path in values[0]])
            case "decoding":
                if callbacks.decoding:
                    callbacks.decoding(*values)
            case "log":
                log.log(*values)
            case "error":
                self.problem = DispflError(values[0])

    def stop(self) -> None:
        """Stop all that still run, as with Ctrl-C: what they have finished is saved."""
        for process in self._started.values():
            process.terminate()
        for connection, process in self._started.items():
            with contextlib.suppress(EOFError, OSError):
                while True:  # a process that waits until its message is received does not end
                    connection.recv_bytes()
            process.join()

    def ended(self) -> str:
        """`1 of 3 jobs was killed (exit code -9)`."""
        codes = ", ".join(map(str, self.killed))
        return f"{len(self.killed)} of {self._count} jobs ended early (exit code {codes})"


def _work(connection: Connection, orders: Sequence[Order], track: str | None) -> None:
    """Run in one of the processes: take runs until none is left."""
    # Ctrl-C reaches all processes; the one that started this one ends it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _stop)
    send = MessageSender(connection)
    log.addHandler(_LogHandler(send))
    runs = []
    for config, path in orders:
        runs.append(GridRun({}, compose(config), Path(path)))

    def callbacks_of(run: GridRun) -> RunObserver:
        path = str(run.path)
        send("run", path)
        return RunObserver(
            begin=partial(send, "begin", path),
            step=partial(send, "step", path),
            round=partial(send, "round", path),
        )

    def waiting_for(others: Sequence[GridRun]) -> None:
        send("wait", [str(run.path) for run in others])

    callbacks = GridCallbacks(
        run=callbacks_of,
        end=lambda run: send("end", str(run.path)),
        wait=waiting_for,
        decoding=partial(send, "decoding"),
    )
    try:
        run_missing(runs, callbacks, track)
    except (KeyboardInterrupt, BrokenPipeError):
        # Stopped, or the process that started this one was killed.
        raise SystemExit(130) from None
    except DispflError as problem:
        send("error", str(problem))


def _stop(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


class MessageSender:
    """Sends messages to the process that started this one; threads may share it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def __call__(self, *message: Any) -> None:
        with self._lock:
            self._connection.send(message)


class _LogHandler(logging.Handler):
    """Sends log messages, also of the threads that train peers."""

    def __init__(self, send: MessageSender) -> None:
        super().__init__()
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        self._send("log", record.levelno, record.getMessage())
