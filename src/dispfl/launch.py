"""Experiments in run directories: begin one, or go on with one that stopped."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dispfl.config import Experiment, compose, differing_keys
from dispfl.data.datasets import load
from dispfl.data.fetch import Progress as Decoding
from dispfl.engines.choice import reach
from dispfl.errors import RunError
from dispfl.federation import Run, execute
from dispfl.runs.directory import RunDirectory, read_config
from dispfl.runs.loop import Progress
from dispfl.runs.split import read_split, write_split
from dispfl.work import Setting


@dataclass(frozen=True)
class Launch:
    """An experiment with its data and its run directory, ready to run."""

    experiment: Experiment
    setting: Setting
    directory: RunDirectory

    @classmethod
    def begin(
        cls, experiment: Experiment, out: Path, decoding: Decoding | None = None, ray_address: str | None = None
    ) -> "Launch":
        """A new run in a new directory; `decoding` is told how many pictures are decoded, where that takes long."""
        reach(experiment.engine, ray_address)
        pictures = load(experiment.data, decoding)
        split = experiment.split(pictures)
        setting = experiment.setting(pictures, split)
        setting.module()  # one that does not fit the pictures leaves no directory behind
        directory = RunDirectory.create(out, experiment.to_toml())
        with closed_on_failure(directory):
            write_split(out, split, split.label_counts(pictures.train_labels, len(pictures.classes)))
        return cls(experiment, setting, directory)

    @classmethod
    def go_on(cls, path: Path, words: Sequence[str] = (), decoding: Decoding | None = None) -> "Launch":
        """The rest of a run, under its own config; other settings are refused, see below."""
        return cls.rest_of(compose(read_config(path), words), path, decoding)

    @classmethod
    def rest_of(cls, asked: Experiment, path: Path, decoding: Decoding | None = None) -> "Launch":
        """The rest of a run that must be of this very experiment."""
        refuse_another_experiment(path, asked)
        directory = RunDirectory.open(path)
        with closed_on_failure(directory):
            pictures = load(asked.data, decoding)
            saved = read_split(path)
            split = saved[0] if saved else asked.split(pictures)
            counts = split.label_counts(pictures.train_labels, len(pictures.classes))
            if saved is None:  # stopped before it was written
                write_split(path, split, counts)
            elif not counts.equal(saved[1]):
                name = asked.data.name
                raise RunError(f"The data set {name} is not the one that {path} was run with: its labels differ.")
            write_what_changed(directory, asked)
        return cls(asked, asked.setting(pictures, split), directory)

    def run(self, progress: Progress, ray_address: str | None = None) -> Run:
        """Run what is left, draw the learning curve and write the summary."""
        experiment = self.experiment
        return execute(self.setting, self.directory, experiment.threads, progress, experiment.engine, ray_address)


def refuse_another_experiment(path: Path, asked: Experiment, fix: str = "Leave it away, or start a new run.") -> None:
    """See that a run directory is of this experiment; where the data lie and who does the work may change."""
    for key, (was, now) in differing_keys(compose(read_config(path)), asked).items():
        if key not in ("data.dir", "threads", "engine"):
            why = " (the prune rate depends on it)" if key == "rounds" else ""
            raise RunError(f"{path} was run with {key}={was}, got {now}{why}. {fix}")


def write_what_changed(directory: RunDirectory, asked: Experiment) -> None:
    """Have a run's config say where its data lie and who does the work from now on."""
    if differing_keys(compose(read_config(directory.path)), asked):
        directory.write_config(asked.to_toml())


@contextlib.contextmanager
def closed_on_failure(directory: RunDirectory) -> Iterator[None]:
    """Give the directory back if something goes wrong before it is in anybody's hands."""
    try:
        yield
    except BaseException:
        directory.close()
        raise
