"""Where a running site shows its page, and the token of those who may see it."""

import contextlib
import os
import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from pydantic import field_validator

from dispfl.errors import RunError
from dispfl.files import new_private_file, read_regular
from dispfl.settings import Settings
from dispfl.view.listen import is_loopback, parse_listen

if TYPE_CHECKING:
    from dispfl.peer.site import Site
    from dispfl.peer.state.log import EventLog

TOKEN_FILE = "view-token"
"""In the folder of a site's key, which no other user can read."""
TOKEN_BYTES = 16


class ViewSettings(Settings):
    """Where a running site shows its page."""

    table: ClassVar[str] = "view"

    listen: str | None = None
    """HOST:PORT at which a browser sees the site's page while its node runs, such as
    127.0.0.1:8090; by default nowhere. Beyond this machine, the page asks for the token in the file
    `identity/view-token`."""

    @field_validator("listen")
    @classmethod
    def _check_listen(cls, listen: str | None) -> str | None:
        if listen is not None:
            parse_listen(listen, "view.listen")
        return listen


@contextlib.asynccontextmanager
async def serving_site(site: "Site", log: "EventLog") -> AsyncIterator[None]:
    """Show a site's page while the block runs, if its settings say where."""
    listen = site.config().view.listen
    if listen is None:
        yield
        return
    from dispfl.view.pages import RunPages
    from dispfl.view.server import serving

    host, port = parse_listen(listen, "view.listen")
    token = None if is_loopback(host) else site_token(site.folder)
    async with serving(RunPages([site.folder]), host, port, token, "view.listen") as place:
        log(
            "view", {"address": place.elsewhere, "token": f"identity/{TOKEN_FILE}" if token else ""}
        )
        yield


def site_token(folder: Path) -> str:
    """Return the token of a site's page; make it first."""
    file = folder / "identity" / TOKEN_FILE
    with contextlib.suppress(FileNotFoundError):
        token = read_regular(file).decode(errors="replace").strip()
        if len(token) < TOKEN_BYTES:
            raise RunError(f"{file} holds no token; delete it, and a new one is made.")
        return token
    token = secrets.token_urlsafe(TOKEN_BYTES)
    with new_private_file(file, replace=True) as opened:
        opened.write(f"{token}{os.linesep}".encode())
    return token
