"""Topologies: who receives whose models in round t, and who is offline.

All peers derive it from the seed alone.
"""

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from typing import Any, ClassVar, Literal

from pydantic import Field

from dispfl.core.names import peer_names
from dispfl.core.rng import stream_seed
from dispfl.errors import ConfigError, user_errors
from dispfl.settings import Component

_FULL_RANGE = 2**63  # stream_seed returns numbers below this


class Topology(Component):
    """Base of the topologies. A roster is the sorted tuple of the peers' names."""

    table: ClassVar[str] = "topology"
    offers_choice: ClassVar[bool] = False
    """Whether peers may choose any others in place of some neighbours (`thinned`)."""
    offline_prob: float = Field(default=0.0, ge=0, le=1)
    """The probability that a peer is offline in a round: it neither sends nor receives then."""
    offline: Literal["train", "skip"] = "train"
    """What an offline peer does: train alone (as in the authors' code), or skip the round."""

    def check(self, peers: int) -> None:
        """Refuse a number of peers that this topology cannot connect."""

    def resolved(self, peers: int) -> "Topology":
        """Return this topology for a number of peers: a default degree is lowered if necessary."""
        return self

    def degrees(self, peers: int) -> list[int]:
        """Return how many neighbours each of so many peers has in round 0."""
        graph = self.checked_neighbours(0, 0, peer_names(peers))
        return [len(neighbours) for neighbours in graph.values()]

    def connections(self, peers: int) -> int:
        """Return how many neighbours a peer has, at most; a server has as many connections."""
        return max(1, *self.degrees(peers))

    def check_roster(self, roster: Sequence[str]) -> None:
        """Refuse peers that this topology does not know; called before a simulation begins."""

    def shared_settings(self) -> dict[str, Any]:
        """Return what all sites of a federation must have in common; by default all settings."""
        return self.model_dump(mode="json")

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
        graph = self.checked_neighbours(seed, t, roster)
        online_graph = {}
        for k in roster:
            if k in online:
                online_graph[k] = sorted(j for j in graph[k] if j in online)
        return online_graph

    def checked_neighbours(self, seed: int, t: int, roster: Sequence[str]) -> dict[str, list[str]]:
        """Return `neighbours`, which a user may have written, if it is a graph of these peers."""
        with user_errors(f"topology {self.name}, round {t}"):
            graph = self.neighbours(seed, t, roster)
        problem = _problem_of_type(graph) or _problem_of_graph(graph, roster)
        if problem:
            raise ConfigError(f"topology {self.name} {problem}", key="topology")
        return graph

    @property
    def is_weighted(self) -> bool:
        """Whether models count differently in an average: `mixing_weights` says how much."""
        return False

    def mixing_weights(
        self, seed: int, t: int, roster: Sequence[str], peer: str
    ) -> dict[str, float] | None:
        """Return how much each neighbour's model, and a peer's own, counts in its average.

        None: all count the same. Whoever averages divides by the sum over the models at hand.
        """
        return None

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

    def thinned(self, count: int) -> "Topology":
        """Return this topology with so many neighbours fewer, in whose place peers choose others.

        Called where it `offers_choice`.
        """
        raise NotImplementedError


def _problem_of_type(graph: Any) -> str:
    """Say what is wrong if a user's function returns no dict of lists."""
    if not isinstance(graph, Mapping):
        value = _described(graph)
        return f"must return a dict from each peer to a list of its neighbours, got {value}."
    for k, neighbours in graph.items():
        if isinstance(neighbours, str) or not isinstance(neighbours, Collection):
            return f"must give peer {k} a list of neighbours, got {_described(neighbours)}."
    return ""


def _described(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _problem_of_graph(graph: Mapping[str, Collection[str]], roster: Sequence[str]) -> str:
    """Say what is wrong if a graph lacks a peer, or names a stranger, a peer itself, or one twice.

    A peer's own model is always in its average; a model that is requested twice costs twice.
    """
    peers = set(roster)
    missing = peers - graph.keys()
    if missing:
        return f"has no entry for peer {min(missing)}; give every peer a list."
    unknown = set(chain.from_iterable(graph.values())) - peers
    if unknown:
        return f"names the neighbour {min(unknown, key=str)!r}, which is not a peer."
    for k, neighbours in graph.items():
        if k in neighbours:
            return f"names peer {k} as its own neighbour; omit it."
        if len(set(neighbours)) < len(neighbours):
            return f"names a neighbour of peer {k} twice; name each neighbour once."
    return ""
