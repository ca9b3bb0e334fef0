"""Execution of runs: of a context or an experiment, with or without a run directory, from the start or resumed."""

import contextlib
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from dispfl.config import EngineName, Experiment, compose, differing_keys
from dispfl.core.live import loaded_network
from dispfl.core.rng import forked_generators
from dispfl.core.train import Report, Train
from dispfl.data.custom import CustomDataset
from dispfl.data.datasets import ImageDataset, load_dataset
from dispfl.data.fetch import ProgressCallback
from dispfl.data.partition import Split
from dispfl.engines.inprocess import InProcess
from dispfl.errors import ConfigError, RunError
from dispfl.extras import can_draw
from dispfl.methods.base import Method, PeerState
from dispfl.round.context import Engine, RunContext, StepResult
from dispfl.round.round import Round, evaluate_global
from dispfl.runs.checkpoint import Checkpoints
from dispfl.runs.directory import SPLIT, RunDirectory, SavedStates, read_config, read_split, write_split
from dispfl.runs.files import SITES, write_atomically
from dispfl.runs.loop import Follower, RunCallbacks, RunHistory, begin, restore, run_rounds
from dispfl.runs.metrics import Metrics, last, summarize


@dataclass(frozen=True)
class RunResult:
    """A finished run."""

    context: RunContext
    states: Mapping[str, PeerState]
    """Every peer's final state, by name."""
    history: Sequence[Metrics]
    """The metrics of each round, as in `metrics.jsonl`."""
    personal: Mapping[str, PeerState]
    """The state that each peer uses from now on: its own, or one with the global model."""
    out: Path | None = None
    """The run directory, if there is one."""

    @property
    def accuracy(self) -> list[float]:
        """The metric on each peer's test data after the last round, in roster order."""
        return list(last(self.history, "accuracy")["per_peer"])

    @property
    def summary(self) -> Metrics:
        """The run as one object, as in `summary.json`."""
        return summarize(self.context, self.history, {name: state.model for name, state in self.personal.items()})

    def model(self, peer: int | str) -> nn.Module:
        """Return the personal model of one peer, by position in the roster or by name, ready to use.

        With masks of channels it is the small network. `states[name].model.unpack()` returns the flat weights of the
        whole network instead, with zeros for the channels that were left out.
        """
        roster = self.context.roster
        name = roster[peer] if isinstance(peer, int) and -len(roster) <= peer < len(roster) else str(peer)
        if name not in self.personal:
            raise ConfigError(f"There is no peer {peer}; there are {len(roster)}, from {roster[0]} to {roster[-1]}.")
        return loaded_network(self.context.module(), self.personal[name].model, self.personal[name].buffers)


def execute(
    context: RunContext,
    directory: RunDirectory | None,
    workers: int | None,
    callbacks: RunCallbacks,
    engine: EngineName = "inprocess",
    ray_address: str | None = None,
    followers: Sequence[Follower] = (),
) -> RunResult:
    """Run the remaining rounds and write the summary, which makes the run count as finished; then draw its curve."""
    out = directory.path if directory else None
    with contextlib.ExitStack() as stack:
        if directory is None and engine == "ray":  # a lost worker is restored from the disk
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="dispfl-"))
            directory = RunDirectory.create(Path(folder) / "run", {})
        if directory:
            stack.callback(directory.close)
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        if next(context.module().buffers(), None) is not None:
            warnings.warn(
                "The model has buffers (batch norm?). They stay with each peer and are not averaged; "
                "group norm is the usual choice in federated learning.",
                stacklevel=3,
            )
        with forked_generators(context.device):
            checkpoints = directory.checkpoints if directory else None
            started = stack.enter_context(running_engine(engine, context, workers, checkpoints, ray_address))
            history = restore(context, started, directory) if directory else begin(context, started)
            for follower in followers:
                stack.callback(follower.directory.close)
                follower.records = follower.directory.truncate_metrics(len(history.records))
            history = run_rounds(context, started, history, directory, callbacks, followers)
            saved = SavedStates(out, context.roster) if out and engine == "ray" else None
            states = dict(started.states) if saved is None else saved
            personal = _evaluated(context, history, started) if context.method.evaluates_global else states
            for follower in followers:
                assert directory is not None
                _finish(follower, history, started, directory)
        result = RunResult(context, states, history.records, personal, out)
        if directory and out:
            directory.write_summary(result.summary)
            draw_learning_curve(out)
    return result


