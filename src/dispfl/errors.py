"""The exception tree. Every message is a sentence that names the thing, the value and the fix.

DispflError
├── ConfigError      an invalid setting: unknown key, value out of range, settings that do not fit each other
├── DataError        a data set that is missing, truncated or invalid
│   └── PartitionError   a partition that these labels do not allow
├── RunError         a run directory that exists, is missing, damaged, in use or on a full disk
│   ├── DamagedError     a checkpoint that is not what was written; an earlier one may be intact
│   └── TakenError       a run directory that another process is using
├── WorkersLostError Ray workers are lost repeatedly, or do not start (dispfl.engines.ray_pool)
├── NonFiniteError   a peer's loss, weights or gradient became infinite or nan
├── MessageError     a message from another peer that is refused; `refusal` is the reason
├── Refused          another peer refuses a request (dispfl.peer.transport)
├── Unreachable      no connection to another peer, or one that broke (dispfl.peer.transport)
├── IdentityError    a key or a certificate that cannot be used (dispfl.peer.membership.identity)
├── InviteError      an invite that is damaged or cannot be accepted (dispfl.peer.membership.invite)
└── RosterError      a roster that is damaged or not signed by enough administrators (dispfl.peer.membership.roster)
"""


class DispflError(Exception):
    """Base class; the command line prints the message as one sentence and exits with 1."""


class ConfigError(DispflError, ValueError):
    """An invalid setting."""


class DataError(DispflError):
    """A data set that is missing, truncated or invalid."""


class PartitionError(DataError):
    """A partition that these labels do not allow."""


class RunError(DispflError):
    """A run directory that exists, is missing, damaged, in use or on a full disk."""


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
