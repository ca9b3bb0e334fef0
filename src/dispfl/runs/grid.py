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
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from dispfl.config import compose
from dispfl.data.fetch import ProgressCallback
from dispfl.engines.checkpoint import Checkpoints
from dispfl.errors import ConfigError, RunError, TakenError
from dispfl.experiment import Experiment
from dispfl.files import write_atomically
from dispfl.registry import METHODS
from dispfl.runs.directory import (
    LABELS,
    RunDirectory,
    has_all_rounds,
    read_config,
    read_labels,
    read_metrics,
)
from dispfl.runs.execute import ExperimentRun, check_same_experiment, connect_engine
from dispfl.runs.fastest import ComputeFormat, find_fastest, saved_format
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
    label: str = field(default="", kw_only=True)
    """The label of its row in tables and figures, if somebody has chosen one."""

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

    The arguments are methods, variants of methods (`dispfl@method.density=0.2`), which may have a
    label (`dispfl@label=ours`), and overrides.
    """
    variants = []
    overrides = []
    for argument in dict.fromkeys(arguments):
        if "=" not in argument or "@" in _key(argument):
            variants.append(_Variant.parse(argument))
        else:
            overrides.append(argument)
    if not variants:
        raise ConfigError(f"Name the methods to compare. There are: {', '.join(METHODS)}.")

    fields = {variant.method: _fields(variant.method) for variant in variants}
    for override in overrides:
        _check_override(override, fields)
    compose(config)  # a config must be valid even if its method is not among these

    rows: dict[str, _Row] = {}
    for variant in variants:
        folder = _safe_name(variant.name)
        if folder in rows:
            raise ConfigError(
                f"{variant.name} and {rows[folder].name['method']} would share the folder {folder};"
                " omit one."
            )
        shared = [
            override for override in overrides if _has(fields[variant.method], _key(override))
        ]
        changes = [*shared, f"method={variant.method}", *variant.changes]
        rows[folder] = _Row({"method": variant.name}, changes, variant.label)
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
    raise ConfigError(
        f"None of these methods ({', '.join(fields)}) has the key {key}."
        f" {did_you_mean(key, method_keys)}",
        key=key,
    )


class _Row(NamedTuple):
    """A row of a grid."""

    name: dict[str, str]
    overrides: list[str]
    label: str = ""


class _Variant(NamedTuple):
    """A method with the settings in which it differs, and the label of its row."""

    name: str
    """As it was written, without the label."""
    method: str
    changes: list[str]
    label: str

    @classmethod
    def parse(cls, text: str) -> "_Variant":
        """Parse `dispfl@method.structure=channels,label=ours`."""
        example = "such as dispfl@method.structure=channels"
        method, at, settings = text.partition("@")
        changes = []
        label = ""
        for setting in _split_at_commas(settings) if at else []:
            key, equals, value = setting.partition("=")
            if not equals or not key.strip():
                raise ConfigError(
                    f"{text!r} must be METHOD@KEY=VALUE[,KEY=VALUE...], {example}; a value with"
                    " commas needs brackets, as in method.density=[0.2,0.5]."
                )
            if key.strip() == LABEL:
                label = _unquoted(value)
            else:
                _check_change(text, setting)
                changes.append(setting)
        if not method:
            raise ConfigError(
                f"{text!r} names no method before the @; write METHOD@KEY=VALUE, {example}."
            )
        name = f"{method}@{','.join(changes)}" if changes else method
        return cls(name, method, changes, label)


LABEL = "label"
"""The key of a row's label, which is no setting of a run."""


def _check_change(text: str, override: str) -> None:
    """Refuse a setting that all rows of a comparison have in common."""
    key = _key(override)
    if key in ("method", "method.name"):
        raise ConfigError(
            f"{text!r} changes the method; name the method before the @, such as"
            " dispfl@method.structure=channels.",
            key="method",
        )
    if key in SAME_FOR_ALL or key.partition(".")[0] in SAME_FOR_ALL:
        raise ConfigError(
            f"{text!r} changes {key}, but all rows of a comparison have the same peers and data."
            f" Set it for all of them ({override}), or use dispfl sweep.",
            key=key,
        )


