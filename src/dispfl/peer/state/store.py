"""A peer's run directory: the files of a simulation with one peer, written by its node."""

import asyncio
import contextlib
import json
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dispfl.core.report import Report
from dispfl.core.task import Task
from dispfl.costs.flops import ForwardCost
from dispfl.errors import DamagedError, DispflError, RunError
from dispfl.files import plain_disk_errors, read_regular, write_atomically
from dispfl.methods.base import PeerState
from dispfl.peer.setup.spec import spec_difference
from dispfl.peer.state.log import EventLog, finite
from dispfl.peer.state.status import NodeStatus
from dispfl.privacy.accountant import PrivacyPlan, PrivateHistory, StepsTaken
from dispfl.privacy.steps import Privacy
from dispfl.round.context import RunContext, StepResult
from dispfl.round.ledger import MessageCost
from dispfl.round.round import PRIVATE_STEPS, Round
from dispfl.runs.directory import RunDirectory, json_line, read_config, read_metrics
from dispfl.runs.metrics import Metrics, round_metrics, summarize

REOPENED = "reopened"
"""In the names of files that `reopen` keeps."""


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
        self._cost = cost
        self._task = task
        self._lines: list[Metrics] = []
        """Lines of rounds that are not on the disk."""
        self._newest: tuple[int, StepResult] | None = None
        """The last round, if its checkpoint is not on the disk."""
        self.unsaved_rounds = 0
        if not (folder / "config.toml").exists():
            config = {**(settings or {}), "peers": 1, "peer": name, "spec": dict(spec)}
            self._directory = RunDirectory.create(folder, config)
            return
        difference = difference_from_start(folder, spec, settings)
        if difference:
            raise RunError(
                f"{folder} was started {difference} Undo that, or delete the folder to start again."
            )
        self._directory = RunDirectory.open(folder)

    def last(self) -> tuple[int, PeerState] | None:
        """Return the number of finished rounds and the state after them; None if there are none.

        They come from the newest intact checkpoint; damaged ones are renamed. Metrics of later
        rounds are dropped: these rounds are repeated.
        """
        checkpoints = self._directory.checkpoints
        damaged = None
        for rounds in reversed(checkpoints.finished_rounds()):
            try:
                steps = checkpoints.load(rounds)
            except DamagedError as damage:
                advice = "Resuming from another round, if there is one."
                damaged = checkpoints.set_aside(rounds, damage, advice)
                continue
            if self.name not in steps:
                raise RunError(
                    f"The checkpoint after {rounds} rounds in {self.folder} is of"
                    f" {', '.join(steps)}."
                )
            self._directory.truncate_metrics(rounds, gaps=True)
            return rounds, steps[self.name].next_state
        if damaged:  # the site starts or joins again; keep the metrics of its earlier rounds
            with plain_disk_errors(damaged), contextlib.suppress(FileNotFoundError):
                shutil.copy(self.folder / "metrics.jsonl", damaged)
        self._directory.truncate_metrics(0)
        return None

    def rewind_to(self, rounds: int) -> None:
        """Discard later checkpoints, if there is one after this many rounds or only round 0 is
        lost."""
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
        clock_time = time.monotonic()
        duration = clock_time - self._last_save
        self._last_save = clock_time
        result = Round({self.name: step.without_state()})
        line = round_metrics(t, result, self._task, self._cost, duration)
        line |= {
            "time": time.time(),
            "links": None,  # positions in a roster that changes; these are the names
            "message_bytes": None,
            "received": list(received),
            "missed": list(missed),
            "report": finite(asdict(step.report)),
            "messages": step.messages,
        }
        self._lines.append(line)
        self._newest = (t, step)
        self.unsaved_rounds += 1
        self.save_again()

    def save_again(self) -> None:
        """Save the rounds that are not on the disk yet, if there are any."""
        if self._newest is None:
            return
        t, step = self._newest
        checkpoints = self._directory.checkpoints
        while self._lines:
            self._directory.append(self._lines[0])
            del self._lines[0]
        try:
            checkpoints.add(t, self.name, step)
            checkpoints.complete(t)
        except BaseException:
            if t + 1 not in checkpoints.finished_rounds():
                with contextlib.suppress(OSError):  # it would take the space that is needed
                    checkpoints.discard(t + 1)
            raise
        self._newest = None
        self.unsaved_rounds = 0

    def use_settings(self, settings: Mapping[str, Any]) -> None:
        """Write the settings of a changed federation; the first version of its spec stays."""
        config = read_config(self.folder)
        first_facts = {key: config[key] for key in ("peers", "peer", "spec")}
        self._directory.extend({**settings, **first_facts})

    def finish(self, context: RunContext, state: PeerState) -> None:
        """Write the summary, which makes the run count as finished."""
        records = read_metrics(self.folder)
        if records:
            self._directory.write_summary(summarize(context, records, {self.name: state}))

    def close(self) -> None:
        """Release the directory's lock."""
        self._directory.close()


