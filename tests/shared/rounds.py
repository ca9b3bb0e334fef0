"""Rounds that start from given states of all peers."""

from collections.abc import Iterable

from dispfl.round.context import PeerTask, RunContext
from dispfl.testing.rounds import FinishedRound, PresetEngine, run_all_rounds, run_from

__all__ = ["FinishedRound", "PresetEngine", "ReversedEngine", "run_all_rounds", "run_from"]


class ReversedEngine(PresetEngine):
    """Runs the tasks in reverse order."""

    def __init__(self, context: RunContext) -> None:
        super().__init__(context, 1)
        self.order: list[str] = []

    def run_tasks(self, tasks: Iterable[PeerTask]):  # type: ignore[no-untyped-def]
        tasks = list(tasks)[::-1]
        self.order += [task.peer for task in tasks]
        yield from super().run_tasks(tasks)
