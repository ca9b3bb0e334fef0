"""Who sent how much to whom in a round."""

from collections import Counter
from dataclasses import dataclass, field

from dispfl.core.packed import PackedModel
from dispfl.costs.traffic import paper_bytes, wire_bytes


@dataclass(frozen=True)
class Busiest:
    """The busiest node's traffic in a round, in bytes, and its name where there was any traffic."""

    paper: int
    """Download in the paper's currency."""
    wire: int
    """Download or upload, whichever is larger, as sent."""
    peer: str | None
    """The node with the largest wire traffic; the first in the roster of several."""


@dataclass
class Ledger:
    """Bytes of every directed link of one round."""

    paper: Counter[tuple[str, str]] = field(default_factory=Counter)
    wire: Counter[tuple[str, str]] = field(default_factory=Counter)

    def carry(self, sender: str, receiver: str, model: PackedModel) -> None:
        """Charge one message to a link."""
        self.paper[sender, receiver] += paper_bytes(model)
        self.wire[sender, receiver] += wire_bytes(model)

    def busiest(self) -> Busiest:
        """The node that this round loads most."""
        wire_up, wire_down = _per_node(self.wire)
        loads = {node: max(wire_up[node], wire_down[node]) for node in wire_up | wire_down}
        peer = min(loads, key=lambda node: (-loads[node], node)) if loads else None
        _, paper_down = _per_node(self.paper)
        return Busiest(max(paper_down.values(), default=0), max(loads.values(), default=0), peer)


def _per_node(links: Counter[tuple[str, str]]) -> tuple[Counter[str], Counter[str]]:
    """Bytes up and bytes down of every node."""
    up: Counter[str] = Counter()
    down: Counter[str] = Counter()
    for (sender, receiver), count in links.items():
        up[sender] += count
        down[receiver] += count
    return up, down
