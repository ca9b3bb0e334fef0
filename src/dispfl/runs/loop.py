"""A run: rounds one after another, each written down before the next begins, from wherever the last stop was."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from dispfl.core.layout import Layout
from dispfl.core.train import Report
from dispfl.costs.flops import forward_cost
from dispfl.errors import DamagedError
from dispfl.methods.base import SERVER, PeerState
from dispfl.round import play_round, start
from dispfl.runs.checkpoint import Checkpoints
from dispfl.runs.directory import RunDirectory
from dispfl.runs.records import Record, round_record
from dispfl.work import Engine, Outcome, Setting, Step

log = logging.getLogger("dispfl")
FAILURES_SHOWN = 3
"""A round's failures that are logged in full."""


@dataclass
class Progress:
    """Who wants to know how far the run is. Every function may be left as it is."""

    begin: Callable[[int, int], None] = lambda done, total: None
    """Peer steps that are done already, and all there are."""
    step: Callable[[], None] = lambda: None
    """One more peer has finished its step."""
    round: Callable[[Record], None] = lambda record: None
    """One more round is written down."""


@dataclass
class History:
    """Where a run stands: what was written down of each round; the peers' states are with the engine."""

    records: list[Record] = field(default_factory=list)
    server: PeerState | None = None
    """The server's state, where there is a server."""
    under_way: dict[str, Outcome] = field(default_factory=dict)
    """What was finished of the next round before a stop."""


def begin(setting: Setting, engine: Engine) -> History:
    """A run that nothing is written down of."""
    engine.recall(0)
    return History(server=start(setting, [SERVER]).get(SERVER))


def recall(setting: Setting, engine: Engine, directory: RunDirectory) -> History:
    """Where the run in a directory stands; a damaged newest checkpoint gives way to the one before it."""
    checkpoints = directory.checkpoints
    for rounds in reversed(checkpoints.finished_rounds()):
        try:
            engine.recall(rounds)
            saved = checkpoints.load(rounds, [SERVER])
        except DamagedError as damage:
            log.warning("%s Going back to an earlier round.", damage)
            checkpoints.discard(rounds)
            continue
        checkpoints.forget_old()
        server = saved[SERVER].state if saved else None
        return History(directory.truncate_metrics(rounds), server, _under_way(engine, checkpoints, rounds))
    history = begin(setting, engine)
    history.records, history.under_way = directory.truncate_metrics(0), _under_way(engine, checkpoints, 0)
    return history


def _under_way(engine: Engine, checkpoints: Checkpoints, t: int) -> dict[str, Outcome]:
    try:
        return engine.under_way(t)
    except DamagedError as damage:
        log.warning("%s Doing that part of the round again.", damage)
        checkpoints.discard(t + 1)
        return {}


def run_rounds(
    setting: Setting, engine: Engine, history: History, directory: RunDirectory | None, progress: Progress
) -> History:
    """Run the rounds that are left. Metrics go to the disk before the checkpoint that makes the round count."""
    module = setting.module()
    cost = forward_cost(module, Layout.of(module), next(setting.peers[setting.roster[0]].train.batches(1))[0])
    peers = len(setting.roster)
    progress.begin(len(history.records) * peers + len(history.under_way), setting.rounds * peers)

    for t in range(len(history.records), setting.rounds):
        began = time.perf_counter()
        try:
            result = play_round(
                setting, history.server, t, engine, history.under_way, lambda peer, outcome: progress.step()
            )
        except BaseException:
            engine.flush(t)
            raise
        record = round_record(t, result, cost, time.perf_counter() - began)
        failures = list(record["failures"].values())
        for failure in failures[:FAILURES_SHOWN]:
            log.warning(failure)
        if len(failures) > FAILURES_SHOWN:
            log.warning("... and %d more peers; the metrics name them all.", len(failures) - FAILURES_SHOWN)
        engine.flush(t)
        if directory:
            if result.server is not None:
                directory.checkpoints.add(t, SERVER, Step(result.server, Report()))
            directory.append(record)
            directory.checkpoints.complete(t)
        history.server = result.server
        history.records.append(record)
        history.under_way = {}
        progress.round(record)
    return history
