"""The metrics of a round and the summary of a run, as they are saved."""

import hashlib
import platform
import resource
import statistics
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from math import isfinite
from typing import Any

import torch

from dispfl.core.metric import Measure, Metric
from dispfl.core.packed import PackedModel
from dispfl.core.report import Report
from dispfl.core.task import Task
from dispfl.costs.flops import ForwardCost
from dispfl.robust.attacks import Attack
from dispfl.round.context import RunContext
from dispfl.round.round import Round
from dispfl.topology import peer_names

Metrics = dict[str, Any]
"""A JSON object."""


def round_metrics(t: int, result: Round, task: Task, cost: ForwardCost, seconds: float) -> Metrics:
    """Return one line of `metrics.jsonl`. Values that were not measured in this round are null or
    missing."""
    reports = {peer: step.report for peer, step in result.results.items()}
    ledger = result.ledger
    busiest = ledger.busiest()
    backdoor = spread([report.backdoor for report in reports.values()])
    senders = received_senders(list(reports.values()))
    worked = [flops for report in reports.values() if (flops := flops_of(report, cost))]
    return {
        "round": t,
        "metric": task.metric.name,
        "scores": scores(task.metrics, list(reports.values())),
        "train_score": spread([report.train_score for report in reports.values()]),
        "validation": spread([report.validation for report in reports.values()]),
        "global_test": spread([report.global_score for report in reports.values()]),
        "mixed": spread([report.mixed for report in reports.values()]),
        "test_loss": spread([report.test_loss for report in reports.values()]),
        "train_loss": spread([report.loss for report in reports.values()]),
        **({"backdoor": backdoor} if backdoor else {}),
        "mask_change": spread([report.mask_change for report in reports.values()]),
        "overlap": spread([report.overlap for report in reports.values()]),
        **({"senders": senders} if senders else {}),
        "busiest": {
            "paper_mb": busiest.paper / 1e6,
            "wire_mb": busiest.wire / 1e6,
            "wire_up_mb": busiest.up / 1e6,
            "wire_down_mb": busiest.down / 1e6,
            "peer": busiest.peer,
            "connections": busiest.connections,
        },
        "traffic": {node: list(up_down) for node, up_down in ledger.traffic().items()},
        "flops_per_peer": statistics.fmean(worked) if worked else 0.0,
        "flops_total": sum(worked),
        "epsilon": spread([report.epsilon for report in reports.values()]),
        "failures": {peer: report.failure for peer, report in reports.items() if report.failure},
        "seconds": round(seconds, 3),
        "peer_seconds": spread(
            [
                round(report.seconds, 4) if report.passes else None for report in reports.values()
            ]  # of those that train
        ),
    }


def scores(metrics: Sequence[Metric], reports: Sequence[Report]) -> Metrics:
    """Return the spread of each metric that a peer has a finite value of, with its direction and
    its format."""
    spreads = {
        metric: spread([report.scores.get(metric.name) for report in reports]) for metric in metrics
    }
    return {
        metric.name: {"higher_is_better": metric.higher_is_better, "format": metric.format, **found}
        for metric, found in spreads.items()
        if found
    }


def received_senders(reports: Sequence[Report]) -> Metrics:
    """Return, of every peer that was received under a robust rule, by how many, how many found it
    far, and its mean distance.
    """
    distances: dict[str, list[float | None]] = {}
    for report in reports:
        for name, distance in (report.distances or {}).items():
            distances.setdefault(name, []).append(distance)
    far = Counter(name for report in reports for name in report.far or ())
    return {
        name: {
            "received": len(found),
            "far": far[name],
            "distance": (spread(found) or {}).get("mean"),
        }
        for name, found in sorted(distances.items())
    }


def byzantine_of(config: Mapping[str, Any]) -> frozenset[str]:
    """Return the peers that lie in a run with this config."""
    share, names = config.get("byzantine", 0.0), peer_names(config["peers"])
    attack = Attack.of(config.get("attack", "none"), share, names, config["seed"])
    return attack.byzantine if attack else frozenset()


def main_scores(record: Metrics) -> Metrics | None:
    """Return the main metric's values in a line of the metrics or in a summary; None if it was not
    measured."""
    found: Metrics | None = record["scores"].get(record["metric"])
    return found


def measure_of(records: Sequence[Metrics]) -> Measure:
    """Return what the main metric of a run measures; until it is measured, a higher value is taken
    as the better."""
    for record in records:
        if found := main_scores(record):
            return Measure(record["metric"], found["higher_is_better"], found["format"])
    return Measure(records[-1]["metric"] if records else "score", higher_is_better=True)


