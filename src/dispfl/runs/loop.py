"""A run: rounds one after another, each written down before the next begins, from wherever the last stop was."""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from dispfl.core.layout import Layout
from dispfl.core.train import Report
from dispfl.costs.flops import forward_cost
from dispfl.errors import RunError
from dispfl.methods.base import SERVER, PeerState
from dispfl.round import Engine, Setting, Step, play_round, start
from dispfl.runs.checkpoint import Checkpoints
from dispfl.runs.directory import RunDirectory
from dispfl.runs.records import Record, round_record

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
    """Where a run stands: all peers' states, and what was written down of each round."""

    states: dict[str, PeerState]
    records: list[Record] = field(default_factory=list)
    under_way: dict[str, Step] = field(default_factory=dict)
    """The steps of the next round that were finished before a stop."""
    judged: Mapping[str, PeerState] | None = None
    """What each peer was judged on in the last round, where that is not its own state."""


def recall(setting: Setting, directory: RunDirectory) -> History:
    """Where the run in a directory stands; a damaged newest checkpoint gives way to the one before it."""
    checkpoints = directory.checkpoints
    saved = checkpoints.finished_rounds()
    for rounds in [*reversed(saved), 0]:
        try:
            states = start(setting) if rounds == 0 else {p: s.state for p, s in checkpoints.load(rounds).items()}
        except RunError as damage:
            log.warning("%s Going back to an earlier round.", damage)
            checkpoints.discard(rounds)
            continue
        checkpoints.forget_old()
        return History(states, directory.truncate_metrics(rounds), _steps_under_way(checkpoints, rounds))
    raise AssertionError("round 0 needs no checkpoint")


def _steps_under_way(checkpoints: Checkpoints, rounds: int) -> dict[str, Step]:
    try:
        steps = checkpoints.load(rounds + 1)
        return {peer: step for peer, step in steps.items() if peer != SERVER}  # the server's part is done again
    except RunError as damage:
        log.warning("%s Doing that part of the round again.", damage)
        checkpoints.discard(rounds + 1)
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

        def finished(peer: str, step: Step, t: int = t) -> None:
            if directory:
                directory.checkpoints.add(t, peer, step)
            progress.step()

        began = time.perf_counter()
        try:
            result = play_round(setting, history.states, t, engine, history.under_way, finished)
        except BaseException:
            if directory:
                directory.checkpoints.flush(t)
            raise
        record = round_record(t, result, cost, time.perf_counter() - began)
        failures = list(record["failures"].values())
        for failure in failures[:FAILURES_SHOWN]:
            log.warning(failure)
        if len(failures) > FAILURES_SHOWN:
            log.warning("... and %d more peers; the metrics name them all.", len(failures) - FAILURES_SHOWN)
        if directory:
            if result.server is not None:
                directory.checkpoints.add(t, SERVER, Step(result.server, Report()))
            directory.append(record)
            directory.checkpoints.complete(t)
        history.states, history.judged = result.states, result.judged
        history.records.append(record)
        history.under_way = {}
        progress.round(record)
    return history
