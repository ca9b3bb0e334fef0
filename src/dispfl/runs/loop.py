"""The loop of a run: round after round, each saved before the next begins."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from dispfl.core.quantities import SIMULATED
from dispfl.core.report import Report
from dispfl.costs.flops import ForwardCost
from dispfl.engines.checkpoint import Checkpoints
from dispfl.errors import DamagedError, user_errors
from dispfl.methods.base import SERVER, PeerState
from dispfl.round.async_gossip import async_round
from dispfl.round.context import Engine, RunContext, StepResult
from dispfl.round.round import Round, evaluate_round, initial_states, train_round
from dispfl.runs.async_clock import AsyncClock, run_cost
from dispfl.runs.deadline_clock import DeadlineRunClock
from dispfl.runs.directory import RunDirectory
from dispfl.runs.metrics import Metrics, check_records, main_scores, round_metrics
from dispfl.runs.progress_file import ProgressFile
from dispfl.runs.timing import RunClock

log = logging.getLogger("dispfl")
AnyClock = RunClock | AsyncClock | DeadlineRunClock
FAILURES_SHOWN = 3
"""Failures of a round that are logged in full."""


@dataclass
class RunObserver:
    """Functions that a run calls as it proceeds."""

    begin: Callable[[int, int], None] = lambda done, total: None
    """At the start, with the peer steps that are done already, and all steps of the run."""
    step: Callable[[], None] = lambda: None
    """After each peer's step."""
    round: Callable[[Metrics], None] = lambda metrics: None
    """After each round, with its metrics."""
    stop: Callable[["RunHistory"], str | None] = lambda history: None
    """After that: returns why the run is to be stopped, or None to continue."""


@dataclass
class RunHistory:
    """The state of a run: the metrics of its rounds and the server's state.

    The engine has the peers' states.
    """

    records: list[Metrics] = field(default_factory=list)
    server: PeerState | None = None
    """The server's state, where there is a server."""
    partial_round: dict[str, StepResult] = field(default_factory=dict)
    """The steps of the next round that were finished before an interruption."""
    stopped: str | None = None
    """Why a callback stopped the run before its last round."""


@dataclass
class Follower:
    """A run that is trained together with another one: FedAvg-FT beside FedAvg.

    Only the evaluation of the two differs.

    It has checkpoints only at its end, those of the other run. Until then its lines of metrics are
    enough to continue.
    """

    context: RunContext
    directory: RunDirectory
    on_round: Callable[[Metrics], None] = lambda metrics: None
    records: list[Metrics] = field(default_factory=list)
    clock: AnyClock | None = None
    evaluated: Mapping[str, PeerState] = field(default_factory=dict)
    """The state that each peer was evaluated with after the last round."""

    def evaluate(
        self, trained: Round, t: int, engine: Engine, cost: ForwardCost, seconds: float
    ) -> None:
        """Evaluate a round that took some seconds to train, and save its metrics."""
        began = time.perf_counter()
        result = evaluate_round(self.context, trained, t, engine)
        if t + 1 == self.context.settings.rounds:
            attackers = {peer: engine.states[peer] for peer in self.context.byzantine}
            self.evaluated = {**attackers, **engine.evaluated}
        record = _record(
            self.context, t, result, cost, seconds + time.perf_counter() - began, self.clock
        )
        self.directory.append(record)
        self.records.append(record)
        self.on_round(record)


def begin(context: RunContext, engine: Engine) -> RunHistory:
    """Begin a run."""
    engine.restore(0)
    return RunHistory(server=initial_states(context, [SERVER]).get(SERVER))


def restore(context: RunContext, engine: Engine, directory: RunDirectory) -> RunHistory:
    """Restore the run in a directory; if the newest checkpoint is damaged, the one before it.

    The last round of a run that was extended since is repeated where only the last one was to be
    evaluated, so that its results are those of the longer run.
    """
    checkpoints = directory.checkpoints
    finished = checkpoints.finished_rounds()
    repeated = None
    if finished and _is_repeated(context, checkpoints, finished[-1]):
        repeated = finished.pop()
    candidates = finished[::-1]
    if repeated and repeated > 1:  # its states are right, where all before it are damaged or gone
        candidates.append(repeated)
    for rounds in candidates:
        try:
            engine.restore(rounds)
            saved = checkpoints.load(rounds, [SERVER])
        except DamagedError as damage:
            checkpoints.set_aside(rounds, damage, "Resuming from another round.")
            continue
        history = RunHistory(server=saved[SERVER].state if saved else None)
        break
    else:
        history = begin(context, engine)
        rounds = 0
    if repeated and rounds < repeated:
        checkpoints.discard(repeated)
    checkpoints.delete_old()
    history.records = directory.truncate_metrics(rounds)
    check_records(directory.path / "metrics.jsonl", history.records, len(context.roster))
    history.partial_round = _partial_round(context, engine, checkpoints, rounds)
    return history


def _is_repeated(context: RunContext, checkpoints: Checkpoints, rounds: int) -> bool:
    """Whether a round was evaluated only because it was the last, and no longer is."""
    if rounds >= context.settings.rounds or context.evaluates(rounds - 1):
        return False
    try:
        return checkpoints.was_last(rounds)
    except DamagedError:
        return False  # restoring it sets it aside


