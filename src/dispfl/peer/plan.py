"""What a site trains, and how: the tables of an experiment without what only a simulation has.

Sites of one federation must agree on everything here but `data`, `train`, `device`, `precision`, `threads`, `limits`,
`pace` and the method's density.
"""

from typing import Any, Literal

from pydantic import Field, SerializeAsAny, field_validator

from dispfl.core.live import Precision, resolve_device
from dispfl.core.train import Train
from dispfl.data.datasets import Data
from dispfl.data.own.settings import OwnData
from dispfl.errors import ConfigError
from dispfl.methods.base import GossipMethod, Method
from dispfl.methods.dispfl import DisPFL
from dispfl.methods.registry import METHODS
from dispfl.models.own import OwnModel
from dispfl.models.registry import Model
from dispfl.peer.limits import Limits
from dispfl.peer.pacing import Pacing
from dispfl.settings import Settings
from dispfl.tables import Choices, chosen
from dispfl.topology import TOPOLOGIES, Full, Topology
from dispfl.wire.codec import Wire

TABLES: dict[str, Choices] = {
    "data": {"": Data, "own": OwnData},
    "model": {"": Model, "own": OwnModel},
    "method": METHODS,
    "topology": TOPOLOGIES,
    "train": {"": Train},
    "wire": {"": Wire},
    "limits": {"": Limits},
    "pace": {"": Pacing},
}
"""The settings of each table, by the table's `name` where there is a choice of them; "" stands for all other names."""


class Plan(Settings):
    """A site's part in a federation."""

    seed: int = Field(default=0, ge=0)
    """Everything random derives from it."""
    rounds: int = Field(default=16, ge=1)
    eval_every: int = Field(default=1, ge=1)
    """Score the site's model every so many rounds, and after the last."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "cpu"
    precision: Precision = "float32"
    """bf16: forward and backward passes in bfloat16, where the hardware is fast with it; all else stays float32."""
    threads: int = Field(default=1, ge=1)
    """How many threads train the site's model; with more than one, results depend on their number."""
    smallest_density: float | None = Field(default=None, gt=0, le=1)
    """The smallest density of any site, which decides what masks look like on the wire; this site's, if not given."""
    data: SerializeAsAny[Data] = Data(augment=False)
    model: SerializeAsAny[Model] = Model()
    method: SerializeAsAny[Method] = DisPFL()
    topology: SerializeAsAny[Topology] = Full()
    train: Train = Train(batch=32)
    wire: Wire = Wire()
    limits: Limits = Limits()
    """How long the site's network waits, and how much it takes from others."""
    pace: Pacing = Pacing()
    """How long its rounds wait for others."""

    @field_validator(*TABLES, mode="before")
    @classmethod
    def _choose(cls, value: Any, info: Any) -> Any:
        key = info.field_name
        return chosen(key, value, TABLES[key], cls.model_fields[key].default)

    @field_validator("device")
    @classmethod
    def _available(cls, device: str) -> str:
        return resolve_device(device)

    @property
    def density(self) -> float:
        """The share of weights that this site keeps."""
        return self.method.densities(1)[0]

    @property
    def least_density(self) -> float:
        """The smallest density in the federation."""
        return self.smallest_density or self.density

    def model_post_init(self, context: Any, /) -> None:
        """Refuse what real sites cannot do."""
        if not isinstance(self.method, GossipMethod):
            gossip = ", ".join(name for name, method in METHODS.items() if issubclass(method, GossipMethod))
            raise ConfigError(f"method {self.method.name} needs a server, and sites have none. Use one of: {gossip}.")
        if isinstance(getattr(self.method, "density", None), tuple):
            raise ConfigError("method.density must be one number at a site: how much of the model this site keeps.")
        if self.density < self.least_density:
            raise ConfigError(
                f"method.density is {self.density:g}, below smallest_density ({self.least_density:g}), which all sites "
                "share. Raise the one or lower the other, at every site."
            )

    def to_toml(self) -> dict[str, Any]:
        """The complete plan as TOML can hold it."""
        return self.model_dump(mode="json", exclude_none=True)
