"""Grids of runs: the runs of a comparison or a sweep, their states, and running them.

    DIR/<method>/seed-0, seed-1, ...             of a comparison of methods
    DIR/<method>@<key>=<value>[,...]/seed-0, ... of a variant of a method in it
    DIR/<key>=<value>[,...]/seed-0, seed-1, ...  of a sweep over settings

Runs with the same seed and data settings have the same split, the same initial weights and the same
test data, because each of these has a random stream of its own that no method draws from.
"""

import contextlib
import itertools
import json
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from dispfl.config import compose
from dispfl.data.fetch import ProgressCallback
from dispfl.engines.checkpoint import Checkpoints
from dispfl.errors import ConfigError, RunError, TakenError
from dispfl.experiment import Experiment
from dispfl.registry import METHODS
from dispfl.runs.directory import RunDirectory, has_all_rounds, read_metrics
from dispfl.runs.execute import ExperimentRun, check_same_experiment, connect_engine
from dispfl.runs.loop import RunObserver
from dispfl.runs.prepare import prepare
from dispfl.runs.tracking import tracking
from dispfl.settings import did_you_mean

POLL_INTERVAL = 1.0
"""Seconds between two looks at the runs of other processes: is one finished, or free?"""


class RunState(StrEnum):
    """The state of a run of a grid."""

    DONE = "done"
    INTERRUPTED = "interrupted"
    MISSING = "missing"


@dataclass(frozen=True)
class GridRun:
    """One run of a grid."""

    row: Mapping[str, str]
    """How it differs from the other runs of its seed.

    `{"method": "ditto"}` in a comparison, `{"method.density": "0.2"}` in a sweep. A variant of a
    method is `{"method": "dispfl@method.structure=channels"}`.
    """
    experiment: Experiment
    path: Path

    @property
    def title(self) -> str:
        """`ditto seed 1`, or `method.density=0.2 seed 1`."""
        return f"{self.path.parent.name} seed {self.experiment.seed}"

    @property
    def steps(self) -> int:
        """The number of peer steps that it takes."""
        return self.experiment.rounds * self.experiment.peers

    @property
    def training(self) -> str:
        """Everything that its training depends on.

        Runs for which it is the same differ in evaluation only. A private run has noise of its own.
        """
        if self.experiment.privacy.enabled:
            return str(self.path)
        method = self.experiment.method.training_method
        training = self.experiment.model_copy(update={"method": method})
        return json.dumps(training.to_toml(), sort_keys=True)

    @property
    def finished_rounds(self) -> int:
        """The rounds after which it has its newest checkpoint; 0 without any."""
        return max(Checkpoints(self.path / "checkpoints").finished_rounds(), default=0)

    @property
    def state(self) -> RunState:
        """The state of its run directory."""
        if not (self.path / "config.toml").exists():
            return RunState.MISSING
        if has_all_rounds(self.path, self.experiment.rounds):
            return RunState.DONE
        return RunState.INTERRUPTED

    def start(
        self, directory: RunDirectory, decoding: ProgressCallback | None = None
    ) -> ExperimentRun:
        """Return the run in its directory, which this process has locked: new, or resumed."""
        return ExperimentRun.start(self.experiment, directory, decoding)


def methods_grid(
    arguments: Sequence[str], config: Mapping[str, Any], seeds: int, out: Path
) -> list[GridRun]:
    """Return the runs of a comparison.

    The arguments are methods, variants of methods (`dispfl@method.density=0.2`), and overrides.
    """
    variants: dict[str, tuple[str, list[str]]] = {}
    overrides = []
    for argument in arguments:
        if "=" not in argument or "@" in _key(argument):
            variants[argument] = _parse_variant(argument)
        else:
            overrides.append(argument)
    if not variants:
        raise ConfigError(f"Name the methods to compare. There are: {', '.join(METHODS)}.")

    fields = {name: _fields(name) for name, _ in variants.values()}
    for override in overrides:
        _check_override(override, fields)
    compose(config)  # a config must be valid even if its method is not among these

    rows: dict[str, tuple[dict[str, str], list[str]]] = {}
    for variant, (name, changes) in variants.items():
        folder = _safe_name(variant)
        if folder in rows:
            raise ConfigError(
                f"{variant} and {rows[folder][0]['method']} would share the folder {folder};"
                " omit one."
            )
        shared = [override for override in overrides if _has(fields[name], _key(override))]
        rows[folder] = ({"method": variant}, [*shared, f"method={name}", *changes])
    cells = _grid(rows, config, seeds, out)
    _refuse_equal_rows(cells[: len(rows)])
    return cells


def _fields(method: str) -> Collection[str]:
    """Return the settings of a method."""
    if method.endswith(".toml"):
        raise ConfigError(
            f"method {method!r} does not exist. Give a config file with -c.", key="method"
        )
    return METHODS.find(method).model_fields.keys() - {"name"}


