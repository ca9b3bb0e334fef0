"""Do peers with similar data learn similar masks? The paper's figure that explains the masks, in numbers.

For every pair of peers: the cosine between their label distributions, and the Hamming distance between their masks,
as the share of all weights that one keeps and the other does not. Spearman's rank correlation over the pairs says how
the one goes with the other.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dispfl.analysis.similarity import (
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
from dispfl.errors import RunError
from dispfl.runs.directory import MADE_IN_PYTHON, read_config, read_metrics
from dispfl.runs.reading import label_counts, layout_of, personal_states, saved_rounds


@dataclass(frozen=True)
class Layer:
    """The share of a layer's weights that peers keep."""

    name: str
    weights: int
    least: float
    mean: float
    most: float


@dataclass(frozen=True, eq=False)
class RunMasks:
    """The masks of a run's peers beside each other, and beside their data."""

    method: str
    rounds: int
    """How many are in the checkpoint that the masks are of."""
    planned: int
    """How many the run should have."""
    peers: tuple[str, ...]
    groups: tuple[int, ...]
    """The sizes of the groups that share a label distribution, in roster order; empty where there are none."""
    densities: tuple[float, ...]
    distances: Matrix
    similarities: Matrix | None
    """None where the run saved no split."""
    correlation: Correlation | None
    """None where there is nothing to correlate."""
    between_groups: float | None
    """Spearman's correlation over the pairs of different groups alone: what is left of it beyond the groups."""
    layers: tuple[Layer, ...]
    """Empty where only the run's caller knows the model."""
    independent: float | None
    """The mean distance that masks of the same densities, layer by layer, have when drawn independently."""
    overlap: tuple[dict[str, float], ...]
    """By round: what share of a peer's kept weights a neighbour that it hears holds too. Empty if not recorded."""

    @property
    def title(self) -> str:
        """`dispfl, 20 peers in 4 groups, after 30 rounds`"""
        groups = f" in {len(self.groups)} groups" if self.groups else ""
        rounds = str(self.rounds) if self.rounds == self.planned else f"{self.rounds} of {self.planned}"
        return f"{self.method}, {len(self.peers)} peers{groups}, after {rounds} round{'s' if rounds != '1' else ''}"

    @property
    def sentence(self) -> str:
        """What the run says about data and masks, and no more than that."""
        if self.similarities is None:
            return "The run saved no split, so how alike the peers' labels are is not known, nor a correlation."
        if self.correlation is None:
            return "There is nothing to correlate: labels, or masks, are equally far apart in all pairs of peers."
        rank = self.correlation
        claim = "Closer data, closer masks" if rank.spearman < 0 else "Closer data, more distant masks"
        if rank.p > 0.05:
            claim = "No clear relation between data and masks"
        chance = f"p = {rank.p:.3f} when peers are shuffled"
        return f"{claim}: rank correlation {rank.spearman:.2f} over {rank.pairs} pairs ({chance})."

    def to_json(self) -> dict[str, Any]:
        """All of it, for other programs."""
        values = asdict(self) | {"sentence": self.sentence}
        matrices = {key: None if values[key] is None else values[key].tolist() for key in ("distances", "similarities")}
        return values | matrices


def masks_of_run(path: Path) -> RunMasks:
    """Compare the masks that a run's peers have in its newest complete checkpoint."""
    config, rounds = read_config(path), saved_rounds(path)
    states = personal_states(path)
    bits = np.stack([state.model.mask.bits.numpy() for state in states.values()])
    [size] = {state.model.mask.size for state in states.values()}
    kept = np.array([state.model.mask.kept for state in states.values()])
    method = config["method"]["name"]
    if np.isin(kept, (0, size)).all():
        raise RunError(f"{path} has no masks to compare: {method} kept every peer's model dense. Try method=dispfl.")
    if len(states) < 2:
        raise RunError(f"{path} has one peer; its mask has no other to be compared with.")
    distances = hamming_distances(bits) / size
    counts = label_counts(path)
    if counts is not None and len(counts) != len(states):
        raise RunError(f"{path} has the labels of {len(counts)} peers but the masks of {len(states)}; it is damaged.")
    similarities = None if counts is None else cosine_similarities(counts.numpy())
    groups = _group_sizes(config.get("partition", {}), len(states))
    layers, independent = ((), None) if MADE_IN_PYTHON in config else _by_layer(path, bits, size)
    return RunMasks(
        method=method,
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
            {"round": record["round"] + 1, "mean": record["overlap"]["mean"], "std": record["overlap"]["std"]}
            for record in read_metrics(path)[:rounds]
            if record.get("overlap")
        ),
    )


def _by_layer(path: Path, bits: Bits, size: int) -> tuple[tuple[Layer, ...], float]:
    """The layers' densities over the peers, and how far apart independent masks with these densities are."""
    layout = layout_of(path)
    if layout.size != size:
        raise RunError(
            f"{path / 'config.toml'} describes a model of {layout.size} weights, but the checkpoint's have {size}; "
            "one of the two is of another run."
        )
    densities = kept_by_layer(bits, layout.sizes) / np.asarray(layout.sizes)
    spread = zip(layout.names, layout.sizes, densities.T.tolist(), strict=True)
    layers = tuple(Layer(name, weights, min(d), float(np.mean(d)), max(d)) for name, weights, d in spread)
    return layers, independent_distance(densities, layout.sizes)


def _group_sizes(partition: Mapping[str, Any], peers: int) -> tuple[int, ...]:
    """The sizes of a grouped partition's blocks of peers, equal up to one, the larger ones first."""
    if partition.get("name") != "grouped":
        return ()
    return tuple(len(block) for block in np.array_split(np.arange(peers), partition["groups"]))


def _between_groups(similarities: Matrix | None, distances: Matrix, groups: tuple[int, ...]) -> float | None:
    if similarities is None or not groups:
        return None
    between = ~within_groups(groups)
    return spearman(pairs_of(similarities)[between], pairs_of(distances)[between])
