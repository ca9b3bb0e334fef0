"""The clock of an asynchronous run, which decides what happens in a round."""

import logging
from collections import Counter
from collections.abc import Mapping
from functools import partial
from statistics import median_low
from typing import Any

from dispfl.clock.availability import HOUR
from dispfl.clock.gossip_times import GossipTimes, GossipWork, TimedRound
from dispfl.clock.schedule import PeerTimes, RoundTimes
from dispfl.core.layout import Layout
from dispfl.core.rng import stream_seed
from dispfl.core.tensors import total_bytes
from dispfl.costs.flops import ForwardCost, forward_cost
from dispfl.costs.steps import step_operations
from dispfl.round.async_gossip import MessageSize
from dispfl.round.context import RunContext
from dispfl.round.exchange import exchange_row
from dispfl.round.ledger import BYTES_PER_VALUE
from dispfl.runs.metrics import Metrics
from dispfl.runs.timing import simulated_times

log = logging.getLogger("dispfl")
MANY_DROPPED = 20
"""Models that may be too stale without a warning."""


class AsyncClock:
    """The clock of an asynchronous run after some rounds."""

    def __init__(self, context: RunContext, cost: ForwardCost, rounds: int = 0) -> None:
        self.context = context
        self.sizes = message_sizes(context)
        self.times = gossip_times(context, cost)
        for _ in range(rounds):
            self.times.advance()
        self._round: TimedRound | None = None
        self._averaged = 0
        """Models that were averaged."""
        self._dropped = 0
        """Models that were too stale."""
        self._has_warned = False

    def next_round(self) -> TimedRound:
        """Return what happens in the next round."""
        self._round = self.times.advance()
        for step in self._round.steps:
            self._averaged += len(step.models)
            self._dropped += len(step.dropped)
        if not self._has_warned and self._dropped > max(MANY_DROPPED, self._averaged):
            self._has_warned = True
            limit = self.context.settings.staleness.limit
            log.warning(
                "Most models arrive more than %d steps after they were finished, and are not"
                " averaged (staleness.limit). Let a step train longer (train.epochs), or raise the"
                " limit.",
                limit,
            )
        return self._round

    def advance(self, record: Mapping[str, Any]) -> Metrics:
        """Return the simulated times of that round, for its line of the metrics."""
        assert self._round is not None, "a round has been simulated"
        start = self._round.start
        end = self._round.end
        steps = Counter(step.peer for step in self._round.steps)
        peers = {}
        for peer in self.times.fleet.peers:
            availability = self.times.fleet.availability(peer)
            times = PeerTimes(
                start,
                computing=availability.online_time(start, end),
                sending=self._round.sending[peer],
                steps=steps[peer],
            )
            times.finish(end, availability)
            peers[peer] = times
        return simulated_times(RoundTimes(end, peers), self.times.fleet, self.context.roster)


def gossip_times(context: RunContext, cost: ForwardCost) -> GossipTimes:
    """Return the times of a run's steps, from its beginning."""
    fleet = context.simulation.fleet_of(context.roster)
    assert fleet is not None, "an asynchronous run has devices"
    operations: dict[tuple[str, int], int] = {}

    def operations_of(peer: str, models: int) -> int:
        if (peer, models) not in operations:
            operations[peer, models] = step_operations(context, cost, peer, models)
        return operations[peer, models]

    hours = context.simulation.hours_per_round
    if hours is not None:
        length = max(1, round(hours * HOUR))
    else:
        durations = [fleet.computing_time(peer, operations_of(peer, 0)) for peer in fleet.peers]
        length = max(1, median_low(durations))
    sizes = {peer: size.wire for peer, size in message_sizes(context).items()}
    work = GossipWork(operations_of, sizes, partial(receivers, context))
    staleness = context.settings.staleness
    return GossipTimes(fleet, work, length, staleness.limit, reuses=staleness.reuse)


def receivers(context: RunContext, peer: str, number: int) -> list[str]:
    """Return to whom a peer sends its model before its step of this number, in random order."""
    _, names = exchange_row(context, number, context.roster, peer)
    seed = context.settings.seed
    return sorted(names, key=lambda name: stream_seed(seed, "send", peer, number, name))


def message_sizes(context: RunContext) -> dict[str, MessageSize]:
    """Return the bytes of each peer's messages: whole models of its density."""
    codec = context.codec
    sizes = {}
    for peer in context.roster:
        kept = sum(context.announced[peer])
        paper = BYTES_PER_VALUE * kept + total_bytes(codec.tensors)
        sizes[peer] = MessageSize(paper, codec.whole_size(kept))
    return sizes


def run_cost(context: RunContext) -> ForwardCost:
    """Return what each parameter of a run's network costs, as its metrics count it."""
    module = context.module()
    sample, _ = next(context.data.peers[context.roster[0]].train.batches(1))
    return forward_cost(module, Layout.of(module), sample)


def steps_in_run(context: RunContext) -> dict[str, int]:
    """Return how many steps each peer finishes in a run: a privacy budget lasts for as many."""
    times = gossip_times(context, run_cost(context))
    counts = dict.fromkeys(context.roster, 0)
    for _ in range(context.settings.rounds):
        for step in times.advance().steps:
            counts[step.peer] += 1
    return {peer: max(1, count) for peer, count in counts.items()}
