"""What can go wrong, as one tree. Every message is a sentence that names the thing, the value and the fix.

DispflError
├── ConfigError      a setting that cannot be: unknown key, value out of range, peers and degree that do not fit
├── DataError        a data set that is missing, truncated or not what it says
│   └── PartitionError   a split that these labels cannot give
├── RunError         a run directory that exists, is missing, broken, busy or on a full disk
│   └── DamagedError     a checkpoint that cannot be read; an earlier one may be whole
├── WorkersLostError Ray's workers are lost again and again, or do not start (dispfl.engines.ray_crew)
├── NonFiniteError   a peer's loss, weights or gradient stopped being numbers
├── MessageError     bytes from another peer that are refused; `refusal` says why, by name
├── Refused          another peer will not answer (dispfl.peer.transport)
├── Unreachable      no connection to another peer, or one that broke (dispfl.peer.transport)
├── IdentityError    a key or a certificate that cannot be used (dispfl.peer.certificates)
└── InviteError      an invite that is damaged (dispfl.peer.invite)
"""


class DispflError(Exception):
    """Anything dispfl refuses to do; the command line prints it as one sentence and exits with 1."""


class ConfigError(DispflError, ValueError):
    """A setting that cannot be."""


class DataError(DispflError):
    """A data set that is missing, truncated or not what it says."""


class PartitionError(DataError):
    """A split that these labels cannot give."""


class RunError(DispflError):
    """A run directory that exists, is missing, broken, busy or on a full disk."""


class DamagedError(RunError):
    """A checkpoint that cannot be read."""


class NonFiniteError(DispflError):
    """A peer's loss, weights or gradient stopped being numbers."""


class MessageError(DispflError):
    """Bytes from another peer that are refused."""

    def __init__(self, refusal: str, sentence: str) -> None:
        super().__init__(sentence)
        self.refusal = refusal
        """The reason's name (`dispfl.wire.refusals.Refusal`)."""
