"""Live pages beside the work of a command: served by a thread of their own."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from pathlib import Path

from dispfl.errors import ConfigError
from dispfl.view.listen import DEFAULT_HOST, DEFAULT_PORT, OTHER_PORTS
from dispfl.view.pages import RunPages
from dispfl.view.server import Listening, Pages, serving


@contextlib.asynccontextmanager
async def serving_at_free_port(pages: Pages) -> AsyncIterator[Listening]:
    """Serve pages on this machine, at the default port or the next free one."""
    async with contextlib.AsyncExitStack() as stack:
        for port in range(DEFAULT_PORT, DEFAULT_PORT + OTHER_PORTS):
            try:
                place = await stack.enter_async_context(serving(pages, DEFAULT_HOST, port))
                break
            except ConfigError:
                if port == DEFAULT_PORT + OTHER_PORTS - 1:
                    raise
        yield place


@contextlib.contextmanager
def viewed(path: Path) -> Iterator[Listening | None]:
    """Serve the pages about a run directory while the block runs; None if no port is free."""
    started: Future[Listening] = Future()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        try:
            async with serving_at_free_port(RunPages([path])) as place:
                started.set_result(place)
                await stop.wait()
        except ConfigError as problem:
            started.set_exception(problem)

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    try:
        try:
            place = started.result()
        except ConfigError:
            place = None
        yield place
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(5.0)
        if not thread.is_alive():
            loop.close()
