"""The program as a user calls it, in a test's own process."""

import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from dispfl.cli import main


@dataclass(frozen=True)
class Said:
    """How it ended and what it printed."""

    code: int
    out: str
    err: str


Dispfl = Callable[..., Said]


@pytest.fixture
def dispfl(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Dispfl:
    """The whole program in this process: words in, exit code and both outputs out."""

    def call(*words: str | Path) -> Said:
        monkeypatch.setattr(sys, "argv", ["dispfl", *map(str, words)])
        polite_kill = signal.getsignal(signal.SIGTERM)
        capsys.readouterr()
        try:
            with pytest.raises(SystemExit) as ended:
                main()
        finally:
            signal.signal(signal.SIGTERM, polite_kill)
        return Said(int(ended.value.code or 0), *capsys.readouterr())

    return call
