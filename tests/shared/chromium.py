"""A real browser for tests of pages."""

import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    """Chromium, without a window."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = (
        shutil.which("chromium")
        or shutil.which("chromium-browser")
        or shutil.which("google-chrome")
    )
    if chromium is None:
        pytest.skip("there is no Chromium on this machine")
    with sync_api.sync_playwright() as play:
        found = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield found
        found.close()


def lowest_contrast(page: "Page", parts: list[str]) -> float:
    """The lowest contrast of texts to the page; WCAG requires 4.5, with its luminance."""
    lowest: float = page.evaluate(
        """parts => {
      const light = colour => {
        const [r, g, b] = colour.match(/[\\d.]+/g).slice(0, 3).map(v => v / 255)
          .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
      };
      const paper = light(getComputedStyle(document.body).backgroundColor);
      return Math.min(...parts.flatMap(part => [...document.querySelectorAll(part)]).map(part => {
        const ink = light(getComputedStyle(part).color);
        return (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
      }));
    }""",
        parts,
    )
    return lowest


def unnamed_pictures(page: "Page") -> int:
    """How many pictures a screen reader could not name."""
    return page.locator("svg:not([aria-label]):not([aria-hidden=true])").count()


def unnamed_controls(page: "Page") -> int:
    """How many controls a screen reader could not name."""
    count: int = page.evaluate(
        """[...document.querySelectorAll('button, input, select, a')].filter(part => !(
          part.getAttribute('aria-label') || part.textContent.trim() || part.closest('label')
        )).length"""
    )
    return count
