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
from rich.console import Console
from rich.table import Table

from dispfl.config import MADE_IN_PYTHON
from dispfl.core.packed import Mask
from dispfl.errors import RunError
from dispfl.paper.similarity import (
    Bits,
    Correlation,
    Matrix,
    correlate,
    cosine_similarities,
    hamming_distances,
    independent_distance,
    kept_by_layer,
    pairs_of,
    spearman,
    within_groups,
)
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
    """The sizes of the groups with a common label distribution, in roster order; empty if there are
    none."""
    densities: tuple[float, ...]
    distances: Matrix
    similarities: Matrix | None
    """None if the run saved no split."""
    correlation: Correlation | None
    """None if there is nothing to correlate."""
    between_groups: float | None
    """Spearman's correlation over the pairs of different groups only: the part that groups do not
    explain."""
    layers: tuple[LayerDensity, ...]
    """Empty if the network is a user's own, or that of custom data, whose shape the run does not
    record."""
    independent: float | None
    """The expected mean distance of independent masks with the same densities in every layer."""
    overlap: tuple[dict[str, float], ...]
    """By round: the fraction of a peer's kept weights that a neighbour keeps too. Empty if not
    recorded."""
    channels: bool = False
    """Whether masks are of channels. Distances and densities are of weights in any case."""

    @property
    def title(self) -> str:
        """`dispfl, 20 peers in 4 groups, after 30 rounds`"""
        groups = f" in {len(self.groups)} groups" if self.groups else ""
        rounds = (
            str(self.rounds) if self.rounds == self.planned else f"{self.rounds} of {self.planned}"
        )
        method = f"{self.method} with masks of channels" if self.channels else self.method
        return (
            f"{method}, {len(self.peers)} peers{groups}, after {rounds}"
            f" round{'s' if rounds != '1' else ''}"
        )

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
        claim = (
            "Closer data, closer masks" if rank.spearman < 0 else "Closer data, more distant masks"
        )
        if rank.p > 0.05:
            claim = "No clear relation between data and masks"
        chance = f"p = {rank.p:.3f} when peers are shuffled"
        return f"{claim}: rank correlation {rank.spearman:.2f} over {rank.pairs} pairs ({chance})."

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON data."""
        values = asdict(self) | {"sentence": self.sentence}
        matrices = {
            key: None if values[key] is None else values[key].tolist()
            for key in ("distances", "similarities")
        }
        return values | matrices


def compare_masks(path: Path) -> RunMasks:
    """Compare the peers' masks in the newest complete checkpoint of a run."""
    config, rounds = read_config(path), saved_rounds(path)
    states = personal_states(path)
    bits = np.stack([_weight_bits(state.model.mask) for state in states.values()])
    [size] = {state.model.mask.size for state in states.values()}
    kept = np.array([state.model.mask.kept for state in states.values()])
    method = config["method"]["name"]
    if np.isin(kept, (0, size)).all():
        raise RunError(
            f"{path} has no masks to compare: all models of {method} are dense. Try method=dispfl."
        )
    if len(states) < 2:
        raise RunError(f"{path} has one peer only; comparing masks needs two or more.")
    distances = hamming_distances(bits) / size
    counts = label_counts(path)
    if counts is not None and len(counts) != len(states):
        raise RunError(
            f"{path} is damaged: it has the labels of {len(counts)} peers but the masks of"
            f" {len(states)}."
        )
    similarities = None if counts is None else cosine_similarities(counts.numpy())
    groups = _group_sizes(config.get("partition", {}), len(states))
    layers, independent = (
        _by_layer(path, bits, size) if _has_built_in_network(config) else ((), None)
    )
    return RunMasks(
        method=method,
        channels=any(state.model.mask.structure == "channels" for state in states.values()),
        rounds=rounds,
        planned=config["rounds"],
        peers=tuple(states),
        groups=groups,
        densities=tuple((kept / size).tolist()),
        distances=distances,
        similarities=similarities,
        correlation=None if similarities is None else correlate(similarities, distances),
        between_groups=_between_groups(similarities, distances, groups),
        layers=layers,
        independent=independent,
        overlap=tuple(
            {
                "round": record["round"] + 1,
                "mean": record["overlap"]["mean"],
                "std": record["overlap"]["std"],
            }
            for record in read_metrics(path)[:rounds]
            if record.get("overlap")
        ),
    )


def _weight_bits(mask: Mask) -> Bits:
    """Return one bit for each weight, also of a mask of channels."""
    return np.packbits(mask.flags(), bitorder="little")


def _has_built_in_network(config: Mapping[str, Any]) -> bool:
    """Whether the config alone says which network it is."""
    return MADE_IN_PYTHON not in config and "custom" not in (
        config["data"]["name"],
        config["model"]["name"],
    )