def draw_learning_curve(path: Path) -> None:
    """Draw a finished run's learning curve into its directory, where matplotlib is installed."""
    if can_draw():
        from dispfl.report.plots import plot_runs  # matplotlib is slow to import

        plot_runs([path], path / "learning-curve.png")


@contextlib.contextmanager
def running_engine(
    engine: EngineName,
    context: RunContext,
    workers: int | None,
    checkpoints: Checkpoints | None,
    ray_address: str | None = None,
) -> Iterator[Engine]:
    """Start an engine, and close it at the end."""
    started: Engine
    if engine == "ray":
        from dispfl.engines.ray_driver import RayEngine  # an extra, and slow to import

        assert checkpoints is not None, "a lost worker is restored from the disk"
        started = RayEngine(context, workers, checkpoints, ray_address)
    else:
        started = InProcess(context, workers, checkpoints)
    with contextlib.closing(started):
        yield started


def connect_engine(engine: EngineName, ray_address: str | None = None) -> None:
    """Connect to the Ray cluster, if one is configured, so that a wrong address leaves no empty run directory."""
    if engine == "ray":
        from dispfl.engines.ray_pool import cluster_address, connect  # an extra, and slow to import

        if cluster_address(ray_address):
            connect(ray_address, workers=0)


def _evaluated(
    context: RunContext, history: RunHistory, engine: Engine, again: bool = False
) -> Mapping[str, PeerState]:
    """Return the global model as each peer was last evaluated with it; evaluate again after an interruption."""
    if again or not engine.evaluated:
        nothing = Round({peer: StepResult(Report()) for peer in context.roster}, history.server)
        evaluate_global(context, nothing, context.rounds - 1, engine)
    return dict(engine.evaluated)


def _finish(follower: Follower, history: RunHistory, engine: Engine, leader: RunDirectory) -> None:
    """Finish a run that was trained together with another one: checkpoint, summary and learning curve."""
    context, directory = follower.context, follower.directory
    personal = follower.evaluated or _evaluated(context, history, engine, again=True)
    directory.checkpoints.copy_from(leader.checkpoints)
    models = {name: state.model for name, state in personal.items()}
    directory.write_summary(summarize(context, follower.records, models))
    draw_learning_curve(directory.path)


def prepare(
    experiment: Experiment, decoding: ProgressCallback | None = None
) -> tuple[ImageDataset | CustomDataset, Split, RunContext]:
    """Return an experiment's data, who gets what, and its context; refuse a model that does not fit data or method."""
    data = load_dataset(experiment.data, decoding)
    split = experiment.split(data)
    context = experiment.split_context(data, split)
    context.check()
    return data, split, context


