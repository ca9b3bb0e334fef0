"""A round of asynchronous gossip: the steps that end in a period of simulated time.

When each step happens, and which models it averages, is known beforehand (`clock/gossip_times.py`).
So a round is a graph of steps, which engines run in any order that the graph allows. A peer keeps
the models that others may still average in its state (`PeerState.sent`), so that they are part of
its checkpoint.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import NamedTuple

from dispfl.clock.gossip_times import TimedRound, TimedStep
from dispfl.core.report import Passes, Report
from dispfl.methods.base import PeerState
from dispfl.round.context import Engine, PeerTask, RunContext, StepResult
from dispfl.round.exchange import exchange_row, published_model
from dispfl.round.ledger import MessageCost
from dispfl.round.round import OnResult, Round


class MessageSize(NamedTuple):
    """The bytes of a peer's messages, which do not change."""

    paper: int
    """As the paper counts them."""
    wire: int
    """As sent."""


def async_round(
    context: RunContext,
    timed: TimedRound,
    sizes: Mapping[str, MessageSize],
    t: int,
    engine: Engine,
    on_result: OnResult,
) -> Round:
    """Take the steps that end in round t."""
    tasks = round_tasks(context, timed, t)
    reports = _take_steps(timed, tasks, engine, on_result)
    engine.end_steps(t, timed.needed)

    messages: dict[str, list[MessageCost]] = {peer: [] for peer in context.roster}
    for sender, receiver in timed.arrivals:
        messages[receiver].append(MessageCost(sender, receiver, *sizes[sender]))
    results = {}
    for peer in context.roster:
        report = merged_report(reports.get(peer, []))
        results[peer] = StepResult(report, tuple(messages[peer]))
    return Round(results)


def _take_steps(
    timed: TimedRound, tasks: Sequence[PeerTask], engine: Engine, on_result: OnResult
) -> dict[str, list[Report]]:
    """Run the tasks of a round; return the reports of each peer in the order of its steps."""
    steps = {(step.peer, step.number): step for step in timed.steps}
    left = Counter(task.peer for task in tasks)
    numbered: dict[str, dict[int, Report]] = {}
    for task, result in engine.run_steps(tasks):
        report = result.report
        if not task.idle:
            step = steps[task.peer, task.t]
            report.steps = 1
            report.staleness = _mean(step.staleness.values())
            report.missed = sorted({*report.missed, *step.dropped})
        numbered.setdefault(task.peer, {})[task.t] = report
        left[task.peer] -= 1
        if not left[task.peer]:  # once for each peer, as in a synchronous round
            on_result(task.peer, result)

    reports = {}
    for peer, reports_of_peer in numbered.items():
        reports[peer] = [reports_of_peer[number] for number in sorted(reports_of_peer)]
    return reports


def round_tasks(context: RunContext, timed: TimedRound, t: int) -> list[PeerTask]:
    """Return the steps of a round as tasks.

    Peers are evaluated after their last step of the round, those without a step as they are.
    """
    evaluates = context.evaluates(t) and not context.method.evaluates_global
    last_steps = {step.peer: step.number for step in timed.steps}
    averaged: set[tuple[str, int]] = set()
    for step in timed.steps:
        averaged.update(step.models.items())

    tasks = []
    for step in timed.steps:
        is_last = step.number == last_steps[step.peer]
        is_averaged_later = step.number in timed.needed.get(step.peer, ())
        task = replace(
            _task(context, timed, step),
            evaluate=evaluates and is_last and step.peer not in context.byzantine,
            sends=is_averaged_later or (step.peer, step.number) in averaged,
        )
        tasks.append(task)
    if evaluates:
        for peer in context.honest_peers:
            if peer not in last_steps:
                tasks.append(PeerTask(peer, t, idle=True, evaluate=True))
    return tasks


def _task(context: RunContext, timed: TimedRound, step: TimedStep) -> PeerTask:
    graph, _ = exchange_row(context, step.number, context.roster, step.peer)
    return PeerTask(
        step.peer,
        step.number,
        senders=sorted(step.models),
        requested=len(graph[step.peer]),
        mixing_weights=context.settings.staleness.mixing_weights(step.peer, step.staleness),
        models=step.models,
        passed=step.start / (timed.end - timed.start),
    )


def with_sent(
    context: RunContext, task: PeerTask, before: PeerState, after: PeerState
) -> PeerState:
    """Return a state with the models that others may still average, the new one among them."""
    sent = dict(before.sent)
    if task.sends:
        sent[task.t] = published_model(context, after)
    return replace(after, sent=sent)


def with_needed(state: PeerState, needed: Collection[int]) -> PeerState:
    """Return a state without the sent models that nobody will average any more."""
    if all(number in needed for number in state.sent):
        return state
    sent = {number: model for number, model in state.sent.items() if number in needed}
    return replace(state, sent=sent)


def merged_report(reports: Sequence[Report]) -> Report:
    """Return one report for all steps of a peer in a round: sums, and the last measurements."""
    if not reports:
        return Report()
    merged = reports[-1]
    received: set[str] = set()
    missed: set[str] = set()
    passes: list[Passes] = []
    scored: list[Passes] = []
    staleness = []
    failure = None
    for report in reports:
        received.update(report.received or ())
        missed.update(report.missed)
        passes += report.passes
        scored += report.scored
        failure = report.failure or failure
        if report.staleness is not None:
            staleness.append(report.staleness)
    return replace(
        merged,
        received=None if merged.received is None else sorted(received),
        missed=sorted(missed - received),
        passes=passes,
        scored=scored,
        failure=failure,
        seconds=sum(report.seconds for report in reports),
        steps=sum(report.steps or 0 for report in reports) or None,
        staleness=_mean(staleness),
    )


def _mean(values: Collection[float]) -> float | None:
    """Return the mean of values; None if there are none."""
    return fmean(values) if values else None
