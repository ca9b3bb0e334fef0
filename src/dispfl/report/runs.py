"""Find run directories, and read and validate them for a report."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from dispfl.config import MADE_IN_PYTHON
from dispfl.core.metric import is_number_format
from dispfl.errors import RunError
from dispfl.runs.directory import label_counts, read_config, read_metrics, read_summary
from dispfl.runs.metrics import last_scores, mean_peer_seconds
from dispfl.topology import peer_names

Record = dict[str, Any]
NUMBERS = (
    ("busiest", "paper_mb"),
    ("busiest", "wire_mb"),
    ("flops_per_peer",),
    ("flops_total",),
    ("seconds",),
)
"""Keys that hold a finite number in every line of the metrics."""
SPREADS = ("mixed", "test_loss", "train_loss", "mask_change", "overlap", "peer_seconds")
"""Keys that hold a mean, a standard deviation and one value per peer, or nothing."""


@dataclass(frozen=True)
class ReportRun:
    """The contents of a run directory."""

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
        return peer_names(self.config["peers"])

    @property
    def scores(self) -> dict[str, float]:
        """Each peer's score in the last evaluated round; peers without a score are omitted."""
        last = last_scores(self.records)
        pairs = zip(self.roster, last["per_peer"], strict=True) if last else ()
        return {peer: score for peer, score in pairs if score is not None}

    @property
    def peer_seconds(self) -> dict[str, float]:
        """The seconds that each peer computes in a round, where they were measured."""
        pairs = zip(
            self.roster, mean_peer_seconds(self.records) or [None] * len(self.roster), strict=True
        )
        return {peer: seconds for peer, seconds in pairs if seconds is not None}

    @property
    def densities(self) -> dict[str, float] | None:
        """Each peer's density if the method lists several: groups of equal size in roster order."""
        densities, peers = self.config["method"].get("density"), self.config["peers"]
        if not isinstance(densities, list) or len(set(densities)) < 2:
            return None
        return {peer: densities[k * len(densities) // peers] for k, peer in enumerate(self.roster)}

    @property
    def failures(self) -> list[tuple[int, str, str]]:
        """Round (1 is the first), peer and reason of each failed step."""
        return [
            (r["round"] + 1, peer, str(reason))
            for r in self.records
            for peer, reason in r["failures"].items()
        ]

    @property
    def traffic(self) -> dict[str, tuple[float, float]] | None:
        """Each node's MB per round, up and down; None if the metrics do not record it."""
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
        """Return each peer's number of training samples per class; None if no split was saved."""
        counts = label_counts(self.path)
        if counts is None:
            return None
        peers = self.config["peers"]
        if counts.dim() != 2 or len(counts) != peers or not counts.numel():
            raise RunError(
                f"The split in {self.path} does not have {peers} peers; restore it, or start the"
                " run again."
            )
        return [[int(count) for count in peer] for peer in counts.tolist()]


def find_runs(paths: Iterable[Path]) -> list[Path]:
    """Return the run directories among these paths and in the folders among them, without
    duplicates."""
    unique: dict[Path, Path] = {}
    for path in paths:
        if not path.exists():
            raise RunError(
                f"{path} does not exist; name a run directory, or a folder that contains some."
            )
        if (path / "config.toml").exists():
            runs = [path]
        else:
            found = {file.parent for file in path.rglob("config.toml")}
            runs = sorted(
                (run for run in found if not found & {*run.parents}), key=_natural_order
            )  # not a run's sites
        if not runs:
            raise RunError(
                f"{path} neither is nor contains a run directory: there is no config.toml."
            )
        for run in runs:
            unique.setdefault(run.resolve(), run)
    return list(unique.values())


def read_run(path: Path) -> ReportRun:
    """Read a run directory and validate everything that a report uses."""
    config, records = read_config(path), read_metrics(path)
    for key in ("seed", "rounds", "peers"):
        if type(config.get(key)) is not int:
            raise RunError(
                f"{path / 'config.toml'} is not the config of a run: {key} must be an integer."
            )
    if not isinstance(config.get("method"), dict) or not isinstance(
        config["method"].get("name"), str
    ):
        raise RunError(
            f"{path / 'config.toml'} is not the config of a run: method.name must be a string."
        )
    for number, record in enumerate(records, start=1):
        invalid = _invalid_key(record, config["peers"])
        if invalid:
            raise RunError(
                f"{path / 'metrics.jsonl'}, line {number}: {invalid} is missing or invalid. Restore"
                " the file, or start the run again."
            )
    return ReportRun(path, config, records, read_summary(path))


def _invalid_key(record: Record, peers: int) -> str | None:
    """Return the first missing or invalid key of a line of the metrics."""
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
    if not isinstance(record.get("metric"), str):
        return "metric"
    scores = record.get("scores")
    if not isinstance(scores, dict) or not all(
        _is_scores(value, peers) for value in scores.values()
    ):
        return "scores"
    if not isinstance(record.get("failures"), dict):
        return "failures"
    traffic = record.get("traffic", {})
    if not isinstance(traffic, dict) or not all(_is_pair(value) for value in traffic.values()):
        return "traffic"
    return None


def _is_spread(value: Any, peers: int) -> bool:
    if (
        not isinstance(value, dict)
        or not _is_number(value.get("mean"))
        or not _is_number(value.get("std"))
    ):
        return False
    per_peer = value.get("per_peer")
    if not isinstance(per_peer, list) or len(per_peer) != peers:
        return False
    return all(score is None or _is_number(score) for score in per_peer)


def _is_scores(value: Any, peers: int) -> bool:
    """Whether a value is the spread of a metric, with its direction and a format for numbers."""
    directed = _is_spread(value, peers) and isinstance(value.get("higher_is_better"), bool)
    return directed and is_number_format(value.get("format"))


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_is_number, value))


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and isfinite(value)


def _natural_order(path: Path) -> tuple[str, int, str]:
    """Sort folders by name, and `seed-2` before `seed-10`."""
    start, _, number = path.name.rpartition("-")
    return (
        (str(path.parent), int(number), start)
        if number.isdecimal()
        else (str(path.parent), 0, path.name)
    )
