"""Topologies: which peers exchange models in a round."""

from dispfl.core.names import MAX_PEERS, peer_names
from dispfl.topology.base import Topology
from dispfl.topology.built_in import Exponential, Full, Grid, RandomRegular, Ring
from dispfl.topology.from_graph import GraphTopology
from dispfl.topology.read_graph import is_graph

__all__ = [
    "MAX_PEERS",
    "Exponential",
    "Full",
    "GraphTopology",
    "Grid",
    "RandomRegular",
    "Ring",
    "Topology",
    "is_graph",
    "peer_names",
]
