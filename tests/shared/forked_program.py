"""The program in processes of its own, which are forked from a server that has imported torch: for
nodes that tests wait for, kill or interrupt. Each starts in a tenth of the time."""

import os
import sys
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

from dispfl.cli import main
from dispfl.processes import training_processes


class ForkedProgram:
    """A running command, whose output is in its log."""

    def __init__(self, words: Sequence[str | Path], folder: Path, log: Path) -> None:
        self.log = log
        log.touch()
        arguments = ([str(word) for word in words], str(folder), str(log))
        self._process: BaseProcess = training_processes().Process(
            target=_run_program, args=arguments, daemon=True
        )
        self._process.start()

    def wait(self, seconds: float) -> int | None:
        """Return the exit code; None if it has not ended by then."""
        self._process.join(seconds)
        return self._process.exitcode

    def kill(self) -> None:
        """End it with SIGKILL."""
        self._process.kill()
        self._process.join()


def _run_program(words: Sequence[str], folder: str, log: str) -> None:
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(folder)
    sys.argv = ["dispfl", *words]
    main()
