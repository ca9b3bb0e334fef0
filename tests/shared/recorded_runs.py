"""Lines of the metrics and runs by hand, for tests of tables and reports."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from dispfl.report.runs import RecordedRun


def spread(values: Sequence[float | None] | None) -> dict[str, Any] | None:
    """The values of all peers, with their mean and standard deviation; None without any."""
    known = [value for value in values or () if value is not None]
    if not known:
        return None
    return {"mean": fmean(known), "std": pstdev(known), "per_peer": list(values or ())}


def scored(
    values: dict[str, Any] | None, metric: str = "accuracy", higher_is_better: bool = True
) -> dict[str, Any]:
    """The scores of a round: those of one metric, or none."""
    if values is None:
        return {}
    return {metric: {"higher_is_better": higher_is_better, "format": ".3f", **values}}


def a_line(
    t: int,
    scores: dict[str, Any],
    *,
    metric: str = "accuracy",
    mb: float = 1.0,
    flops: float = 1e9,
    peers: int = 1,
    **changes: Any,
) -> dict[str, Any]:
    """A line of the metrics; `mb` is the busiest node's on the wire, twice the paper's."""
    busiest = {"paper_mb": mb / 2, "wire_mb": mb, "wire_up_mb": mb, "wire_down_mb": mb}
    return {
        "round": t,
        "metric": metric,
        "scores": scores,
        "mixed": None,
        "mask_change": None,
        "busiest": {**busiest, "peer": None, "connections": 0},
        "flops_per_peer": flops,
        "flops_total": peers * flops,
        "failures": {},
        "seconds": 1.5,
        **changes,
    }


def a_recorded_run(
    lines: Sequence[dict[str, Any]],
    seed: int = 0,
    path: Path = Path("run"),
    method: str = "any",
    structure: str = "weights",
    **config: Any,
) -> RecordedRun:
    """A run with these metrics that no directory has."""
    method_table = {"name": method, "structure": structure}
    settings = {"seed": seed, "rounds": len(lines), "peers": 1, "method": method_table, **config}
    return RecordedRun(path, settings, lines)
