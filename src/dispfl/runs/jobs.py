"""Several processes that run a grid together: each takes the next run that no other has, and
reports to this one.

A process that is killed loses nothing: its lock ends with it, and another one takes up its run.
Each has a pipe of its own, because a killed process may leave a shared queue locked.
"""

import contextlib
import logging
import multiprocessing
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
    """Resume the interrupted runs and start the missing ones in several processes, which divide the
    workers."""
    if ray := [run for run in runs if run.experiment.engine == "ray"]:
        raise ConfigError(
            f"--jobs is {jobs}, but {ray[0].title} has engine=ray, which has processes of its own;"
            " omit it.",
            key="--jobs",
        )
    left = [run for run in runs if run.state is not RunState.DONE]
    processes = _Processes(runs, callbacks or GridCallbacks())
    try:
        for _ in range(min(jobs, len(left))):
            processes.start([_order(run, jobs) for run in left], track)
        processes.receive()
    finally:
        processes.stop()
    if processes.problem:
        raise processes.problem
    unfinished = [run for run in left if run.state is not RunState.DONE]
    if unfinished:
        names = ", ".join(run.title for run in unfinished)
        raise RunError(f"{processes.ended()}; not finished: {names}. Repeat the command to resume.")
    if processes.killed:
        log.warning("%s; the others have done its work.", processes.ended())


def _order(run: GridRun, jobs: int) -> Order:
    experiment = run.experiment.model_copy(
        update={"workers": max(1, run.experiment.workers // jobs)}
    )
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
        context = multiprocessing.get_context("spawn")  # a fork of a process with threads may hang
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_work, args=(theirs, orders, track))
        process.start()
        theirs.close()
        self._started[ours] = process
        self._count += 1

    def receive(self) -> None:
        """Pass the messages of all processes on to the callbacks, until all have ended or one has
        failed."""
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

    def _pass_on(self, what: str, *values: Any) -> None:
        callbacks = self._callbacks
        match what:
            case "run":
                self._running[values[0]] = callbacks.run(self._runs[values[0]])
            case "begin" | "step" | "round":
                getattr(self._running[values[0]], what)(*values[1:])
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
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches all; the process that started this one ends it
    signal.signal(signal.SIGTERM, _stop)
    send = MessageSender(connection)
    log.addHandler(_LogHandler(send))
    runs = [GridRun({}, compose(config), Path(path)) for config, path in orders]

    def callbacks_of(run: GridRun) -> RunObserver:
        path = str(run.path)
        send("run", path)
        return RunObserver(
            begin=partial(send, "begin", path),
            step=partial(send, "step", path),
            round=partial(send, "round", path),
        )

    callbacks = GridCallbacks(
        run=callbacks_of,
        end=lambda run: send("end", str(run.path)),
        wait=lambda runs: send("wait", [str(run.path) for run in runs]),
        decoding=partial(send, "decoding"),
    )
    try:
        run_missing(runs, callbacks, track)
    except (
        KeyboardInterrupt,
        BrokenPipeError,
    ):  # stopped, or the process that started this one was killed
        raise SystemExit(130) from None
    except DispflError as problem:
        send("error", str(problem))


def _stop(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


class MessageSender:
    """Sends messages to the process that started this one; several threads may do so at the same
    time."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._lock = connection, threading.Lock()

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
