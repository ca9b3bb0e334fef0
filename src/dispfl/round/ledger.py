"""The bytes that nodes send to each other in a round."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple


class MessageCost(NamedTuple):
    """The bytes of one message."""

    sender: str
    receiver: str
    paper: int
    """Bytes as the paper counts them, which omits requests."""
    wire: int
    """Bytes as sent."""
    is_request: bool = False


@dataclass(frozen=True)
class Busiest:
    """The busiest node's traffic in a round, in bytes, and its name where there was any traffic."""

    paper: int
    """The largest download, as the paper counts it."""
    up: int
    """The largest upload, as sent."""
    down: int
    """The largest download, as sent."""
    peer: str | None
    """The node with the largest wire traffic in a direction; the first in the roster of several."""
    connections: int = 0
    """The largest number of nodes that one node receives models from."""

    @property
    def wire(self) -> int:
        """Download or upload, whichever is larger."""
        return max(self.up, self.down)


@dataclass
class Ledger:
    """Bytes of every directed link of one round."""

    paper: Counter[tuple[str, str]] = field(default_factory=Counter)
    wire: Counter[tuple[str, str]] = field(default_factory=Counter)

    @classmethod
    def of(cls, messages: Iterable[MessageCost]) -> "Ledger":
        """Return the ledger of these messages."""
        ledger = cls()
        for message in messages:
            link = (message.sender, message.receiver)
            if message.paper:
                ledger.paper[link] += message.paper
            ledger.wire[link] += message.wire
        return ledger

    def busiest(self) -> Busiest:
        """Return the node with the most traffic."""
        up, down = per_node(self.wire)
        loads = up | down  # the larger of the two
        peer = min(loads, key=lambda node: (-loads[node], node), default=None)
        _, paper_down = per_node(self.paper)
        senders = Counter(receiver for _, receiver in self.paper)
        return Busiest(_largest(paper_down), _largest(up), _largest(down), peer, _largest(senders))

    def traffic(self) -> dict[str, tuple[int, int]]:
        """Return the bytes up and down of every node with any traffic, as sent."""
        up, down = per_node(self.wire)
        return {node: (up[node], down[node]) for node in sorted(up | down)}


def per_node(links: Counter[tuple[str, str]]) -> tuple[Counter[str], Counter[str]]:
    """Return the bytes up and down of every node."""
    up: Counter[str] = Counter()
    down: Counter[str] = Counter()
    for (sender, receiver), count in links.items():
        up[sender] += count
        down[receiver] += count
    return up, down


def _largest(loads: Counter[str]) -> int:
    return max(loads.values(), default=0)


BYTES_PER_VALUE = 4
"""As the paper counts, which omits masks."""
