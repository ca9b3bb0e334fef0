"""Finding run directories and reading them, with a sentence for each that is not what it should be."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from dispfl.errors import RunError
from dispfl.roster import roster_names
from dispfl.runs.directory import MADE_IN_PYTHON, read_config, read_metrics, read_summary
from dispfl.runs.reading import label_counts

Record = dict[str, Any]
NUMBERS = (("busiest", "paper_mb"), ("busiest", "wire_mb"), ("flops_per_peer",), ("flops_total",), ("seconds",))
"""What every line of the metrics has as a finite number."""
SPREADS = ("accuracy", "accuracy_mixed", "mask_change", "overlap")
"""What a line has with a mean, a standard deviation and a value a peer, or has not."""


@dataclass(frozen=True)
class Run:
    """A run directory as it was read."""

    path: Path
    config: Mapping[str, Any]
    records: Sequence[Record]
    summary: Record | None
    """None while the run is not finished."""

    @property
    def seed(self) -> int:
        return int(self.config["seed"])

    @property
    def method(self) -> str:
        return str(self.config["method"]["name"])

    @property
    def made_in_python(self) -> bool:
        return MADE_IN_PYTHON in self.config

    @property
    def roster(self) -> list[str]:
        return roster_names(self.config["peers"])

    @property
    def scores(self) -> dict[str, float]:
        """Each peer's score in the last round that was scored; a peer that has none is left out."""
        last = next((record["accuracy"] for record in reversed(self.records) if record["accuracy"]), None)
        pairs = zip(self.roster, last["per_peer"], strict=True) if last else ()
        return {peer: score for peer, score in pairs if score is not None}

    @property
    def densities(self) -> dict[str, float] | None:
        """Each peer's density, where there are groups: as many of equal size as the method lists, in roster order."""
        listed, peers = self.config["method"].get("density"), self.config["peers"]
        if not isinstance(listed, list) or len(set(listed)) < 2:
            return None
        return {peer: listed[k * len(listed) // peers] for k, peer in enumerate(self.roster)}

    @property
    def failures(self) -> list[tuple[int, str, str]]:
        """Round (1 is the first), peer and reason of each step that was given up."""
        return [(r["round"] + 1, peer, str(why)) for r in self.records for peer, why in r["failures"].items()]

    @property
    def traffic(self) -> dict[str, tuple[float, float]] | None:
        """Each node's megabytes a round, up and down; None where the metrics do not tell."""
        if not all("traffic" in record for record in self.records):
            return None
        total = dict.fromkeys(self.roster, (0.0, 0.0))
        for record in self.records:
            for node, (up, down) in record["traffic"].items():
                before = total.get(node, (0.0, 0.0))
                total[node] = (before[0] + up, before[1] + down)
        scale = 1e6 * len(self.records)
        return {node: (up / scale, down / scale) for node, (up, down) in total.items()}

    def label_counts(self) -> list[list[int]] | None:
        """How many training samples of each class every peer has; None where no split was saved."""
        counts = label_counts(self.path)
        if counts is None:
            return None
        if counts.dim() != 2 or len(counts) != self.config["peers"] or not counts.numel():
            raise RunError(
                f"The split in {self.path} is not of {self.config['peers']} peers; restore it, or run again."
            )
        return [[int(count) for count in own] for own in counts.tolist()]


def find_runs(paths: Iterable[Path]) -> list[Path]:
    """The run directories among these paths and in the folders among them, each once."""
    found: dict[Path, Path] = {}
    for path in paths:
        if not path.exists():
            raise RunError(f"{path} does not exist; name a run directory, or a folder that has some in it.")
        if (path / "config.toml").exists():
            inside = [path]
        else:
            inside = sorted((file.parent for file in path.rglob("config.toml")), key=_natural)
        if not inside:
            raise RunError(f"{path} is not a run directory, and none is in it: there is no config.toml.")
        for run in inside:
            found.setdefault(run.resolve(), run)
    return list(found.values())


def read_run(path: Path) -> Run:
    """Read a run directory and check all that a report relies on."""
    config, records = read_config(path), read_metrics(path)
    for key in ("seed", "rounds", "peers"):
        if type(config.get(key)) is not int:
            raise RunError(f"{path / 'config.toml'} is not a run's config: {key} is not a whole number in it.")
    if not isinstance(config.get("method"), dict) or not isinstance(config["method"].get("name"), str):
        raise RunError(f"{path / 'config.toml'} is not a run's config: method.name is not a text in it.")
    for number, record in enumerate(records, start=1):
        wrong = _wrong(record, config["peers"])
        if wrong:
            raise RunError(
                f"{path / 'metrics.jsonl'}, line {number}: {wrong} is missing or not what it should be. Restore the "
                "file, or run it again."
            )
    return Run(path, config, records, read_summary(path))


def _wrong(record: Record, peers: int) -> str | None:
    """The first thing in a line of the metrics that is not what it should be."""
    for keys in NUMBERS:
        value: Any = record
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        if not _is_number(value):
            return ".".join(keys)
    for key in SPREADS:
        value = record.get(key)
        if value is not None and not _is_spread(value, peers):
            return key
    if "accuracy" not in record:
        return "accuracy"
    if not isinstance(record.get("failures"), dict):
        return "failures"
    traffic = record.get("traffic", {})
    if not isinstance(traffic, dict) or not all(_is_pair(value) for value in traffic.values()):
        return "traffic"
    return None


def _is_spread(value: Any, peers: int) -> bool:
    if not isinstance(value, dict) or not _is_number(value.get("mean")) or not _is_number(value.get("std")):
        return False
    per_peer = value.get("per_peer")
    if not isinstance(per_peer, list) or len(per_peer) != peers:
        return False
    return all(score is None or _is_number(score) for score in per_peer)


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_is_number, value))


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and isfinite(value)


def _natural(path: Path) -> tuple[str, int, str]:
    """Folders by name, and `seed-2` before `seed-10`."""
    start, _, number = path.name.rpartition("-")
    return (str(path.parent), int(number), start) if number.isdecimal() else (str(path.parent), 0, path.name)
