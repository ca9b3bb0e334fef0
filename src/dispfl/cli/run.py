"""`dispfl run`, `demo`, `show` and `report`: runs of single methods, and their results."""

import contextlib
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from dispfl.cli.completion import complete_config_and_settings, complete_runs
from dispfl.errors import ConfigError, reading
from dispfl.terminal import SafeConsole, print_text

if TYPE_CHECKING:
    from rich.console import Console

    from dispfl.experiment import Experiment
    from dispfl.runs.execute import ExperimentRun

TrackOption = Annotated[
    str | None,
    typer.Option(help="Also show the run in another program: tensorboard, wandb or mlflow."),
]
TrustOption = Annotated[
    bool,
    typer.Option(
        "--trust",
        help="Import the code that the directory's config names, although somebody else made it.",
    ),
]
FastOption = Annotated[
    bool,
    typer.Option(
        "--fast",
        help=(
            "Try for a few seconds which precision and memory_format are the fastest on this"
            " machine, and use them; what the settings state is kept."
        ),
    ),
]
DEMO_METHODS = ("dispfl", "local", "fedavg", "dpsgd")


def run(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONFIG.toml] [KEY=VALUE]...",
            help="A config file, then overrides.",
            autocompletion=complete_config_and_settings,
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The run directory; by default a new one under runs/.")
    ] = None,
    resume: Annotated[Path | None, typer.Option(help="Resume the run in this directory.")] = None,
    trust: TrustOption = False,
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
    fast: FastOption = False,
) -> None:
    """Train a federation of simulated peers and save everything in a run directory.

    Without a config it runs the demo's settings on the bundled data.
    With --resume, more rounds (rounds=40) extend a run, also a finished one,
    to the run that had been started with so many, unless a schedule of its
    method or training depends on the number of rounds.
    With --fast, the run gets the precision and the memory format that are
    the fastest on this machine for its network, data and batch size. They
    are saved in its config.toml, so that a resumed or repeated run and Ray
    workers use the same. The default is kept unless another is 5 % faster.

    Example: dispfl run data=cifar10 partition.alpha=0.3 peers=20 rounds=50 method.density=0.2
    --data-dir DATA
    """

    from dispfl.cli.progress import show_decoding
    from dispfl.config import compose, read_toml
    from dispfl.report.page import write_report
    from dispfl.report.run_tables import print_results
    from dispfl.runs.directory import check_learned, has_all_rounds, trusted_config
    from dispfl.runs.execute import ExperimentRun, check_same_experiment, draw_learning_curve
    from dispfl.runs.tracking import check_tracker

    check_tracker(track)
    console = SafeConsole()
    overrides = list(arguments or [])
    if ray_address:
        overrides.append("engine=ray")
    overrides += data_dir_override(data_dir)
    if resume is None:
        file, overrides = split_config(overrides)
        experiment = compose(read_toml(file) if file else {}, overrides)
        default = Path("runs") / f"{experiment.method.name}-{experiment.data.name}"
        with output_folder(out, default) as path, show_decoding(console) as bar:
            created = ExperimentRun.create(experiment, path, bar, ray_address, fast=fast)
        if created.fastest is not None:
            print_text(console, created.fastest.sentence)
        run_to_end(created, console, track, ray_address, describe=True)
    else:
        path = resume
        if out is not None:
            raise ConfigError(
                "--resume continues in the run's own directory; omit --out.", key="--out"
            )
        if fast:
            raise ConfigError(
                "--resume continues with the run's own precision and memory_format; omit --fast.",
                key="--fast",
            )
        with reading(path):
            experiment = compose(trusted_config(path, trust=trust), overrides)
            check_same_experiment(path, experiment)
            finished = has_all_rounds(path, experiment.rounds)
        if not finished:
            with show_decoding(console) as bar, reading(path):
                resumed = ExperimentRun.resume(path, overrides, bar)
            run_to_end(resumed, console, track, ray_address)
        else:
            print_text(console, f"{path} is already finished.")
            if not (path / "learning-curve.png").exists():  # killed before it was drawn
                draw_learning_curve(path)
            if not (path / "report.html").exists():  # killed before it was written
                write_report([path], path / "report.html")
    with reading(path):
        print_results([path], console)
    print_text(console, f"Report: {path / 'report.html'}")
    check_learned(path)


