"""Execution of runs: new or resumed, with or without a run directory."""

import contextlib
import logging
import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dispfl.config import compose, differing_keys
from dispfl.core.quantities import SIMULATED
from dispfl.core.report import Report
from dispfl.core.rng import forked_generators
from dispfl.data.datasets import CustomData, load_dataset
from dispfl.data.fetch import ProgressCallback
from dispfl.data.labelled import InputFormat, LabelledDataset
from dispfl.data.split import Split
from dispfl.engines.checkpoint import Checkpoints
from dispfl.engines.inprocess import InProcess
from dispfl.errors import ConfigError, RunError
from dispfl.experiment import Experiment, RunSettings, Simulation
from dispfl.extras import can_draw
from dispfl.files import SITES, write_atomically
from dispfl.methods.base import PeerState
from dispfl.privacy.steps import KEY_BYTES
from dispfl.round.context import Engine, RunContext, StepResult
from dispfl.round.round import Round, evaluate_global
from dispfl.runs.async_clock import steps_in_run
from dispfl.runs.callbacks import Callback, UserCallbacks, check_callbacks
from dispfl.runs.directory import (
    SPLIT,
    RunDirectory,
    read_config,
    read_inputs,
    read_split,
    read_summary,
    saved_states,
    trusted_config,
    write_split,
)
from dispfl.runs.fastest import FastestFormat, find_fastest, saved_format
from dispfl.runs.loop import Follower, RunHistory, RunObserver, begin, restore, run_rounds
from dispfl.runs.metrics import Metrics, summarize
from dispfl.runs.prepare import experiment_context, prepare, split_dataset
from dispfl.runs.progress import python_progress, show_in_python
from dispfl.runs.progress_file import ProgressFile
from dispfl.runs.run import RoundRecords, Run
from dispfl.runs.saved import context_of
from dispfl.runs.timing import summarize_times
from dispfl.runs.unseen_peers import evaluate_newcomers

log = logging.getLogger("dispfl")
MAY_DIFFER = ("data.dir", "workers", "engine", "memory_limit", "checkpoint_every")
"""Settings that do not change results, so that a resumed run may have others."""


def execute(
    context: RunContext,
    directory: RunDirectory | None = None,
    observer: RunObserver | None = None,
    *,
    callbacks: Sequence[Callback] = (),
    followers: Sequence[Follower] = (),
    ray_address: str | None = None,
    config: Mapping[str, Any] | None = None,
) -> Run:
    """Run the remaining rounds, write the summary and draw the learning curve.

    The summary makes the run count as finished. `config` describes a run without a directory.
    """
    out = directory.path if directory else None
    on_ray = context.simulation.engine == "ray"
    limited = context.simulation.memory_limit is not None
    if limited and directory is None:
        raise ConfigError(
            f"memory_limit is {context.simulation.memory_limit:g}, but there is no run directory"
            " for the states beyond it; give one (out=), or omit memory_limit.",
            key="memory_limit",
        )
    with contextlib.ExitStack() as stack:
        if directory is None and on_ray:  # a lost worker is restored from the disk
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="dispfl-"))
            directory = RunDirectory.create(Path(folder) / "run", {})
        if directory:
            stack.callback(directory.close)
        config = read_config(out) if out else config or {}
        if context.settings.privacy.enabled:
            key = directory.secret_key() if directory and out else os.urandom(KEY_BYTES)
            context = replace(context, secret_key=key)
            if context.settings.is_async:
                context = replace(context, step_counts=steps_in_run(context))
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        _warn_about_buffers(context)
        _warn_about_memory(context)

        with forked_generators(context.settings.device):
            checkpoints = directory.checkpoints if directory else None
            engine = stack.enter_context(running_engine(context, checkpoints, ray_address))
            for follower in followers:
                stack.callback(follower.directory.close)
            stop = UserCallbacks(callbacks, context, engine, config)
            observer = replace(observer or RunObserver(), stop=stop)
            history = _train(context, engine, directory, observer, followers)

            if out and (on_ray or limited):
                states: Mapping[str, PeerState] = saved_states(out, context.roster)
            else:
                states = dict(engine.states)
            personal = states
            if context.method.evaluates_global:
                personal = _evaluated(context, history, engine)
            unseen = evaluate_newcomers(context, states, history.server)
            for follower in followers:
                assert directory is not None
                _finish(follower, history, engine, states, directory)

        run = Run(
            config=config,
            metrics=RoundRecords(history.records, context.roster, context.class_of),
            states=states,
            personal=personal,
            network=context.module,
            out=out,
            _task=lambda: context.task,
            _summary=lambda: _summary(context, history, personal, unseen),
        )
        if directory and out:
            directory.write_summary(run.summary)
            if not history.stopped:
                directory.forget_secret_key()
            draw_learning_curve(out)
    return run


