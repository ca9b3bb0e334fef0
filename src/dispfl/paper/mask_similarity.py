"""Do peers with similar data learn similar masks? The numbers behind the paper's Figure 5.

For every pair of peers: the cosine similarity of their label distributions, and the Hamming
distance of their masks as the fraction of all weights that exactly one of them keeps. Spearman's
rank correlation over the pairs relates the two.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from dispfl.config import MADE_IN_PYTHON
from dispfl.core.packed import Mask
from dispfl.errors import RunError
from dispfl.report.wording import plural
from dispfl.runs.directory import (
    label_counts,
    layout_of,
    personal_states,
    read_config,
    read_metrics,
    saved_rounds,
)
from dispfl.terminal import number_table, print_text

MAX_LAYERS = 16
"""The number of layers in the printed table."""
Matrix = NDArray[np.float64]
Bits = NDArray[np.uint8]
"""One mask per row, as bits, least significant first; the unused bits of the last byte are zero."""

BLOCK_WORDS = 8192
"""Of 64 bits: the blocks of a hundred peers, 6.5 MB, stay in the cache while pairs are compared."""
SHUFFLES = 999


@dataclass(frozen=True)
class Correlation:
    """The rank correlation of two quantities over all pairs of peers."""

    spearman: float
    pairs: int
    p: float
    """How often randomly permuted peers correlate as strongly, in either direction (Mantel test).

    Each peer is part of many pairs, so pairs are not independent and the usual p-value would be too
    small.
    """


def hamming_distances(bits: Bits) -> NDArray[np.int64]:
    """Return the number of positions in which each two masks differ, as (peers, peers)."""
    peers, width = bits.shape
    padded = np.zeros((peers, -(-width // 8) * 8), np.uint8)
    padded[:, :width] = bits
    words = padded.view(np.uint64)
    distances = np.zeros((peers, peers), np.int64)
    for begin in range(0, words.shape[1], BLOCK_WORDS):
        block = words[:, begin : begin + BLOCK_WORDS]
        for k in range(peers - 1):
            differing = np.bitwise_count(block[k + 1 :] ^ block[k])
            distances[k, k + 1 :] += differing.sum(axis=1, dtype=np.uint32)
    return distances + distances.T


def cosine_similarities(counts: NDArray[np.int64]) -> Matrix:
    """Return the cosine of each two peers' label counts: 1 for equal, 0 for disjoint ones.

    Rounded to twelve digits, so that equal distributions tie regardless of the order of summation.
    """
    directions = counts / np.linalg.norm(counts, axis=1, keepdims=True)
    return np.asarray(np.round(directions @ directions.T, 12))


def pairs_of(matrix: Matrix) -> Matrix:
    """Return the entries of a symmetric matrix above the diagonal, one per pair."""
    return np.asarray(matrix[np.triu_indices(len(matrix), 1)])


def within_groups(sizes: Sequence[int]) -> NDArray[np.bool_]:
    """Return which pairs, in the order of `pairs_of`, belong to one group."""
    group = np.repeat(np.arange(len(sizes)), sizes)
    return np.asarray((group[:, None] == group)[np.triu_indices(len(group), 1)])


def ranks(values: Matrix) -> Matrix:
    """Return the ascending ranks of values, from 1; equal values share their mean rank."""
    _, index, ties = np.unique(values, return_inverse=True, return_counts=True)
    return np.asarray((np.cumsum(ties) - (ties - 1) / 2)[index])


def spearman(values: Matrix, reference: Matrix) -> float | None:
    """Return the rank correlation of two vectors; None if either is constant."""
    a = _standard_ranks(values)
    b = _standard_ranks(reference)
    if a is None or b is None:
        return None
    return float(a @ b)


def correlate(values: Matrix, reference: Matrix, shuffles: int = SHUFFLES) -> Correlation | None:
    """Return the rank correlation of two symmetric matrices; None if either is constant."""
    a = _standard_ranks(pairs_of(values))
    b = _standard_ranks(pairs_of(reference))
    if a is None or b is None:
        return None
    correlation = float(a @ b)
    pairs = np.triu_indices(len(values), 1)
    square = np.zeros(values.shape)
    square[pairs] = b
    square += square.T

    rng = np.random.default_rng(0)
    stronger = 0
    threshold = abs(correlation) - 1e-9  # rounding must not exclude the identity permutation
    for _ in range(shuffles):
        order = rng.permutation(len(values))
        shuffled = float(a @ square[order][:, order][pairs])
        stronger += abs(shuffled) >= threshold
    return Correlation(correlation, len(a), (1 + stronger) / (1 + shuffles))


def _standard_ranks(values: Matrix) -> Matrix | None:
    """Return ranks with mean 0 and norm 1, whose scalar product is the correlation.

    None if all values are equal.
    """
    centred = ranks(values) - (len(values) + 1) / 2
    norm = np.linalg.norm(centred)
    if norm == 0:
        return None
    return centred / norm


def kept_by_layer(bits: Bits, sizes: Sequence[int]) -> NDArray[np.int64]:
    """Return the number of kept weights in each layer of each peer, as (peers, layers).

    Masks are not unpacked.
    """
    byte, bit = np.divmod(np.cumsum(sizes), 8)
    kept = np.empty((len(bits), len(sizes)), np.int64)
    for k, mask in enumerate(bits):
        before = np.concatenate([[0], np.cumsum(np.bitwise_count(mask), dtype=np.int64)])
        # A layer may end inside a byte.
        last = np.append(mask, np.uint8(0))[byte] & ((1 << bit) - 1)
        kept[k] = np.diff(before[byte] + np.bitwise_count(last), prepend=0)
    return kept


def independent_distance(densities: Matrix, sizes: Sequence[int]) -> float:
    """Return the expected distance of independent masks, mean over pairs.

    Where a layer has densities d_i and d_j in two peers, a position differs with probability
    d_i (1 - d_j) + d_j (1 - d_i).
    """
    weighted = densities * (np.asarray(sizes) / np.sum(sizes))
    only_one = weighted @ (1 - densities).T
    return float(np.mean(pairs_of(only_one + only_one.T)))


@dataclass(frozen=True)
class LayerDensity:
    """The density of one layer over the peers."""

    name: str
    weights: int
    least: float
    mean: float
    most: float


@dataclass(frozen=True, eq=False)
class RunMasks:
    """The masks of a run's peers compared with each other and with the peers' data."""

    method: str
    rounds: int
    """The number of rounds in the checkpoint."""
    planned: int
    """The number of rounds in the config."""
    peers: tuple[str, ...]
    groups: tuple[int, ...]
    """The sizes of the groups with a common label distribution, in roster order; may be empty."""
    densities: tuple[float, ...]
    distances: Matrix
    similarities: Matrix | None
    """None if the run saved no split."""
    correlation: Correlation | None
    """None if there is nothing to correlate."""
    between_groups: float | None
    """Spearman's correlation over pairs of different groups: what groups do not explain."""
    layers: tuple[LayerDensity, ...]
    """Empty if the run does not record the network's shape: a user's own, or for custom data."""
    independent: float | None
    """The expected mean distance of independent masks with the same densities in every layer."""
    overlap: tuple[dict[str, float], ...]
    """By round: the fraction of a peer's kept weights that a neighbour keeps too.

    Empty if not recorded.
    """
    channels: bool = False
    """Whether masks are of channels. Distances and densities are of weights in any case."""

    @property
    def title(self) -> str:
        """`dispfl, 20 peers in 4 groups, after 30 rounds`"""
        method = self.method
        if self.channels:
            method += " with masks of channels"
        peers = f"{len(self.peers)} peers"
        if self.groups:
            peers += f" in {len(self.groups)} groups"
        rounds = plural(self.rounds, "round")
        if self.rounds != self.planned:
            rounds = f"{self.rounds} of {plural(self.planned, 'round')}"
        return f"{method}, {peers}, after {rounds}"

    @property
    def sentence(self) -> str:
        """The relation between data and masks, as far as the numbers support it."""
        if self.similarities is None:
            return (
                "The run saved no split, so the similarity of labels and its correlation with masks"
                " are unknown."
            )
        if self.correlation is None:
            return (
                "There is nothing to correlate: all pairs of peers have the same label similarity"
                " or mask distance."
            )
        rank = self.correlation
        if rank.p > 0.05:
            claim = "No clear relation between data and masks"
        elif rank.spearman < 0:
            claim = "Closer data, closer masks"
        else:
            claim = "Closer data, more distant masks"
        chance = f"p = {rank.p:.3f} when peers are shuffled"
        return f"{claim}: rank correlation {rank.spearman:.2f} over {rank.pairs} pairs ({chance})."

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON data."""
        values = asdict(self) | {"sentence": self.sentence}
        for key in ("distances", "similarities"):
            if values[key] is not None:
                values[key] = values[key].tolist()
        return values


def compare_masks(path: Path) -> RunMasks:
    """Compare the peers' masks in the newest complete checkpoint of a run."""
    config = read_config(path)
    rounds = saved_rounds(path)
    states = personal_states(path)
    masks = [state.model.mask for state in states.values()]
    kept_counts = np.array([mask.kept for mask in masks])
    [size] = {mask.size for mask in masks}
    _check_masks(path, config, kept_counts, size)

    bits = np.stack(list(map(_weight_bits, masks)))
    distances = hamming_distances(bits) / size
    similarities = _label_similarities(path, len(states))
    groups = _group_sizes(config.get("partition", {}), len(states))
    correlation = None
    if similarities is not None:
        correlation = correlate(similarities, distances)
    layers: tuple[LayerDensity, ...] = ()
    independent = None
    if _has_built_in_network(config):
        layers, independent = _by_layer(path, bits, size)
    return RunMasks(
        method=str(config["method"]["name"]),
        channels=any(mask.structure == "channels" for mask in masks),
        rounds=rounds,
        planned=config["rounds"],
        peers=tuple(states),
        groups=groups,
        densities=tuple((kept_counts / size).tolist()),
        distances=distances,
        similarities=similarities,
        correlation=correlation,
        between_groups=_between_groups(similarities, distances, groups),
        layers=layers,
        independent=independent,
        overlap=tuple(_overlap_by_round(path, rounds)),
    )


