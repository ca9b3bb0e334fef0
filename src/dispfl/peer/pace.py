"""How long a peer waits for others: as long as rounds usually take, several times over, and never less than a floor."""

import statistics
from collections import deque
from dataclasses import dataclass, field

REMEMBERED = 5


@dataclass
class Pace:
    """The deadline of a round, from what earlier rounds have taken."""

    floor: float = 30.0
    """Seconds that a peer waits for others at least."""
    first: float = 600.0
    """Seconds that it waits in its first round, while sites are being started by hand."""
    ceiling: float = 3600.0
    """Seconds that it waits at most."""
    factor: float = 3.0
    """How many times the usual round the deadline is."""
    _rounds: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))

    @property
    def deadline(self) -> float:
        """Seconds after which this round goes on without those who have not answered."""
        if not self._rounds:
            return max(self.first, self.floor)
        return min(self.ceiling, max(self.floor, self.factor * statistics.median(self._rounds)))

    @property
    def glance(self) -> float:
        """Seconds for somebody who did not answer the last time: enough to see whether it is back."""
        return min(self.deadline, self.floor) / 5

    def took(self, seconds: float) -> None:
        """A round took so long: until the last answer came, and for the step. Waiting in vain does not count, or a
        dead neighbour would stretch every following deadline.
        """
        self._rounds.append(seconds)
