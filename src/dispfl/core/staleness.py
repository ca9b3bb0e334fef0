"""How much the models of others count where nobody waits: less, the staler they are."""

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field

from dispfl.settings import Settings

Mode = Literal["sync", "async"]
"""Whether peers wait in each round for the models of their neighbours."""
MAX_AGE = 8
"""Rounds after which a model that arrives after its deadline is not averaged any more."""


class Staleness(Settings):
    """How received models count with `schedule = "async"`.

    The staleness of a model is the number of steps that its receiver has begun since the model was
    finished. The receiver's own model always counts 1.
    """

    table: ClassVar[str] = "staleness"
    exponent: float = Field(default=0.5, ge=0)
    """A model of staleness tau counts (1 + tau)^-exponent; with 0 all count the same."""
    limit: int = Field(default=8, ge=0)
    """Staler models are not averaged."""
    reuse: bool = False
    """Average a model in every step until a newer one of its sender arrives, instead of once."""

    def weight(self, staleness: int) -> float:
        """Return how much a model counts in an average."""
        return float((1 + staleness) ** -self.exponent)

    def mixing_weights(self, peer: str, staleness: Mapping[str, int]) -> dict[str, float] | None:
        """Return how much each sender's model, and the peer's own, counts; None: all the same."""
        weights = {sender: self.weight(steps) for sender, steps in staleness.items()}
        if all(weight == 1.0 for weight in weights.values()):
            return None
        return {**weights, peer: 1.0}