def _check_override(override: str, fields: Mapping[str, Collection[str]]) -> None:
    """Refuse an override that is for none of the methods with these fields."""
    key = _key(override)
    if key in ("method", "method.name"):
        raise ConfigError(
            f"Name the methods to compare without 'method=', got {override!r}.", key="method"
        )
    if any(_has(names, key) for names in fields.values()):
        return
    method_keys = [f"method.{name}" for name in set().union(*fields.values())]
    fix = "They have no settings of their own."
    if method_keys:
        fix = did_you_mean(key, method_keys)
    raise ConfigError(
        f"None of these methods ({', '.join(fields)}) has the key {key}. {fix}", key=key
    )


def _parse_variant(text: str) -> tuple[str, list[str]]:
    """Split `dispfl@method.structure=channels,method.density=0.2` into method and overrides."""
    example = "such as dispfl@method.structure=channels"
    name, at, changes = text.partition("@")
    overrides = _split_at_commas(changes) if at else []
    for override in overrides:
        key = _key(override)
        if "=" not in override or not key:
            raise ConfigError(
                f"{text!r} must be METHOD@KEY=VALUE[,KEY=VALUE...], {example}; a value with commas"
                " needs brackets, as in method.density=[0.2,0.5]."
            )
        if key in ("method", "method.name"):
            raise ConfigError(
                f"{text!r} changes the method; name the method before the @, {example}.",
                key="method",
            )
        if key in SAME_FOR_ALL or key.partition(".")[0] in SAME_FOR_ALL:
            raise ConfigError(
                f"{text!r} changes {key}, but all rows of a comparison have the same peers and"
                f" data. Set it for all of them ({override}), or use dispfl sweep.",
                key=key,
            )
    if not name:
        raise ConfigError(
            f"{text!r} names no method before the @; write METHOD@KEY=VALUE, {example}."
        )
    return name, overrides


SAME_FOR_ALL = ("seed", "peers", "data", "partition")
"""Keys and tables that all rows of a comparison have in common."""


def _safe_name(text: str) -> str:
    """Return a folder's name for a method or a variant, safe in shells and paths."""
    return re.sub(r"[^\w.,=@+-]+", "_", text.replace(":", ".")).strip("_")


def _refuse_equal_rows(cells: Sequence[GridRun]) -> None:
    """Refuse rows with the same settings, such as dispfl and dispfl@method.structure=weights."""
    for first, second in itertools.combinations(cells, 2):
        if first.experiment == second.experiment:
            raise ConfigError(
                f"{first.row['method']} and {second.row['method']} have the same settings; omit one"
                " of them."
            )


def sweep_grid(
    overrides: Sequence[str], config: Mapping[str, Any], seeds: int, out: Path
) -> list[GridRun]:
    """Return the runs of a sweep.

    They are the product of all overrides with several values, such as `method.density=0.2,0.4`.
    """
    fixed: list[str] = []
    swept: dict[str, list[str]] = {}
    for override in overrides:
        if "=" not in override:
            raise ConfigError(
                f"Expected key=value, got {override!r}. To compare methods use dispfl compare."
            )
        values = _values(override)
        if len(values) == 1:
            fixed.append(override)
        else:
            swept[_key(override)] = list(dict.fromkeys(values))
    if not swept:
        raise ConfigError(
            "Nothing to sweep: give a key several values, such as method.density=0.2,0.5."
        )
    if "seed" in swept:
        raise ConfigError(
            "For several seeds use --seeds 3, which takes the config's seed and the next two.",
            key="seed",
        )
    rows = {}
    for combination in itertools.product(*swept.values()):
        row = dict(zip(swept, combination, strict=True))
        chosen = [f"{key}={value}" for key, value in row.items()]
        folder = ",".join(chosen).replace("/", "_")
        if folder in rows:
            raise ConfigError(
                f"Two runs of the sweep would share the folder {folder}; give values without"
                " slashes."
            )
        rows[folder] = (row, [*fixed, *chosen])
    return _grid(rows, config, seeds, out)


def check_grid(runs: Iterable[GridRun]) -> None:
    """Refuse run directories of other experiments, and networks that a method cannot use.

    Whether a network has channels that can be left out takes its data; it does not depend on the
    seed.
    """
    tried: list[Experiment] = []
    for run in runs:
        if run.state is not RunState.MISSING:
            fix = "Give the settings that it was run with, or another --out."
            check_same_experiment(run.path, run.experiment, fix)
            continue
        experiment = run.experiment.model_copy(update={"seed": 0})
        if experiment.method.masks_channels and experiment not in tried:
            tried.append(experiment)
            prepare(experiment)


