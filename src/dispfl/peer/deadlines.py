"""How long a node waits for other peers: the deadline of a round, and the startup period."""

import math
import statistics
from collections import deque
from dataclasses import dataclass, field
from typing import Any, ClassVar

from pydantic import Field

from dispfl.errors import ConfigError
from dispfl.peer.state.status import PeerStatus
from dispfl.settings import Settings

WINDOW_ROUNDS = 5
"""Recent rounds from which a deadline follows."""


@dataclass
class Deadlines:
    """The deadlines of one node, from the durations of its recent rounds."""

    min: float = 30.0
    """The shortest deadline, in seconds."""
    startup: float = 600.0
    """The deadline of the first round, while sites are being started by hand."""
    max: float = 3600.0
    """The longest deadline."""
    factor: float = 3.0
    """The ratio of the deadline to the median duration of the last rounds."""
    _rounds: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW_ROUNDS))
    """The durations of recent rounds."""
    _steps: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW_ROUNDS))
    """The parts of these durations that are our own training steps."""

    def __post_init__(self) -> None:
        self.patience = self.startup
        """The longest that others may make us wait in a round, unless our own steps take as
        long."""
        self.startup_until = 0.0
        """The end of the startup period, by the event loop's clock."""
        self.awaits_unseen = True
        """Whether peers that never responded may still be starting."""

    def use(self, settings: "DeadlineSettings") -> None:
        """Take other settings, for the rounds from now on."""
        self.min = settings.min
        self.max = settings.max
        self.factor = settings.factor

    # the startup period

    def start(self, now: float) -> None:
        """Begin the startup period, in which peers that have not started yet are waited for."""
        self.startup_until = now + self.startup

    def start_joining(self, now: float) -> None:
        """Begin the startup period in a running federation: wait only for peers that respond."""
        self.start(now)
        self.awaits_unseen = False
        self.startup = self.min

    def skip_startup(self) -> None:
        """Shorten the startup period of a node that resumes in the middle of a run."""
        self.startup = self.min

    def is_started_up(self, now: float) -> bool:
        """Whether the startup period is over."""
        return now >= self.startup_until

    def may_be_starting(self, peer: PeerStatus, now: float) -> bool:
        """Whether a peer that does not respond may still be starting, or starting again."""
        if self.is_started_up(now) or not self.awaits_unseen:
            return False
        if peer.unreachable or peer.spec_mismatch:
            return False
        has_run = peer.was_seen and not self.is_first_round
        return not has_run

    # rounds

    @property
    def is_first_round(self) -> bool:
        """Whether no round has ended yet."""
        return not self._rounds

    @property
    def deadline(self) -> float:
        """Seconds after which the round continues without the peers that have not responded.

        Others decide how long a round lasts: half of them, if they respond just in time round after
        round, extend it. So no deadline of a run exceeds that of its first round, unless our own
        steps take as long.
        """
        if self.is_first_round:
            return max(self.startup, self.min)
        usual = self.factor * statistics.median(self._rounds)
        longest = max(self.patience, self.factor * statistics.median(self._steps))
        return min(self.max, max(self.min, min(longest, usual)))

    @property
    def probe_timeout(self) -> float:
        """Seconds to wait for an unreachable peer: a fraction of how long others wait for us."""
        return min(self.deadline, self.min) / 5

    def record_round(self, waited: float, step: float) -> None:
        """Record the duration of a round: until half of the responses had arrived, and of the step.

        The last responses are not counted: a slow neighbour, or one that answers late on purpose,
        would extend all following deadlines.
        """
        self._rounds.append(waited + step)
        self._steps.append(step)

    @property
    def slow_after(self) -> float:
        """Seconds after which an answer is slow; a fifth of `min` is never."""
        if self.is_first_round:
            return math.inf
        usual = self.factor * statistics.median(self._rounds)
        return min(self.deadline, max(usual, self.probe_timeout))

    def note_latency(self, peer: PeerStatus, seconds: float) -> None:
        """Note how long a peer took to answer, and whether it is persistently slow.

        It is slow if most of its last answers were, and until all of its last answers are quick.
        """
        peer.latencies = [*peer.latencies, round(seconds, 3)][-WINDOW_ROUNDS:]
        if len(peer.latencies) < WINDOW_ROUNDS:
            return
        typical = max(peer.latencies) if peer.slow else statistics.median(peer.latencies)
        peer.slow = typical > self.slow_after


class DeadlineSettings(Settings):
    """How long a round waits for responses (`dispfl.peer.deadlines`). Each site has its own."""

    table: ClassVar[str] = "deadlines"

    min: float = Field(default=Deadlines.min, gt=0)
    """The shortest deadline, in seconds; an unreachable peer is retried for a fifth of it, and one
    whose answers take less is never slow."""
    startup: float = Field(default=Deadlines.startup, gt=0)
    """The deadline of the first round, while sites are being started by hand. Later ones exceed it
    only where our own steps take that long."""
    max: float = Field(default=Deadlines.max, gt=0)
    """The longest deadline."""
    factor: float = Field(default=Deadlines.factor, ge=1)
    """The ratio of the deadline to the median duration of the last rounds, between `min` and
    `max`."""

    def model_post_init(self, context: Any, /) -> None:
        """Refuse a `min` above `max`."""
        if self.min > self.max:
            raise ConfigError(
                f"deadlines.min is {self.min:g} and deadlines.max {self.max:g}; min must not exceed"
                " max.",
                key="deadlines.min",
            )

    def start(self) -> Deadlines:
        """Return the deadlines of a site that starts now."""
        return Deadlines(self.min, self.startup, self.max, self.factor)