def _check_masks(path: Path, config: Mapping[str, Any], kept: NDArray[Any], size: int) -> None:
    """Refuse runs whose masks cannot be compared."""
    if np.isin(kept, (0, size)).all():
        method = config["method"]["name"]
        raise RunError(
            f"{path} has no masks to compare: all models of {method} are dense. Try method=dispfl."
        )
    if len(kept) < 2:
        raise RunError(f"{path} has one peer only; comparing masks needs two or more.")


def _label_similarities(path: Path, peers: int) -> Matrix | None:
    """Return the similarities of the peers' labels; None if the run saved no split."""
    counts = label_counts(path)
    if counts is None:
        return None
    if len(counts) != peers:
        raise RunError(
            f"{path} is damaged: it has the labels of {len(counts)} peers but the masks of {peers}."
        )
    return cosine_similarities(counts.numpy())


def _overlap_by_round(path: Path, rounds: int) -> Iterator[dict[str, float]]:
    for record in read_metrics(path)[:rounds]:
        overlap = record.get("overlap")
        if overlap:
            yield {"round": record["round"] + 1, "mean": overlap["mean"], "std": overlap["std"]}


def _weight_bits(mask: Mask) -> Bits:
    """Return one bit for each weight, also of a mask of channels."""
    return np.packbits(mask.flags(), bitorder="little")