@dataclass
class GridCallbacks:
    """Functions that a grid of runs calls as it proceeds."""

    run: Callable[[GridRun], RunObserver] = lambda run: RunObserver()
    """At the start of each run; returns the run's own callbacks."""
    end: Callable[[GridRun], None] = lambda run: None
    """When a run is finished."""
    wait: Callable[[Sequence[GridRun]], None] = lambda runs: None
    """Once a second while nothing is left but the runs of other processes."""
    decoding: ProgressCallback | None = None
    """While images are decoded for the first time."""


def run_missing(
    runs: Iterable[GridRun], callbacks: GridCallbacks | None = None, track: str | None = None
) -> None:
    """Resume the interrupted runs and start the missing ones, until all are finished.

    Several processes may do this at the same time: each takes the next run that no other has, and
    at the end waits for the others. A run whose process dies is taken up by one of those that wait.
    """
    callbacks = callbacks or GridCallbacks()
    # Interrupted runs come first: others may be trained together with them.
    remaining = sorted(runs, key=lambda run: not run.finished_rounds)
    while remaining:
        taken = []
        for run in remaining:
            directory = _lock(run)
            if directory is None:
                taken.append(run)
            else:
                _run_together(run, directory, remaining, callbacks, track)

        all_taken = len(taken) == len(remaining)
        remaining = [run for run in taken if run.state is not RunState.DONE]
        if remaining and all_taken:
            callbacks.wait(remaining)
            time.sleep(POLL_INTERVAL)


def _run_together(
    leader: GridRun,
    directory: RunDirectory,
    runs: Iterable[GridRun],
    callbacks: GridCallbacks,
    track: str | None,
) -> None:
    """Run a run, and with it those that differ only in how the same models are evaluated."""
    with contextlib.ExitStack() as stack:
        locked: list[tuple[GridRun, RunDirectory]] = []
        for run in runs:
            if run.path == leader.path or not _follows(run, leader):
                continue
            follower_directory = _lock(run)
            if follower_directory:
                stack.callback(follower_directory.close)
                locked.append((run, follower_directory))
        stack.callback(directory.close)

        observer = callbacks.run(leader)
        started = leader.start(directory, callbacks.decoding)
        tracked = stack.enter_context(tracking(track, leader.path, observer))
        followers = []
        for run, follower_directory in locked:
            follower = started.follower(run.experiment, follower_directory)
            follower.on_round = stack.enter_context(tracking(track, run.path, RunObserver())).round
            followers.append(follower)
        started.run(tracked, followers=followers)

    callbacks.end(leader)
    for run, _ in locked:
        callbacks.end(run)


def _follows(run: GridRun, leader: GridRun) -> bool:
    """Whether a run can be trained with another one: both from the start, or both interrupted."""
    if run.training != leader.training or run.finished_rounds:
        return False
    return len(read_metrics(run.path)) >= leader.finished_rounds


def _lock(run: GridRun) -> RunDirectory | None:
    """Lock the directory of an unfinished run; None if it is finished or another process has it."""
    state = run.state
    if state is RunState.DONE:
        return None
    try:
        if state is RunState.MISSING:
            connect_engine(run.experiment)
            return RunDirectory.claim(run.path)
        directory = RunDirectory.open(run.path)
    except TakenError:
        return None
    except RunError:
        if run.state is state:
            raise
        return None  # another process has just created it
    if run.state is RunState.DONE:  # another process has just finished it
        directory.close()
        return None
    return directory


def _grid(
    rows: Mapping[str, tuple[dict[str, str], list[str]]],
    config: Mapping[str, Any],
    seeds: int,
    out: Path,
) -> list[GridRun]:
    """Return all rows at the first seed, then all at the next.

    So an interrupted grid has complete comparisons in it.
    """
    first_seeds = {}
    for folder, (_, overrides) in rows.items():
        first_seeds[folder] = compose(config, overrides).seed

    runs = []
    for number in range(seeds):
        for folder, (row, overrides) in rows.items():
            seed = first_seeds[folder] + number
            experiment = compose(config, [*overrides, f"seed={seed}"])
            runs.append(GridRun(row, experiment, out / folder / f"seed-{seed}"))
    return runs


def _has(fields: Collection[str], key: str) -> bool:
    """Whether a key is for a method with these fields; those of other tables are for all."""
    return not key.startswith("method.") or key.removeprefix("method.") in fields


def _key(override: str) -> str:
    return override.partition("=")[0].strip()


def _values(override: str) -> list[str]:
    """Return the values of an override."""
    return _split_at_commas(override.partition("=")[2])


def _split_at_commas(text: str) -> list[str]:
    """Split a text at the commas outside brackets and quotes."""
    values = [""]
    depth = 0
    quote = ""
    for letter in text:
        if letter == "," and depth == 0 and not quote:
            values.append("")
            continue
        values[-1] += letter
        if quote:
            if letter == quote:
                quote = ""
        elif letter in "'\"":
            quote = letter
        elif letter in "[{":
            depth += 1
        elif letter in "]}":
            depth -= 1
    return [value.strip() for value in values]