def difference_from_start(
    folder: Path, spec: Mapping[str, str], settings: Mapping[str, Any] | None
) -> str | None:
    """Describe why a run cannot be resumed with this spec and these settings; None if it can."""
    saved_settings = read_config(folder)
    difference = spec_difference(spec, saved_settings.get("spec", {}), "now", "then")
    if difference:
        return f"with another spec: {difference}"
    if settings is None:
        return None

    is_private = _is_private(settings)
    if is_private != _is_private(saved_settings):
        change = "without the table privacy, and now it is there"
        if not is_private:
            change = "with the table privacy, and now it is missing"
        return f"{change}: no budget covers rounds of both kinds."

    density = settings.get("method", {}).get("density")
    saved_density = saved_settings.get("method", {}).get("density")
    if density != saved_density:
        return (
            f"with method.density={saved_density}, and now it is {density}: the model keeps as many"
            " weights as before, and the others would refuse what does not match the announced"
            " density."
        )
    return None


def _is_private(settings: Mapping[str, Any]) -> bool:
    """Whether training is private with the settings of a config file."""
    return Privacy(**settings.get("privacy", {})).enabled


class PrivateRounds:
    """The rounds of private training that a site has begun.

    They are on the disk before each round, so that a crash, a repeated round, and other settings or
    data later never count less than was spent.
    """

    def __init__(self, folder: Path) -> None:
        self.file = folder / "privacy.json"

    @property
    def begun(self) -> PrivateHistory:
        """The rounds, and their steps."""
        try:
            content = json.loads(read_regular(self.file))
            if "restored_from" in content:
                raise RunError(
                    f"The site was restored from a backup of {content['restored_from']}, and what"
                    f" it has spent since is not known. Put its newest privacy.json in place of"
                    f" {self.file}. If it has not run since, restore it again with --newest."
                )
            taken = tuple(StepsTaken(**entry) for entry in content["taken"])
            return PrivateHistory(int(content["rounds_begun"]), taken)
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
        epsilon = plan.after(history).spent(plan.steps_in(history))
        is_exhausted = plan.begin_round(history) is None
        return epsilon, is_exhausted

    def begin(self, plan: PrivacyPlan, state: PeerState) -> PrivateHistory:
        """Count a round, unless the budget does not last for it; return what was begun before.

        A file that counts fewer steps than the state that the round begins with is older than that,
        or lost.
        """
        before = self.begun
        counted_steps = sum(entry.steps for entry in before.taken)
        steps_of_model = int(state.memory.get(PRIVATE_STEPS, 0))
        if counted_steps < steps_of_model:
            raise RunError(
                f"{self.file} counts {counted_steps} steps of private training, but the model has"
                f" taken {steps_of_model}. Restore the newest copy; with this one the site would"
                " spend more than its budget."
            )
        after = plan.begin_round(before)
        if after is not None:
            content = {
                "version": 1,
                "rounds_begun": after.rounds,
                "taken": [asdict(entry) for entry in after.taken],
            }
            write_atomically(self.file, json.dumps(content).encode())
        return before


class SavingThread:
    """Saves rounds on a thread; those that a full or failing disk refuses are saved later."""

    RETRY_SECONDS = 10.0

    def __init__(self, store: PeerStore, status: NodeStatus, log: EventLog) -> None:
        self.store = store
        self._status = status
        self._log = log
        self._pool = ThreadPoolExecutor(1, "saving")

    async def save(
        self, t: int, step: StepResult, received: Sequence[str], missed: Sequence[str]
    ) -> None:
        """Save a round, and those that could not be saved before, as far as the disk accepts
        them."""
        await self._run(partial(self.store.save, t, step, received, missed))

    def use(self, run: RunContext) -> None:
        """Write the settings of later rounds, before the next round is saved."""
        settings = run.settings.to_toml()
        self._pool.submit(self._use_settings, settings)

    def _use_settings(self, settings: Mapping[str, Any]) -> None:
        try:
            self.store.use_settings(settings)
        except (DispflError, OSError) as problem:  # a full disk: the config is shown, not used
            self._log("problem", {"detail": self._reason(problem)})

    async def retry(self) -> None:
        """Try again for ever, while there are unsaved rounds."""
        while True:
            await asyncio.sleep(self.RETRY_SECONDS)
            if self._status.unsaved_rounds:
                await self._run(self.store.save_again)

    async def wait_until_saved(self) -> None:
        """Wait until everything is saved: the last model exists only in memory until then."""
        while self._status.unsaved_rounds:
            await asyncio.sleep(self.RETRY_SECONDS / 10)

    def close(self) -> None:
        """Finish the save in progress, and make a last attempt."""
        self._pool.shutdown()
        try:
            self.store.save_again()
        except (DispflError, OSError) as problem:
            detail = self._reason(problem)
            self._log("lost", {"rounds": self.store.unsaved_rounds, "detail": detail})

    async def _run(self, save: Callable[[], None]) -> None:
        status = self._status
        problem = None
        try:
            await asyncio.get_running_loop().run_in_executor(self._pool, save)
        except (DispflError, OSError) as error:
            problem = self._reason(error)
            status.saving_errors += 1
        if problem != status.save_problem:
            if problem:
                detail = f"{problem}; training continues in memory, and saving is tried again"
                self._log("not saved", {"round": status.round, "detail": detail})
            else:
                self._log("saved", {"round": status.round})
        status.save_problem = problem
        status.unsaved_rounds = self.store.unsaved_rounds

    def _reason(self, problem: Exception) -> str:
        """What the system says, without the advice for a run that has ended."""
        cause = problem.__cause__ or problem
        if isinstance(cause, OSError):
            return f"{cause.strerror or cause} in {self.store.folder}"
        return str(problem)