def _train(
    context: RunContext,
    engine: Engine,
    directory: RunDirectory | None,
    observer: RunObserver,
    followers: Sequence[Follower],
) -> RunHistory:
    """Run all rounds, or those that an interrupted or stopped run has left."""
    if directory is None:
        return run_rounds(context, engine, begin(context, engine), None, observer)
    progress = ProgressFile(directory.path)
    with progress.kept_after_error(), directory.checkpoints.in_background():
        return _train_on(context, engine, directory, observer, followers, progress)


def _train_on(
    context: RunContext,
    engine: Engine,
    directory: RunDirectory,
    observer: RunObserver,
    followers: Sequence[Follower],
    progress: ProgressFile,
) -> RunHistory:
    """Run the rounds that the run in a directory has left."""
    history = restore(context, engine, directory)
    for follower in followers:
        follower.records = follower.directory.truncate_metrics(len(history.records))
    if 0 < len(history.records) < context.settings.rounds:
        # The process may have ended after the last round, before the callbacks were called.
        if read_summary(directory.path) is None:
            history.stopped = observer.stop(history)
        # The summary of a run that a callback stopped.
        (directory.path / "summary.json").unlink(missing_ok=True)
    if history.stopped:
        return history
    return run_rounds(context, engine, history, directory, observer, followers, progress)


def _warn_about_buffers(context: RunContext) -> None:
    if context.simulation.average_buffers or not list(context.module().buffers()):
        return
    warnings.warn(
        "The model has buffers (batch norm?). They stay with each peer and are not averaged"
        " (average_buffers=True averages them); group norm is the usual choice in federated"
        " learning.",
        stacklevel=4,
    )


def _warn_about_memory(context: RunContext) -> None:
    """Say that the memory of devices changes nothing where no density is chosen by it."""
    if context.fitted is not None:
        return
    for name, device in context.simulation.classes.items():
        if device.memory is not None:
            log.warning(
                "classes.%s.memory is %g, which counts with method.density=fit only; omit it, or"
                " use method.density=fit.",
                name,
                device.memory,
            )


def _summary(
    context: RunContext,
    history: RunHistory,
    personal: Mapping[str, PeerState],
    unseen: Metrics | None,
) -> Metrics:
    summary = summarize(context, history.records, personal) | {"unseen_peers": unseen}
    peers = context.data.participants
    fleet = context.simulation.fleet_of(peers)
    if fleet:
        summary[SIMULATED] = summarize_times(history.records, peers, fleet.class_of)
    if history.stopped:
        summary["stopped"] = history.stopped
    return summary


def draw_learning_curve(path: Path) -> None:
    """Draw a finished run's learning curve into its directory, where matplotlib is installed."""
    if can_draw():
        from dispfl.report.plots import plot_runs  # matplotlib is slow to import

        plot_runs([path], path / "learning-curve.png")


@contextlib.contextmanager
def running_engine(
    context: RunContext, checkpoints: Checkpoints | None = None, ray_address: str | None = None
) -> Iterator[Engine]:
    """Start the engine of a run, and close it at the end."""
    engine: Engine
    workers = context.simulation.workers
    if context.simulation.engine == "ray":
        from dispfl.engines.ray_driver import RayEngine  # an extra, and slow to import

        assert checkpoints is not None, "a lost worker is restored from the disk"
        engine = RayEngine(context, workers, checkpoints, ray_address)
    else:
        engine = InProcess(context, workers, checkpoints)
    with contextlib.closing(engine):
        yield engine


def connect_engine(settings: Simulation, ray_address: str | None = None) -> None:
    """Connect to the Ray cluster, if one is configured.

    A wrong address, and settings that no simulation can have, are noticed before there is a run
    directory.
    """
    settings.check_async_simulation()
    if settings.engine == "ray":
        from dispfl.engines.ray_pool import cluster_address, connect  # an extra, and slow to import

        if cluster_address(ray_address):
            connect(ray_address, workers=0)


def _evaluated(
    context: RunContext, history: RunHistory, engine: Engine, again: bool = False
) -> Mapping[str, PeerState]:
    """Return the global model as each honest peer was last evaluated with it.

    After an interruption it is evaluated again. Byzantine peers are not evaluated, and have their
    own models.
    """
    t = len(history.records) - 1
    # A callback may stop the run after any round, also one without evaluation.
    if again or not engine.evaluated or not context.evaluates(t):
        no_results = {peer: StepResult(Report()) for peer in context.roster}
        evaluate_global(context, Round(no_results, history.server), t, engine)

    evaluated = engine.evaluated  # which asks all workers on Ray
    personal = {}
    for peer in context.roster:
        if peer in context.byzantine:
            personal[peer] = engine.states[peer]
        else:
            personal[peer] = evaluated[peer]
    return personal


