"""The web server of the live pages: who may ask, which page, and what has changed on it.

Pages are only read. A request must name this machine in its Host header, so that no web site can
read them by a name that it points here (DNS rebinding). Where other machines can connect, it also
needs a token.
"""

import asyncio
import contextlib
import hashlib
import hmac
import ipaddress
import json
import os
import secrets
import socket
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol
from urllib.parse import quote, urlencode, urlsplit

from aiohttp import web

from dispfl.errors import ConfigError
from dispfl.report.html import HtmlPage, content_policy, render
from dispfl.terminal import printable
from dispfl.view.listen import is_loopback, names_of_listener

POLL_SECONDS = 1.0
"""Seconds between two looks at the files of a page that somebody has open."""
MAX_SHARE = 0.25
"""Share of the time in which one page is drawn again: a large one is updated less often."""
KEEP_ALIVE_SECONDS = 15.0
MAX_PAGES = 32
"""Pages that are kept in memory."""
MAX_STATES = 3
"""Of each page: the last states, so that a reader who has one of them gets what has changed."""
MAX_READERS = 64
"""Open pages that are updated."""
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
TOKEN = "token"
SEEN = "seen"


class Pages(Protocol):
    """What a server shows: pages by address."""

    def find(self, address: str) -> Callable[[], HtmlPage] | None:
        """Return the function that draws the page at an address, as it is now; None: no page."""


@dataclass(frozen=True)
class Drawn:
    """A page as it was last drawn."""

    html: str
    parts: Mapping[str, str]
    title: str
    digest: str
    """It says whether the page has changed."""

    @classmethod
    def of(cls, page: HtmlPage, address: str) -> "Drawn":
        """Draw the page at an address."""
        parts = {name: printable(html) for name, html in page.parts.items()}
        content = hashlib.blake2b(digest_size=12)
        for name, html in parts.items():
            content.update(f"{name}\0{html}\0".encode())
        digest = content.hexdigest()
        events = f"/events/{quote(address)}?{urlencode({SEEN: digest})}"
        return cls(printable(page.html(events)), parts, printable(page.title), digest)


@dataclass
class _Slot:
    """The last states of a page that somebody has open."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    states: OrderedDict[str, Drawn] = field(default_factory=OrderedDict)
    """By their digests; the last one is the present one."""
    next_look: float = 0.0
    """By the event loop's clock."""

    @property
    def newest(self) -> Drawn | None:
        return next(reversed(self.states.values()), None)

    def add(self, drawn: Drawn) -> None:
        """Add the present state."""
        self.states[drawn.digest] = drawn
        self.states.move_to_end(drawn.digest)
        while len(self.states) > MAX_STATES:
            self.states.popitem(last=False)