def _unquoted(text: str) -> str:
    """Return a label without the quotes around it, on one line."""
    text = " ".join(text.split())
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        text = text[1:-1].strip()
    if not text:
        raise ConfigError("A label must not be empty: write METHOD@label=TEXT.", key=LABEL)
    return text


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

    They are the product of all overrides with several values, such as `method.density=0.2,0.4`,
    each of which may have a label (`0.2@label=sparse`).
    """
    fixed: list[str] = []
    swept: dict[str, dict[str, str]] = {}
    for override in overrides:
        if "=" not in override:
            raise ConfigError(
                f"Expected key=value, got {override!r}. To compare methods use dispfl compare."
            )
        values = _values(override)
        if len(values) == 1:
            fixed.append(override)
        else:
            swept[_key(override)] = _labelled_values(values)
    if not swept:
        raise ConfigError(
            "Nothing to sweep: give a key several values, such as method.density=0.2,0.5."
        )
    if "seed" in swept:
        raise ConfigError(
            "For several seeds use --seeds 3, which takes the config's seed and the next two.",
            key="seed",
        )
    rows: dict[str, _Row] = {}
    for combination in itertools.product(*swept.values()):
        name = {}
        chosen = []
        parts = []
        for key, value in zip(swept, combination, strict=True):
            label = swept[key][value]
            name[key] = label or value
            chosen.append(f"{key}={value}")
            parts.append(label or f"{key}={value}")
        folder = ",".join(chosen).replace("/", "_")
        if folder in rows:
            raise ConfigError(
                f"Two runs of the sweep would share the folder {folder}; give values without"
                " slashes."
            )
        row_label = ", ".join(parts) if parts != chosen else ""
        rows[folder] = _Row(name, [*fixed, *chosen], row_label)
    return _grid(rows, config, seeds, out)


def _labelled_values(values: Sequence[str]) -> dict[str, str]:
    """Return the values of a swept key with their labels: `0.2@label=sparse` has one."""
    labels = {}
    for text in values:
        value, separator, label = text.partition(f"@{LABEL}=")
        labels[value] = _unquoted(label) if separator else ""
    return labels


def reference_names(runs: Sequence[GridRun], text: str) -> dict[str, str]:
    """Return the names of the rows that `--against` means: a row, its label, or `key=value`."""
    for run in runs:
        if text in (run.path.parent.name, run.label):
            return dict(run.row)
        for key, value in run.row.items():
            if text == value:
                return {key: value}
    names = {}
    for part in _split_at_commas(text):
        key, _, value = part.partition("=")
        names[key] = value
    if any(names.items() <= run.row.items() for run in runs):
        return names
    rows = dict.fromkeys(run.label or run.path.parent.name for run in runs)
    raise ConfigError(
        f"--against {text!r} is none of the rows. There are: {', '.join(rows)}.", key="--against"
    )


def save_labels(runs: Sequence[GridRun], out: Path) -> None:
    """Save the labels of rows in the folder of their runs, where reports find them."""
    labels = read_labels(out)
    for run in runs:
        folder = run.path.parent.name
        labels.pop(folder, None)
        if run.label:
            labels[folder] = run.label
    if labels or (out / LABELS).exists():
        out.mkdir(parents=True, exist_ok=True)
        text = json.dumps(labels, indent=2, ensure_ascii=False)
        write_atomically(out / LABELS, f"{text}\n".encode())


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


def with_fastest_format(runs: Sequence[GridRun]) -> tuple[list[GridRun], str]:
    """Return the runs with the fastest precision and memory format, and a sentence about it.

    There is one format for all runs, apart from what a run's own settings state. It is found with
    the first run, or taken from runs that exist already, so that a command can be repeated.
    """
    settings: dict[str, Any] = {}
    exists = False
    for run in runs:
        if run.state is not RunState.MISSING:
            exists = True
            settings = {**saved_format(read_config(run.path), run.experiment), **settings}
    if exists:
        sentence = f"As in the existing runs: {ComputeFormat(**settings)}."
    else:
        _, _, context = prepare(runs[0].experiment)
        fastest = find_fastest(context)
        settings = fastest.settings
        sentence = fastest.sentence

    fast_runs = []
    for run in runs:
        stated = run.experiment.model_fields_set
        changes = {key: value for key, value in settings.items() if key not in stated}
        experiment = run.experiment.model_copy(update=changes)
        fast_runs.append(replace(run, experiment=experiment))
    return fast_runs, sentence


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
    rows: Mapping[str, _Row],
    config: Mapping[str, Any],
    seeds: int,
    out: Path,
) -> list[GridRun]:
    """Return all rows at the first seed, then all at the next.

    So an interrupted grid has complete comparisons in it.
    """
    first_seeds = {}
    for folder, row in rows.items():
        first_seeds[folder] = compose(config, row.overrides).seed

    runs = []
    for number in range(seeds):
        for folder, row in rows.items():
            seed = first_seeds[folder] + number
            experiment = compose(config, [*row.overrides, f"seed={seed}"])
            path = out / folder / f"seed-{seed}"
            runs.append(GridRun(row.name, experiment, path, label=row.label))
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
