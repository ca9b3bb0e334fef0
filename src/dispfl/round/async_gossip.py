"""A round of asynchronous gossip: the steps that end in a period of simulated time.

When each step happens, and which models it averages, is known beforehand (`clock/gossip_times.py`).
So a round is a graph of steps, which engines run in any order that the graph allows. A peer keeps
the models that others may still average in its state (`PeerState.sent`), so that they are part of
its checkpoint.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from dispfl.clock.gossip_times import TimedRound, TimedStep
from dispfl.core.report import Passes, Report
from dispfl.methods.base import PeerState
from dispfl.round.context import Engine, PeerTask, RunContext, StepResult
from dispfl.round.exchange import exchange_row, published_model
from dispfl.round.ledger import MessageCost
from dispfl.round.round import OnResult, Round


def async_round(
    context: RunContext,
    timed: TimedRound,
    sizes: Mapping[str, MessageCost],
    t: int,
    engine: Engine,
    on_result: OnResult,
) -> Round:
    """Take the steps that end in round t; `sizes` has a message of each peer to itself."""
    tasks = round_tasks(context, timed, t)
    steps = {(step.peer, step.number): step for step in timed.steps}
    left = {task.peer: 0 for task in tasks}
    for task in tasks:
        left[task.peer] += 1

    reports: dict[str, list[tuple[int, Report]]] = {}
    for task, result in engine.run_steps(tasks):
        report = result.report
        if not task.idle:
            step = steps[task.peer, task.t]
            report.steps = 1
            report.staleness = _mean(step.staleness)
            report.missed = sorted({*report.missed, *step.dropped})
        reports.setdefault(task.peer, []).append((task.t, report))
        left[task.peer] -= 1
        if not left[task.peer]:  # once for each peer, as in a synchronous round
            on_result(task.peer, result)
    engine.end_steps(t, timed.needed)

    messages: dict[str, list[MessageCost]] = {}
    for arrival in timed.arrivals:
        message = sizes[arrival.sender]._replace(receiver=arrival.receiver)
        messages.setdefault(arrival.receiver, []).append(message)
    results = {}
    for peer in context.roster:
        in_order = [report for _, report in sorted(reports.get(peer, ()), key=_number)]
        results[peer] = StepResult(merged_report(in_order), tuple(messages.get(peer, ())))
    return Round(results)


def round_tasks(context: RunContext, timed: TimedRound, t: int) -> list[PeerTask]:
    """Return the steps of a round as tasks.

    Peers are evaluated after their last step of the round, those without a step as they are.
    """
    evaluates = context.evaluates(t) and not context.method.evaluates_global
    last = {step.peer: step.number for step in timed.steps}
    averaged = {(sender, number) for step in timed.steps for sender, number in step.models.items()}
    tasks = []
    for step in timed.steps:
        is_last = step.number == last[step.peer]
        is_needed = step.number in timed.needed.get(step.peer, ())
        task = _task(context, timed, step)
        tasks.append(
            replace(
                task,
                evaluate=evaluates and is_last and step.peer not in context.byzantine,
                sends=is_needed or (step.peer, step.number) in averaged,
            )
        )
    for peer in context.honest_peers:
        if evaluates and peer not in last:
            tasks.append(PeerTask(peer, t, idle=True, evaluate=True))
    return tasks


def _task(context: RunContext, timed: TimedRound, step: TimedStep) -> PeerTask:
    neighbours, _ = exchange_row(context, step.number, context.roster, step.peer)
    return PeerTask(
        step.peer,
        step.number,
        senders=sorted(step.models),
        requested=len(neighbours.get(step.peer, ())),
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
    last = reports[-1]
    if len(reports) == 1:
        return last
    received: set[str] = set()
    missed: set[str] = set()
    passes: list[Passes] = []
    scored: list[Passes] = []
    for report in reports:
        received.update(report.received or ())
        missed.update(report.missed)
        passes += report.passes
        scored += report.scored
    failures = [report.failure for report in reports if report.failure]
    staleness = [report.staleness for report in reports if report.staleness is not None]
    return replace(
        last,
        received=sorted(received),
        missed=sorted(missed - received),
        passes=passes,
        scored=scored,
        failure=failures[-1] if failures else None,
        seconds=sum(report.seconds for report in reports),
        steps=sum(report.steps or 0 for report in reports),
        staleness=fmean(staleness) if staleness else None,
    )


def _mean(staleness: Mapping[str, int]) -> float | None:
    return fmean(staleness.values()) if staleness else None


def _number(numbered: tuple[int, Report]) -> int:
    return numbered[0]
