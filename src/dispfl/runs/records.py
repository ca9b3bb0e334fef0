"""What is written down of a round and of a run."""

import hashlib
import platform
import resource
import statistics
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from math import isfinite
from typing import Any

import torch

from dispfl.core.packed import PackedModel
from dispfl.core.train import Report
from dispfl.costs.flops import ForwardCost
from dispfl.round import Round
from dispfl.work import Setting

Record = dict[str, Any]
"""A JSON object."""


def round_record(t: int, result: Round, cost: ForwardCost, seconds: float) -> Record:
    """One line of `metrics.jsonl`. What was not measured in this round is null."""
    reports = {peer: outcome.report for peer, outcome in result.outcomes.items()}
    ledger = result.ledger
    busiest = ledger.busiest()
    worked = [flops for report in reports.values() if (flops := flops_of(report, cost))]
    return {
        "round": t,
        "accuracy": spread([report.score for report in reports.values()]),
        "accuracy_mixed": spread([report.mixed for report in reports.values()]),
        "loss": spread([report.loss for report in reports.values()]),
        "mask_change": spread([report.mask_change for report in reports.values()]),
        "overlap": spread([report.overlap for report in reports.values()]),
        "busiest": {
            "paper_mb": busiest.paper / 1e6,
            "wire_mb": busiest.wire / 1e6,
            "wire_up_mb": busiest.up / 1e6,
            "wire_down_mb": busiest.down / 1e6,
            "peer": busiest.peer,
        },
        "traffic": {node: list(up_down) for node, up_down in ledger.traffic().items()},
        "flops_per_peer": statistics.fmean(worked) if worked else 0.0,
        "flops_total": sum(worked),
        "failures": {peer: report.failure for peer, report in reports.items() if report.failure},
        "seconds": round(seconds, 3),
    }


def spread(values: Sequence[float | None]) -> Record | None:
    """Mean and standard deviation over the peers that have a finite value, and each one's; None where nobody has."""
    finite = [None if value is None or not isfinite(value) else value for value in values]
    known = [value for value in finite if value is not None]
    if not known:
        return None
    return {"mean": statistics.fmean(known), "std": statistics.pstdev(known), "per_peer": finite}


def summarize(setting: Setting, records: Sequence[Record], models: Mapping[str, PackedModel]) -> Record:
    """`summary.json`: the run in one object; `models` are what the peers would use from now on."""
    return {
        "method": setting.method.name,
        "rounds": len(records),
        "peers": len(setting.peers),
        "accuracy": last(records, "accuracy"),
        "groups": groups(setting.method.densities(len(setting.peers)), last(records, "accuracy")),
        "busiest": {
            "paper_mb_per_round": statistics.fmean(record["busiest"]["paper_mb"] for record in records),
            "wire_mb_per_round": statistics.fmean(record["busiest"]["wire_mb"] for record in records),
        },
        "flops_per_peer_round": statistics.fmean(record["flops_per_peer"] for record in records),
        "flops_total_round": statistics.fmean(record["flops_total"] for record in records),
        "failures": sum(len(record["failures"]) for record in records),
        "seconds": round(sum(record["seconds"] for record in records), 3),
        "peak_rss_mb": round(peak_rss_mb(), 1),
        "weights_sha256": [weights_sha256(models[peer]) for peer in setting.roster],
        "versions": versions(),
    }


def groups(densities: Sequence[float], accuracy: Record | None) -> list[Record]:
    """The accuracy of each group of peers of one density, where there are several."""
    if accuracy is None or len(set(densities)) < 2:
        return []
    by_density: dict[float, list[float | None]] = {}
    for density, score in zip(densities, accuracy["per_peer"], strict=True):
        by_density.setdefault(density, []).append(score)
    found = {density: spread(scores) for density, scores in by_density.items()}
    return [
        {"density": density, "peers": len(by_density[density]), "mean": group["mean"], "std": group["std"]}
        for density, group in sorted(found.items())
        if group
    ]


def last(records: Sequence[Record], key: str) -> Any:
    """The newest value of a key that was not measured in every round."""
    return next((record[key] for record in reversed(records) if record[key] is not None), None)


def flops_of(report: Report, cost: ForwardCost) -> int:
    """What a peer's round cost, in the paper's currency."""
    return sum(cost.training(kept, samples) for samples, kept in report.passes)


def weights_sha256(model: PackedModel) -> str:
    """The digest of a model's dense weights: `named_parameters()` order, row-major, little-endian float32."""
    weights, _ = model.unpack()
    return hashlib.sha256(weights.numpy().astype("<f4", copy=False).tobytes()).hexdigest()


def peak_rss_mb() -> float:
    """The most memory this process ever held, in MB (1e6 bytes)."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def versions() -> Record:
    """What made the numbers, as far as numbers depend on it."""
    return {
        "dispfl": version("dispfl"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": version("numpy"),
        "machine": platform.machine(),
        "system": platform.system(),
    }
