"""The command line: each command parses, delegates and prints; it imports torch if it needs it."""

import os
import signal
import sys
from types import FrameType
from typing import Annotated

import typer

from dispfl.cli import (
    attack,
    audit,
    bound,
    costs,
    data,
    explain,
    export,
    grid,
    masks,
    peer,
    privacy,
    relay,
    reproduce,
    run,
    table,
    timing,
    up,
    view,
)
from dispfl.cli.completion import COMPLETE_VARIABLE, complete_in_bash
from dispfl.errors import DispflError, user_errors
from dispfl.extras import require_posix
from dispfl.terminal import printable

app = typer.Typer(
    name="dispfl",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(requested: bool) -> None:
    if requested:
        from importlib.metadata import version

        typer.echo(f"dispfl {version('dispfl')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", is_eager=True, callback=_print_version
        ),
    ] = False,
) -> None:
    """Decentralized, personalized, sparse federated learning: every peer trains its own sparse
    model, no server."""


app.command("run")(run.run)
app.command("show")(run.show)
app.command("demo")(run.demo)
app.command("compare")(grid.compare)
app.command("sweep")(grid.sweep)
app.command("attack")(attack.attack)
app.command("reproduce")(reproduce.reproduce)
app.command("costs")(costs.costs)
app.command("privacy")(privacy.privacy)
app.command("audit")(audit.audit)
app.command("explain")(explain.explain)
app.command("masks")(masks.masks)
app.command("bound")(bound.bound)
app.command("report")(run.report)
app.command("view")(view.view)
app.command("table")(table.table)
app.command("time")(timing.time)
app.command("export")(export.export)
app.command("predict")(export.predict)
app.command("up")(up.up)
app.command("relay")(relay.relay)
app.add_typer(peer.app, name="peer")
app.add_typer(data.app, name="data")


def main() -> None:
    """Run the `dispfl` command.

    Errors, also of a user's own function, are printed as one sentence on stderr, with exit code 1.
    """
    signal.signal(signal.SIGTERM, _stop)
    try:
        require_posix()
        if os.environ.get(COMPLETE_VARIABLE) == "complete_bash":
            complete_in_bash(app)
        else:
            with user_errors("In code of your own"):
                app()
    except DispflError as problem:
        print(f"dispfl: {printable(str(problem))}", file=sys.stderr)
        sys.exit(1)


def _stop(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt  # SIGTERM stops as cleanly as Ctrl-C
