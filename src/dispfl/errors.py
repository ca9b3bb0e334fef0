"""The exception tree. Every message is a sentence that names the thing, the value and the fix.

DispflError ├── ConfigError      an invalid setting: unknown key, value out of range, settings that
do not fit each other ├── DataError        a data set that is missing, truncated or invalid │   └──
PartitionError   a partition that these labels do not allow ├── RunError         a run directory
that exists, is missing, damaged, in use or on a full disk; a user's function │   │
that raised an exception, which is the cause │   ├── DamagedError     a checkpoint that is not what
was written; an earlier one may be intact │   └── TakenError       a run directory that another
process is using ├── WorkersLostError Ray workers are lost repeatedly, or do not start
(dispfl.engines.ray_pool) ├── NonFiniteError   a peer's loss, weights or gradient became infinite or
nan ├── MessageError     a message from another peer that is refused; `refusal` is the reason ├──
Refused          another peer refuses a request (dispfl.peer.transport) ├── Unreachable      no
connection to another peer, or one that broke (dispfl.peer.transport) ├── IdentityError    a key or
a certificate that cannot be used (dispfl.peer.membership.identity) ├── InviteError      an invite
that is damaged or cannot be accepted (dispfl.peer.membership.invite) └── RosterError      a roster
that is damaged or not signed by enough administrators (dispfl.peer.membership.roster)
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
    """A run directory that exists, is missing, damaged, in use or on a full disk; or a user's
    function that failed."""


class DamagedError(RunError):
    """A checkpoint that is not what was written."""


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
    """Turn an exception of a user's function into a sentence that names it, after `where`: "Peer
    003, round 2"."""
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


_PACKAGE, _PYTHON = f"{Path(__file__).parent}{os.sep}", sysconfig.get_path("stdlib")
_TORCH_CALLS = ("_wrapped_call_impl", "_call_impl", "decorate_context")
"""Functions of torch between us and a user's module."""
_WITHOUT_FRAMES = {
    "Metric.__call__": "the metric",
    "Trainer.loss": "the loss",
    "Trainer.backward": "the loss",
}
"""What fails in these functions themselves: a function written in C, or one that returns no
number."""


def _called_function(problem: Exception) -> str | None:
    """`MyNet.forward (mine.py, line 7)`: the last function outside this package that this package
    called."""
    found, called_by_us, name = None, True, ""
    for frame, line in traceback.walk_tb(problem.__traceback__):
        code, name = frame.f_code, frame.f_code.co_qualname
        if code.co_filename.startswith(_PACKAGE):
            called_by_us = True
        elif (
            called_by_us
            and code.co_name not in _TORCH_CALLS
            and not _is_python_itself(code.co_filename)
        ):
            place = f"{Path(code.co_filename).name}, line {line}"
            found, called_by_us = f"{name.rpartition('<locals>.')[2]} ({place})", False
    return _WITHOUT_FRAMES.get(name, found) if called_by_us else found


def _is_python_itself(file: str) -> bool:
    """Whether a file is of the standard library, such as the threads that we use."""
    return file.startswith(_PYTHON) and "-packages" not in file