def _has_built_in_network(config: Mapping[str, Any]) -> bool:
    """Whether the config alone says which network it is."""
    if MADE_IN_PYTHON in config:
        return False
    return "custom" not in (config["data"]["name"], config["model"]["name"])


def _by_layer(path: Path, bits: Bits, size: int) -> tuple[tuple[LayerDensity, ...], float]:
    """Return the layers' densities over the peers, and the distance of independent masks."""
    layout = layout_of(path)
    if layout.size != size:
        raise RunError(
            f"{path / 'config.toml'} describes a model of {layout.size} weights, but those in the"
            f" checkpoint have {size}; one of the two is from another run."
        )
    densities = kept_by_layer(bits, layout.sizes) / np.asarray(layout.sizes)
    layers = []
    for name, weights, values in zip(layout.names, layout.sizes, densities.T, strict=True):
        layers.append(
            LayerDensity(
                name,
                weights,
                least=float(values.min()),
                mean=float(values.mean()),
                most=float(values.max()),
            )
        )
    return tuple(layers), independent_distance(densities, layout.sizes)


def _group_sizes(partition: Mapping[str, Any], peers: int) -> tuple[int, ...]:
    """Return the sizes of a grouped partition's blocks of peers, the larger ones first."""
    if partition.get("name") != "grouped":
        return ()
    return tuple(map(len, np.array_split(np.arange(peers), partition["groups"])))