def spread(values: Sequence[float | None]) -> Metrics | None:
    """Return mean and standard deviation over the peers with a finite value, and all values; None
    without any."""
    finite = [None if value is None or not isfinite(value) else value for value in values]
    known = [value for value in finite if value is not None]
    if not known:
        return None
    return {"mean": statistics.fmean(known), "std": statistics.pstdev(known), "per_peer": finite}


def summarize(
    context: RunContext, records: Sequence[Metrics], models: Mapping[str, PackedModel]
) -> Metrics:
    """Return the content of `summary.json`; `models` are the models that the peers use from now
    on."""
    densities = [density for peer, density in context.densities.items() if peer in context.peers]
    return {
        "method": context.method.name,
        "rounds": len(records),
        "peers": len(context.peers),
        "metric": context.task.metric.name,
        "scores": last(records, "scores"),
        "test_loss": last(records, "test_loss"),
        "train_score": last(records, "train_score"),
        "validation": last(records, "validation"),
        "global_test": last(records, "global_test"),
        "groups": groups(densities, last_scores(records), mean_peer_seconds(records)),
        "busiest": {
            "paper_mb_per_round": statistics.fmean(
                record["busiest"]["paper_mb"] for record in records
            ),
            "wire_mb_per_round": statistics.fmean(
                record["busiest"]["wire_mb"] for record in records
            ),
            "connections": max(record["busiest"]["connections"] for record in records),
        },
        "flops_per_peer_round": statistics.fmean(record["flops_per_peer"] for record in records),
        "flops_total_round": statistics.fmean(record["flops_total"] for record in records),
        "failures": sum(len(record["failures"]) for record in records),
        "seconds": round(sum(record["seconds"] for record in records), 3),
        "seconds_per_peer_round": seconds_per_peer_round(records),
        "peak_rss_mb": round(peak_rss_mb(), 1),
        "weights_sha256": [weights_sha256(models[peer]) for peer in sorted(models)],
        "versions": versions(),
    }


def groups(
    densities: Sequence[float],
    scores: Metrics | None,
    seconds: Sequence[float | None] | None = None,
) -> list[Metrics]:
    """Return score and seconds per round of each group of peers with the same density, if there are
    several groups.

    `seconds` are those of each peer.
    """
    if scores is None or len(set(densities)) < 2:
        return []
    found = []
    for density in sorted(set(densities)):
        peers = [k for k, own in enumerate(densities) if own == density]
        own = spread([scores["per_peer"][k] for k in peers])
        times = spread([seconds[k] for k in peers]) if seconds else None
        if own:
            group = {
                "density": density,
                "peers": len(peers),
                "mean": own["mean"],
                "std": own["std"],
            }
            found.append(group | ({"seconds": times["mean"]} if times else {}))
    return found


def mean_peer_seconds(records: Sequence[Metrics]) -> list[float | None] | None:
    """Return the seconds that each peer computes in a round, mean over the rounds in which it
    trains; None if unknown.

    A peer that never trains has None.
    """
    known = [record["peer_seconds"]["per_peer"] for record in records if record.get("peer_seconds")]
    if not known:
        return None
    by_peer = [
        [value for value in values if value is not None] for values in zip(*known, strict=True)
    ]
    return [statistics.fmean(values) if values else None for values in by_peer]


def seconds_per_peer_round(records: Sequence[Metrics]) -> float | None:
    """Return the seconds that a peer computes in a round: mean over the peers that train, then over
    rounds."""
    known = [record["peer_seconds"]["mean"] for record in records if record.get("peer_seconds")]
    return statistics.fmean(known) if known else None


def last(records: Sequence[Metrics], key: str) -> Any:
    """Return the newest value of a key that is not measured in every round; None or nothing if it
    never was."""
    return next(
        (record[key] for record in reversed(records) if record.get(key)),
        records[-1].get(key) if records else None,
    )


def last_scores(records: Sequence[Metrics]) -> Metrics | None:
    """Return the newest values of the main metric; None if it was never measured."""
    return next((found for record in reversed(records) if (found := main_scores(record))), None)


def flops_of(report: Report, cost: ForwardCost) -> int:
    """Return the FLOPs of a peer's round, as the paper counts them."""
    return sum(cost.training(kept, samples) for samples, kept in report.passes)


def weights_sha256(model: PackedModel) -> str:
    """Return the SHA-256 of a model's dense weights: `named_parameters()` order, row-major,
    little-endian float32."""
    weights, _ = model.unpack()
    return hashlib.sha256(weights.numpy().astype("<f4", copy=False).tobytes()).hexdigest()


def peak_rss_mb() -> float:
    """Return the peak memory of this process in MB (1e6 bytes); 0 where the system does not report
    it."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def versions() -> Metrics:
    """Return the versions that results depend on."""
    return {
        "dispfl": version("dispfl"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": version("numpy"),
        "machine": platform.machine(),
        "system": platform.system(),
    }
