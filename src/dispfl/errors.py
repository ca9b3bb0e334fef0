"""The exception tree. Every message is a sentence that names the thing, the value and the fix.

DispflError
├── ConfigError       an invalid setting, or settings that do not fit each other
├── DataError         a data set that is missing, truncated or invalid
│   └── PartitionError    a partition that these labels do not allow
├── RunError          a run directory that is missing or cannot be used; a user's function that
│   │                 raised an exception, which is the cause
│   ├── DamagedError      a corrupt checkpoint; an earlier one may be intact
│   └── TakenError        a run directory that another process is using
├── NonFiniteError    a peer's loss, weights or gradient became infinite or nan
├── MessageError      a message from another peer that is refused
├── WorkersLostError  Ray workers are lost repeatedly, or do not start (engines.ray_pool)
├── Refused           another peer refuses a request (peer.transport)
├── Unreachable       no connection to another peer, or one that broke (peer.transport)
├── IdentityError     an unusable key or certificate (peer.membership.identity)
├── InviteError       an invite that cannot be accepted (peer.membership.invite)
└── RosterError       a damaged or insufficiently signed roster (peer.membership.roster)
"""

import contextlib
import os
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path


class DispflError(Exception):
    """Base class; the command line prints the message as one sentence and exits with 1."""


class ConfigError(DispflError, ValueError):
    """An invalid setting."""

    def __init__(self, sentence: str, *, key: str | None = None) -> None:
        super().__init__(sentence)
        self.key = key
        """The setting as the user typed it, such as `method.density`; None where there is none."""


class DataError(DispflError):
    """A data set that is missing, truncated or invalid."""


class PartitionError(DataError):
    """A partition that these labels do not allow."""


class RunError(DispflError):
    """A run directory that is missing or cannot be used; or a user's function that failed."""


class DamagedError(RunError):
    """A corrupt checkpoint."""


class TakenError(RunError):
    """A run directory that another process is using."""


class NonFiniteError(DispflError):
    """A peer's loss, weights or gradient became infinite or nan."""


class MessageError(DispflError):
    """A message from another peer that is refused."""

    def __init__(self, refusal: str, sentence: str) -> None:
        super().__init__(sentence)
        self.refusal = refusal
        """The reason, a `dispfl.wire.refusals.Refusal`."""


@contextlib.contextmanager
def user_errors(where: str) -> Iterator[None]:
    """Turn an exception of a user's function into a sentence that names it.

    The sentence begins with `where`: "Peer 003, round 2".
    """
    try:
        yield
    except (DispflError, InterruptedError, MemoryError):
        raise
    except Exception as problem:
        function = _called_function(problem)
        if function is None:  # our own mistake
            raise
        message = " ".join(f"{type(problem).__name__}: {problem}".split()).rstrip(".: ")
        raise RunError(f"{where}: {function} raised {message}.") from problem


_PACKAGE = f"{Path(__file__).parent}{os.sep}"
_PYTHON = sysconfig.get_path("stdlib")
_TORCH_CALLS = ("_wrapped_call_impl", "_call_impl", "decorate_context")
"""Functions of torch between us and a user's module."""
_WITHOUT_FRAMES = {
    "Metric.__call__": "the metric",
    "Trainer.loss": "the loss",
    "Trainer.backward": "the loss",
    "Trainer._compute_gradient": "the loss",
    "RunContext._check_loss": "the loss",
}
"""What fails in these functions themselves: a function written in C, or one that returns no
number."""


def _called_function(problem: Exception) -> str | None:
    """The last function outside this package that this package called.

    As `MyNet.forward (mine.py, line 7)`.
    """
    user_function = None
    called_by_us = True
    name = ""
    for frame, line in traceback.walk_tb(problem.__traceback__):
        code = frame.f_code
        name = code.co_qualname
        if code.co_filename.startswith(_PACKAGE):
            called_by_us = True
            continue
        passes_on = (
            code.co_name in _TORCH_CALLS
            or _is_python_itself(code.co_filename)
            or frame.f_globals.get("__name__", "").startswith("typer.")
        )
        if called_by_us and not passes_on:
            place = f"{Path(code.co_filename).name}, line {line}"
            user_function = f"{name.rpartition('<locals>.')[2]} ({place})"
            called_by_us = False
    if called_by_us:
        return _WITHOUT_FRAMES.get(name, user_function)
    return user_function


def _is_python_itself(file: str) -> bool:
    """Whether a file is of the standard library, such as the threads that we use."""
    return file.startswith(_PYTHON) and "-packages" not in file


@contextlib.contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Turn what a damaged file in a folder causes into one sentence.

    Readers check what they use, and name it. What no check has foreseen is still no traceback: the
    folder may come from somebody else.
    """
    try:
        yield
    except DispflError:
        raise
    except _OF_DAMAGED_FILES as problem:
        reason = str(problem).strip().partition("\n")[0][:200]
        raise RunError(
            f"{folder} is damaged, or another version of dispfl wrote it"
            f" ({type(problem).__name__}: {reason}). Restore it from a copy."
        ) from problem


_OF_DAMAGED_FILES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
