"""A site's settings: those that all runs have, and its own network, threads and deadlines."""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from pydantic import Field, SerializeAsAny, field_validator

from dispfl.config import compose_values, parse_overrides
from dispfl.errors import ConfigError
from dispfl.experiment import NamedSettings
from dispfl.methods.base import GossipMethod, Method, check_async
from dispfl.methods.dispfl import DisPFL
from dispfl.peer.deadlines import DeadlineSettings
from dispfl.peer.schedule import ScheduleSettings
from dispfl.peer.state.metrics import MetricsSettings
from dispfl.peer.transport.http import Limits
from dispfl.registry import METHODS
from dispfl.robust.averages import Robust, check_mixing_weights
from dispfl.topology import Full, Topology
from dispfl.view.settings import ViewSettings

OUTBOX_NEEDS_PUSH = (
    "outbox needs whole models: in a pull, every receiver gets another part of a model, which only"
    ' a running site can answer. Set wire.exchange = "push" at every site, or omit outbox.'
)


class SiteConfig(NamedSettings):
    """What a site trains and how; most of it is equal at all sites (`dispfl.peer.setup.spec`)."""

    SHORT: ClassVar[Mapping[str, str]] = {"schedule": "mode"}
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
    alone_rounds: int = Field(default=0, ge=0)
    """Consecutive rounds that the site may train without any of the models that it requested; then
    it waits for the others."""
    limits: Limits = Limits()
    """Timeouts and limits of the site's network."""
    deadlines: DeadlineSettings = DeadlineSettings()
    """How long its rounds wait for other sites."""
    schedule: ScheduleSettings = ScheduleSettings()
    """When it trains and exchanges models."""
    metrics: MetricsSettings = MetricsSettings()
    """Where it shows its figures to a monitoring system."""
    view: ViewSettings = ViewSettings()
    """Where it shows its page to its operator's browser."""

    @field_validator("schedule", mode="before")
    @classmethod
    def _mode_alone(cls, value: Any) -> Any:
        """Accept `schedule = "async"` for a table with this mode."""
        return {"mode": value} if isinstance(value, str) else value

    @property
    def is_async(self) -> bool:
        return self.schedule.mode == "async"

    @classmethod
    def compose(cls, config: Mapping[str, Any], overrides: Iterable[str] = ()) -> "SiteConfig":
        """Return the settings of a new site; a method that can average robustly does so by
        default."""
        values = compose_values(cls, config, parse_overrides(overrides))
        method = values["method"]
        if issubclass(METHODS.find(str(method["name"])), Robust):
            method = {"robust": "clip"} | method
        return cls.from_values({**values, "method": method})

    def to_toml(self) -> dict[str, Any]:
        """Return the settings for a TOML file; sites compare the digest of a graph in the spec."""
        content = super().to_toml()
        content["topology"].pop("digest", None)
        return content

    @property
    def density(self) -> float:
        """The share of weights that this site keeps."""
        return self.method.densities(1)[0]

    @property
    def least_density(self) -> float:
        """The smallest density in the federation."""
        return self.smallest_density or self.density

    @property
    def pulls(self) -> bool:
        """Whether sites request models with their own masks, so that no stored one would do."""
        is_masked = isinstance(self.method, GossipMethod) and self.method.pulls_masked
        return self.wire.exchange == "pull" and is_masked and not self.is_async

    def model_post_init(self, context: Any, /) -> None:
        """Refuse settings that only work in a simulation."""
        if not isinstance(self.method, GossipMethod):
            names = [name for name, method in METHODS.items() if issubclass(method, GossipMethod)]
            raise ConfigError(
                f"method {self.method.name} needs a server, which real sites do not have. Use one"
                f" of: {', '.join(names)}.",
                key="method",
            )
        if self.is_async:
            self._check_async()
        check_mixing_weights(self.method, self.topology)
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

    def _check_async(self) -> None:
        """Refuse what only makes sense for sites that wait for others."""
        check_async(self.method, self.topology)
        if self.deadlines != DeadlineSettings():
            raise ConfigError(
                "schedule is async, where no site waits for another, but deadlines says how long"
                " rounds wait; omit the table deadlines, or use schedule=sync.",
                key="deadlines",
            )
        if self.alone_rounds:
            raise ConfigError(
                f"alone_rounds is {self.alone_rounds}, but with schedule=async a site goes on"
                " without the others; omit it.",
                key="alone_rounds",
            )