def _between_groups(
    similarities: Matrix | None, distances: Matrix, groups: tuple[int, ...]
) -> float | None:
    if similarities is None or not groups:
        return None
    between = ~within_groups(groups)
    return spearman(pairs_of(similarities)[between], pairs_of(distances)[between])


def print_masks(masks: RunMasks, console: Console) -> None:
    """Print the conclusion, distances and similarities over the pairs, and densities by layer."""
    print_text(console, masks.title, "bold")
    print_text(console, masks.sentence)
    console.print("", _pairs_table(masks), "", sep="\n")
    sparse = [layer for layer in masks.layers if layer.least < 1]
    largest = sorted(sparse, key=lambda layer: -layer.weights)[:MAX_LAYERS]
    shown = [layer for layer in sparse if layer in largest]
    if shown:
        console.print(_layers_table(shown), "", sep="\n")
    for note in _notes(masks, len(sparse) - len(shown)):
        print_text(console, note, "dim")


def _pairs_table(masks: RunMasks) -> Table:
    """Return the distances of masks and the similarities of labels over the pairs."""
    table = number_table("over pairs of peers", "least", "mean", "most")

    def row(name: str, values: Matrix) -> None:
        if len(values):
            table.add_row(
                name, f"{values.min():.3f}", f"{values.mean():.3f}", f"{values.max():.3f}"
            )

    distances = pairs_of(masks.distances)
    row("distance of masks", distances)
    if masks.groups:
        within = within_groups(masks.groups)
        row("  within a group", distances[within])
        row("  between groups", distances[~within])
    if masks.independent is not None:
        table.add_row("  if independent", "", f"{masks.independent:.3f}", "")
    if masks.similarities is not None:
        row("similarity of labels", pairs_of(masks.similarities))
    return table


def _layers_table(layers: Sequence[LayerDensity]) -> Table:
    table = number_table("density over peers", "least", "mean", "most", "weights")
    for layer in layers:
        table.add_row(
            layer.name,
            f"{layer.least:.3f}",
            f"{layer.mean:.3f}",
            f"{layer.most:.3f}",
            f"{layer.weights:,}",
        )
    return table


def _notes(masks: RunMasks, smaller: int) -> Iterator[str]:
    """Yield remarks on the numbers; `smaller` layers are not in the table."""
    if masks.between_groups is not None:
        pairs = int((~within_groups(masks.groups)).sum())
        yield (
            f"Between groups only, the rank correlation is {masks.between_groups:.2f} over {pairs}"
            " pairs."
        )
    omitted = []
    dense = sum(layer.least == 1 for layer in masks.layers)
    if dense:
        omitted.append(f"{dense} dense in every peer")
    if smaller:
        omitted.append(f"{smaller} smaller ones")
    if omitted:
        yield f"Layers not shown: {', '.join(omitted)}; --json has them."
    if max(masks.densities) - min(masks.densities) > 0.01:
        yield (
            "The peers' densities differ, which increases the distance of masks regardless of the"
            " data."
        )
    if masks.overlap:
        first = masks.overlap[0]
        last = masks.overlap[-1]
        yield (
            f"A neighbour keeps {first['mean']:.3f} of a peer's kept weights in round"
            f" {first['round']:.0f}, {last['mean']:.3f} in round {last['round']:.0f}."
        )
    else:
        yield "The run did not record the overlap with neighbours by round."
    if masks.channels:
        yield "The masks are of channels; a weight is kept where all of its channels are."
    yield (
        "Distance: fraction of all weights that exactly one of two peers keeps. Similarity: cosine"
        " of label counts."
    )
