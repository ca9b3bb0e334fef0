"""The graphs of a topology, one for each round, and how peers find themselves in them."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dispfl.errors import ConfigError

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]
TOLERANCE = 1e-6
"""How far a row of weights may exceed 1 by rounding."""


class Edges(NamedTuple):
    """The edges of one round, sorted by receiver and sender; one to itself has the own weight."""

    receivers: Indices
    senders: Indices
    weights: Floats

    def row(self, receiver: int) -> dict[int, float]:
        """Return the weight of each sender of a receiver."""
        begin, end = np.searchsorted(self.receivers, [receiver, receiver + 1])
        senders = self.senders[begin:end].tolist()
        return dict(zip(senders, self.weights[begin:end].tolist(), strict=True))


@dataclass(frozen=True, eq=False)
class PeerGraphs:
    """One graph for each round of a cycle."""

    source: str
    """What it was read from, for messages."""
    labels: tuple[str, ...]
    """The nodes as they are named: peers' names, or numbers."""
    rounds: tuple[Edges, ...]
    is_complete: bool
    """Whether it has all peers, as a matrix does; a list of edges omits those without any."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PeerGraphs) and self.digest() == other.digest()

    def __hash__(self) -> int:
        return hash(self.digest())

    def digest(self) -> str:
        """Return a digest of nodes, edges and weights."""
        content = hashlib.blake2b(repr((self.labels, self.is_complete)).encode(), digest_size=16)
        for edges in self.rounds:
            for array in edges:
                content.update(f"{len(array)} ".encode())
                content.update(array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes())
        return content.hexdigest()

    @cached_property
    def is_weighted(self) -> bool:
        """Whether an edge has another weight than 1."""
        return any(bool((edges.weights != 1).any()) for edges in self.rounds)

    def without_weights(self) -> "PeerGraphs":
        """Return the same edges, all with the weight 1."""
        rounds = []
        for edges in self.rounds:
            rounds.append(edges._replace(weights=np.ones_like(edges.weights)))
        return replace(self, rounds=tuple(rounds))

    # who is who

    @property
    def is_numbered(self) -> bool:
        """Whether all nodes are numbers, which may be indices of peers."""
        return all(label.isascii() and label.isdecimal() for label in self.labels)

    def nodes_by_peer(self, roster: Sequence[str]) -> dict[str, int]:
        """Return the node of each peer that the graph has.

        Nodes are peers' names if all are names, else indices of the roster if all are numbers.
        """
        nodes = dict(zip(self.labels, range(len(self.labels)), strict=True))
        if not self.is_numbered or nodes.keys() <= set(roster):
            return {peer: nodes[peer] for peer in roster if peer in nodes}
        self.check_size(len(roster))
        by_index = dict(zip(map(int, self.labels), range(len(self.labels)), strict=True))
        if len(by_index) < len(nodes):
            raise ConfigError(
                f"{self.source} names a peer in two ways, such as 1 and 001; use one.",
                key="topology.path",
            )
        highest = max(by_index, default=0)
        if highest >= len(roster):
            raise ConfigError(
                f"{self.source} names peer {highest}, but the {len(roster)} peers of the federation"
                f" are 0 to {len(roster) - 1}.",
                key="topology.path",
            )
        return {peer: by_index[k] for k, peer in enumerate(roster) if k in by_index}

    def check_size(self, peers: int) -> None:
        """Refuse another number of peers than a graph of all peers has."""
        if self.is_complete and len(self.labels) != peers:
            raise ConfigError(
                f"{self.source} has {len(self.labels)} peers, but the federation has {peers}; they"
                " must be the same.",
                key="topology.path",
            )

    def check_roster(self, roster: Sequence[str]) -> None:
        """Refuse a roster that is not the graph's."""
        nodes = self.nodes_by_peer(roster)
        if len(nodes) == len(self.labels):
            return
        stranger = min(set(self.labels) - nodes.keys())
        first_peers = ", ".join(roster[:3])
        raise ConfigError(
            f"{self.source} names {stranger!r}, which is no peer of this federation; its"
            f" {len(roster)} peers are {first_peers}, ...",
            key="topology.path",
        )

    def check_contains(self, peer: str, roster: Sequence[str]) -> None:
        """Refuse a peer that the graph does not name, and which would be alone for ever."""
        if not self.is_numbered and peer not in self.labels:
            raise ConfigError(
                f"{self.source} does not name {peer}, so it has no neighbours; add it to the file"
                " at every site.",
                key="topology.path",
            )

    # who receives from whom

    def edges(self, t: int) -> Edges:
        """Return the edges of round t; after the last graph the first one follows."""
        return self.rounds[t % len(self.rounds)]

    def neighbours(self, t: int, roster: Sequence[str]) -> dict[str, list[str]]:
        """Return whom each peer receives from in round t; strangers are left out."""
        nodes = self.nodes_by_peer(roster)
        peers = dict(zip(nodes.values(), nodes, strict=True))
        graph: dict[str, list[str]] = {peer: [] for peer in roster}
        edges = self.edges(t)
        for receiver, sender in zip(edges.receivers.tolist(), edges.senders.tolist(), strict=True):
            if receiver != sender and receiver in peers and sender in peers:
                graph[peers[receiver]].append(peers[sender])
        return {peer: sorted(senders) for peer, senders in graph.items()}

    def degrees(self, peers: int) -> list[int]:
        """Return how many neighbours each peer has in round 0."""
        edges = self.edges(0)
        is_neighbour = edges.receivers != edges.senders
        counts: list[int] = np.bincount(
            edges.receivers[is_neighbour], minlength=len(self.labels)
        ).tolist()
        return counts + [0] * (peers - len(counts))

    def mixing_weights(self, t: int, roster: Sequence[str], peer: str) -> dict[str, float]:
        """Return the weight of each neighbour and of the peer itself in round t."""
        nodes = self.nodes_by_peer(roster)
        if peer not in nodes:
            return {peer: 1.0}
        peers = dict(zip(nodes.values(), nodes, strict=True))
        row = self.edges(t).row(nodes[peer])
        own_weight = row.pop(nodes[peer], None)
        if own_weight is None:
            own_weight = max(0.0, 1.0 - sum(row.values()))
        weights = {peers[node]: weight for node, weight in row.items() if node in peers}
        return {**weights, peer: own_weight}

    def check_weights(self) -> None:
        """Refuse rows of weights that leave nothing for the peer's own model."""
        if not self.is_weighted:
            return
        for t, edges in enumerate(self.rounds):
            sums = np.bincount(edges.receivers, edges.weights, minlength=len(self.labels))
            states_own = np.zeros(len(self.labels), dtype=bool)
            states_own[edges.receivers[edges.receivers == edges.senders]] = True
            excess = np.flatnonzero((sums > 1 + TOLERANCE) & ~states_own)
            if len(excess):
                node = int(excess[0])
                when = f" in round {t}" if len(self.rounds) > 1 else ""
                raise ConfigError(
                    f"{self.source}: the weights of peer {self.labels[node]}'s neighbours add up"
                    f" to {sums[node]:g}{when}, more than 1, and leave none for its own model."
                    " State its own weight on the diagonal, scale them, or set"
                    " topology.weights=false.",
                    key="topology.weights",
                )
