"""`dispfl run`: one run, from a config or from where it stopped."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from dispfl.errors import ConfigError, RunError

if TYPE_CHECKING:
    from dispfl.config import Experiment


def run(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[CONFIG.toml] [KEY=VALUE]...", help="A config file, then settings that win over it."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The run directory; by default a new one under runs/.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with the run in this directory.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Where the data set's files are.")] = None,
) -> None:
    """Train a federation of simulated peers, and write everything down in a run directory.

    With no config it runs the demo's default on the bundled data.

    Example: dispfl run data=cifar10 partition.alpha=0.3 peers=20 rounds=50 method.density=0.2 --data-dir DATA
    """
    words = list(words or [])
    console = Console()
    try:
        if resume is not None:
            if out is not None:
                raise ConfigError("--resume goes on in the run's own directory; leave --out away.")
            result = _resume(resume, words, data_dir, console)
        else:
            experiment = _experiment(words, data_dir)
            result = start(experiment, out or free_directory(experiment), console)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    from dispfl.analysis.tables import print_results

    print_results([result], console)


def start(experiment: "Experiment", out: Path, console: Console) -> Path:
    """Begin a new run and see it through."""
    from dispfl.data.datasets import load
    from dispfl.runs.directory import RunDirectory
    from dispfl.runs.split import write_split

    pictures = load(experiment.data)
    split = experiment.split(pictures)
    directory = RunDirectory.create(out, experiment.to_toml())
    write_split(out, split, split.label_counts(pictures.train_labels, len(pictures.classes)))
    return _see_through(experiment, split, pictures, directory, console)


def _resume(path: Path, words: list[str], data_dir: Path | None, console: Console) -> Path:
    """Go on with a run under its own config; other settings are refused, except where the data lie."""
    from dispfl.config import compose, differing_keys
    from dispfl.data.datasets import load
    from dispfl.runs.directory import RunDirectory, read_config, read_summary
    from dispfl.runs.split import read_split

    written = compose(read_config(path))
    asked = compose(read_config(path), [*words, *_data_word(data_dir)])
    for key, (was, now) in differing_keys(written, asked).items():
        if key != "data.dir":
            why = " (the prune rate depends on it)" if key == "rounds" else ""
            raise RunError(f"{path} was run with {key}={was}, got {now}{why}. Leave it away, or start a new run.")
    if read_summary(path) is not None:
        console.print(f"{path} is finished already.")
        return path
    directory = RunDirectory.open(path)
    pictures = load(asked.data)
    split, counts = read_split(path)
    if not counts.equal(split.label_counts(pictures.train_labels, len(pictures.classes))):
        raise RunError(f"The data set {asked.data.name} is not the one that {path} was run with: its labels differ.")
    return _see_through(asked, split, pictures, directory, console)


def _see_through(experiment, split, pictures, directory, console) -> Path:  # type: ignore[no-untyped-def]
    from dispfl.analysis.plots import learning_curve
    from dispfl.cli.progress import watching
    from dispfl.federation import execute

    setting = experiment.setting(pictures, split)
    title = experiment.method.name
    try:
        with watching(title, experiment.rounds, console) as progress:
            execute(setting, directory, experiment.threads, progress)
    except KeyboardInterrupt:
        console.print(f"\nStopped; nothing that was finished is lost. Go on with: dispfl run --resume {directory.path}")
        raise
    learning_curve([directory.path], directory.path / "learning-curve.png")
    return directory.path


def _experiment(words: list[str], data_dir: Path | None) -> "Experiment":
    from dispfl.config import compose, read_toml

    config = {}
    if words and "=" not in words[0]:
        config = read_toml(Path(words.pop(0)))
    return compose(config, [*words, *_data_word(data_dir)])


def _data_word(data_dir: Path | None) -> list[str]:
    return [] if data_dir is None else [f"data.dir='{data_dir}'"]


def free_directory(experiment: "Experiment") -> Path:
    """`runs/dispfl-cifar10`, or the first of `-2`, `-3`, ... that is free."""
    return first_free(Path("runs") / f"{experiment.method.name}-{experiment.data.name}")


def first_free(path: Path) -> Path:
    """The path itself, or with the first number that is free."""
    number = 1
    candidate = path
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.name}-{number}")
    return candidate
