"""How long a transport waits, and how much it takes from others."""

from typing import ClassVar

from pydantic import Field

from dispfl.settings import Settings


class Limits(Settings):
    """Limits of an `HttpsTransport`. The defaults suit a handful to a hundred sites."""

    table: ClassVar[str] = "limits"

    connect: float = Field(default=10.0, gt=0)
    """Seconds to connect and shake hands, either way."""
    head: float = Field(default=10.0, gt=0)
    """Seconds for the head of a request to arrive, once a connection is there or the head has begun."""
    patience: float = Field(default=120.0, gt=0)
    """Seconds for an answer to begin, once the ask has been sent."""
    stall: float = Field(default=30.0, gt=0)
    """Seconds in which a transfer must bring `stall * pace` bytes, or its rest. In all it may take any time."""
    pace: float = Field(default=1000.0, ge=0)
    """Bytes a second that a transfer must keep up."""
    attempts: int = Field(default=4, ge=1)
    """How often in a row a broken transfer is gone on with to no avail."""
    backoff: float = Field(default=0.1, ge=0)
    """Seconds before a broken transfer is gone on with; doubled each time."""
    keepalive: float = Field(default=600.0, gt=0)
    """Seconds that an idle connection is kept for the next round."""
    farewell: float = Field(default=1.0, ge=0)
    """Seconds that answers under way have to end when the transport is closed."""
    to_one: int = Field(default=2, ge=1)
    """Connections to one member at a time."""
    from_one: int = Field(default=4, ge=1)
    """Connections from one member at a time: those of its last life may still be open."""
    strangers: int = Field(default=32, ge=1)
    """Connections from one address that have not yet asked as a member; one more, and the oldest of them is cut."""
    connections: int = Field(default=512, ge=1)
    """Connections from outside in all."""

    @property
    def least(self) -> int:
        """Bytes that `stall` seconds must bring."""
        return max(1, round(self.stall * self.pace))
