"""`dispfl run`, `demo`, `show` and `report`: a run, four methods on the bundled data, and the
results of runs."""

import contextlib
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from dispfl.errors import ConfigError
from dispfl.terminal import print_text

if TYPE_CHECKING:
    from rich.console import Console

    from dispfl.experiment import Experiment
    from dispfl.runs.execute import ExperimentRun

TrackOption = Annotated[
    str | None,
    typer.Option(help="Also show the run in another program: tensorboard, wandb or mlflow."),
]
DEMO_METHODS = ("dispfl", "local", "fedavg", "dpsgd")


def run(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONFIG.toml] [KEY=VALUE]...", help="A config file, then overrides."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The run directory; by default a new one under runs/.")
    ] = None,
    resume: Annotated[Path | None, typer.Option(help="Resume the run in this directory.")] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="The folder with the data set's files.")
    ] = None,
    track: TrackOption = None,
    ray_address: Annotated[
        str | None,
        typer.Option(
            help="With engine=ray: the cluster. By default Ray is started on this machine."
        ),
    ] = None,
) -> None:
    """Train a federation of simulated peers and save everything in a run directory.

    Without a config it runs the demo's settings on the bundled data.
    With --resume, more rounds (rounds=40) extend a run, also a finished one,
    to the run that had been started with so many, unless a schedule of its
    method or training depends on the number of rounds.

    Example: dispfl run data=cifar10 partition.alpha=0.3 peers=20 rounds=50 method.density=0.2
    --data-dir DATA
    """
    from rich.console import Console

    from dispfl.cli.progress import show_decoding
    from dispfl.config import compose, read_toml
    from dispfl.report.page import write_report
    from dispfl.report.result_tables import print_results
    from dispfl.runs.directory import has_all_rounds, read_config
    from dispfl.runs.execute import ExperimentRun, check_same_experiment, draw_learning_curve
    from dispfl.runs.tracking import check_tracker

    check_tracker(track)
    overrides = [*(arguments or []), *(["engine=ray"] if ray_address else [])]
    console = Console()
    overrides += data_dir_override(data_dir)
    if resume is None:
        file, overrides = split_config(overrides)
        experiment = compose(read_toml(file) if file else {}, overrides)
        default = Path("runs") / f"{experiment.method.name}-{experiment.data.name}"
        with output_folder(out, default) as path, show_decoding(console) as bar:
            created = ExperimentRun.create(experiment, path, bar, ray_address)
        run_to_end(created, console, track, ray_address, describe=True)
    else:
        path = resume
        if out is not None:
            raise ConfigError(
                "--resume continues in the run's own directory; omit --out.", key="--out"
            )
        experiment = compose(read_config(path), overrides)
        check_same_experiment(path, experiment)
        if not has_all_rounds(path, experiment.rounds):
            with show_decoding(console) as bar:
                resumed = ExperimentRun.resume(path, overrides, bar)
            run_to_end(resumed, console, track, ray_address)
        else:
            print_text(console, f"{path} is already finished.")
            if not (path / "learning-curve.png").exists():  # killed before it was drawn
                draw_learning_curve(path)
            if not (path / "report.html").exists():  # killed before it was written
                write_report([path], path / "report.html")
    print_results([path], console)
    print_text(console, f"Report: {path / 'report.html'}")


