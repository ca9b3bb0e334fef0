"""Fixtures for tests of custom data: a site's folder, with the site's code."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Path]:
    """An empty folder; modules imported from it are unloaded afterwards."""
    path, loaded = list(sys.path), set(sys.modules)
    yield tmp_path
    sys.path[:] = path
    for name in set(sys.modules) - loaded:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def code(site: Path) -> Callable[[str], None]:
    """Write the site's module `mine.py`."""

    def write(text: str) -> None:
        (site / "mine.py").write_text(text)

    return write
