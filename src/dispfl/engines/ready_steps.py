"""Which steps of an asynchronous round may begin: those whose models exist already."""

from collections.abc import Collection, Sequence
from heapq import heappop, heappush

from dispfl.round.context import PeerTask

Step = tuple[str, int]
"""A peer, and the number of its step."""


class ReadySteps:
    """The steps of a round that have not begun, and those of them that may.

    A step needs the peer's step before it, and those whose models it averages. Of the steps that
    may begin, those with the most steps of the same peer after them are first.
    """

    def __init__(self, tasks: Sequence[PeerTask], running: Collection[Step] = ()) -> None:
        self._tasks: dict[Step, PeerTask] = {}
        for task in tasks:
            self._tasks[task.peer, task.t] = task
        steps = {step for step, task in self._tasks.items() if not task.idle}
        self._blockers: dict[Step, int] = {}
        """How many steps of this round each one still needs."""
        self._dependents: dict[Step, list[Step]] = {}
        self._priority: dict[Step, tuple[int, int]] = {}
        self._ready: list[tuple[tuple[int, int], Step]] = []
        later: dict[str, int] = {}
        for order, step in reversed(list(enumerate(self._tasks))):
            peer = step[0]
            self._priority[step] = (-later.get(peer, 0), order)
            later[peer] = later.get(peer, 0) + 1
            needed = needed_steps(self._tasks[step]) & steps
            self._blockers[step] = len(needed)
            for other in needed:
                self._dependents.setdefault(other, []).append(step)
        for step, blockers in self._blockers.items():
            if not blockers and step not in running:
                heappush(self._ready, (self._priority[step], step))

    def take(self) -> PeerTask | None:
        """Return the next step that may begin; None if none may now."""
        if not self._ready:
            return None
        _, step = heappop(self._ready)
        return self._tasks[step]

    def finish(self, task: PeerTask) -> None:
        """Note that a step is over: others may begin."""
        for step in self._dependents.get((task.peer, task.t), ()):
            self._blockers[step] -= 1
            if not self._blockers[step]:
                heappush(self._ready, (self._priority[step], step))


def needed_steps(task: PeerTask) -> set[Step]:
    """Return the steps that must be over before one begins."""
    if task.idle:
        return set()
    return {(task.peer, task.t - 1), *(task.models or {}).items()}