def describe_run(run: "ExperimentRun") -> list[str]:
    """Say what a run is going to do: data, network, method, and what a round moves and computes."""
    from dispfl.costs.estimate import CostInputs, estimate, wire_costs
    from dispfl.data.catalogue import DATASETS
    from dispfl.methods.base import GossipMethod, ServerMethod
    from dispfl.models.settings import CustomModel
    from dispfl.report.labels import METHOD_LABELS

    experiment, context = run.experiment, run.context
    method, layout, everyone = context.method, context.layout, list(context.data.peers.values())
    train, test = (
        _range([len(getattr(peer, part)) for peer in everyone]) for part in ("train", "test")
    )
    kept = [
        sum(method.kept_counts(layout, density))
        for density in set(method.densities(experiment.peers))
    ]
    sparse = "" if min(kept) == layout.size else f", of which a peer keeps {_range(kept)}"
    links = ""
    if isinstance(method, ServerMethod):
        links = (
            f", a server with {min(method.cohort or experiment.peers, experiment.peers)} peers a"
            " round"
        )
    elif isinstance(method, GossipMethod) and method.communicates:
        links = f", {experiment.topology.name} topology"
    lines = [
        (
            f"Data: {experiment.data.name}, {experiment.partition.name} partition;"
            f" {experiment.peers} peer{'s' * (experiment.peers > 1)} with {train} training and"
            f" {test} test samples each."
        ),
        f"Network: {experiment.model.name}, {layout.size:,} weights{sparse}.",
        (
            f"Method: {METHOD_LABELS.get(method.name, method.name)}{links}; "
            f"{experiment.rounds} {'round' if experiment.rounds == 1 else 'rounds'} of "
            f"{experiment.train.duration} in batches of {experiment.train.batch_size}."
        ),
    ]
    if experiment.data.name in DATASETS and not isinstance(experiment.model, CustomModel):
        inputs = CostInputs.of(experiment)
        costs, wire = estimate(inputs), wire_costs(inputs)
        busiest = max(wire.busiest_up_mb, wire.busiest_down_mb)
        moved = (
            f"{busiest:.3g} MB on the wire of the busiest node" if busiest else "nothing is sent"
        )
        lines.append(
            f"A round: {moved}, {costs.flops_per_peer / 1e9:.3g} GFLOPs of training for a peer that"
            " trains."
        )
    return lines


def _range(counts: Sequence[int]) -> str:
    """`96`, or `80 to 112`."""
    low, high = min(counts), max(counts)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def demo(
    out: Annotated[
        Path | None, typer.Option(help="The folder of the runs; by default a new one under runs/.")
    ] = None,
    seed: Annotated[
        int, typer.Option(help="The seed of the split, the weights and the masks.")
    ] = 0,
    figure: Annotated[
        Literal["png", "pdf", "svg"],
        typer.Option("--format", help="Format of the figure with the learning curves."),
    ] = "png",
) -> None:
    """Train Dis-PFL, Local, FedAvg and D-PSGD on the bundled images, print a table and draw the
    learning curves.

    Example: dispfl demo --seed 1
    """
    from rich.console import Console

    from dispfl.config import compose
    from dispfl.extras import can_draw
    from dispfl.report.page import write_report
    from dispfl.report.result_tables import print_results
    from dispfl.runs.execute import ExperimentRun

    console = Console()
    with output_folder(out, Path("runs/demo")) as folder:
        paths = [folder / name for name in DEMO_METHODS]
        for path in paths:
            run_to_end(
                ExperimentRun.create(compose({}, [f"method={path.name}", f"seed={seed}"]), path),
                console,
            )
    print_results(paths, console)
    write_report(paths, folder / "report.html")
    files = f"Everything on one page: {folder / 'report.html'}"
    if can_draw():
        from dispfl.report.plots import plot_runs

        plot_runs(paths, folder / f"learning-curves.{figure}")
        files = f"Learning curves: {folder / f'learning-curves.{figure}'}. {files}"
    print_text(console, files)


def run_to_end(
    prepared: "ExperimentRun",
    console: "Console",
    track: str | None = None,
    ray_address: str | None = None,
    describe: bool = False,
) -> None:
    """Run to the end with a progress bar, and write the report; after Ctrl-C, print how to resume.

    With `describe`, first say what the run is going to do.
    """
    from dispfl.report.page import write_report
    from dispfl.runs.progress import show_progress
    from dispfl.runs.tracking import tracking

    experiment, path = prepared.experiment, prepared.directory.path
    warn_about_noise([experiment])
    try:
        for line in describe_run(prepared) if describe else ():
            print_text(console, line, "dim")
        with (
            show_progress(experiment.method.name, experiment.rounds, console) as observer,
            tracking(track, path, observer) as tracked,
        ):
            prepared.run(tracked, ray_address=ray_address)
    except KeyboardInterrupt:
        message = (
            "\nStopped; all finished work is saved. Resume with: dispfl run --resume"
            f" {quote(str(path))}"
        )
        print_text(console, message)
        raise typer.Exit(130) from None
    write_report([path], path / "report.html")