def _finish(
    follower: Follower,
    history: RunHistory,
    engine: Engine,
    states: Mapping[str, PeerState],
    leader: RunDirectory,
) -> None:
    """Finish a run that was trained with another one: checkpoint, summary and learning curve."""
    context = follower.context
    directory = follower.directory
    personal = states
    if context.method.evaluates_global:
        personal = follower.evaluated or _evaluated(context, history, engine, again=True)
    directory.checkpoints.copy_from(leader.checkpoints)
    unseen = evaluate_newcomers(context, states, history.server)
    directory.write_summary(
        _summary(context, replace(history, records=follower.records), personal, unseen)
    )
    draw_learning_curve(directory.path)


@dataclass(frozen=True)
class ExperimentRun:
    """An experiment with its data and its run directory, ready to run."""

    experiment: Experiment
    context: RunContext
    directory: RunDirectory
    fastest: FastestFormat | None = None
    """The format that was chosen for it, if it was to be a fast one."""

    @classmethod
    def create(
        cls,
        experiment: Experiment,
        out: Path,
        decoding: ProgressCallback | None = None,
        ray_address: str | None = None,
        *,
        fast: bool = False,
    ) -> "ExperimentRun":
        """Create a run in a new directory; `decoding` is called while images are decoded.

        With `fast` it gets the precision and the memory format that are the fastest here.
        """
        connect_engine(experiment, ray_address)
        return cls.start(experiment, RunDirectory.claim(out), decoding, fast=fast)

    @classmethod
    def resume(
        cls,
        path: Path,
        overrides: Sequence[str] = (),
        decoding: ProgressCallback | None = None,
        *,
        trust: bool = False,
    ) -> "ExperimentRun":
        """Resume a run under its own config; overrides that change its results are refused.

        A directory of somebody else whose config names code needs `trust`.
        """
        experiment = compose(trusted_config(path, trust=trust), overrides)
        return cls.resume_as(experiment, path, decoding)

    @classmethod
    def resume_as(
        cls, experiment: Experiment, path: Path, decoding: ProgressCallback | None = None
    ) -> "ExperimentRun":
        """Resume a run that must be of this experiment."""
        return cls.start(experiment, RunDirectory.open(path), decoding)

    @classmethod
    def start(
        cls,
        experiment: Experiment,
        directory: RunDirectory,
        decoding: ProgressCallback | None = None,
        *,
        fast: bool = False,
    ) -> "ExperimentRun":
        """Return the run in a directory that this process has locked: new, or resumed.

        `fast` is for a new one; see `create`.
        """
        path = directory.path
        with directory.closed_on_failure():
            if not (path / "config.toml").exists():
                data, split, context = prepare(experiment, decoding)
                fastest = None
                if fast:
                    fastest = find_fastest(context)
                    experiment = experiment.model_copy(update=fastest.settings)
                    context = context.changed(**fastest.settings)
                experiment = experiment.named(split.names)
                directory.write_config(experiment.to_toml())
                save_split(path, data, split, context)
                return cls(experiment, context, directory, fastest)
            if not experiment.names:
                experiment = experiment.named(read_config(path).get("names", ()))
            if (path / SITES).is_dir():
                raise RunError(
                    f"{path} was run by `dispfl up`. Resume it with: dispfl up --resume {path}"
                )
            check_same_experiment(path, experiment)
            context = _resumed_context(experiment, directory, decoding)
            if experiment.rounds > read_config(path)["rounds"]:
                directory.extend(experiment.to_toml())
            else:
                update_config(directory, experiment)
        return cls(experiment, context, directory)

    def follower(self, experiment: Experiment, directory: RunDirectory) -> Follower:
        """Return a run that this one trains too, because only its evaluation differs."""
        experiment = experiment.named(self.experiment.names)
        with directory.closed_on_failure():
            directory.write_config(experiment.to_toml())
            write_atomically(directory.path / SPLIT, (self.directory.path / SPLIT).read_bytes())
        return Follower(replace(self.context, settings=experiment), directory)

    def run(
        self,
        observer: RunObserver | None = None,
        *,
        callbacks: Sequence[Callback] = (),
        followers: Sequence[Follower] = (),
        ray_address: str | None = None,
    ) -> Run:
        """Run the remaining rounds, and with them those of the followers."""
        saved = read_split(self.directory.path)
        run = execute(
            self.context,
            self.directory,
            observer,
            callbacks=callbacks,
            followers=followers,
            ray_address=ray_address,
        )
        return replace(run, split=saved and saved[0])


