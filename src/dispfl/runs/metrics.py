"""The metrics of a round and the summary of a run, as they are saved."""

import hashlib
import platform
import resource
import statistics
import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from importlib.metadata import version
from math import isfinite
from pathlib import Path
from typing import Any

import torch

from dispfl.core.metric import Measure, Metric
from dispfl.core.names import roster_of
from dispfl.core.packed import PackedModel
from dispfl.core.quantities import ROUND_QUANTITIES, SIMULATED, Shape, is_finite_number
from dispfl.core.report import PEER_QUANTITIES, QUANTITIES, Report
from dispfl.core.task import Task
from dispfl.costs.flops import ForwardCost
from dispfl.errors import RunError
from dispfl.methods.base import SERVER, PeerState
from dispfl.robust.attacks import Attack
from dispfl.round.context import RunContext
from dispfl.round.ledger import Ledger, MessageCost
from dispfl.round.round import Round
from dispfl.runs.links import MAX_SIZES, encode_links, encode_numbers, encode_sizes

Metrics = dict[str, Any]
"""A JSON object."""


def round_metrics(
    t: int,
    result: Round,
    task: Task,
    cost: ForwardCost,
    seconds: float,
    *,
    all_sizes: bool = False,
) -> Metrics:
    """Return one line of `metrics.jsonl`: all declared quantities, null where not measured.

    With `all_sizes` it has the sizes of any number of messages, which a clock needs.
    """
    reports = []
    flops = []
    failures = {}
    for peer, step in result.results.items():
        reports.append(step.report)
        flops.append(flops_of(step.report, cost))
        if step.report.failure:
            failures[peer] = step.report.failure

    record: Metrics = {
        "round": t,
        "metric": task.metric.name,
        "scores": scores(task.metrics, reports),
    }
    for quantity in PEER_QUANTITIES:
        record[quantity.name] = spread([getattr(report, quantity.name) for report in reports])
    record["logged"] = logged(reports)
    return record | {
        "busiest": busiest_node(result.ledger),
        "traffic": {node: list(up_down) for node, up_down in result.ledger.traffic().items()},
        **links_of(result),
        "message_bytes": message_bytes(result, all_sizes),
        "senders": received_senders(reports),
        "flops_per_peer": mean_or_none(list(filter(None, flops))) or 0.0,
        "flops_total": sum(flops),
        "kernel_flops": spread([kernel_flops_of(report, cost) for report in reports]),
        "failures": failures,
        "seconds": round(seconds, 3),
        SIMULATED: None,
    }


def scores(metrics: Sequence[Metric], reports: Sequence[Report]) -> Metrics:
    """Return the spread of each metric that a peer has a finite value of.

    Each has its direction and its format.
    """
    by_metric = {}
    for metric in metrics:
        values = spread([report.scores.get(metric.name) for report in reports])
        if values:
            measure = {"higher_is_better": metric.higher_is_better, "format": metric.format}
            by_metric[metric.name] = measure | values
    return by_metric


def logged(reports: Sequence[Report]) -> Metrics:
    """Return the spread of each quantity that a method logged for some of the peers."""
    names: dict[str, None] = {}
    for report in reports:
        names |= dict.fromkeys(report.logged)
    return {name: spread([report.logged.get(name) for report in reports]) for name in names}


def busiest_node(ledger: Ledger) -> Metrics:
    """Return the traffic of the busiest node."""
    busiest = ledger.busiest()
    return {
        "paper_mb": busiest.paper / 1e6,
        "wire_mb": busiest.wire / 1e6,
        "wire_up_mb": busiest.up / 1e6,
        "wire_down_mb": busiest.down / 1e6,
        "peer": busiest.peer,
        "connections": busiest.connections,
    }


def links_of(result: Round) -> Metrics:
    """Return who received whose model in a round, what was missed, and who is similar, as texts."""
    received: dict[str, Sequence[str] | None] = {}
    missed: dict[str, Sequence[str] | None] = {}
    similarities: dict[str, Mapping[str, float]] = {}
    for peer, step in result.results.items():
        received[peer] = step.report.received
        if step.report.missed:
            missed[peer] = step.report.missed
        if step.report.similarities is not None:
            similarities[peer] = step.report.similarities
    nodes = _nodes(result)
    if result.server is not None:
        received[SERVER] = result.uploads
    return {
        "links": encode_links(received, nodes),
        "missed_links": encode_links(missed, nodes) if missed else None,
        "similarities": encode_numbers(similarities, received, nodes) if similarities else None,
    }


