"""Topologies: who receives whose models in round t, and who is offline.

All peers derive it from the seed alone.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import chain
from math import isqrt
from typing import ClassVar, Literal

from pydantic import Field

from dispfl.core.rng import stream_seed
from dispfl.errors import ConfigError
from dispfl.settings import Component

_FULL_RANGE = 2**63  # stream_seed returns numbers below this


class Topology(Component):
    """Base of the topologies. A roster is the sorted tuple of the peers' names."""

    table: ClassVar[str] = "topology"
    offline_prob: float = Field(default=0.0, ge=0, le=1)
    """The probability that a peer is offline in a round: it neither sends nor receives then."""
    offline: Literal["train", "skip"] = "train"
    """What an offline peer does: train alone (as in the authors' code), or skip the round."""

    def check(self, peers: int) -> None:
        """Refuse a number of peers that this topology cannot connect."""

    def resolved(self, peers: int) -> "Topology":
        """Return this topology for a number of peers: a default degree is lowered if necessary."""
        return self

    def connections(self, peers: int) -> int:
        """Return how many neighbours a peer has, at most; a server has as many connections."""
        graph = self.neighbours(0, 0, peer_names(peers))
        return max(1, *map(len, graph.values()))

    @abstractmethod
    def neighbours(self, seed: int, t: int, roster: Sequence[str]) -> dict[str, list[str]]:
        """Return each peer's neighbours in round t if all were online (S_{k,t} in the paper)."""

    def online(self, seed: int, t: int, roster: Sequence[str]) -> set[str]:
        """Return the peers that take part in the exchange of round t.

        Deviation 6: an offline peer neither sends nor receives.
        """
        if not self.offline_prob:
            return set(roster)
        threshold = self.offline_prob * _FULL_RANGE
        return {peer for peer in roster if stream_seed(seed, "offline", peer, t) >= threshold}

    def online_neighbours(self, seed: int, t: int, roster: Sequence[str]) -> dict[str, list[str]]:
        """Return the online neighbours of each online peer in round t, in roster order."""
        online = self.online(seed, t, roster)
        graph = self.neighbours(seed, t, roster)
        self._check_graph(graph, roster)
        online_graph = {}
        for k in roster:
            if k in online:
                online_graph[k] = sorted(j for j in graph[k] if j in online)
        return online_graph

    def _check_graph(self, graph: Mapping[str, Sequence[str]], roster: Sequence[str]) -> None:
        """Refuse a graph that lacks a peer, or that names a stranger, a peer itself, or one twice.

        A peer's own model is always in its average; a model that is requested twice costs twice.
        """
        peers = set(roster)
        missing = peers - graph.keys()
        unknown = set(chain.from_iterable(graph.values())) - peers
        problem = ""
        if missing:
            problem = f"has no entry for peer {min(missing)}; give every peer a list."
        elif unknown:
            problem = f"names the neighbour {min(unknown)!r}, which is not a peer."
        for k, neighbours in graph.items():
            if k in neighbours:
                problem = f"names peer {k} as its own neighbour; omit it."
            elif len(set(neighbours)) < len(neighbours):
                problem = f"names a neighbour of peer {k} twice; name each neighbour once."
        if problem:
            raise ConfigError(f"topology {self.name} {problem}", key="topology")

    def row(
        self, seed: int, t: int, roster: Sequence[str], peer: str
    ) -> tuple[list[str], list[str]]:
        """Return whom one peer receives from in round t, and who receives from it.

        The same as in `online_neighbours`. A site needs no more than this. A topology with many
        peers may know it without the rows of the others.
        """
        graph = self.online_neighbours(seed, t, roster)
        receivers = [name for name, senders in graph.items() if peer in senders]
        return graph.get(peer, []), receivers

    def reachable(self, received: Mapping[str, Sequence[str]], peer: str) -> Sequence[str]:
        """Return the peers that an online peer may receive from: by default its neighbours."""
        return received[peer]


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

    def reachable(self, received: Mapping[str, Sequence[str]], peer: str) -> Sequence[str]:
        """Return all online peers: any two may be neighbours in some round."""
        return [name for name in received if name != peer]

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


MAX_PEERS = 1_000_000
"""More than anyone simulates: a damaged config must not fill the memory with names."""


def peer_names(count: int) -> list[str]:
    """Return the names of simulated peers: `000`, `001`, ..., in the roster's order."""
    if count > MAX_PEERS:
        raise ConfigError(f"peers must be at most {MAX_PEERS:,}, got {count:,}.", key="peers")
    width = max(3, len(str(count - 1)))
    return [f"{k:0{width}d}" for k in range(count)]