def describe_run(run: "ExperimentRun") -> list[str]:
    """Say what a run is going to do: data, network, method, and what a round moves and computes."""
    from dispfl.data.catalogue import DATASETS
    from dispfl.methods.base import ServerMethod
    from dispfl.models.settings import CustomModel
    from dispfl.report.labels import METHOD_LABELS
    from dispfl.report.wording import plural

    experiment = run.experiment
    method = run.context.method
    peers = plural(experiment.peers, "peer")
    train = _range([len(peer.train) for peer in run.context.data.peers.values()])
    test = _range([len(peer.test) for peer in run.context.data.peers.values()])
    lines = [
        f"Data: {experiment.data.name}, {experiment.partition.name} partition; {peers} with {train}"
        f" training and {test} test samples each."
    ]

    layout = run.context.layout
    densities = set(run.context.densities.values())
    kept_counts = [sum(method.kept_counts(layout, density)) for density in densities]
    network = f"Network: {experiment.model.name}, {layout.size:,} weights"
    if min(kept_counts) < layout.size:
        network += f", of which a peer keeps {_range(kept_counts)}"
    lines.append(f"{network}.")

    name = METHOD_LABELS.get(method.name, method.name)
    if isinstance(method, ServerMethod):
        cohort = min(method.cohort or experiment.peers, experiment.peers)
        name += f", a server with {cohort} peers a round"
    elif method.gossips:
        name += f", {experiment.topology.name} topology"
    rounds = plural(experiment.rounds, "round")
    lines.append(
        f"Method: {name}; {rounds} of {experiment.train.duration} in batches of"
        f" {experiment.train.batch_size}."
    )
    if experiment.classes:
        classes = []
        for name, count in Counter(run.context.class_of.values()).items():
            classes.append(f"{name} with {plural(count, 'peer')}")
        lines.append(f"Classes of devices: {', '.join(classes)}.")
    if run.context.fitted:
        lines.append(_describe_fit(run))
    if experiment.data.name in DATASETS and not isinstance(experiment.model, CustomModel):
        lines.append(_describe_costs(run))
    return lines


def _describe_fit(run: "ExperimentRun") -> str:
    """Say which densities fit the devices of each class."""
    from dispfl.report.wording import join_and, plural

    fitted = run.context.fitted
    fleet = run.experiment.fleet_of(run.context.data.participants)
    assert fitted is not None
    assert fleet is not None
    counts: Counter[tuple[str, float, float]] = Counter()
    for peer, fit in fitted.peers.items():
        counts[fleet.class_of[peer], fit.density, fit.seconds] += 1
    groups = []
    for (name, density, seconds), count in sorted(counts.items()):
        group = f"{density:g} for {plural(count, 'peer')} of {name}"
        if seconds > fitted.round_time:
            group += f" (who need {seconds:.3g} s)"
        groups.append(group)
    return f"Densities for a round of {fitted.round_time:.3g} s: {join_and(groups)}."


def _describe_costs(run: "ExperimentRun") -> str:
    from dispfl.costs.estimate import CostInputs, estimate, wire_costs
    from dispfl.report.units import bytes_text, flops_text
    from dispfl.report.wording import plural
    from dispfl.runs.async_clock import message_sizes

    experiment = run.experiment
    inputs = CostInputs.of(experiment)
    flops = flops_text(estimate(inputs).flops_per_peer)
    if experiment.is_async:
        traffic = "nothing is sent"
        if run.context.method.gossips:
            largest = max(size.wire for size in message_sizes(run.context).values())
            receivers = experiment.topology.connections(experiment.peers)
            traffic = f"a model of {bytes_text(largest)} to {plural(receivers, 'peer')}"
        return f"A step of a peer: {traffic}, {flops} of training."
    wire = wire_costs(inputs)
    busiest = 1e6 * max(wire.busiest_up_mb, wire.busiest_down_mb)
    traffic = "nothing is sent"
    if busiest:
        traffic = f"{bytes_text(busiest)} on the wire of the busiest node"
    return f"A round: {traffic}, {flops} of training for a peer that trains."


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
    """Train Dis-PFL, Local, FedAvg and D-PSGD on the bundled images and compare them.

    Example: dispfl demo --seed 1
    """

    from dispfl.config import compose
    from dispfl.extras import can_draw
    from dispfl.report.page import write_report
    from dispfl.report.run_tables import print_results
    from dispfl.runs.execute import ExperimentRun

    console = SafeConsole()
    with output_folder(out, Path("runs/demo")) as folder:
        paths = [folder / name for name in DEMO_METHODS]
        for path in paths:
            experiment = compose({}, [f"method={path.name}", f"seed={seed}"])
            run_to_end(ExperimentRun.create(experiment, path), console)
    print_results(paths, console)

    page = folder / "report.html"
    write_report(paths, page)
    files = f"Everything on one page: {page}"
    if can_draw():
        from dispfl.report.plots import plot_runs

        curves = folder / f"learning-curves.{figure}"
        plot_runs(paths, curves)
        files = f"Learning curves: {curves}. {files}"
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

    experiment = prepared.experiment
    path = prepared.directory.path
    warn_about_protection([experiment])
    try:
        if describe:
            with prepared.directory.closed_on_failure():  # code of a user's own
                lines = describe_run(prepared)
            for line in lines:
                print_text(console, line, "dim")
        with (
            show_progress(experiment.method.name, experiment.rounds, console) as observer,
            tracking(track, path, observer) as tracked,
        ):
            prepared.run(tracked, ray_address=ray_address)
    except KeyboardInterrupt:
        command = f"dispfl run --resume {quote(str(path))}"
        print_text(console, f"\nStopped; all finished work is saved. Resume with: {command}")
        raise typer.Exit(130) from None
    write_report([path], path / "report.html")


