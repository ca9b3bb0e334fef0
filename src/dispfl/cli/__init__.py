"""The command line: one small module a command, which parses, delegates and prints. torch is imported only to work."""

import signal
import sys
from types import FrameType
from typing import Annotated

import typer

from dispfl.cli import (
    bound,
    compare,
    costs,
    data,
    demo,
    export,
    masks,
    peer,
    predict,
    report,
    reproduce,
    run,
    show,
    sweep,
    up,
)
from dispfl.errors import DispflError

app = typer.Typer(
    name="dispfl",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"dispfl {version('dispfl')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Decentralized, personalized, sparse federated learning: every peer trains its own sparse model, no server."""


app.command("run")(run.run)
app.command("show")(show.show)
app.command("demo")(demo.demo)
app.command("compare")(compare.compare)
app.command("sweep")(sweep.sweep)
app.command("reproduce")(reproduce.reproduce)
app.command("costs")(costs.costs)
app.command("masks")(masks.masks)
app.command("bound")(bound.bound)
app.command("report")(report.report)
app.command("export")(export.export)
app.command("predict")(predict.predict)
app.command("up")(up.up)
app.add_typer(peer.app, name="peer")
app.add_typer(data.app, name="data")


def main() -> None:
    """The `dispfl` command. Refusals are one sentence on stderr and exit code 1."""
    signal.signal(signal.SIGTERM, _stop)
    try:
        app()
    except DispflError as problem:
        print(f"dispfl: {problem}", file=sys.stderr)
        sys.exit(1)


def _stop(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt  # a polite kill stops as cleanly as Ctrl-C
