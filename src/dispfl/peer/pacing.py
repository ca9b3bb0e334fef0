"""How patient a site is with others: the table [pace] of its settings."""

from typing import Any, ClassVar

from pydantic import Field

from dispfl.errors import ConfigError
from dispfl.peer.pace import Pace
from dispfl.settings import Settings


class Pacing(Settings):
    """When a round goes on without those who have not answered. Each site decides for itself."""

    table: ClassVar[str] = "pace"

    floor: float = Field(default=Pace.floor, gt=0)
    """Seconds that it waits for others at least; a fifth of it for somebody who did not answer the last time."""
    first: float = Field(default=Pace.first, gt=0)
    """Seconds that it waits in the first round, while sites are being started by hand."""
    ceiling: float = Field(default=Pace.ceiling, gt=0)
    """Seconds that it waits at most."""
    factor: float = Field(default=Pace.factor, ge=1)
    """How many times the usual round it waits, between the floor and the ceiling."""

    def model_post_init(self, context: Any, /) -> None:
        """Refuse a floor above the ceiling."""
        if self.floor > self.ceiling:
            raise ConfigError(
                f"pace.floor is {self.floor:g} and pace.ceiling {self.ceiling:g}; the floor is what is waited at least."
            )

    def begin(self) -> Pace:
        """The pace of a site that starts now, which will learn what rounds take."""
        return Pace(self.floor, self.first, self.ceiling, self.factor)
