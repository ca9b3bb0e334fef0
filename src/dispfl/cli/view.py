"""`dispfl view`: live pages about runs and sites in the browser."""

import contextlib
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from dispfl.cli.completion import complete_runs
from dispfl.terminal import SafeConsole, print_text


def view(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[FOLDER]...",
            autocompletion=complete_runs,
            help="Run directories, folders that contain some, or a site; default: runs.",
        ),
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Where to listen; beyond this machine a token is needed. Default: 127.0.0.1:8090,"
            " or the next free port.",
        ),
    ] = None,
    no_open: Annotated[
        bool, typer.Option("--no-open", help="Do not open the page in the browser.")
    ] = False,
) -> None:
    """Watch runs in the browser while they are made: a list, and each one's report.

    Nothing is written, and runs may be made by any other process. Ctrl-C ends it.

    Example: dispfl view runs
    """
    import asyncio

    from dispfl.extras import require

    require("view", "dispfl view")
    paths = folders or [Path("runs") if Path("runs").is_dir() else Path()]
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(paths, listen, opens=not no_open and _has_desktop()))


async def _serve(paths: list[Path], listen: str | None, *, opens: bool) -> None:
    """Serve until Ctrl-C."""
    import asyncio
    import webbrowser

    from dispfl.view.background import serving_at_free_port
    from dispfl.view.listen import parse_listen
    from dispfl.view.pages import RunPages
    from dispfl.view.server import serving

    console = SafeConsole()
    pages = RunPages(paths)
    server = serving(pages, *parse_listen(listen)) if listen else serving_at_free_port(pages)
    async with server as place:
        print_text(console, f"View: {place.with_token}")
        if place.elsewhere != place.address:
            print_text(console, f"From other machines: {place.elsewhere_with_token}")
        print_text(console, "Press Ctrl-C to end it.")
        if opens:
            webbrowser.open(place.with_token)
        await asyncio.Event().wait()


def _has_desktop() -> bool:
    """Whether a browser can be expected to open a window here."""
    if sys.platform == "darwin":
        return "SSH_CONNECTION" not in os.environ
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
