"""A site's settings: those that runs have in common, and how long it waits for other sites."""

import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from pydantic import Field, SerializeAsAny

from dispfl.config import compose_values
from dispfl.errors import ConfigError
from dispfl.experiment import RunSettings
from dispfl.methods.base import GossipMethod, Method
from dispfl.methods.dispfl import DisPFL
from dispfl.peer.transport.base import Limits
from dispfl.registry import METHODS
from dispfl.robust.averages import Robust
from dispfl.settings import Settings
from dispfl.topology import Full, Topology

WINDOW_ROUNDS = 5


@dataclass
class Deadlines:
    """The deadline of a round, from the durations of earlier rounds."""

    min: float = 30.0
    """The shortest deadline, in seconds."""
    startup: float = 600.0
    """The deadline of the first round, while sites are being started by hand."""
    max: float = 3600.0
    """The longest deadline."""
    factor: float = 3.0
    """The ratio of the deadline to the median duration of the last rounds."""
    _rounds: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW_ROUNDS))
    _steps: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW_ROUNDS))
    """The parts of these durations that are our own."""

    def __post_init__(self) -> None:
        self.patience = self.startup
        """The longest that others may make us wait in a round, unless our own steps take as
        long."""

    @property
    def is_first_round(self) -> bool:
        """Whether no round has ended yet."""
        return not self._rounds

    @property
    def deadline(self) -> float:
        """Seconds after which the round continues without the peers that have not responded.

        Others decide how long a round lasts: a peer that responds just in time, round after round,
        extends it. So no deadline of a run exceeds that of its first round, unless our own steps
        take as long.
        """
        if self.is_first_round:
            return max(self.startup, self.min)
        bound = max(self.patience, self.factor * statistics.median(self._steps))
        return min(
            self.max, max(self.min, min(bound, self.factor * statistics.median(self._rounds)))
        )

    @property
    def probe_timeout(self) -> float:
        """Seconds to wait for a peer that cannot be reached: a fraction of how long others wait for
        us meanwhile."""
        return min(self.deadline, self.min) / 5

    def record_round(self, waited: float, step: float) -> None:
        """Record the duration of a round: until the last response, and of the step.

        Time spent waiting for a peer that does not respond is not counted: a dead neighbour would
        extend all following deadlines.
        """
        self._rounds.append(waited + step)
        self._steps.append(step)


class DeadlineSettings(Settings):
    """How long a round waits for responses (`dispfl.peer.setup.site_config`). Each site has its own."""

    table: ClassVar[str] = "deadlines"

    min: float = Field(default=Deadlines.min, gt=0)
    """The shortest deadline, in seconds; a peer that did not respond the last time gets a fifth of
    it."""
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


class SiteConfig(RunSettings):
    """What a site trains and how; all sites of a federation agree on most of it (see
    `dispfl.peer.setup.spec`)."""

    validation: float = Field(default=0.0, ge=0, lt=1)
    """Share of the site's training samples that is held out for choices such as when to stop; 0:
    none."""
    threads: int = Field(default=1, ge=1)
    """Threads that train the site's model; with more than one, results depend on their number."""
    smallest_density: float | None = Field(default=None, gt=0, le=1)
    """The smallest density of any site, which decides how masks are encoded; by default this
    site's."""
    method: SerializeAsAny[Method] = DisPFL(robust="clip")
    """Dis-PFL that withstands a fifth of Byzantine peers, because nobody vouches for the members of
    a federation."""
    topology: SerializeAsAny[Topology] = Full()
    limits: Limits = Limits()
    """Timeouts and limits of the site's network."""
    deadlines: DeadlineSettings = DeadlineSettings()
    """How long its rounds wait for other sites."""

    @classmethod
    def compose(cls, config: Mapping[str, Any], overrides: Iterable[str] = ()) -> "SiteConfig":
        """Return the settings of a new site. A method that can average robustly does so unless
        stated."""
        values = compose_values(cls, config, overrides)
        method = values["method"]
        if issubclass(METHODS.find(str(method["name"])), Robust):
            method = {"robust": "clip"} | method
        return cls.from_values({**values, "method": method})

    @property
    def density(self) -> float:
        """The share of weights that this site keeps."""
        return self.method.densities(1)[0]

    @property
    def least_density(self) -> float:
        """The smallest density in the federation."""
        return self.smallest_density or self.density

    def model_post_init(self, context: Any, /) -> None:
        """Refuse settings that only work in a simulation."""
        if not isinstance(self.method, GossipMethod):
            gossip = ", ".join(
                name for name, method in METHODS.items() if issubclass(method, GossipMethod)
            )
            raise ConfigError(
                f"method {self.method.name} needs a server, which real sites do not have. Use one"
                f" of: {gossip}.",
                key="method",
            )
        if isinstance(getattr(self.method, "density", None), tuple):
            raise ConfigError(
                "method.density must be one number at a site: the share of weights that this site"
                " keeps.",
                key="method.density",
            )
        if self.density < self.least_density:
            raise ConfigError(
                f"method.density is {self.density:g}, below smallest_density"
                f" ({self.least_density:g}), which all sites share. Raise method.density, or lower"
                " smallest_density at every site.",
                key="method.density",
            )
