"""How a peer and its neighbours are doing: for the log, for `dispfl peer status`, and to know who is not waited for."""

import statistics
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
    replies: int = 0
    """How often it answered anything that we asked."""
    answered: int = 0
    missed: int = 0
    received_bytes: int = 0
    sent_bytes: int = 0
    gone: bool = False
    """It did not answer the last time that we asked, whatever it asks us itself."""
    silent: bool = False
    """And nothing came from it since."""
    disagrees: str | None = None
    """How its terms differ from ours, in a sentence, if they do."""


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

    def ended(self) -> None:
        """The node runs no more."""
        if self.state != "finished":
            self.state = "stopped"

    def met(self, name: str, t: int | None, now: float) -> None:
        """Something came from a peer, a question or an answer; perhaps it said where it is."""
        neighbour = self.neighbours[name]
        neighbour.last_seen, neighbour.silent, neighbour.disagrees = now, False, None
        if t is not None:
            neighbour.round = max(neighbour.round, t)

    def replied(self, name: str) -> None:
        """A peer answered something that we asked: it can be reached."""
        neighbour = self.neighbours[name]
        neighbour.replies, neighbour.gone = neighbour.replies + 1, False

    def is_gone(self, name: str) -> bool:
        """Whether a peer did not answer the last time that we asked: it is not waited for."""
        return name in self.neighbours and self.neighbours[name].gone

    def is_silent(self, name: str) -> bool:
        """Whether a peer is gone and asks nothing either: nothing is kept for it."""
        return name in self.neighbours and self.neighbours[name].silent

    def was_met(self, name: str) -> bool:
        """Whether anything ever came from a peer."""
        return self.neighbours[name].last_seen is not None

    def replies_of(self, name: str) -> int:
        """How often a peer has answered so far."""
        return self.neighbours[name].replies

    def lost(self, name: str) -> None:
        """A peer did not answer."""
        self.neighbours[name].gone = self.neighbours[name].silent = True

    def disagreed(self, name: str, sentence: str) -> None:
        """A peer's terms are not ours."""
        neighbour = self.neighbours[name]
        neighbour.disagrees = neighbour.disagrees or sentence

    def disagreement(self, name: str) -> str | None:
        """Why a peer cannot answer us, nor we it: how its terms differ from ours."""
        return self.neighbours[name].disagrees if name in self.neighbours else None

    def round_of(self, name: str) -> int:
        """Where a peer was seen last."""
        return self.neighbours[name].round

    def others_are_at(self) -> int:
        """The round that most of those have reached who were met; -1 if nobody was."""
        rounds = [neighbour.round for neighbour in self.neighbours.values() if neighbour.last_seen is not None]
        return statistics.median_low(rounds) if rounds else -1  # of two the lower: one liar moves nobody

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

    def served(self, name: str, requested: int, size: int) -> None:
        """A neighbour has our model, for a request of so many bytes: the other end of `received`."""
        self.neighbours[name].received_bytes += requested
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
