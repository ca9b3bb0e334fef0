"""All pages of a view: the list of runs, and a page for each run, folder of runs and site."""

import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from dispfl.report.html import HtmlPage
from dispfl.view.folders import FoundFolders, WatchedFolders
from dispfl.view.list_page import RunList
from dispfl.view.run_page import HOME, RunPage
from dispfl.view.site_page import SitePage

MAX_PAGES = 16
"""Pages whose runs are kept in memory: those that were asked for last."""
LOOK_SECONDS = 1.0
"""How long what was found in the folders is used."""


class RunPages:
    """The pages about the runs and sites below folders."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._folders = WatchedFolders(paths)
        self._list = RunList(self._folders)
        self._pages: dict[str, RunPage] = {}
        self._lock = threading.Lock()
        self._looked_at = -LOOK_SECONDS

    def find(self, address: str) -> Callable[[], HtmlPage] | None:
        """Return the function that draws the page at an address; None if there is none."""
        with self._lock:  # requests come on several threads
            if time.monotonic() - self._looked_at >= LOOK_SECONDS:
                self._list.look()
                self._looked_at = time.monotonic()
            return self._find(address, self._list.found)

    def _find(self, address: str, found: FoundFolders) -> Callable[[], HtmlPage] | None:
        if address == "":
            if len(found.sites) == 1 and not found.runs:
                [folder] = found.sites.values()
                return SitePage(folder, None).page
            return self._list.page
        if address in found.sites:
            return SitePage(found.sites[address], HOME).page
        paths = found.runs_below(address)
        if address in found.runs:
            paths = [found.runs[address]]
        if not paths:
            self._pages.pop(address, None)
            return None
        page = self._pages.pop(address, None)
        if page is None or page.paths != paths:
            page = RunPage(address, paths, self._folders)
        self._pages[address] = page
        while len(self._pages) > MAX_PAGES:
            del self._pages[next(iter(self._pages))]
        return page.page
