"""The clock of a run with a deadline, which decides which models are late."""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from dispfl.clock.deadline import DeadlineClock
from dispfl.clock.links import SECOND
from dispfl.costs.flops import ForwardCost
from dispfl.costs.steps import step_operations
from dispfl.round.context import RunContext
from dispfl.runs.metrics import Metrics
from dispfl.runs.timing import round_work, simulated_times


class DeadlineRunClock:
    """The clock of a run with a deadline, after the rounds of some records."""

    def __init__(
        self, context: RunContext, cost: ForwardCost, records: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        fleet = context.simulation.fleet_of(context.roster)
        deadline = context.simulation.deadline
        assert fleet is not None, "a run with a deadline has devices"
        assert deadline is not None

        @cache
        def operations(peer: str, models: int) -> int:
            return step_operations(context, cost, peer, models)

        self.context = context
        self.clock = DeadlineClock(fleet, max(1, round(deadline * SECOND)), operations)
        for record in records:
            self.clock.exchange(round_work(record, context.roster).messages)

    def advance(self, record: Mapping[str, Any]) -> Metrics:
        """Return the simulated times of the last round, for its line of the metrics."""
        return simulated_times(self.clock.times, self.clock.fleet, self.context.roster)