class PageServer:
    """Answers requests for pages and their changes."""

    def __init__(self, pages: Pages, host: str, token: str | None) -> None:
        self._pages = pages
        self._host = host
        self._token = token
        self._slots: OrderedDict[str, _Slot] = OrderedDict()
        self._drawing = asyncio.Semaphore(2)
        self._readers: set[asyncio.Task[None]] = set()

    def application(self) -> web.Application:
        """Return the application with all addresses."""
        application = web.Application(middlewares=[self._guard], client_max_size=4096)
        application.router.add_get("/", self._show)
        application.router.add_get("/page/{address:(?s:.+)}", self._show)
        application.router.add_get("/events/{address:(?s:.*)}", self._follow)
        application.on_shutdown.append(self._end_readers)
        return application

    # who may ask

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Refuse requests for another host's name, and those without the token."""
        response: web.StreamResponse
        try:
            self._check_host(request)
            if self._token is not None and request.method == "POST":
                response = await self._take_token(request)
            elif self._is_admitted(request):
                response = await handler(request)
            else:
                response = self._ask_for_token(request)
        except web.HTTPException as refusal:
            response = web.Response(status=refusal.status, text=refusal.text)
        if not response.prepared:
            response.headers.update(HEADERS)
            response.headers["Content-Security-Policy"] = (
                f"{content_policy(live=True)}; frame-ancestors 'none'"
            )
        return response

    def _check_host(self, request: web.Request) -> None:
        try:
            name = urlsplit(f"//{request.host}").hostname or ""
        except ValueError:
            name = ""
        if not self._is_this_machine(name):
            raise web.HTTPForbidden(
                text=f"This page is not served under the name {printable(name)[:100]!r}: open it as"
                " http://localhost, or by the address of the machine.\n"
            )

    def _is_this_machine(self, name: str) -> bool:
        if name in LOCAL_NAMES or name == self._host:
            return True
        if self._token is None:
            return False
        with contextlib.suppress(ValueError):
            ipaddress.ip_address(name)  # no name that somebody else could point here
            return True
        return name in (socket.gethostname().lower(), socket.getfqdn().lower())

    def _is_admitted(self, request: web.Request) -> bool:
        if self._token is None:
            return True
        return self._is_token(request.cookies.get(self._cookie(request), ""))

    def _is_token(self, text: str) -> bool:
        assert self._token is not None
        return hmac.compare_digest(text.encode(errors="replace"), self._token.encode())

    @staticmethod
    def _cookie(request: web.Request) -> str:
        """Cookies are shared by the ports of a machine, so the name has the port."""
        address = request.transport and request.transport.get_extra_info("sockname")
        return f"dispfl-view-{address[1] if address else 0}"

    def _ask_for_token(self, request: web.Request) -> web.Response:
        if self._is_token(request.query.get(TOKEN, "")):
            return self._admit(request)
        return web.Response(text=str(render("token.html")), content_type="text/html", status=401)

    async def _take_token(self, request: web.Request) -> web.Response:
        """Take the token that the form on any page sends, and continue with that page."""
        form = await request.post()
        text = form.get(TOKEN, "")
        if not isinstance(text, str) or not self._is_token(text.strip()):
            return web.Response(
                text=str(render("token.html", wrong=True)), content_type="text/html", status=401
            )
        return self._admit(request)

    def _admit(self, request: web.Request) -> web.Response:
        """Remember the token in a cookie, which no script can read, and continue."""
        assert self._token is not None
        location = quote(f"/{request.path.lstrip('/')}")  # two slashes would be another machine
        response = web.Response(status=303, headers={"Location": location})
        # Lax: a link in a web page, such as a terminal in the browser, opens the page. No other
        # origin can read it, and no request changes anything.
        response.set_cookie(
            self._cookie(request), self._token, httponly=True, samesite="Lax", path="/"
        )
        return response

    # pages

    async def _show(self, request: web.Request) -> web.Response:
        drawn = await self._current(request.match_info.get("address", ""))
        if drawn is None:
            raise web.HTTPNotFound(text="There is no such run or folder (any more).\n")
        return web.Response(text=drawn.html, content_type="text/html")

    async def _current(self, address: str) -> Drawn | None:
        """Return a page as it is now, or as it was shortly before if drawing it takes long."""
        make_page = await asyncio.to_thread(self._pages.find, address)
        if make_page is None:
            self._slots.pop(address, None)
            return None
        slot = self._slots.setdefault(address, _Slot())
        self._slots.move_to_end(address)
        while len(self._slots) > MAX_PAGES:
            self._slots.popitem(last=False)
        async with slot.lock:
            clock = asyncio.get_running_loop().time
            began = clock()
            if slot.newest is None or began >= slot.next_look:
                async with self._drawing:
                    slot.add(await asyncio.to_thread(lambda: Drawn.of(make_page(), address)))
                seconds = clock() - began
                slot.next_look = clock() + max(POLL_SECONDS / 2, seconds / MAX_SHARE - seconds)
            return slot.newest

    async def _follow(self, request: web.Request) -> web.StreamResponse:
        """Send the parts of a page that change, until the reader leaves."""
        if len(self._readers) >= MAX_READERS:
            raise web.HTTPServiceUnavailable(text="Too many pages are open.\n")
        response = web.StreamResponse(
            headers={**HEADERS, "Content-Type": "text/event-stream; charset=utf-8"}
        )
        task = asyncio.current_task()
        assert task is not None
        self._readers.add(task)
        try:
            with contextlib.suppress(ConnectionError, asyncio.CancelledError):
                await response.prepare(request)
                await self._send_changes(request, response)
        finally:
            self._readers.discard(task)
        return response

    async def _send_changes(self, request: web.Request, response: web.StreamResponse) -> None:
        address = request.match_info["address"]
        slot = self._slots.get(address, _Slot())
        seen = slot.states.get(request.query.get(SEEN, ""))
        known = seen.parts if seen else {}
        clock = asyncio.get_running_loop().time
        sent_at = clock()
        while request.transport is not None:  # the reader has not left
            drawn = await self._current(address)
            if drawn is None:
                await response.write(b"event: gone\ndata: {}\n\n")
                return
            if drawn.parts != known:
                await response.write(_event(drawn, known))
                known = drawn.parts
                sent_at = clock()
            elif clock() - sent_at > KEEP_ALIVE_SECONDS:
                await response.write(b": still here\n\n")
                sent_at = clock()
            await asyncio.sleep(POLL_SECONDS)

    async def _end_readers(self, application: web.Application) -> None:
        for reader in self._readers:
            reader.cancel()


def _event(drawn: Drawn, known: Mapping[str, str]) -> bytes:
    """Return the parts that differ from those that a reader has, and the order of all."""
    changed = {name: html for name, html in drawn.parts.items() if known.get(name) != html}
    content = {
        "title": drawn.title,
        "digest": drawn.digest,
        "order": list(drawn.parts),
        "changed": changed,
    }
    return f"event: parts\ndata: {json.dumps(content)}\n\n".encode()


@dataclass(frozen=True)
class Listening:
    """Where a server listens."""

    address: str
    """Of its first page, for this machine."""
    elsewhere: str
    """The same for other machines, if they can connect."""
    token: str | None

    @property
    def with_token(self) -> str:
        """The address that opens the first page without asking."""
        return self._with_token(self.address)

    @property
    def elsewhere_with_token(self) -> str:
        """The same for other machines."""
        return self._with_token(self.elsewhere)

    def _with_token(self, address: str) -> str:
        return f"{address}?{urlencode({TOKEN: self.token})}" if self.token else address


@contextlib.asynccontextmanager
async def serving(
    pages: Pages, host: str, port: int, token: str | None = None, key: str = "--listen"
) -> AsyncIterator[Listening]:
    """Serve pages while the block runs; a token is made where other machines can connect."""
    if is_loopback(host):
        token = None
    elif token is None:
        token = secrets.token_urlsafe(16)
    application = PageServer(pages, host, token).application()
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as problem:
            raise ConfigError(
                f"{key} is {host}:{port}, where this machine cannot listen"
                f" ({os.strerror(problem.errno or 0)}); choose another address.",
                key=key,
            ) from None
        here, elsewhere = names_of_listener(host)
        port = runner.addresses[0][1]
        yield Listening(f"http://{here}:{port}/", f"http://{elsewhere}:{port}/", token)
    finally:
        await runner.cleanup()