def _resumed_context(
    experiment: Experiment, directory: RunDirectory, decoding: ProgressCallback | None
) -> RunContext:
    """Return the context of a run that is resumed, with the data that it was started with."""
    path = directory.path
    data = load_dataset(experiment.data, decoding, task=experiment.task, inputs=read_inputs(path))
    if read_split(path) is not None:
        return context_of(path, experiment, data)
    if isinstance(experiment.data, CustomData) and directory.checkpoints.finished_rounds():
        raise RunError(
            f"{path / SPLIT} is missing, which has the scaling and the samples that the models were"
            " trained with. Restore it from a backup, or start the run again."
        )
    split = split_dataset(experiment, data)  # interrupted before it was written
    context = experiment_context(experiment, data, split)
    save_split(path, data, split, context)
    return context


def save_split(path: Path, data: LabelledDataset, split: Split, context: RunContext) -> None:
    """Save who has which samples, the digest of all, and the format of the models' inputs."""
    counts = split.label_counts(data.train_labels, len(data.classes))
    write_split(path, split, counts, context.data.digest(), InputFormat.of(data))


def run_experiment(
    experiment: Experiment,
    out: Path | str | None,
    *,
    resume: bool = False,
    callbacks: Sequence[Callback] = (),
    progress: bool | None = None,
    fast: bool = False,
) -> Run:
    """Run an experiment, in a run directory or without one; see `Experiment.run`."""
    check_callbacks(callbacks, bool(experiment.partition.validation))
    with python_progress(progress, experiment.method.name, experiment.rounds) as observer:
        if out is not None:
            path = Path(out)
            started = _started(experiment, path, resume=resume, fast=fast)
            if started.fastest is not None:
                show_in_python(progress, started.fastest.sentence)
            return started.run(observer, callbacks=callbacks)
        if resume:
            raise ConfigError("resume=True needs the run directory: give it as out=.", key="out")
        connect_engine(experiment)
        _, split, context = prepare(experiment)
        if fast:
            fastest = find_fastest(context)
            show_in_python(progress, fastest.sentence)
            experiment = experiment.model_copy(update=fastest.settings)
            context = context.changed(**fastest.settings)
        config = experiment.named(split.names).to_toml()
        run = execute(context, None, observer, callbacks=callbacks, config=config)
        return replace(run, split=split)


def _started(experiment: Experiment, path: Path, *, resume: bool, fast: bool) -> ExperimentRun:
    """Return a new run in this directory, or the one that is there, which keeps its format."""
    if not resume or not (path / "config.toml").exists():
        return ExperimentRun.create(experiment, path, fast=fast)
    if fast:
        experiment = experiment.model_copy(update=saved_format(read_config(path), experiment))
    return ExperimentRun.resume_as(experiment, path)


def check_same_experiment(
    path: Path, experiment: Experiment, fix: str = "Omit it, or start a new run."
) -> None:
    """Refuse a run directory of another experiment.

    The data's folder, the engine and the workers may differ, and there may be more rounds where
    nothing forbids it.
    """
    saved = compose(trusted_config(path, own=experiment.to_toml()))
    _check_edited_rounds(path, saved, experiment)
    differing = differing_keys(saved, experiment)
    for key, (earlier, present) in differing.items():
        if key in MAY_DIFFER:
            continue
        reason = ""
        if key == "rounds":
            reason = why_not_extended(earlier, present, experiment)
            if not reason:
                continue
            reason = f" ({reason})"
        raise RunError(f"{path} was run with {key}={earlier}, got {present}{reason}. {fix}")


def _check_edited_rounds(path: Path, saved: Experiment, experiment: Experiment) -> None:
    """Refuse a finished run whose config.toml was edited to rounds that it cannot continue with."""
    summary = read_summary(path)
    if summary is None or "stopped" in summary:
        return
    rounds = int(summary["rounds"])
    reason = why_not_extended(rounds, experiment.rounds, experiment)
    if saved.rounds != rounds and reason:
        raise RunError(
            f"{path} has run {rounds} rounds, and its config.toml now says rounds={saved.rounds}"
            f" ({reason}). Set rounds = {rounds} there again, or start a new run."
        )


def why_not_extended(earlier: int, present: int, settings: RunSettings) -> str:
    """Return why a run cannot be continued with another number of rounds; empty if it can."""
    if present < earlier:
        return "a run can only be extended"
    if present == earlier:
        return ""
    if settings.privacy.enabled:
        return "the privacy budget is that of all rounds"
    return settings.method.depends_on_rounds or settings.train.depends_on_rounds


def update_config(directory: RunDirectory, experiment: Experiment) -> None:
    """Write a changed data folder, engine or number of workers into a run's config."""
    saved = compose(trusted_config(directory.path, own=experiment.to_toml()))
    if differing_keys(saved, experiment):
        directory.write_config(experiment.to_toml())