def _by_layer(path: Path, bits: Bits, size: int) -> tuple[tuple[LayerDensity, ...], float]:
    """Return the layers' densities over the peers, and the expected distance of independent
    masks."""
    layout = layout_of(path)
    if layout.size != size:
        raise RunError(
            f"{path / 'config.toml'} describes a model of {layout.size} weights, but those in the"
            f" checkpoint have {size}; one of the two is from another run."
        )
    densities = kept_by_layer(bits, layout.sizes) / np.asarray(layout.sizes)
    columns = zip(layout.names, layout.sizes, densities.T.tolist(), strict=True)
    layers = tuple(
        LayerDensity(name, weights, min(d), float(np.mean(d)), max(d))
        for name, weights, d in columns
    )
    return layers, independent_distance(densities, layout.sizes)


def _group_sizes(partition: Mapping[str, Any], peers: int) -> tuple[int, ...]:
    """Return the sizes of a grouped partition's blocks of peers, equal up to one, the larger ones
    first."""
    if partition.get("name") != "grouped":
        return ()
    return tuple(len(block) for block in np.array_split(np.arange(peers), partition["groups"]))


def _between_groups(
    similarities: Matrix | None, distances: Matrix, groups: tuple[int, ...]
) -> float | None:
    if similarities is None or not groups:
        return None
    between = ~within_groups(groups)
    return spearman(pairs_of(similarities)[between], pairs_of(distances)[between])


def print_masks(found: RunMasks, console: Console) -> None:
    """Print the conclusion, distances and similarities over the pairs, and densities by layer."""
    print_text(console, found.title, "bold")
    print_text(console, found.sentence)
    console.print("", _pairs_table(found), "", sep="\n")
    sparse = [layer for layer in found.layers if layer.least < 1]
    shown = sorted(sparse, key=lambda layer: -layer.weights)[:MAX_LAYERS]
    if shown:
        console.print(_layers_table([layer for layer in sparse if layer in shown]), "", sep="\n")
    for note in _notes(found, len(sparse) - len(shown)):
        print_text(console, note, "dim")


def _pairs_table(found: RunMasks) -> Table:
    """Return the distances of masks and the similarities of labels over the pairs."""
    table = number_table("over pairs of peers", "least", "mean", "most")

    def row(name: str, values: Matrix) -> None:
        if len(values):
            table.add_row(
                name, *(f"{number:.3f}" for number in (values.min(), values.mean(), values.max()))
            )

    distances = pairs_of(found.distances)
    row("distance of masks", distances)
    if found.groups:
        within = within_groups(found.groups)
        row("  within a group", distances[within])
        row("  between groups", distances[~within])
    if found.independent is not None:
        table.add_row("  if independent", "", f"{found.independent:.3f}", "")
    if found.similarities is not None:
        row("similarity of labels", pairs_of(found.similarities))
    return table


def _layers_table(layers: Sequence[LayerDensity]) -> Table:
    table = number_table("density over peers", "least", "mean", "most", "weights")
    for layer in layers:
        densities = (f"{density:.3f}" for density in (layer.least, layer.mean, layer.most))
        table.add_row(layer.name, *densities, f"{layer.weights:,}")
    return table


def _notes(found: RunMasks, smaller: int) -> Iterator[str]:
    """Yield remarks on the numbers; `smaller` layers are not in the table."""
    if found.between_groups is not None:
        pairs = int((~within_groups(found.groups)).sum())
        yield (
            f"Between groups only, the rank correlation is {found.between_groups:.2f} over {pairs}"
            " pairs."
        )
    dense = sum(layer.least == 1 for layer in found.layers)
    omitted = [f"{dense} dense in every peer"] * (dense > 0) + [f"{smaller} smaller ones"] * (
        smaller > 0
    )
    if omitted:
        yield f"Layers not shown: {', '.join(omitted)}; --json has them."
    if max(found.densities) - min(found.densities) > 0.01:
        yield (
            "The peers' densities differ, which increases the distance of masks regardless of the"
            " data."
        )
    if found.overlap:
        first, last = found.overlap[0], found.overlap[-1]
        yield (
            f"A neighbour keeps {first['mean']:.3f} of a peer's kept weights in round"
            f" {first['round']:.0f}, {last['mean']:.3f} in round {last['round']:.0f}."
        )
    else:
        yield "The run did not record the overlap with neighbours by round."
    if found.channels:
        yield "The masks are of channels; a weight is kept where all of its channels are."
    yield (
        "Distance: fraction of all weights that exactly one of two peers keeps. Similarity: cosine"
        " of label counts."
    )