def _partial_round(
    context: RunContext, engine: Engine, checkpoints: Checkpoints, t: int
) -> dict[str, StepResult]:
    """Return the steps of round t that were finished before an interruption."""
    if context.settings.is_async:
        return {}
    try:
        steps = engine.partial_round(t)
    except DamagedError as damage:
        checkpoints.set_aside(t + 1, damage, "Repeating that part of the round.")
        return {}
    if context.evaluates(t):
        return steps
    trained = {}
    for peer, step in steps.items():
        trained[peer] = replace(step, report=step.report.without_evaluation())
    return trained


def run_rounds(
    context: RunContext,
    engine: Engine,
    history: RunHistory,
    directory: RunDirectory | None,
    observer: RunObserver,
    followers: Sequence[Follower] = (),
    progress: ProgressFile | None = None,
) -> RunHistory:
    """Run the remaining rounds.

    Metrics are written before the checkpoint that makes the round count.
    """
    cost = run_cost(context)
    cost.warn()
    clock = _clock(context, cost, history.records)
    deadline = clock.clock if isinstance(clock, DeadlineRunClock) else None
    for follower in followers:
        follower.clock = clock
        if isinstance(clock, RunClock):
            follower.clock = _clock(follower.context, cost, follower.records)
    peers = len(context.roster)
    observer.begin(
        len(history.records) * peers + len(history.partial_round), context.settings.rounds * peers
    )

    def after_step(peer: str, result: StepResult) -> None:
        observer.step()
        if progress:
            progress.add(peer)

    without_scores = False
    saved_at = time.monotonic()
    for t in range(len(history.records), context.settings.rounds):
        began = time.perf_counter()
        if progress:
            progress.begin_round(t)
        saves = _saves(context, t, time.monotonic() - saved_at)
        if directory:
            directory.checkpoints.saves_round = saves
        try:
            with user_errors(f"Round {t}"):
                if isinstance(clock, AsyncClock):
                    timed = clock.next_round()
                    trained = async_round(context, timed, clock.sizes, t, engine, after_step)
                else:
                    trained = train_round(
                        context,
                        history.server,
                        t,
                        engine,
                        history.partial_round,
                        after_step,
                        deadline,
                    )
                seconds = time.perf_counter() - began
                for follower in followers:
                    follower.evaluate(trained, t, engine, cost, seconds)
                began = time.perf_counter()
                result = evaluate_round(context, trained, t, engine)
        except BaseException:
            engine.flush(t)
            raise
        duration = seconds + time.perf_counter() - began
        record = _record(context, t, result, cost, duration, clock)
        _log_failures(list(record["failures"].values()))
        if context.evaluates(t) and main_scores(record) is None and not without_scores:
            without_scores = True
            name = context.task.metric.name
            log.warning(
                "Round %d: the metric %s is infinite or nan for every peer, so there are no"
                " scores.",
                t,
                name,
            )
        engine.flush(t)
        if directory:
            if result.server is not None:
                directory.checkpoints.add(t, SERVER, StepResult(Report(), state=result.server))
            directory.append(record)
            if saves:
                directory.checkpoints.complete(t, last=t + 1 == context.settings.rounds)
                saved_at = time.monotonic()
        history.server = result.server
        history.records.append(record)
        history.partial_round = {}
        observer.round(record)
        reason = observer.stop(history)
        if reason is not None and t + 1 < context.settings.rounds:
            history.stopped = reason
            if directory and not saves:
                _save_states(directory.checkpoints, t, engine, result.server)
            break
    return history


def _saves(context: RunContext, t: int, seconds: float) -> bool:
    """Whether round t gets a checkpoint, so many seconds after the last one."""
    settings = context.simulation
    if t + 1 == settings.rounds or settings.memory_limit is not None:
        return True
    if settings.checkpoint_minutes is not None:
        return seconds >= 60 * settings.checkpoint_minutes
    return (t + 1) % int(settings.checkpoint_every) == 0


def _save_states(
    checkpoints: Checkpoints, t: int, engine: Engine, server: PeerState | None
) -> None:
    """Save the states after round t, which was not to be saved, because the run ends with it."""
    checkpoints.saves_round = True
    for peer, state in engine.states.items():
        checkpoints.add(t, peer, StepResult(Report(), state=state))
    if server is not None:
        checkpoints.add(t, SERVER, StepResult(Report(), state=server))
    checkpoints.complete(t)


def _clock(context: RunContext, cost: ForwardCost, records: Sequence[Metrics]) -> AnyClock | None:
    """Return the clock of a run after its rounds so far; None without one."""
    if context.settings.is_async:
        return AsyncClock(context, cost, len(records))
    if context.simulation.deadline is not None:
        return DeadlineRunClock(context, cost, records)
    roster = context.data.participants
    fleet = context.simulation.fleet_of(roster)
    return RunClock(fleet, roster, records) if fleet else None


def _record(
    context: RunContext,
    t: int,
    result: Round,
    cost: ForwardCost,
    seconds: float,
    clock: AnyClock | None,
) -> Metrics:
    """Return the line of a round, with its simulated times if there is a clock."""
    needs_sizes = isinstance(clock, RunClock | DeadlineRunClock)
    record = round_metrics(t, result, context.task, cost, seconds, all_sizes=needs_sizes)
    if clock is not None:
        record[SIMULATED] = clock.advance(record)
    return record


def _log_failures(failures: Sequence[str]) -> None:
    for failure in failures[:FAILURES_SHOWN]:
        log.warning(failure)
    if len(failures) > FAILURES_SHOWN:
        log.warning(
            "... and %d more peers; metrics.jsonl names them all.", len(failures) - FAILURES_SHOWN
        )
