"""`dispfl up`: a federation of real processes on this machine."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from dispfl.cli.completion import complete_config_and_settings
from dispfl.cli.run import TrustOption
from dispfl.errors import ConfigError, RunError
from dispfl.files import read_regular
from dispfl.report.units import BYTES, axis_unit, common_unit
from dispfl.terminal import SafeConsole, print_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from dispfl.experiment import Experiment
    from dispfl.peer.local_federation import PeerProcesses

DEFAULT_PEERS = 8
REFRESH_SECONDS = 0.5
"""Seconds between two updates of the table."""
HEADINGS = (
    "peer",
    "round",
    "score",
    "MB\nin",
    "MB\nout",
    "TLS\n%",
    "models\nin",
    "missed",
    "refused",
    "state",
)
"""Headings of the live table, short enough for 80 columns."""
NO_VALUE = "–"


def up(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONFIG.toml] [KEY=VALUE]...",
            help="A config file, then overrides.",
            autocompletion=complete_config_and_settings,
        ),
    ] = None,
    peers: Annotated[int | None, typer.Option(help="Number of processes; default: 8.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="The run directory; default: a new one under runs/.")
    ] = None,
    resume: Annotated[Path | None, typer.Option(help="Resume the run in this directory.")] = None,
    trust: TrustOption = False,
    data_dir: Annotated[Path | None, typer.Option(help="Folder with the data set's files.")] = None,
) -> None:
    """Run real peers on this machine: one process each, over mutually authenticated TLS.

    The result is a run directory as from dispfl run, with the same models.
    Ctrl-C stops all peers; --resume continues.

    Example: dispfl up --peers 8 rounds=10
    """

    from dispfl.cli.run import data_dir_override
    from dispfl.core.names import roster_of
    from dispfl.peer.local_federation import PeerProcesses, collect_results
    from dispfl.runs.directory import RunDirectory, read_config, read_summary
    from dispfl.view.background import viewed

    arguments = list(arguments or [])
    console = SafeConsole()
    options = [*_peers_override(peers, arguments), *data_dir_override(data_dir)]
    if resume is None:
        path, experiment = _create(arguments, options, out)
    else:
        if out is not None:
            raise ConfigError(
                "--resume continues in the run's own directory; omit --out.", key="--out"
            )
        path = resume
        experiment = _resumed(path, [*arguments, *options], trust)
        if read_summary(path) is not None:
            print_text(console, f"{path} is already finished.")
            show(path, console)
            return

    processes = PeerProcesses(path, roster_of(read_config(path)), simultaneous=resume is not None)
    metric = experiment.metric[0].rpartition(":")[2]
    with closing(RunDirectory.open(path)), viewed(path) as place:
        if place is not None:
            print_text(console, f"View: {place.address}")
        watch(processes, experiment.rounds, metric, console)
    collect_results(path)
    show(path, console)


def _create(
    arguments: list[str], options: Sequence[str], out: Path | None
) -> "tuple[Path, Experiment]":
    """Create the run directory and the sites of a new run."""
    from dispfl.cli.run import output_folder, split_config
    from dispfl.config import compose, read_toml
    from dispfl.peer.local_federation import create_run

    file, overrides = split_config(arguments)
    config = read_toml(file) if file else {}
    # The file of a simulated run may set workers, which does not apply here; an override does.
    config = {"peers": DEFAULT_PEERS, **config, "workers": 1}
    experiment = compose(config, [*overrides, *options])
    _refuse_simulation_settings(experiment)
    default = Path("runs") / f"up-{experiment.method.name}-{experiment.data.name}"
    with output_folder(out, default) as path:
        create_run(experiment, path)
    return path, experiment


def _resumed(path: Path, overrides: Sequence[str], trust: bool) -> "Experiment":
    """Prepare a run to be resumed, unless it is finished; return its experiment."""
    from dispfl.config import compose
    from dispfl.peer.local_federation import prepare_resume
    from dispfl.runs.directory import read_summary, trusted_config
    from dispfl.runs.execute import check_same_experiment

    config = trusted_config(path, trust=trust)
    experiment = compose(config, overrides)
    _refuse_simulation_settings(experiment)
    check_same_experiment(path, experiment)
    if experiment.rounds != config["rounds"]:
        raise RunError(
            f"{path} was run with rounds={config['rounds']}, got {experiment.rounds}; dispfl up"
            " cannot extend a run."
        )
    if read_summary(path) is None:
        prepare_resume(path, experiment)
    return experiment


def _peers_override(peers: int | None, arguments: Sequence[str]) -> list[str]:
    """Return `--peers` as an override; refuse a different `peers=`."""
    if peers is None:
        return []
    for key, _, value in (argument.partition("=") for argument in arguments):
        if key.strip() == "peers" and value.strip() != str(peers):
            raise ConfigError(
                f"peers={value.strip()} contradicts --peers {peers}; give one of them.", key="peers"
            )
    return [f"peers={peers}"]


def _refuse_simulation_settings(experiment: "Experiment") -> None:
    """Refuse settings without effect here: each peer is a process that trains on one thread."""
    if experiment.average_buffers:
        raise ConfigError(
            "average_buffers is for simulated runs: messages between real peers contain no buffers."
            " Omit it, or use dispfl run.",
            key="average_buffers",
        )
    if experiment.deadline is not None:
        raise ConfigError(
            f"deadline is {experiment.deadline:g}, which counts simulated seconds: the peers of"
            " `dispfl up` have deadlines of their own, which follow from their last rounds. Omit"
            " it, or use dispfl run.",
            key="deadline",
        )
    for key, required in (("engine", "inprocess"), ("vmap_peers", 1), ("workers", 1)):
        value = getattr(experiment, key)
        if value != required:
            raise ConfigError(
                f"{key} is {value}, which is for simulated runs: `dispfl up` trains each peer on"
                f" one thread. Use {key}={required}, or dispfl run.",
                key=key,
            )


def show(path: Path, console: "Console") -> None:
    """Write the report and print the results of a run."""
    from dispfl.report.page import write_report
    from dispfl.report.run_tables import print_results
    from dispfl.runs.directory import check_learned, read_summary
    from dispfl.runs.execute import draw_learning_curve

    if not (path / "report.html").exists():
        draw_learning_curve(path)
        write_report([path], path / "report.html")
    print_results([path], console)
    summary = read_summary(path)
    if summary:
        print_text(console, network_line(summary["network"]))
    print_text(console, f"Report: {path / 'report.html'}")
    check_learned(path)


def network_line(network: Mapping[str, Any]) -> str:
    """Describe the bytes of the messages and of the sockets."""
    messages = 1e6 * network["ledger_mb"]
    sockets = 1e6 * network["socket_mb"]
    unit = common_unit([messages, sockets], BYTES)
    text = (
        f"Messages {unit.text(messages)} {unit.name}, on the sockets {unit.text(sockets)}"
        f" {unit.name}"
    )
    overhead = network["overhead_percent"]
    if overhead is not None:
        text += f": {overhead:.1f} % more, for TLS, HTTP and membership sync"
    return f"{text}."


def watch(processes: "PeerProcesses", rounds: int, metric: str, console: "Console") -> None:
    """Start all peers and show a live table until they have ended."""
    import time

    from rich.live import Live

    try:
        for name in processes.names:
            processes.start(name)
        with Live(table(processes, rounds, metric), console=console, refresh_per_second=4) as live:
            while len(processes.ended()) < len(processes.names):
                time.sleep(REFRESH_SECONDS)
                live.update(table(processes, rounds, metric))
            live.update(table(processes, rounds, metric))
    except KeyboardInterrupt:
        processes.stop()
        print_text(
            console,
            f"Stopped; finished rounds are saved. Resume with: {_resume_command(processes)}",
        )
        raise typer.Exit(130) from None
    finally:
        processes.stop()
    failed = [name for name, code in processes.ended().items() if code]
    for name in failed:
        print_text(
            console, f"Peer {name} failed; its log is {processes.out / 'sites' / name / 'log.txt'}."
        )
    if failed:
        print_text(console, f"After fixing the cause, resume with: {_resume_command(processes)}")
        raise typer.Exit(1)


def _resume_command(processes: "PeerProcesses") -> str:
    return f"dispfl up --resume {quote(str(processes.out))}"


def table(processes: "PeerProcesses", rounds: int, metric: str = "accuracy") -> "Table":
    """Return the current status of all peers; `metric` is the name of their score."""
    from rich import box
    from rich.table import Table

    sites = processes.out / "sites"
    statuses = {name: _status(sites / name / "run" / "status.json") for name in processes.names}
    traffic = message_bytes(statuses)
    unit = axis_unit(max(map(max, traffic.values())), BYTES)

    shown = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for heading in HEADINGS:
        title = metric if heading == "score" else heading.replace("MB", unit.name)
        justify: Literal["left", "right"] = "left" if heading in ("peer", "state") else "right"
        shown.add_column(title, justify=justify, no_wrap=True)

    exit_codes = processes.ended()
    for name, status in statuses.items():
        received, sent = traffic[name]
        neighbours = status.get("peers", {}).values()
        refusals = 0
        for reasons in status.get("refused", {}).values():
            refusals += sum(reasons.values())
        score = status.get("score")
        shown.add_row(
            name,
            f"{min(status.get('round', 0), rounds)}/{rounds}",
            NO_VALUE if score is None else f"{score:.3f}",
            unit.text(received),
            unit.text(sent),
            _overhead(status, received + sent),
            str(sum(peer["answered"] for peer in neighbours)),
            str(sum(peer["missed"] for peer in neighbours)),
            str(refusals),
            _state(status, exit_codes.get(name)),
        )
    return shown


def _overhead(status: Mapping[str, Any], message_bytes: int) -> str:
    """What TLS, HTTP and membership sync add to the messages, in percent."""
    socket_bytes = sum(status.get("sockets", {}).values())
    if not socket_bytes or not message_bytes:
        return NO_VALUE
    return f"{100 * (socket_bytes / message_bytes - 1):.1f}"


def _state(status: Mapping[str, Any], exit_code: int | None) -> str:
    if exit_code is None:
        return str(status.get("state", "starting"))
    return "ended" if exit_code == 0 else "failed"


def message_bytes(statuses: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[int, int]]:
    """Return the message bytes that each peer received and sent, as the ledger counts them.

    Peers count what they send, so a peer has received what all others have sent to it.
    """
    received: Counter[str] = Counter()
    sent: Counter[str] = Counter()
    for sender, status in statuses.items():
        for receiver, peer in status.get("peers", {}).items():
            received[receiver] += peer["sent_bytes"]
            sent[sender] += peer["sent_bytes"]
    return {name: (received[name], sent[name]) for name in statuses}


def _status(file: Path) -> dict[str, Any]:
    try:
        status: dict[str, Any] = json.loads(read_regular(file))
    except (OSError, ValueError):
        return {}
    return status
