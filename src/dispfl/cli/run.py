"""`dispfl run`: one run, from a config or from where it stopped."""

import json
from collections.abc import Iterable
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from dispfl.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from dispfl.config import Experiment
    from dispfl.launch import Launch


def run(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[CONFIG.toml] [KEY=VALUE]...", help="A config file, then settings that win over it."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The run directory; by default a new one under runs/.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with the run in this directory.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Where the data set's files are.")] = None,
    track: Annotated[str | None, typer.Option(help="Show the run in another program too: tensorboard.")] = None,
    ray_address: Annotated[
        str | None, typer.Option(help="With engine=ray: the cluster; without, Ray is started on this machine.")
    ] = None,
) -> None:
    """Train a federation of simulated peers, and write everything down in a run directory.

    With no config it runs the demo's default on the bundled data.

    Example: dispfl run data=cifar10 partition.alpha=0.3 peers=20 rounds=50 method.density=0.2 --data-dir DATA
    """
    from rich.console import Console

    from dispfl.analysis.report.page import write_report
    from dispfl.analysis.tables import print_results
    from dispfl.cli.progress import decoding
    from dispfl.config import compose, read_toml
    from dispfl.launch import Launch, refuse_another_experiment
    from dispfl.runs.directory import read_config, read_summary
    from dispfl.runs.tracking import check_tracker

    check_tracker(track)
    words = [*(words or []), *(["engine=ray"] if ray_address else [])]
    console = Console()
    words += data_dir_words(data_dir)
    if resume is None:
        named = words and ("=" not in words[0] or Path(words[0]).is_file())  # folders may be called lr=0.1
        config = read_toml(Path(words.pop(0))) if named else {}
        experiment = compose(config, words)
        path = out or first_free(Path("runs") / f"{experiment.method.name}-{experiment.data.name}")
        with decoding(console) as bar:
            launch = Launch.begin(experiment, path, bar, ray_address)
        see_through(launch, console, track, ray_address)
    else:
        path = resume
        if out is not None:
            raise ConfigError("--resume goes on in the run's own directory; leave --out away.")
        refuse_another_experiment(path, compose(read_config(path), words))
        if read_summary(path) is None:
            with decoding(console) as bar:
                launch = Launch.go_on(path, words, bar)
            see_through(launch, console, track, ray_address)
        else:
            console.print(f"{path} is finished already.", soft_wrap=True, highlight=False, markup=False)
            if not (path / "report.html").exists():  # killed in the very end
                write_report([path], path / "report.html")
    print_results([path], console)
    console.print(f"Report: {path / 'report.html'}", soft_wrap=True, highlight=False, markup=False)


def see_through(launch: "Launch", console: "Console", track: str | None = None, ray_address: str | None = None) -> None:
    """Run to the end with a progress bar, and write the report; Ctrl-C says how to go on."""
    from dispfl.analysis.report.page import write_report
    from dispfl.cli.progress import watching
    from dispfl.runs.tracking import tracking

    experiment, path = launch.experiment, launch.directory.path
    warn_of_noise([experiment])
    try:
        with (
            watching(experiment.method.name, experiment.rounds, console) as progress,
            tracking(track, path, progress) as told,
        ):
            launch.run(told, ray_address)
    except KeyboardInterrupt:
        message = f"\nStopped; nothing that was finished is lost. Go on with: dispfl run --resume {quote(str(path))}"
        console.print(message, soft_wrap=True, highlight=False, markup=False)
        raise typer.Exit(130) from None
    write_report([path], path / "report.html")


def data_dir_words(data_dir: Path | None) -> list[str]:
    """`--data-dir` as a setting; absolute, because a run may be resumed from another working directory."""
    if data_dir is None:
        return []
    folder = str(data_dir.expanduser().absolute())
    return [f"data.dir={json.dumps(folder, ensure_ascii=False)}"]  # quoted as TOML quotes too


def warn_of_noise(experiments: "Iterable[Experiment]") -> None:
    """Say once, on stderr, that a run with noise is not therefore private."""
    if any(experiment.train.noise for experiment in experiments):
        typer.echo(
            "train.noise alone is no privacy guarantee: gradients are clipped by the batch and not by the sample, and "
            "nothing counts what the rounds reveal together.",
            err=True,
        )


def first_free(path: Path) -> Path:
    """The path itself, or with the first number that is free: `runs/demo`, `runs/demo-2`, ..."""
    number, candidate = 1, path
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.name}-{number}")
    return candidate
