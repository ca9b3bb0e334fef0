"""Graphs of peers from matrices, files and networkx, checked, with the place of what is wrong.

Everywhere the first peer receives from the second: the row of a matrix from the column, the first
peer of an edge from the second. An undirected networkx graph has both directions.
"""

import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dispfl.errors import ConfigError
from dispfl.files import read_regular
from dispfl.topology.peer_graphs import Edges, Floats, PeerGraphs

EDGE_COLUMNS = ("receiver", "sender", "weight", "round")
MAX_ROUND = 1_000_000


# Python objects


def is_graph(value: object) -> bool:
    """Whether this is meant as a graph: a networkx one, an array, or a list."""
    return isinstance(value, (list, tuple)) or hasattr(value, "__array__") or _is_networkx(value)


def graphs_from(graph: object) -> PeerGraphs:
    """Return the graphs of a matrix, a networkx graph, or a list of these, one for each round."""
    source = "The graph"
    if isinstance(graph, (list, tuple)) and graph:
        if all(map(_is_networkx, graph)):
            return _from_networkx(graph, source)
        if any(map(_is_networkx, graph)):
            raise ConfigError(
                "topology must be a list of graphs of the same type, got networkx graphs beside"
                " others.",
                key="topology",
            )
    if _is_networkx(graph):
        return _from_networkx([graph], source)
    try:
        matrix = np.asarray(graph)
    except ValueError:  # rows of different lengths
        matrix = np.asarray(None)
    return _from_array(matrix, source)


def _is_networkx(graph: object) -> bool:
    """Whether this is a networkx graph; networkx itself is not needed."""
    return hasattr(graph, "adj") and hasattr(graph, "is_directed") and hasattr(graph, "edges")


def _from_networkx(graphs: Sequence[Any], source: str) -> PeerGraphs:
    names: set[str] = set()
    for graph in graphs:
        names.update(map(str, graph.nodes))
    nodes = _numbered(names)
    rounds = []
    for t, graph in enumerate(graphs):
        place = f"{source} of round {t}" if len(graphs) > 1 else source
        weights = _EdgeWeights(nodes)
        for u, v, weight in graph.edges(data="weight", default=1):
            weights.add(str(u), str(v), weight, f"{place}, edge {u} to {v}")
            if not graph.is_directed() and u != v:
                weights.add(str(v), str(u), weight, f"{place}, edge {v} to {u}")
        rounds.append(weights.edges())
    return PeerGraphs(source, tuple(nodes), tuple(rounds), is_complete=True)


def _numbered(names: set[str]) -> dict[str, int]:
    """Return a number for each name, the same in whichever order they are read."""
    return dict(zip(sorted(names), range(len(names)), strict=True))


def _from_array(
    array: NDArray[Any], source: str, labels: Sequence[str] | None = None
) -> PeerGraphs:
    """Return the graphs of a square matrix, or of several, one for each round."""
    if array.dtype.kind not in "biuf" or array.ndim not in (2, 3):
        raise ConfigError(
            f"{source} must be a square matrix of numbers, or one for each round, got"
            f" {_shape(array)}.",
            key="topology.path",
        )
    matrices = array[None] if array.ndim == 2 else array
    rounds, rows, columns = matrices.shape
    if rows != columns or not rounds or not rows:
        raise ConfigError(
            f"{source} must be a square matrix, or one for each round, got {_shape(array)}.",
            key="topology.path",
        )
    matrices = matrices.astype(np.float64)
    _check_entries(matrices, source, by_round=array.ndim == 3)
    if labels is None:
        labels = list(map(str, range(rows)))
    graphs = map(_edges_of, matrices)
    return PeerGraphs(source, tuple(labels), tuple(graphs), is_complete=True)


def _shape(array: NDArray[Any]) -> str:
    if array.ndim == 0:
        return "a single value"
    if array.dtype.kind not in "biuf":
        return "values that are no numbers"
    return "one of shape " + " x ".join(map(str, array.shape))


