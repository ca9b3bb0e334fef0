"""A topology from data: a matrix, a list of edges or a networkx graph, constant or by round."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import PrivateAttr

from dispfl.errors import ConfigError
from dispfl.topology.base import Topology
from dispfl.topology.peer_graphs import PeerGraphs
from dispfl.topology.read_graph import graphs_from, read_graphs


class GraphTopology(Topology):
    """Who receives from whom, as a file or a graph says: its rows receive from its columns.

    In Python the graph itself may be given, as `Federation(topology=graph)` does: an adjacency
    matrix (a NumPy array, a tensor or nested lists), a networkx graph, or a list of these, one for
    each round.
    """

    name: Literal["file"] = "file"
    path: str = ""
    """An adjacency matrix (.npy, .csv), or a list of edges (.csv with the columns receiver, sender
    and optionally weight and round; .txt with these in order).

    Peers are given by name, or by their number from 0. If there are more rounds than graphs, they
    are repeated in turn.
    """
    directed: bool = True
    """Whether an edge of a list means that the first receives from the second only; false: both
    receive from each other."""
    weights: bool = True
    """Whether numbers other than 0 and 1 are weights of the average; false: all count the same."""
    digest: str = ""
    """A digest of the graph, filled in when it is read: a resumed run must find the same."""
    _graphs: PeerGraphs = PrivateAttr()

    def __init__(self, graph: object = None, /, **settings: Any) -> None:
        super().__init__(**settings)
        if graph is None:
            if not self.path:
                raise ConfigError(
                    "topology.path is missing: name a file with an adjacency matrix or a list of"
                    " edges.",
                    key="topology.path",
                )
            path = Path(self.path).expanduser().absolute()
            graphs = read_graphs(path, directed=self.directed)
            object.__setattr__(self, "path", str(path))
        else:
            graphs = graphs_from(graph)
        if not self.weights:
            graphs = graphs.without_weights()
        graphs.check_weights()

        digest = graphs.digest()
        if self.digest not in ("", digest):
            raise ConfigError(
                f"{graphs.source} has changed: its digest is {digest}, but topology.digest is"
                f" {self.digest}. Restore it, or omit topology.digest in a new run.",
                key="topology.digest",
            )
        object.__setattr__(self, "digest", digest)
        self._graphs = graphs

    @classmethod
    def located(cls, settings: dict[str, Any], folder: Path) -> dict[str, Any]:
        """Return the settings with the path in a folder, if it is relative."""
        if not settings.get("path"):
            return settings
        return {**settings, "path": str(folder / Path(str(settings["path"])).expanduser())}

    def shared_settings(self) -> dict[str, Any]:
        """Return all but the path: every site has the file in a place of its own."""
        return self.model_dump(mode="json", exclude={"path"})

    @property
    def is_weighted(self) -> bool:
        return self._graphs.is_weighted

    def check(self, peers: int) -> None:
        self._graphs.check_size(peers)

    def check_roster(self, roster: Sequence[str]) -> None:
        self._graphs.check_roster(roster)

    def degrees(self, peers: int) -> list[int]:
        return self._graphs.degrees(peers)

    def neighbours(self, seed: int, t: int, roster: Sequence[str]) -> dict[str, list[str]]:
        return self._graphs.neighbours(t, roster)

    def row(
        self, seed: int, t: int, roster: Sequence[str], peer: str
    ) -> tuple[list[str], list[str]]:
        self._graphs.check_contains(peer, roster)
        return super().row(seed, t, roster, peer)

    def mixing_weights(
        self, seed: int, t: int, roster: Sequence[str], peer: str
    ) -> dict[str, float] | None:
        """Return p_kj of each neighbour j, and of the peer k itself.

        The own weight is that on the diagonal. Where there is none it is the rest of 1.
        """
        if not self.is_weighted:
            return None
        return self._graphs.mixing_weights(t, roster, peer)
