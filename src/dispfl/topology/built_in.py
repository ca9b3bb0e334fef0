"""The built-in topologies: fixed graphs, and a random one that changes from round to round."""

from collections.abc import Sequence
from functools import lru_cache
from math import isqrt
from typing import ClassVar, Literal

from pydantic import Field

from dispfl.core.rng import stream_seed
from dispfl.errors import ConfigError
from dispfl.topology.base import Topology


class Ring(Topology):
    """Each peer receives from the one before and the one after it."""

    name: Literal["ring"] = "ring"

    def neighbours(self, seed: int, t: int, roster: Sequence[str]) -> dict[str, list[str]]:
        graph = {}
        for i, k in enumerate(roster):
            beside = {roster[i - 1], roster[(i + 1) % len(roster)]}
            graph[k] = sorted(beside - {k})
        return graph


class Full(Topology):
    """Each peer receives from all others."""

    name: Literal["full"] = "full"

    def neighbours(self, seed: int, t: int, roster: Sequence[str]) -> dict[str, list[str]]:
        graph = {}
        for k in roster:
            graph[k] = [j for j in roster if j != k]
        return graph

    def row(
        self, seed: int, t: int, roster: Sequence[str], peer: str
    ) -> tuple[list[str], list[str]]:
        online = self.online(seed, t, roster)
        if peer not in online:
            return [], []
        neighbours = sorted(online - {peer})
        return neighbours, neighbours


class Grid(Topology):
    """Peers on a torus grid, as square as their number allows; each has the four around it."""

    name: Literal["grid"] = "grid"

    def neighbours(self, seed: int, t: int, roster: Sequence[str]) -> dict[str, list[str]]:
        n = len(roster)
        rows = max(divisor for divisor in range(1, isqrt(n) + 1) if n % divisor == 0)
        columns = n // rows

        def at(row: int, column: int) -> str:
            return roster[row % rows * columns + column % columns]

        graph = {}
        for i, k in enumerate(roster):
            row, column = divmod(i, columns)
            neighbourhood = {
                at(row - 1, column),
                at(row + 1, column),
                at(row, column - 1),
                at(row, column + 1),
            }
            graph[k] = sorted(neighbourhood - {k})
        return graph


class Exponential(Topology):
    """Each peer receives from the peers 1, 2, 4, 8, ... positions further on."""

    name: Literal["exponential"] = "exponential"

    def neighbours(self, seed: int, t: int, roster: Sequence[str]) -> dict[str, list[str]]:
        n = len(roster)
        steps = [2**power for power in range((n - 1).bit_length())]
        graph = {}
        for i, k in enumerate(roster):
            ahead = {roster[(i + step) % n] for step in steps}
            graph[k] = sorted(ahead - {k})
        return graph


class RandomRegular(Topology):
    """A new graph each round: every peer receives from `degree` peers and sends to as many.

    Deviation 5: the peers are ordered on a circle by a hash, and `degree` distinct hashed offsets
    give whom each receives from, so that "the busiest node has at most 10 connections" is true for
    sending and for receiving.
    """

    offers_choice: ClassVar[bool] = True  # any two peers may be neighbours in some round
    name: Literal["random"] = "random"
    degree: int = Field(default=4, ge=1)
    """Neighbours of a peer in a round.

    The default is lowered where there are fewer other peers; at real sites, whose number changes,
    so is any degree.
    """

    def resolved(self, peers: int) -> Topology:
        if self.degree < peers or "degree" in self.model_fields_set:
            return self
        if peers == 1:  # nobody to receive from
            return Full(offline_prob=self.offline_prob, offline=self.offline)
        return self.model_copy(update={"degree": peers - 1})

    def connections(self, peers: int) -> int:
        return self.degree

    def check(self, peers: int) -> None:
        if self.degree >= peers:
            fix = f"Use at most {peers - 1}" if peers > 1 else "Use topology=full"
            raise ConfigError(
                f"topology.degree must be below the number of peers ({peers}), got {self.degree}."
                f" {fix}, or more peers.",
                key="topology.degree",
            )

    def thinned(self, count: int) -> Topology:
        return self.model_copy(update={"degree": self.degree - count})

    def neighbours(self, seed: int, t: int, roster: Sequence[str]) -> dict[str, list[str]]:
        circle, offsets = _circle(seed, t, tuple(roster), self.degree)
        graph = {}
        for i, k in enumerate(circle):
            senders = [circle[(i + offset) % len(circle)] for offset in offsets]
            graph[k] = sorted(senders)
        return graph

    def row(
        self, seed: int, t: int, roster: Sequence[str], peer: str
    ) -> tuple[list[str], list[str]]:
        online = self.online(seed, t, roster)
        circle, offsets = _circle(seed, t, tuple(roster), self.degree)
        if peer not in online:
            return [], []
        n = len(circle)
        i = circle.index(peer)
        senders = [circle[(i + offset) % n] for offset in offsets]
        receivers = [circle[(i - offset) % n] for offset in offsets]
        return sorted(online.intersection(senders)), sorted(online.intersection(receivers))


@lru_cache(maxsize=64)
def _circle(seed: int, t: int, roster: tuple[str, ...], degree: int) -> tuple[list[str], list[int]]:
    """Return the peers' order on the circle of round t, and the offsets of each one's senders.

    With fewer other peers than `degree`, each receives from all of them.
    """
    circle = sorted(roster, key=lambda peer: stream_seed(seed, "circle", peer, t))
    offsets = list(range(1, len(roster)))
    offsets.sort(key=lambda offset: stream_seed(seed, "offset", offset, t))
    return circle, offsets[:degree]
