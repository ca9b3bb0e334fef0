"""All pages of a view: the list of runs, and a page for each run, folder of runs and site."""

import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from dispfl.report.html import HtmlPage
from dispfl.view.folders import WatchedFolders
from dispfl.view.list_page import RunList
from dispfl.view.run_page import HOME, RunPage
from dispfl.view.site_page import SitePage

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
        with self._lock:
            if time.monotonic() - self._looked_at >= LOOK_SECONDS:
                self._list.look()
                self._looked_at = time.monotonic()
        found = self._list.found
        sites = dict(found.sites)
        if address == "":
            if len(sites) == 1 and not found.runs:
                [folder] = sites.values()
                return SitePage(folder, None).page
            return self._list.page
        if address in sites:
            return SitePage(sites[address], HOME).page
        paths = found.runs_below(address)
        if address in found.runs:
            paths = [found.runs[address]]
        if not paths:
            self._pages.pop(address, None)
            return None
        known = self._pages.get(address)
        if known is None or known.paths != paths:
            known = self._pages[address] = RunPage(address, paths, self._folders)
        return known.page
