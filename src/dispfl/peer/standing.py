"""How a peer and its neighbours are doing: for the log, for `dispfl peer status`, and to know who is not waited for."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from dispfl.costs.ledger import Carried
from dispfl.costs.traffic import BYTES_PER_VALUE


@dataclass
class Neighbour:
    """What is known of another peer."""

    round: int = -1
    """The furthest round that it was seen in."""
    last_seen: float | None = None
    """By the event loop's clock."""
    answered: int = 0
    missed: int = 0
    received_bytes: int = 0
    sent_bytes: int = 0
    gone: bool = False
    """It did not answer the last time, and nothing came from it since."""


@dataclass
class Standing:
    """A peer's own view of the federation."""

    round: int = 0
    rounds: int = 0
    state: str = "starting"
    score: float | None = None
    deadline: float = 0.0
    neighbours: dict[str, Neighbour] = field(default_factory=lambda: defaultdict(Neighbour))
    refused: Mapping[str, Counter[str]] = field(default_factory=dict)
    _carried: list[tuple[int, Carried]] = field(default_factory=list)

    def met(self, name: str, t: int | None, now: float) -> None:
        """Something came from a peer; perhaps it said where it is."""
        neighbour = self.neighbours[name]
        neighbour.last_seen, neighbour.gone = now, False
        if t is not None:
            neighbour.round = max(neighbour.round, t)

    def is_gone(self, name: str) -> bool:
        """Whether a peer did not answer the last time."""
        return name in self.neighbours and self.neighbours[name].gone

    def was_met(self, name: str) -> bool:
        """Whether anything ever came from a peer."""
        return self.neighbours[name].last_seen is not None

    def seen_since(self, name: str, moment: float) -> bool:
        """Whether anything came from a peer after that moment."""
        seen = self.neighbours[name].last_seen
        return seen is not None and seen > moment

    def lost(self, name: str) -> None:
        """A peer did not answer."""
        self.neighbours[name].gone = True

    def round_of(self, name: str) -> int:
        """Where a peer was seen last."""
        return self.neighbours[name].round

    def others_are_at(self) -> int:
        """The round that most of those are in who were met; -1 if nobody was."""
        rounds = sorted(neighbour.round for neighbour in self.neighbours.values() if neighbour.last_seen is not None)
        return rounds[len(rounds) // 2] if rounds else -1

    def answered(self, name: str) -> None:
        """A neighbour was heard in this round."""
        self.neighbours[name].answered += 1

    def missed(self, name: str) -> None:
        """A neighbour was not heard in this round."""
        self.neighbours[name].missed += 1

    def received(self, own: str, name: str, t: int, requested: int, size: int, values: int) -> None:
        """A neighbour's model of so many values has arrived, for a request of so many bytes."""
        neighbour = self.neighbours[name]
        neighbour.received_bytes += size
        neighbour.sent_bytes += requested
        if requested:
            self._carried.append((t, Carried(own, name, 0, requested)))
        self._carried.append((t, Carried(name, own, BYTES_PER_VALUE * values, size)))

    def sent(self, name: str, size: int) -> None:
        """A model was handed to a neighbour."""
        self.neighbours[name].sent_bytes += size

    def take_carried(self, t: int) -> Iterator[Carried]:
        """The messages that were sent for our round t."""
        taken = [message for round_, message in self._carried if round_ == t]
        self._carried.clear()
        return iter(taken)

    def as_json(self) -> dict[str, Any]:
        """For the status file."""
        return {
            "round": self.round,
            "rounds": self.rounds,
            "state": self.state,
            "score": self.score,
            "deadline_seconds": round(self.deadline, 3),
            "peers": {name: asdict(neighbour) for name, neighbour in sorted(self.neighbours.items())},
            "refused": {name: dict(reasons) for name, reasons in sorted(self.refused.items())},
        }