def _check_entries(matrices: Floats, source: str, *, by_round: bool) -> None:
    """Refuse negative and non-finite entries, and name the first."""
    wrong = np.argwhere(~np.isfinite(matrices) | (matrices < 0))
    if len(wrong):
        t, row, column = wrong[0].tolist()
        when = f"round {t}, " if by_round else ""
        raise ConfigError(
            f"{source}, {when}row {row}, column {column} (from 0): a weight must be a finite number"
            f" of at least 0, got {matrices[t, row, column]:g}.",
            key="topology.path",
        )


def _edges_of(matrix: Floats) -> Edges:
    receivers, senders = np.nonzero(matrix)
    return Edges(receivers, senders, matrix[receivers, senders])


class _EdgeWeights:
    """Collects the edges of one round, and refuses bad weights and edges that are there already."""

    def __init__(self, nodes: Mapping[str, int]) -> None:
        self._nodes = nodes
        self._weights: dict[tuple[int, int], float] = {}

    def add(self, receiver: str, sender: str, weight: object, place: str) -> None:
        """Add an edge; `place` is where it was read."""
        try:
            number = float(weight)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            number = float("nan")
        if not isfinite(number) or number < 0:
            raise ConfigError(
                f"{place}: a weight must be a finite number of at least 0, got {weight}.",
                key="topology.path",
            )
        edge = self._nodes[receiver], self._nodes[sender]
        if edge in self._weights:
            raise ConfigError(
                f"{place}: {receiver} receives from {sender} already; name each edge once.",
                key="topology.path",
            )
        self._weights[edge] = number

    def edges(self) -> Edges:
        """Return the edges; those of weight 0 are none."""
        edges = sorted(self._weights)
        pairs = np.array(edges, dtype=np.int64).reshape(-1, 2)
        weights = np.array(list(map(self._weights.get, edges)), dtype=np.float64)
        is_edge = weights > 0
        return Edges(pairs[is_edge, 0], pairs[is_edge, 1], weights[is_edge])


# files


def read_graphs(path: Path, *, directed: bool) -> PeerGraphs:
    """Read a matrix or a list of edges."""
    try:
        content = read_regular(path)
    except OSError as problem:
        reason = problem.strerror or str(problem)
        raise ConfigError(
            f"topology.path is {path}, which cannot be read: {reason}.", key="topology.path"
        ) from None
    if path.suffix.lower() == ".npy":
        return _from_array(_read_npy(content, path), str(path))

    lines = list(_text_lines(content, path))
    if not lines:
        raise ConfigError(f"{path} is empty; it must have a graph.", key="topology.path")
    first_line = list(map(str.lower, lines[0].cells))
    if first_line[:2] == ["receiver", "sender"]:
        return _from_edges(lines[1:], first_line, path, directed=directed)
    if path.suffix.lower() == ".csv":
        return _from_table(lines, path)
    return _from_edges(lines, EDGE_COLUMNS, path, directed=directed)


def _read_npy(content: bytes, path: Path) -> NDArray[Any]:
    try:
        array: NDArray[Any] = np.load(io.BytesIO(content), allow_pickle=False)
    except (ValueError, OSError, EOFError) as problem:
        raise ConfigError(
            f"{path} is no .npy file of numbers: {str(problem).rstrip('.')}.", key="topology.path"
        ) from None
    return array


class _Line(NamedTuple):
    """A line of a text file."""

    number: int
    cells: list[str]


