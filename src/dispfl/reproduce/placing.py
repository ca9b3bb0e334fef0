"""Where a run of an experiment stands: in the paper's tables, among the other runs, and on the disk."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dispfl import paper
from dispfl.config import Experiment, differing_keys
from dispfl.errors import ConfigError
from dispfl.grid import Cell
from dispfl.paper.printed import WITHOUT_TOPOLOGY
from dispfl.settings import did_you_mean

NO_PART_IN_IT = ("seed", "threads", "data.dir")
"""Keys that leave it the same experiment."""


@dataclass(frozen=True)
class PlacedRun:
    """A run of an experiment, and its place in the paper."""

    cell: Cell
    place: Mapping[str, str]
    """Data, partition, model, topology, method and density, in the paper's names, and the drop probability."""
    printed: paper.Row | None
    """The row that it stands beside, where the paper prints numbers."""
    targets: tuple[float, ...]


def chosen(runs: Sequence[PlacedRun], only: Sequence[str]) -> list[PlacedRun]:
    """The runs of these methods, data sets, partitions, ..., each named by its word in the paper's names."""
    wanted: dict[str, set[str]] = {}
    known = {value: key for run in runs for key, value in run.place.items()}
    for word in only:
        if word not in known:
            raise ConfigError(f"--only {word!r} is nothing that these runs differ in. {did_you_mean(word, known)}")
        wanted.setdefault(known[word], set()).add(word)
    found = [run for run in runs if all(run.place[key] in values for key, values in wanted.items())]
    if not found:
        raise ConfigError(f"--only {','.join(only)} leaves no run; no run is all of that.")
    return found


def place_of(experiment: Experiment) -> dict[str, Any]:
    """Where the paper's tables would have it; as in `paper.Row`, what plays no part is None."""
    said = experiment.to_toml()
    method, density = said["method"]["name"], said["method"].get("density", 1.0)
    return {
        "data": said["data"]["name"],
        "partition": said["partition"]["name"],
        "model": said["model"]["name"],
        "topology": None if method in WITHOUT_TOPOLOGY else said["topology"]["name"],
        "method": method,
        "density": None if method == "subfedavg" else tuple(density) if isinstance(density, list) else density,
    }


def as_text(place: Mapping[str, Any], experiment: Experiment) -> dict[str, str]:
    """The same in words, and the probability of dropping out."""
    match place["density"]:
        case None:
            density = "–"
        case tuple() as groups:
            density = f"{min(groups):g}–{max(groups):g}"
        case share:
            density = f"{share:g}"
    drop = "–" if place["topology"] is None else f"{experiment.topology.drop:g}"
    return {**{key: value or "–" for key, value in place.items()}, "density": density, "drop": drop}


def named(placed: Sequence[PlacedRun]) -> list[PlacedRun]:
    """The same runs, each called by what differs between them."""
    everywhere = {key: {run.place[key] for run in placed} for key in placed[0].place}
    differing = [key for key, values in everywhere.items() if len(values - {"–"}) > 1 or key == "method"]
    heading = {"data": "paper's data", "model": "paper's model"}
    return [
        replace(run, cell=replace(run.cell, row={heading.get(key, key): run.place[key] for key in differing}))
        for run in placed
    ]


def run_path(runs: Path, experiment: Experiment) -> Path:
    """The run directory: words to know it by, and a digest of all settings that are not the defaults."""
    said = experiment.to_toml()
    differing = differing_keys(Experiment(), experiment)
    settings = {key: value for key, (_, value) in differing.items() if key not in NO_PART_IN_IT}
    digest = hashlib.blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=4).hexdigest()
    data, partition, method, topology = (said[key]["name"] for key in ("data", "partition", "method", "topology"))
    density, drop = said["method"].get("density"), said["topology"]["drop"]
    kept = [] if density is None else [f"{density:g}" if isinstance(density, float) else "groups"]
    dropped = [f"drop{drop:g}"] if drop else []
    words = "-".join([method, *kept, topology, *dropped, digest])
    return runs / f"{data}-{partition}" / words / f"seed-{experiment.seed}"