def rounds_of(folder: Path) -> dict[int, Metrics]:
    """Return the metrics of a peer's rounds, by round."""
    return {record["round"]: record for record in read_metrics(folder)}


@dataclass(frozen=True)
class Company:
    """In how many of its rounds a site had company: received a model that it had requested."""

    trained_rounds: int
    alone_rounds: int
    """Rounds without any of the requested models."""
    alone_in_a_row: int
    """The last of them, since the last received model."""
    until: int
    """How many rounds had passed at the last received model."""
    rounds: int
    """How many have passed, with those that the site skipped."""

    @classmethod
    def of_rounds(cls, rounds: Iterable[Mapping[str, Any]]) -> "Company":
        """Count the rounds of a peer's metrics, which are in order."""
        trained_rounds = 0
        alone_rounds = 0
        alone_in_a_row = 0
        until = 0
        passed = 0
        for entry in rounds:
            trained_rounds += 1
            passed = entry["round"] + 1
            if entry["received"]:
                alone_in_a_row = 0
                until = passed
            elif entry["missed"]:
                alone_rounds += 1
                alone_in_a_row += 1
        return cls(trained_rounds, alone_rounds, alone_in_a_row, until, passed)

    @property
    def problem(self) -> str | None:
        """A sentence if the site was alone in most of its rounds, else None."""
        if 2 * self.alone_rounds <= self.trained_rounds:
            return None
        return (
            f"{self.alone_rounds} of {self.trained_rounds} rounds were trained without a model of"
            " any other site, so this is not the model of a federation. `dispfl peer status` shows"
            " the others' addresses, rounds and refusals; `dispfl peer reopen` continues after the"
            " last round with a received model."
        )


def isolation_problem(folder: Path) -> str | None:
    """Return a sentence if a peer was alone in most of its rounds, else None.

    One that waits for nobody may have taken few steps; it is a peer of the federation if it was
    with the others in the second half of the rounds.
    """
    company = Company.of_rounds(read_metrics(folder))
    if company.problem is None or 2 * company.until <= company.rounds:
        return company.problem
    is_async = read_config(folder).get("spec", {}).get("schedule") == "async"
    return None if is_async else company.problem


def reopen(folder: Path, name: str, rounds: int | None = None) -> int:
    """Continue a run after this many rounds, by default after the last received model.

    Where that checkpoint is gone, the newest model continues there. Later checkpoints, metrics and
    the summary are renamed. Returns the number of rounds.
    """
    with contextlib.closing(RunDirectory.open(folder)) as directory:
        checkpoints = directory.checkpoints
        finished = checkpoints.finished_rounds()
        records = read_metrics(folder)
        if rounds is None:
            rounds = max((entry["round"] + 1 for entry in records if entry["received"]), default=0)
        newest = finished[-1] if finished else 0
        if not 0 < rounds <= newest:
            raise RunError(
                f"{name} can be reopened after 1 to {newest} rounds, got {rounds}. To start again"
                f" with round 0, rename {folder}."
            )

        later = [entry for entry in records if entry["round"] >= rounds]
        _set_aside(folder, "metrics", "jsonl", b"".join(map(json_line, later)))
        if (folder / "summary.json").exists():
            _set_aside(folder, "summary", "json", (folder / "summary.json").read_bytes())
            (folder / "summary.json").unlink()

        # There is a complete checkpoint at any moment.
        for checkpoint in finished[:-1]:
            if checkpoint > rounds:
                checkpoints.rename(checkpoint, REOPENED)
        if rounds not in finished:
            checkpoints.add(rounds - 1, name, checkpoints.load(newest)[name])
            checkpoints.complete(rounds - 1)
        if newest > rounds:
            checkpoints.rename(newest, REOPENED)
        directory.truncate_metrics(rounds, gaps=True)
    return rounds


def _set_aside(folder: Path, stem: str, suffix: str, content: bytes) -> None:
    """Write a file with a new name, such as metrics.2.reopened.jsonl."""
    number = 1
    while (file := folder / f"{stem}.{number}.{REOPENED}.{suffix}").exists():
        number += 1
    write_atomically(file, content)


def report_of(entry: Mapping[str, Any]) -> tuple[Report, tuple[MessageCost, ...]]:
    """Return the report and the messages in a line of a peer's metrics."""
    messages = tuple(MessageCost(*message) for message in entry["messages"])
    return Report(**entry["report"]), messages
