"""A peer's run directory: the same files as a simulation's, with one peer in it, written by a
node."""

import asyncio
import contextlib
import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from dispfl.core.report import Report
from dispfl.core.task import Task
from dispfl.costs.flops import ForwardCost
from dispfl.errors import DamagedError, DispflError, RunError
from dispfl.files import plain_disk_errors, write_atomically
from dispfl.methods.base import PeerState
from dispfl.peer.setup.spec import spec_difference
from dispfl.peer.state.log import EventLog, finite
from dispfl.peer.state.status import NodeStatus
from dispfl.privacy.accountant import PrivacyPlan, PrivateHistory, StepsTaken
from dispfl.privacy.steps import Privacy
from dispfl.round.context import RunContext, StepResult
from dispfl.round.ledger import MessageCost
from dispfl.round.round import PRIVATE_STEPS, Round
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
        self._last_save = time.monotonic()
        self._cost, self._task = cost, task
        self._lines: list[Metrics] = []
        """Lines of rounds that are not on the disk."""
        self._newest: tuple[int, StepResult] | None = None
        """The last round, if its checkpoint is not on the disk."""
        self.unsaved_rounds = 0
        if not (folder / "config.toml").exists():
            config = {**(settings or {}), "peers": 1, "peer": name, "spec": dict(spec)}
            self._directory = RunDirectory.create(folder, config)
            return
        if differs := difference_from_start(folder, spec, settings):
            raise RunError(
                f"{folder} was started {differs} Undo that, or delete the folder to start again."
            )
        self._directory = RunDirectory.open(folder)

    def last(self) -> tuple[int, PeerState] | None:
        """Return the number of finished rounds and the state after them, from the newest intact
        checkpoint.

        Damaged ones are kept under another name. Metrics of later rounds are dropped: these rounds
        are repeated.
        """
        checkpoints, kept = self._directory.checkpoints, None
        for rounds in reversed(checkpoints.finished_rounds()):
            try:
                steps = checkpoints.load(rounds)
            except DamagedError as damage:
                kept = checkpoints.set_aside(
                    rounds, damage, "Resuming from another round, if there is one."
                )
                continue
            if self.name not in steps:
                raise RunError(
                    f"The checkpoint after {rounds} rounds in {self.folder} is of"
                    f" {', '.join(steps)}."
                )
            self._directory.truncate_metrics(rounds, gaps=True)
            return rounds, steps[self.name].next_state
        if kept:  # the site starts or joins again; its earlier rounds are kept with the damaged checkpoint
            with plain_disk_errors(kept), contextlib.suppress(FileNotFoundError):
                shutil.copy(self.folder / "metrics.jsonl", kept)
        self._directory.truncate_metrics(0)
        return None

    def rewind_to(self, rounds: int) -> None:
        """Discard the checkpoints after this many rounds, if there is one for them, or if only
        round 0 is lost."""
        finished = self._directory.checkpoints.finished_rounds()
        if rounds in finished or (rounds, finished) == (0, [1]):
            for later in finished:
                if later > rounds:
                    self._directory.checkpoints.discard(later)

    def save(
        self, t: int, step: StepResult, received: Sequence[str], missed: Sequence[str]
    ) -> None:
        """Save a round: first its line, last the checkpoint, which makes the round count.

        If this fails, the round is saved by the next call of `save` or `save_again`.
        """
        assert self._cost is not None
        assert self._task is not None
        now, result = time.monotonic(), Round({self.name: step.without_state()})
        line = round_metrics(t, result, self._task, self._cost, now - self._last_save)
        line |= {"time": time.time(), "received": list(received), "missed": list(missed)}
        line |= {"report": finite(asdict(step.report)), "messages": step.messages}
        self._last_save = now
        self._lines.append(line)
        self._newest = (t, step)
        self.unsaved_rounds += 1
        self.save_again()

    def save_again(self) -> None:
        """Save the rounds that are not on the disk yet, if there are any."""
        if self._newest is None:
            return
        (t, step), checkpoints = self._newest, self._directory.checkpoints
        while self._lines:
            self._directory.append(self._lines[0])
            del self._lines[0]
        try:
            checkpoints.add(t, self.name, step)
            checkpoints.complete(t)
        except BaseException:
            if t + 1 not in checkpoints.finished_rounds():
                with contextlib.suppress(OSError):
                    checkpoints.discard(
                        t + 1
                    )  # half of a checkpoint would take the space that is needed
            raise
        self._newest, self.unsaved_rounds = None, 0

    def finish(self, context: RunContext, state: PeerState) -> None:
        """Write the summary, which makes the run count as finished."""
        records = read_metrics(self.folder)
        if records:
            self._directory.write_summary(summarize(context, records, {self.name: state.model}))

    def close(self) -> None:
        """Release the directory's lock."""
        self._directory.close()


def difference_from_start(
    folder: Path, spec: Mapping[str, str], settings: Mapping[str, Any] | None
) -> str | None:
    """Describe what keeps a run directory from being resumed with this spec and these settings;
    None: nothing does."""
    written = read_config(folder)
    if differs := spec_difference(spec, written.get("spec", {}), "now", "then"):
        return f"with another spec: {differs}"
    if settings is None:
        return None
    if (now := _is_private(settings)) != _is_private(written):
        return (
            f"{'without' if now else 'with'} the table privacy, and now it is"
            f" {'there' if now else 'missing'}: no budget covers rounds of both kinds."
        )
    if (density := settings.get("method", {}).get("density")) != (
        then := written.get("method", {}).get("density")
    ):
        return (
            f"with method.density={then}, and now it is {density}: the model keeps as many weights"
            " as before, and the others would refuse what does not match the announced density."
        )
    return None


