"""`dispfl up`: real peers on this machine, to see how it works."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from dispfl.up import Processes

EVERY = 0.5
"""Seconds between two looks at the peers."""


def up(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[CONFIG.toml] [KEY=VALUE]...", help="A config file, then settings that win over it."),
    ] = None,
    peers: Annotated[int, typer.Option(min=1, help="How many processes.")] = 8,
    out: Annotated[Path | None, typer.Option(help="The run directory; by default a new one under runs/.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Where the data set's files are.")] = None,
) -> None:
    """Run real peers on this machine: a process each, with its own certificate, over mutually authenticated links.

    Everything is as between machines, except that all sites are here. In the
    end there is a run directory as from dispfl run, with the same models.
    Ctrl-C stops all.

    Example: dispfl up --peers 8 rounds=10
    """
    from rich.console import Console

    from dispfl.analysis.plots import learning_curve
    from dispfl.analysis.report.page import write_report
    from dispfl.analysis.tables import print_results
    from dispfl.cli.run import data_dir_words, first_free
    from dispfl.config import compose, read_toml
    from dispfl.roster import roster_names
    from dispfl.up import Processes, gather_up, set_up

    words = list(words or [])
    config = read_toml(Path(words.pop(0))) if words and "=" not in words[0] else {}
    experiment = compose(config, [*words, *data_dir_words(data_dir), f"peers={peers}", "threads=1"])
    out = out or first_free(Path("runs") / f"up-{experiment.method.name}-{experiment.data.name}")
    console = Console()
    set_up(experiment, out)
    processes = Processes(out, roster_names(peers))
    if watch(processes, experiment.rounds, console):
        gather_up(out)
        learning_curve([out], out / "learning-curve.png")
        write_report([out], out / "report.html")
        print_results([out], console)


def watch(processes: "Processes", rounds: int, console: Any) -> bool:
    """Start all and show them until they have ended; whether all came to their end."""
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
        console.print("Stopped.")
        raise typer.Exit(130) from None
    finally:
        processes.stop()
    failed = {name: code for name, code in processes.ended().items() if code}
    for name in failed:
        log = processes.out / "sites" / name / "log.txt"
        console.print(f"Peer {name} failed; its log is {log}.", soft_wrap=True, highlight=False, markup=False)
    if failed:
        raise typer.Exit(1)
    return True


def table(processes: "Processes", rounds: int) -> "Table":
    """All peers as they are now."""
    from rich import box
    from rich.table import Table

    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("peer", "round", "accuracy", "MB in", "MB out", "heard", "missed", "refused", "state"):
        shown.add_column(heading, justify="left" if heading in ("peer", "state") else "right")
    ended = processes.ended()
    for name in processes.names:
        found = _status(processes.out / "sites" / name / "run" / "status.json")
        known = list(found.get("peers", {}).values())
        score = found.get("score")
        state = found.get("state", "starting") if name not in ended else ("ended" if ended[name] == 0 else "failed")
        shown.add_row(
            name,
            f"{min(found.get('round', 0), rounds)}/{rounds}",
            "–" if score is None else f"{score:.3f}",
            f"{sum(peer['received_bytes'] for peer in known) / 1e6:.2f}",
            f"{sum(peer['sent_bytes'] for peer in known) / 1e6:.2f}",
            str(sum(peer["answered"] for peer in known)),
            str(sum(peer["missed"] for peer in known)),
            str(sum(sum(reasons.values()) for reasons in found.get("refused", {}).values())),
            state,
        )
    return shown


def _status(file: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return {}
    return found
