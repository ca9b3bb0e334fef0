"""The command line: one small module a command, which parses, delegates and prints. torch is imported only to work."""

import signal
import sys
from types import FrameType

import typer

from dispfl.cli import data, demo, run, show
from dispfl.errors import DispflError

app = typer.Typer(
    name="dispfl",
    help="Decentralized, personalized, sparse federated learning: every peer trains its own sparse model, no server.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("run")(run.run)
app.command("show")(show.show)
app.command("demo")(demo.demo)
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