def split_config(arguments: Sequence[str]) -> tuple[Path | None, list[str]]:
    """Return the config file that the first argument names, if any, and the overrides.

    A file may be in a folder `lr=0.1`.
    """
    if not arguments:
        return None, []
    first, *overrides = arguments
    if "=" in first and not Path(first).is_file():
        return None, list(arguments)
    return Path(first), overrides


def data_dir_override(data_dir: Path | None) -> list[str]:
    """Return `--data-dir` as an override.

    It is absolute, because a run may be resumed from another working directory.
    """
    if data_dir is None:
        return []
    folder = str(data_dir.expanduser().absolute())
    return [f"data.dir={json.dumps(folder, ensure_ascii=False)}"]  # quoted as in TOML


def warn_about_protection(experiments: "Iterable[Experiment]") -> None:
    """Warn once, on stderr, about runs that are less private than they may seem."""
    warnings: set[str] = set()
    for experiment in experiments:
        if experiment.train.noise_std:
            warnings.add(
                "train.noise_std alone is no privacy guarantee: gradients are clipped per batch and"
                " not per sample, and the privacy loss of the rounds is not accounted."
            )
    for warning in sorted(warnings):
        typer.echo(warning, err=True)


@contextlib.contextmanager
def output_folder(given: Path | None, default: Path) -> Iterator[Path]:
    """Yield the given folder, or a new one: the default, `runs/demo-2`, `runs/demo-3`, ...

    The folder is created in one step, so that no two processes get the same; left empty, it is
    removed again.
    """
    if given is not None:
        yield given
        return
    from dispfl.files import plain_disk_errors

    new_parent = not default.parent.exists()
    path = default
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
            if new_parent:
                default.parent.rmdir()


RunFolders = Annotated[
    list[Path],
    typer.Argument(
        metavar="DIR...",
        autocompletion=complete_runs,
        help="Run directories, or folders that contain some, such as compare's.",
    ),
]


def show(
    directories: RunFolders,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summaries as JSON.")] = False,
) -> None:
    """Print the results of runs, finished or not, and who is ahead of Dis-PFL, or of the first.

    Example: dispfl show runs/dispfl-fashion-sample
    Example: dispfl show runs/five
    """

    from dispfl.files import run_folder
    from dispfl.report.run_tables import find_shown, overview, print_results
    from dispfl.report.runs import load_run

    with reading(directories[0]):
        if not as_json:
            print_results(directories, SafeConsole())
            return
        summaries = [overview(load_run(run_folder(path))) for path in find_shown(directories)]
        typer.echo(json.dumps(summaries if len(summaries) > 1 else summaries[0], indent=2))


def report(
    directories: Annotated[
        list[Path],
        typer.Argument(
            metavar="DIR...",
            autocompletion=complete_runs,
            help="Run directories, or folders that contain some, such as compare's.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The file to write.")] = Path(
        "report.html"
    ),
    against: Annotated[
        str | None,
        typer.Option(
            "--against",
            metavar="ROW",
            help="The row that the others are compared with: a method or a label.",
        ),
    ] = None,
) -> None:
    """Write one HTML page about runs: accuracy, costs and results per peer.

    The page is self-contained: it needs no network and no scripts.
    Runs that differ only in their seed are one row, with a mean and a band.

    Example: dispfl report runs/five -o five.html
    """
    from dispfl.report.page import write_report

    with reading(directories[0]):
        write_report(directories, out, against)
    typer.echo(f"Written: {out}")