def _nodes(result: Round) -> list[str]:
    """Return the nodes of a round in the order of links: the peers, and the server last."""
    nodes = list(result.results)
    if result.server is not None:
        nodes.append(SERVER)
    return nodes


def message_bytes(result: Round, all_sizes: bool) -> str | None:
    """Return the sizes of a round's messages as a text.

    None if there are too many, or if some node is not in the roster: a real federation's changes.
    """
    nodes = _nodes(result)
    messages: list[MessageCost] = []
    for step in result.results.values():
        messages += step.messages
    if len(messages) > MAX_SIZES and not all_sizes:
        return None
    ends = {message.sender for message in messages} | {message.receiver for message in messages}
    if not ends <= set(nodes):
        return None
    return encode_sizes(messages, nodes)


def received_senders(reports: Sequence[Report]) -> Metrics:
    """Return how each sender was received under a robust rule.

    By how many peers, to how many of them it was far, and its mean distance.
    """
    distances: dict[str, list[float | None]] = {}
    far: Counter[str] = Counter()
    for report in reports:
        far.update(report.far or ())
        for sender, distance in (report.distances or {}).items():
            distances.setdefault(sender, []).append(distance)

    senders = {}
    for sender, values in sorted(distances.items()):
        measured = spread(values)
        senders[sender] = {
            "received": len(values),
            "far": far[sender],
            "distance": measured["mean"] if measured else None,
        }
    return senders


def byzantine_of(config: Mapping[str, Any]) -> frozenset[str]:
    """Return the Byzantine peers of a run with this config."""
    share = config.get("byzantine", 0.0)
    attack = Attack.of(config.get("attack", "none"), share, roster_of(config), config["seed"])
    if attack is None:
        return frozenset()
    return attack.byzantine


def check_records(file: Path, records: Sequence[Mapping[str, Any]], peers: int) -> None:
    """Refuse lines of the metrics that lack a declared quantity, or have one of another shape."""
    for number, record in enumerate(records, start=1):
        invalid = []
        if not isinstance(record.get("metric"), str):
            invalid.append("metric")
        if not _is_timed(record.get(SIMULATED)):
            invalid.append(SIMULATED)
        for quantity in QUANTITIES:
            if not quantity.shape.accepts(quantity.value(record), peers):
                invalid.append(quantity.name)
        if invalid:
            raise RunError(
                f"{file}, line {number}: {invalid[0]} is missing or invalid. Restore the file, or"
                " start the run again."
            )


_OF_A_CLOCK = {
    quantity.name.removeprefix(f"{SIMULATED}.")
    for quantity in ROUND_QUANTITIES
    if quantity.group == SIMULATED and quantity.shape is not Shape.CLASSES  # of older runs
}


def _is_timed(simulated: Any) -> bool:
    """Whether the simulated times of a line are whole: all of them, or null without a clock."""
    if simulated is None:
        return True
    return (
        isinstance(simulated, dict)
        and simulated.keys() >= _OF_A_CLOCK
        and is_finite_number(simulated["hours"])
    )


def main_scores(record: Mapping[str, Any]) -> Metrics | None:
    """Return the main metric's values in a line of the metrics or in a summary.

    None if it was not measured.
    """
    values: Metrics | None = record["scores"].get(record["metric"])
    return values


def measure_of(records: Sequence[Mapping[str, Any]]) -> Measure:
    """Return what the main metric of a run measures.

    Until it is measured, a higher value is taken as the better.
    """
    for record in records:
        values = main_scores(record)
        if values:
            return Measure(record["metric"], values["higher_is_better"], values["format"])
    return Measure(_metric_of(records), higher_is_better=True)


def _metric_of(records: Sequence[Mapping[str, Any]]) -> str:
    """Return the name of the main metric; `score` before the first round."""
    if not records:
        return "score"
    return str(records[-1]["metric"])