def split_config(arguments: Sequence[str]) -> tuple[Path | None, list[str]]:
    """Return the config file that the first argument names, if any, and the overrides; a folder may
    be `lr=0.1`."""
    first = arguments[0] if arguments else "="
    if "=" in first and not Path(first).is_file():
        return None, list(arguments)
    return Path(first), list(arguments[1:])


def data_dir_override(data_dir: Path | None) -> list[str]:
    """Return `--data-dir` as an override; absolute, because a run may be resumed from another
    working directory."""
    if data_dir is None:
        return []
    folder = str(data_dir.expanduser().absolute())
    return [f"data.dir={json.dumps(folder, ensure_ascii=False)}"]  # quoted as in TOML


def warn_about_noise(experiments: "Iterable[Experiment]") -> None:
    """Warn once, on stderr, that a run with noise is not therefore private."""
    if any(experiment.train.noise_std for experiment in experiments):
        typer.echo(
            "train.noise_std alone is no privacy guarantee: gradients are clipped per batch and not"
            " per sample, and the privacy loss of the rounds is not accounted.",
            err=True,
        )


@contextlib.contextmanager
def output_folder(given: Path | None, default: Path) -> Iterator[Path]:
    """Yield the given folder; otherwise create the default one, or its first numbered variant:
    `runs/demo-2`, ...

    The folder is created in one step, so that no two processes get the same; left empty, it is
    removed again.
    """
    if given is not None:
        yield given
        return
    from dispfl.files import plain_disk_errors

    first, path = not default.parent.exists(), default
    with plain_disk_errors(default):
        default.parent.mkdir(parents=True, exist_ok=True)
        for number in itertools.count(2):
            with contextlib.suppress(FileExistsError):
                path.mkdir()
                break
            path = default.with_name(f"{default.name}-{number}")
    try:
        yield path
    finally:
        with contextlib.suppress(OSError):  # not empty
            path.rmdir()
            if first:
                default.parent.rmdir()


def show(
    directories: Annotated[
        list[Path],
        typer.Argument(
            metavar="DIR...",
            help="Run directories, or folders that contain some, such as compare's.",
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print the summaries as JSON.")] = False,
) -> None:
    """Print the result table of one or more runs, finished or not, and who is ahead of Dis-PFL, or
    of the first.

    Example: dispfl show runs/dispfl-fashion-sample
    Example: dispfl show runs/five
    """
    from rich.console import Console

    from dispfl.files import run_folder
    from dispfl.report.result_tables import find_shown, overview, print_results
    from dispfl.report.runs import load_run

    if as_json:
        summaries = [overview(load_run(run_folder(path))) for path in find_shown(directories)]
        typer.echo(json.dumps(summaries if len(summaries) > 1 else summaries[0], indent=2))
    else:
        print_results(directories, Console())


def report(
    directories: Annotated[
        list[Path],
        typer.Argument(
            metavar="DIR...",
            help="Run directories, or folders that contain some, such as compare's.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The file to write.")] = Path(
        "report.html"
    ),
) -> None:
    """Write one HTML page about runs: accuracy, costs and results per peer.

    The page is self-contained: it needs no network and no scripts.
    Runs that differ only in their seed are one row, with a mean and a band.

    Example: dispfl report runs/five -o five.html
    """
    from dispfl.report.page import write_report

    write_report(directories, out)
    typer.echo(f"Written: {out}")
