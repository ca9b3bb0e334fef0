"""The program as a user calls it, in a test's own process."""

import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from dispfl.cli import main


@dataclass(frozen=True)
class CommandResult:
    """The exit code and both outputs of a command."""

    code: int
    out: str
    err: str


Dispfl = Callable[..., CommandResult]


@pytest.fixture
def dispfl(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Dispfl:
    """The whole program in this process: arguments in, exit code and both outputs out."""

    def call(*arguments: str | Path) -> CommandResult:
        monkeypatch.setattr(sys, "argv", ["dispfl", *map(str, arguments)])
        sigterm_handler = signal.getsignal(signal.SIGTERM)
        capsys.readouterr()
        try:
            with pytest.raises(SystemExit) as ended:
                main()
        finally:
            signal.signal(signal.SIGTERM, sigterm_handler)
        return CommandResult(int(ended.value.code or 0), *capsys.readouterr())

    return call