def spread(values: Sequence[float | None]) -> Metrics | None:
    """Return mean and standard deviation over the peers with a finite value, and all values.

    None if no peer has one.
    """
    per_peer: list[float | None] = []
    measured: list[float] = []
    for value in values:
        if value is None or not isfinite(value):
            per_peer.append(None)
        else:
            per_peer.append(value)
            measured.append(value)
    if not measured:
        return None
    mean = statistics.fmean(measured)
    return {"mean": mean, "std": statistics.pstdev(measured), "per_peer": per_peer}


def measured_values(spread: Mapping[str, Any]) -> list[float]:
    """Return the values of the peers that have one."""
    return [value for value in spread["per_peer"] if value is not None]


def spreads(record: Mapping[str, Any]) -> Metrics:
    """Return the spreads of a line of the metrics, by name; those of metrics by theirs."""
    by_name: Metrics = {}
    for quantity in QUANTITIES:
        by_name |= quantity.spreads(record)
    return by_name


def numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the single numbers of a line of the metrics, by name; of spreads the means."""
    by_name: dict[str, float] = {}
    for quantity in QUANTITIES:
        by_name |= quantity.numbers(record)
    return by_name


def summarize(
    context: RunContext, records: Sequence[Metrics], states: Mapping[str, PeerState]
) -> Metrics:
    """Return the content of `summary.json`; `states` are those that the peers use from now on."""
    densities = []
    classes = []
    for peer, density in context.densities.items():
        if peer in context.data.peers:
            densities.append(density)
            classes.append(context.class_of.get(peer))
    fitted = {"densities": densities} if context.fitted else {}
    return {
        "method": context.method.name,
        **fitted,
        "peers": len(context.data.peers),
        **summarize_rounds(records),
        "metric": context.task.metric.name,
        "groups": groups(densities, last_scores(records), mean_peer_seconds(records), classes),
        "peak_rss_mb": round(peak_rss_mb(), 1),
        "failed_peers": failed_peers(records, sorted(states)),
        "weights_sha256": [weights_sha256(states[peer].model) for peer in sorted(states)],
        "versions": versions(),
    }


def summarize_rounds(records: Sequence[Metrics]) -> Metrics:
    """Return the part of a summary that follows from the metrics, also of an unfinished run."""
    summary: Metrics = {"rounds": len(records), "metric": _metric_of(records), "scores": {}}
    for quantity in QUANTITIES:
        if quantity.summarized and records:
            summary[quantity.name] = last(records, quantity.name)

    # One list of numbers per quantity of a round; that of failures counts them.
    columns: dict[str, list[float]] = {}
    for record in records:
        for quantity in ROUND_QUANTITIES:
            for name, number in quantity.numbers(record).items():
                columns.setdefault(name, []).append(number)

    def mean(name: str) -> float:
        if not records:
            return 0.0
        return statistics.fmean(columns[name])

    return summary | {
        "busiest": {
            "paper_mb_per_round": mean("busiest.paper_mb"),
            "wire_mb_per_round": mean("busiest.wire_mb"),
            "connections": max(columns.get("busiest.connections", [0])),
        },
        "flops_per_peer_round": mean("flops_per_peer"),
        "flops_total_round": mean("flops_total"),
        "failures": sum(columns.get("failures", [])),
        "seconds": round(sum(columns.get("seconds", [])), 3),
        "seconds_per_peer_round": seconds_per_peer_round(records),
    }


def groups(
    densities: Sequence[float],
    scores: Metrics | None,
    seconds: Sequence[float | None] | None = None,
    classes: Sequence[str | None] = (),
) -> list[Metrics]:
    """Return score and seconds per round of each group of peers: of one class, or of one density.

    There is none unless they differ. `seconds` and `classes` are those of each peer.
    """
    classes = classes or [None] * len(densities)
    by_group: dict[tuple[str, float], list[int]] = {}
    for index, (name, density) in enumerate(zip(classes, densities, strict=True)):
        by_group.setdefault((name or "", density), []).append(index)
    if scores is None or len(by_group) < 2:
        return []

    all_groups = []
    for (name, density), peers in sorted(by_group.items()):
        score = spread([scores["per_peer"][peer] for peer in peers])
        if not score:
            continue
        group = {
            "density": density,
            "peers": len(peers),
            "mean": score["mean"],
            "std": score["std"],
        }
        if name:
            group = {"class": name, **group}
        if seconds:
            times = spread([seconds[peer] for peer in peers])
            if times:
                group["seconds"] = times["mean"]
        all_groups.append(group)
    return all_groups


def failed_peers(records: Sequence[Metrics], roster: Sequence[str]) -> list[str]:
    """Return the peers that have learned nothing: every step of their training failed."""
    trained: set[str] = set()
    failed: set[str] = set()
    for record in records:
        seconds = record.get("peer_seconds") or {"per_peer": []}
        for peer, took in zip(roster, seconds["per_peer"], strict=False):
            if took is None:
                continue
            if peer in record["failures"]:
                failed.add(peer)
            else:
                trained.add(peer)
    return sorted(failed - trained)


def mean_peer_seconds(records: Sequence[Metrics]) -> list[float | None] | None:
    """Return the seconds that each peer computes in a round; None if they were not measured.

    They are the mean over the rounds in which it trains. A peer that never trains has None.
    """
    measured: list[list[float]] | None = None
    for record in records:
        if not record.get("peer_seconds"):
            continue
        per_peer = record["peer_seconds"]["per_peer"]
        measured = measured or [[] for _ in per_peer]
        for seconds_of_peer, seconds in zip(measured, per_peer, strict=True):
            if seconds is not None:
                seconds_of_peer.append(seconds)
    if measured is None:
        return None
    return list(map(mean_or_none, measured))


def seconds_per_peer_round(records: Sequence[Metrics]) -> float | None:
    """Return the seconds that a peer computes in a round.

    They are the mean over the peers that train, then over rounds; None if not measured.
    """
    means = []
    for record in records:
        if record.get("peer_seconds"):
            means.append(record["peer_seconds"]["mean"])
    return mean_or_none(means)


def mean_or_none(values: Collection[float] | None) -> float | None:
    """Return the mean of values; None if there are none."""
    if not values:
        return None
    return statistics.fmean(values)


def last(records: Sequence[Metrics], key: str) -> Any:
    """Return the newest value of a key that is not measured in every round.

    None or nothing if it never was.
    """
    for record in reversed(records):
        if record.get(key):
            return record[key]
    if not records:
        return None
    return records[-1].get(key)


def last_scores(records: Sequence[Metrics]) -> Metrics | None:
    """Return the newest values of the main metric; None if it was never measured."""
    for record in reversed(records):
        values = main_scores(record)
        if values:
            return values
    return None


def flops_of(report: Report, cost: ForwardCost) -> int:
    """Return the FLOPs of a peer's round, as the paper counts them."""
    return sum(
        cost.training(passes.kept, passes.samples, passes.trained) for passes in report.passes
    )


def kernel_flops_of(report: Report, cost: ForwardCost) -> int | None:
    """Return the FLOPs that the kernels do in a peer's round; None if it took no part.

    Masks of single weights save none: a layer is computed whole, and its gradient is, if some of
    its weights are trained.
    """
    if not report.passes and report.received is None:
        return None
    flops = 0
    for passes in report.passes:
        computed = report.computed or passes.kept
        trained = None
        if passes.trained is not None:
            trained = [
                size if count else 0 for size, count in zip(computed, passes.trained, strict=True)
            ]
        flops += cost.training(computed, passes.samples, trained)
    for passes in (*report.scored, *report.evaluations):
        flops += passes.samples * cost.sparse(passes.kept)
    return flops


def weights_sha256(model: PackedModel) -> str:
    """Return the SHA-256 of a model's dense weights.

    They are in the order of `named_parameters()`, row-major, as little-endian float32.
    """
    weights, _ = model.unpack()
    return hashlib.sha256(weights.numpy().astype("<f4", copy=False).tobytes()).hexdigest()


def peak_rss_mb() -> float:
    """Return the peak memory of this process in MB (1e6 bytes); 0 where it is unknown."""
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
