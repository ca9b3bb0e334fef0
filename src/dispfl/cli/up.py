"""`dispfl up`: real peers on this machine, to see how it works."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dispfl.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from dispfl.config import Experiment
    from dispfl.up import Processes

DEFAULT_PEERS = 8
EVERY = 0.5
"""Seconds between two looks at the peers."""
HEADINGS = ("peer", "round", "accuracy", "MB\nin", "MB\nout", "TLS\n%", "heard", "missed", "refused", "state")
"""Of the live table. As wide as what stands below them, for all to fit into 80 columns."""


def up(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[CONFIG.toml] [KEY=VALUE]...", help="A config file, then settings that win over it."),
    ] = None,
    peers: Annotated[int | None, typer.Option(help="How many processes; 8 without a word.")] = None,
    out: Annotated[Path | None, typer.Option(help="The run directory; by default a new one under runs/.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with the run in this directory.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Where the data set's files are.")] = None,
) -> None:
    """Run real peers on this machine: a process each, with its own certificate, over mutually authenticated links.

    Everything is as between machines, except that all sites are here. In the
    end there is a run directory as from dispfl run, with the same models.
    Ctrl-C stops all, and --resume goes on.

    Example: dispfl up --peers 8 rounds=10
    """
    from rich.console import Console

    from dispfl.cli.run import data_dir_words, first_free
    from dispfl.config import compose, read_toml
    from dispfl.launch import refuse_another_experiment
    from dispfl.roster import roster_names
    from dispfl.runs.directory import read_config, read_summary
    from dispfl.up import Processes, gather_up, go_on, set_up

    words, console = list(words or []), Console()
    said = [*_peers_words(peers, words), *data_dir_words(data_dir)]
    if resume is None:
        config = read_toml(Path(words.pop(0))) if words and "=" not in words[0] else {}
        # A run's own file says how many threads trained its peers; that is no wish for here, but a word is.
        experiment = compose({"peers": DEFAULT_PEERS, **config, "threads": 1}, [*words, *said])
        _refuse_what_only_a_simulation_heeds(experiment)
        path = out or first_free(Path("runs") / f"up-{experiment.method.name}-{experiment.data.name}")
        set_up(experiment, path)
    else:
        path = resume
        if out is not None:
            raise ConfigError("--resume goes on in the run's own directory; leave --out away.")
        experiment = compose(read_config(path), [*words, *said])
        _refuse_what_only_a_simulation_heeds(experiment)
        refuse_another_experiment(path, experiment)
        if read_summary(path) is not None:
            _say(console, f"{path} is finished already.")
            show(path, console)
            return
        go_on(path, experiment)
    watch(Processes(path, roster_names(experiment.peers), together=resume is not None), experiment.rounds, console)
    gather_up(path)
    show(path, console)


def _peers_words(peers: int | None, words: Sequence[str]) -> list[str]:
    """`--peers` as a setting, unless a word sets something else."""
    if peers is None:
        return []
    for key, _, value in (word.partition("=") for word in words):
        if key.strip() == "peers" and value.strip() != str(peers):
            raise ConfigError(f"peers is {value.strip()} and --peers says {peers}: say it once.")
    return [f"peers={peers}"]


def _refuse_what_only_a_simulation_heeds(experiment: "Experiment") -> None:
    """Here each peer is a process, which trains its own model on one thread, and the system shares out the cores."""
    for key, heeded in (("engine", "inprocess"), ("together", 1), ("threads", 1)):
        if (got := getattr(experiment, key)) != heeded:
            raise ConfigError(
                f"{key} is {got}, which is for simulated runs: here every peer is a process of one thread. "
                f"Use {key}={heeded}, or dispfl run."
            )


def show(path: Path, console: "Console") -> None:
    """Draw and print what came of a run."""
    from dispfl.analysis.plots import learning_curve
    from dispfl.analysis.report.page import write_report
    from dispfl.analysis.tables import print_results
    from dispfl.runs.directory import read_summary

    if not (path / "report.html").exists():
        learning_curve([path], path / "learning-curve.png")
        write_report([path], path / "report.html")
    print_results([path], console)
    if summary := read_summary(path):
        _say(console, network_line(summary["network"]))
    _say(console, f"Report: {path / 'report.html'}")


def network_line(network: Mapping[str, Any]) -> str:
    """What the sockets carried beside the messages."""
    ledger, sockets, overhead = (network[key] for key in ("ledger_mb", "socket_mb", "overhead_percent"))
    more = "" if overhead is None else f": {overhead:.1f} % more, for TLS, HTTP and greetings"
    return f"Messages {ledger:.2f} MB, on the sockets {sockets:.2f} MB{more}."


def watch(processes: "Processes", rounds: int, console: "Console") -> None:
    """Start all and show them until all have come to their end."""
    import time

    from rich.live import Live

    try:
        for name in processes.names:
            processes.start(name)
        with Live(table(processes, rounds), console=console, refresh_per_second=4) as live:
            while len(processes.ended()) < len(processes.names):
                time.sleep(EVERY)
                live.update(table(processes, rounds))
            live.update(table(processes, rounds))
    except KeyboardInterrupt:
        processes.stop()
        _say(console, f"Stopped; no finished round is lost. Go on with: {_resuming(processes)}")
        raise typer.Exit(130) from None
    finally:
        processes.stop()
    failed = [name for name, code in processes.ended().items() if code]
    for name in failed:
        _say(console, f"Peer {name} failed; its log is {processes.out / 'sites' / name / 'log.txt'}.")
    if failed:
        _say(console, f"Once the reason is gone, go on with: {_resuming(processes)}")
        raise typer.Exit(1)


def _resuming(processes: "Processes") -> str:
    return f"dispfl up --resume {quote(str(processes.out))}"


def table(processes: "Processes", rounds: int) -> "Table":
    """All peers as they are now."""
    from rich import box
    from rich.table import Table

    from dispfl.analysis.tables import short

    shown = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for heading in HEADINGS:
        shown.add_column(heading, justify="left" if heading in ("peer", "state") else "right", no_wrap=True)
    ended = processes.ended()
    status = {name: _status(processes.out / "sites" / name / "run" / "status.json") for name in processes.names}
    carried = messages(status)
    for name, found in status.items():
        known = list(found.get("peers", {}).values())
        score = found.get("score")
        state = found.get("state", "starting") if name not in ended else ("ended" if ended[name] == 0 else "failed")
        into, out = carried[name]
        sockets = sum(found.get("sockets", {}).values())
        shown.add_row(
            name,
            f"{min(found.get('round', 0), rounds)}/{rounds}",
            "–" if score is None else f"{score:.3f}",
            short(into / 1e6, 2),
            short(out / 1e6, 2),
            f"{100 * (sockets / (into + out) - 1):.1f}" if sockets and into + out else "–",
            str(sum(peer["answered"] for peer in known)),
            str(sum(peer["missed"] for peer in known)),
            str(sum(sum(reasons.values()) for reasons in found.get("refused", {}).values())),
            "serving" if state == "serving others" else state,
        )
    return shown


def messages(status: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[int, int]]:
    """Bytes of requests and answers that came in to each peer and went out, as the ledger counts them.

    A peer knows what it has sent to whom, so what came in to one is what all others have sent to it.
    """
    sent = {
        (name, other): peer["sent_bytes"]
        for name, found in status.items()
        for other, peer in found.get("peers", {}).items()
    }
    return {
        name: (
            sum(count for (_, receiver), count in sent.items() if receiver == name),
            sum(count for (sender, _), count in sent.items() if sender == name),
        )
        for name in status
    }


def _status(file: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return {}
    return found


def _say(console: "Console", text: str) -> None:
    console.print(text, soft_wrap=True, highlight=False, markup=False)
