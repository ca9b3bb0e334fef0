"""A peer's run directory: the same files as a simulation's, with one peer in it, written by a node."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dispfl.core.train import Report, Task
from dispfl.costs.flops import ForwardCost
from dispfl.costs.ledger import MessageCost
from dispfl.errors import RunError
from dispfl.methods.base import PeerState
from dispfl.peer.spec import spec_difference
from dispfl.round.context import RunContext, StepResult
from dispfl.round.round import Round
from dispfl.runs.directory import RunDirectory, read_config, read_metrics
from dispfl.runs.metrics import Metrics, round_metrics, summarize


class PeerStore:
    """The run directory of one peer, locked by this process."""

    def __init__(
        self,
        folder: Path,
        name: str,
        spec: Mapping[str, str],
        settings: Mapping[str, Any] | None = None,
        cost: ForwardCost | None = None,
        task: Task | None = None,
    ) -> None:
        """Create the directory, or open an existing one, which must have the same federation spec.

        `settings` are saved with a new one; `cost` and `task` are needed to save rounds.
        """
        self.name = name
        self.folder = folder
        self._last_save = time.time()
        self._cost, self._task = cost, task
        if not (folder / "config.toml").exists():
            config = {**(settings or {}), "peers": 1, "peer": name, "spec": dict(spec)}
            self._directory = RunDirectory.create(folder, config)
            return
        written = read_config(folder)
        if differs := spec_difference(spec, written.get("spec", {}), "now", "then"):
            raise RunError(f"{folder} was started with another spec: {differs} Delete the folder to start again.")
        self._directory = RunDirectory.open(folder)

    def last(self) -> tuple[int, PeerState] | None:
        """Return the number of finished rounds and the state after them, from the newest complete checkpoint.

        Metrics of later rounds are dropped: these rounds are repeated.
        """
        checkpoints = self._directory.checkpoints
        for rounds in reversed(checkpoints.finished_rounds()):
            try:
                state = checkpoints.load(rounds)[self.name].next_state
            except (RunError, KeyError):
                checkpoints.discard(rounds)
                continue
            self._directory.truncate_metrics(rounds, gaps=True)
            return rounds, state
        self._directory.truncate_metrics(0)
        return None

    def rewind_to(self, rounds: int) -> None:
        """Discard the checkpoints after this many rounds, if there is one for them, or if only round 0 is lost."""
        finished = self._directory.checkpoints.finished_rounds()
        if rounds in finished or (rounds, finished) == (0, [1]):
            for later in finished:
                if later > rounds:
                    self._directory.checkpoints.discard(later)

    def save(self, t: int, step: StepResult, heard: Sequence[str], missed: Sequence[str]) -> None:
        """Save a round: first its line, last the checkpoint, which makes the round count."""
        assert self._cost is not None
        assert self._task is not None
        now, result = time.time(), Round({self.name: step.without_state()})
        line = round_metrics(t, result, self._task, self._cost, max(0.0, now - self._last_save))
        line |= {"time": now, "heard": list(heard), "missed": list(missed)}
        line |= {"report": asdict(step.report), "messages": step.messages}
        self._directory.append(line)
        self._directory.checkpoints.add(t, self.name, step)
        self._directory.checkpoints.complete(t)
        self._last_save = now

    def finish(self, context: RunContext, state: PeerState) -> None:
        """Write the summary, which makes the run count as finished."""
        records = read_metrics(self.folder)
        if records:
            self._directory.write_summary(summarize(context, records, {self.name: state.model}))

    def close(self) -> None:
        """Release the directory's lock."""
        self._directory.close()


def rounds_of(folder: Path) -> dict[int, Metrics]:
    """Return the metrics of a peer's rounds, by round."""
    return {record["round"]: record for record in read_metrics(folder)}


def report_of(entry: Mapping[str, Any]) -> tuple[Report, tuple[MessageCost, ...]]:
    """Return the report and the messages in a line of a peer's metrics."""
    return Report(**entry["report"]), tuple(MessageCost(*message) for message in entry["messages"])
