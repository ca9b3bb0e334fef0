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

from dispfl.core.layout import Layout
from dispfl.core.masks import kept_per_layer
from dispfl.core.packed import PackedModel
from dispfl.costs.flops import ForwardCost
from dispfl.methods.base import PeerState
from dispfl.round import Round, Setting

Record = dict[str, Any]
"""A JSON object."""


def round_record(t: int, result: Round, flops: Mapping[str, int], seconds: float) -> Record:
    """One line of `metrics.jsonl`. What was not measured in this round is null."""
    steps = result.steps
    busiest = result.ledger.busiest()
    worked = [0 if step.report.loss is None or step.report.failure else flops[peer] for peer, step in steps.items()]
    return {
        "round": t,
        "accuracy": spread([step.report.score for step in steps.values()]),
        "accuracy_mixed": spread([step.report.mixed for step in steps.values()]),
        "loss": spread([step.report.loss for step in steps.values()]),
        "mask_change": spread([step.report.mask_change for step in steps.values()]),
        "busiest": {"paper_mb": busiest.paper / 1e6, "wire_mb": busiest.wire / 1e6, "peer": busiest.peer},
        "flops_per_peer": statistics.fmean(worked),
        "failures": {peer: step.report.failure for peer, step in steps.items() if step.report.failure},
        "seconds": round(seconds, 3),
    }


def spread(values: Sequence[float | None]) -> Record | None:
    """Mean and standard deviation over the peers that have a finite value, and each one's; None where nobody has."""
    finite = [None if value is None or not isfinite(value) else value for value in values]
    known = [value for value in finite if value is not None]
    if not known:
        return None
    return {"mean": statistics.fmean(known), "std": statistics.pstdev(known), "per_peer": finite}


def summarize(setting: Setting, records: Sequence[Record], states: Mapping[str, PeerState]) -> Record:
    """`summary.json`: the run in one object."""
    return {
        "method": setting.method.name,
        "rounds": len(records),
        "peers": len(states),
        "accuracy": last(records, "accuracy"),
        "busiest": {
            "paper_mb_per_round": statistics.fmean(record["busiest"]["paper_mb"] for record in records),
            "wire_mb_per_round": statistics.fmean(record["busiest"]["wire_mb"] for record in records),
        },
        "flops_per_peer_round": statistics.fmean(record["flops_per_peer"] for record in records),
        "failures": sum(len(record["failures"]) for record in records),
        "seconds": round(sum(record["seconds"] for record in records), 3),
        "peak_rss_mb": round(peak_rss_mb(), 1),
        "weights_sha256": [weights_sha256(states[peer].model) for peer in setting.roster],
        "versions": versions(),
    }


def last(records: Sequence[Record], key: str) -> Any:
    """The newest value of a key that was not measured in every round."""
    return next((record[key] for record in reversed(records) if record[key] is not None), None)


def flops_of_a_round(
    setting: Setting, states: Mapping[str, PeerState], layout: Layout, cost: ForwardCost
) -> dict[str, int]:
    """What a round costs each peer, in the paper's currency. A layer's kept count never changes, so once will do."""
    flops = {}
    for peer, state in states.items():
        samples = len(setting.peers[peer].train)
        search = min(setting.train.batch, samples) if setting.method.searches else 0
        kept = kept_per_layer(state.model.mask.unpack(), layout)
        flops[peer] = cost.local_phase(kept, samples, setting.train.epochs, search)
    return flops


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