@dataclass(frozen=True)
class ExperimentRun:
    """An experiment with its data and its run directory, ready to run."""

    experiment: Experiment
    context: RunContext
    directory: RunDirectory

    @classmethod
    def create(
        cls,
        experiment: Experiment,
        out: Path,
        decoding: ProgressCallback | None = None,
        ray_address: str | None = None,
    ) -> "ExperimentRun":
        """Create a run in a new directory; `decoding` is called while images are decoded."""
        connect_engine(experiment.engine, ray_address)
        return cls.start(experiment, RunDirectory.claim(out), decoding)

    @classmethod
    def resume(
        cls, path: Path, overrides: Sequence[str] = (), decoding: ProgressCallback | None = None
    ) -> "ExperimentRun":
        """Resume a run under its own config; overrides that change its results are refused."""
        return cls.resume_as(compose(read_config(path), overrides), path, decoding)

    @classmethod
    def resume_as(cls, experiment: Experiment, path: Path, decoding: ProgressCallback | None = None) -> "ExperimentRun":
        """Resume a run that must be of this experiment."""
        return cls.start(experiment, RunDirectory.open(path), decoding)

    @classmethod
    def start(
        cls, experiment: Experiment, directory: RunDirectory, decoding: ProgressCallback | None = None
    ) -> "ExperimentRun":
        """Return the run in a directory that this process has locked: a new run, or its own run resumed."""
        path = directory.path
        with _closed_on_failure(directory):
            if not (path / "config.toml").exists():
                data, split, context = prepare(experiment, decoding)
                directory.write_config(experiment.to_toml())
                write_split(path, split, split.label_counts(data.train_labels, len(data.classes)))
                return cls(experiment, context, directory)
            if (path / SITES).is_dir():
                raise RunError(f"{path} was run by `dispfl up`. Resume it with: dispfl up --resume {path}")
            check_same_experiment(path, experiment)
            data = load_dataset(experiment.data, decoding)
            saved = read_split(path)
            split = saved[0] if saved else experiment.split(data)
            counts = split.label_counts(data.train_labels, len(data.classes))
            if saved is None:  # interrupted before it was written
                write_split(path, split, counts)
            elif not counts.equal(saved[1]):
                name = experiment.data.name
                raise RunError(f"The data set {name} is not the one that {path} was run with: its labels differ.")
            if experiment.rounds > read_config(path)["rounds"]:
                directory.extend(experiment.to_toml())
            else:
                update_config(directory, experiment)
        return cls(experiment, experiment.split_context(data, split), directory)

    def follower(self, experiment: Experiment, directory: RunDirectory) -> Follower:
        """Return a run that this one trains too: an experiment that differs in the evaluation of its models only."""
        with _closed_on_failure(directory):
            directory.write_config(experiment.to_toml())
            write_atomically(directory.path / SPLIT, (self.directory.path / SPLIT).read_bytes())
        return Follower(replace(self.context, method=experiment.method), directory)

    def run(
        self,
        callbacks: RunCallbacks | None = None,
        ray_address: str | None = None,
        followers: Sequence[Follower] = (),
    ) -> RunResult:
        """Run the remaining rounds, and with them those of the followers."""
        experiment = self.experiment
        return execute(
            self.context,
            self.directory,
            experiment.workers,
            callbacks or RunCallbacks(),
            experiment.engine,
            ray_address,
            followers,
        )


def run_experiment(experiment: Experiment, out: Path | str, *, resume: bool = False) -> RunResult:
    """Run an experiment in a run directory, as `dispfl run` does; `resume` continues an interrupted run."""
    path = Path(out)
    if resume and (path / "config.toml").exists():
        return ExperimentRun.resume_as(experiment, path).run()
    return ExperimentRun.create(experiment, path).run()


def check_same_experiment(path: Path, experiment: Experiment, fix: str = "Omit it, or start a new run.") -> None:
    """Refuse a run directory of another experiment.

    The data's folder, the engine and the workers may differ, and there may be more rounds where nothing forbids it.
    """
    for key, (was, now) in differing_keys(compose(read_config(path)), experiment).items():
        why = why_not_extended(was, now, experiment.method, experiment.train) if key == "rounds" else ""
        if key not in ("data.dir", "workers", "engine", "rounds") or why:
            raise RunError(f"{path} was run with {key}={was}, got {now}{f' ({why})' if why else ''}. {fix}")


def why_not_extended(was: int, now: int, method: Method, train: Train) -> str:
    """Return why a run of `was` rounds cannot be continued as one of `now` rounds; empty if it can."""
    if now <= was:
        return "a run can only be extended" if now < was else ""
    return method.bound_to_rounds or train.bound_to_rounds


def update_config(directory: RunDirectory, experiment: Experiment) -> None:
    """Write a changed data folder, engine or number of workers into a run's config."""
    if differing_keys(compose(read_config(directory.path)), experiment):
        directory.write_config(experiment.to_toml())


@contextlib.contextmanager
def _closed_on_failure(directory: RunDirectory) -> Iterator[None]:
    """Close the directory if an exception occurs."""
    try:
        yield
    except BaseException:
        directory.close()
        raise