def _text_lines(content: bytes, path: Path) -> Iterator[_Line]:
    """Yield the lines with their cells; separated by commas in CSV files, else by white space."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is no text file in UTF-8.", key="topology.path") from None
    is_csv = path.suffix.lower() == ".csv"
    for number, line in enumerate(text.splitlines(), start=1):
        line = line.partition("#")[0]
        cells = line.replace(",", " ").split()
        if is_csv:
            cells = list(map(str.strip, next(csv.reader([line]), [])))
        if any(cells):
            yield _Line(number, cells)


def _from_table(lines: Sequence[_Line], path: Path) -> PeerGraphs:
    """Return the graph of a matrix in a CSV file, maybe with names in its first row and column."""
    header = lines[0].cells
    labels = None
    if len(lines) == len(header) + 1:  # n names above n rows
        labels = header
        lines = lines[1:]
    elif len(lines) == len(header) and _as_number(header[0]) is None:  # names on both sides
        labels = header[1:]
        lines = lines[1:]
    if labels is not None:
        if len(set(labels)) < len(labels):
            raise ConfigError(f"{path}, line 1: a name occurs twice.", key="topology.path")
        if all(len(line.cells) == len(labels) + 1 for line in lines):
            lines = _without_names(lines, labels, path)

    size = len(lines)
    matrix = np.zeros((size, size))
    for row, line in enumerate(lines):
        if len(line.cells) != size:
            raise ConfigError(
                f"{path}, line {line.number}: a matrix of {size} rows has {size} numbers in a row,"
                f" got {len(line.cells)}. A list of edges begins with the line receiver,sender.",
                key="topology.path",
            )
        for column, cell in enumerate(line.cells):
            number = _as_number(cell)
            if number is None or not isfinite(number) or number < 0:
                raise ConfigError(
                    f"{path}, line {line.number}, column {column + 1}: a weight must be a finite"
                    f" number of at least 0, got {cell!r}.",
                    key="topology.path",
                )
            matrix[row, column] = number
    return _from_array(matrix, str(path), labels)


def _without_names(lines: Sequence[_Line], labels: Sequence[str], path: Path) -> list[_Line]:
    """Return the rows of a matrix without the names in their first column."""
    for line, label in zip(lines, labels, strict=True):
        if line.cells[0] != label:
            raise ConfigError(
                f"{path}, line {line.number}: the names of rows must be those of columns in the"
                f" same order, so this is {label!r}, got {line.cells[0]!r}.",
                key="topology.path",
            )
    return [_Line(line.number, line.cells[1:]) for line in lines]


def _as_number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None


def _from_edges(
    lines: Iterable[_Line], columns: Sequence[str], path: Path, *, directed: bool
) -> PeerGraphs:
    """Return the graphs of a list of edges."""
    if not set(columns) <= set(EDGE_COLUMNS) or len(set(columns)) < len(columns):
        raise ConfigError(
            f"{path}, line 1: the columns are receiver, sender and optionally weight and round, got"
            f" {', '.join(columns)}.",
            key="topology.path",
        )
    edges = [_edge(line, columns, path) for line in lines]
    names: set[str] = set()
    for edge in edges:
        names.update((edge.receiver, edge.sender))
    nodes = _numbered(names)
    by_round: dict[int, _EdgeWeights] = {}
    for edge in edges:
        weights = by_round.setdefault(edge.t, _EdgeWeights(nodes))
        weights.add(edge.receiver, edge.sender, edge.weight, edge.place)
        if not directed and edge.receiver != edge.sender:
            weights.add(edge.sender, edge.receiver, edge.weight, edge.place)

    rounds = []
    for t in range(max(by_round, default=0) + 1):
        rounds.append(by_round.get(t, _EdgeWeights(nodes)).edges())
    return PeerGraphs(str(path), tuple(nodes), tuple(rounds), is_complete=False)


class _Edge(NamedTuple):
    """A line of a list of edges."""

    receiver: str
    sender: str
    weight: str
    t: int
    place: str


def _edge(line: _Line, columns: Sequence[str], path: Path) -> _Edge:
    place = f"{path}, line {line.number}"
    cells = dict(zip(columns, line.cells, strict=False))
    if len(line.cells) > len(columns) or not cells.get("receiver") or not cells.get("sender"):
        raise ConfigError(
            f"{place}: an edge is {', '.join(columns)}; got {' '.join(line.cells)!r}.",
            key="topology.path",
        )
    t = _round_of(cells.get("round") or "0", place)
    return _Edge(cells["receiver"], cells["sender"], cells.get("weight") or "1", t, place)


def _round_of(cell: str, place: str) -> int:
    if not (cell.isascii() and cell.isdecimal()) or int(cell) > MAX_ROUND:
        raise ConfigError(
            f"{place}: a round must be a whole number from 0 to {MAX_ROUND:,}, got {cell!r}.",
            key="topology.path",
        )
    return int(cell)