def _is_private(settings: Mapping[str, Any]) -> bool:
    """Whether training is private with the settings of a config file."""
    return Privacy(**settings.get("privacy", {})).enabled


class PrivateRounds:
    """The rounds of private training that a site has begun: on the disk before each of them, so
    that a crash, a round that is repeated with other neighbours, and other settings or data later
    never count less than was spent.
    """

    def __init__(self, folder: Path) -> None:
        self.file = folder / "privacy.json"

    @property
    def begun(self) -> PrivateHistory:
        """The rounds, and their steps."""
        try:
            found = json.loads(self.file.read_text())
            return PrivateHistory(
                int(found["rounds_begun"]), tuple(StepsTaken(**taken) for taken in found["taken"])
            )
        except FileNotFoundError:
            return PrivateHistory()
        except (OSError, ValueError, KeyError, TypeError) as problem:
            raise RunError(
                f"{self.file}, which counts the rounds of private training, cannot be read:"
                f" {problem}. Restore it; without it the site would spend more than its budget."
            ) from problem

    def spent(self, plan: PrivacyPlan) -> tuple[float, bool]:
        """Return the spent epsilon, and whether the budget does not last for another round."""
        history = self.begun
        return plan.after(history).spent(plan.steps_in(history)), plan.begin_round(history) is None

    def begin(self, plan: PrivacyPlan, state: PeerState) -> PrivateHistory:
        """Count a round, unless the budget does not last for it; return what was begun before.

        A file that counts fewer steps than the state that the round begins with is older than that,
        or lost.
        """
        before = self.begun
        counted, taken = (
            sum(each.steps for each in before.taken),
            int(state.memory.get(PRIVATE_STEPS, 0)),
        )
        if counted < taken:
            raise RunError(
                f"{self.file} counts {counted} steps of private training, but the model has taken"
                f" {taken}. Restore the newest copy; with this one the site would spend more than"
                " its budget."
            )
        if now := plan.begin_round(before):
            found = {
                "version": 1,
                "rounds_begun": now.rounds,
                "taken": [asdict(taken) for taken in now.taken],
            }
            write_atomically(self.file, json.dumps(found).encode())
        return before


class SavingThread:
    """Saves rounds on a thread. A disk that is full or fails does not stop the node: it saves them
    later."""

    RETRY_SECONDS = 10.0

    def __init__(self, store: PeerStore, status: NodeStatus, log: EventLog) -> None:
        self.store = store
        self._status = status
        self._log = log
        self._pool = ThreadPoolExecutor(1, "saving")

    async def save(
        self, t: int, step: StepResult, received: Sequence[str], missed: Sequence[str]
    ) -> None:
        """Save a round, and those that could not be saved before; return also if the disk
        refuses."""
        await self._run(partial(self.store.save, t, step, received, missed))

    async def retry(self) -> None:
        """Try again for ever, while there are unsaved rounds."""
        while True:
            await asyncio.sleep(self.RETRY_SECONDS)
            if self._status.unsaved_rounds:
                await self._run(self.store.save_again)

    async def wait_until_saved(self) -> None:
        """Return once everything is saved. The model of the last round exists only in memory until
        then."""
        while self._status.unsaved_rounds:
            await asyncio.sleep(self.RETRY_SECONDS / 10)

    def close(self) -> None:
        """Finish the save in progress, and make a last attempt."""
        self._pool.shutdown()
        try:
            self.store.save_again()
        except (DispflError, OSError) as problem:
            self._log(
                "lost", {"rounds": self.store.unsaved_rounds, "detail": self._reason(problem)}
            )

    async def _run(self, save: Callable[[], None]) -> None:
        status, problem = self._status, None
        try:
            await asyncio.get_running_loop().run_in_executor(self._pool, save)
        except (DispflError, OSError) as error:
            problem = self._reason(error)
        if problem != status.save_problem:
            if problem:
                detail = f"{problem}; training continues in memory, and saving is tried again"
                self._log("not saved", {"round": status.round, "detail": detail})
            else:
                self._log("saved", {"round": status.round})
        status.save_problem, status.unsaved_rounds = problem, self.store.unsaved_rounds

    def _reason(self, problem: Exception) -> str:
        """What the system says, without the advice for a run that has ended."""
        cause = problem.__cause__ or problem
        return (
            f"{cause.strerror or cause} in {self.store.folder}"
            if isinstance(cause, OSError)
            else str(problem)
        )


def rounds_of(folder: Path) -> dict[int, Metrics]:
    """Return the metrics of a peer's rounds, by round."""
    return {record["round"]: record for record in read_metrics(folder)}


def unheard(folder: Path) -> str | None:
    """Return the sentence about a peer whose rounds missed neighbours and never received one, else
    None."""
    rounds = rounds_of(folder).values()
    if any(entry["received"] for entry in rounds) or not any(entry["missed"] for entry in rounds):
        return None
    return (
        f"All {len(rounds)} rounds were run without hearing any other site, so the model was"
        " trained alone. `dispfl peer status` shows the others' addresses, rounds and refusals."
    )


def report_of(entry: Mapping[str, Any]) -> tuple[Report, tuple[MessageCost, ...]]:
    """Return the report and the messages in a line of a peer's metrics."""
    return Report(**entry["report"]), tuple(MessageCost(*message) for message in entry["messages"])
