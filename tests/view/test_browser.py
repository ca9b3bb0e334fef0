"""Live pages in a real browser, beside real runs in processes of their own."""

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from chromium import browser, lowest_contrast, unnamed_controls, unnamed_pictures

from dispfl.view.background import viewed

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

__all__ = ["browser"]
Write = Callable[..., Path]
COMMAND = str(Path(sys.executable).parent / "dispfl")
LONG = ["peers=4", "rounds=100000", "train.epochs=1", "workers=1", "checkpoint_every=1"]
BEYOND_THE_EDGE = "cells => cells.filter(e => e.getBoundingClientRect().right > innerWidth).length"
PATIENCE = 90_000
"""Milliseconds until a change must be on the page, on a busy machine."""


@contextmanager
def program(*arguments: str | Path) -> Iterator["subprocess.Popen[str]"]:
    """A process of the command line, which is killed at the end."""
    command = [COMMAND, *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def page(browser: "Browser") -> Iterator["Page"]:
    """A tab; closing it checks that no error was logged and nothing came from elsewhere."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(PATIENCE)
    opened = context.new_page()
    errors: list[str] = []
    requests: list[str] = []
    opened.on("pageerror", lambda error: errors.append(str(error)))
    opened.on("request", lambda request: requests.append(request.url))
    yield opened
    context.close()
    assert errors == []
    assert [url for url in requests if not url.startswith(("http://127.0.0.1:", "data:"))] == []


def test_a_run_is_followed_while_it_makes_rounds_is_killed_is_resumed_and_deleted(
    page: "Page", tmp_path: Path
) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    with program("view", runs, "--no-open", "--listen", "127.0.0.1:0") as server:
        assert server.stdout is not None
        address = server.stdout.readline().split()[-1]
        page.goto(address)
        page.get_by_text("No runs yet").wait_for()

        with program("run", *LONG, "--out", runs / "long") as run:
            page.locator("#running-now a", has_text="runs/long").click()
            page.evaluate("window.loaded = 'once'")
            now = page.locator("#now")
            now.get_by_text("Still to train").or_(now.get_by_text("have finished")).first.wait_for()
            for _ in range(3):
                rounds = page.locator("#results td[data-label=Rounds]")
                rounds.filter(has_not_text=rounds.inner_text()).wait_for()
            assert page.locator("#curves svg[role=img]").count() >= 2
            run.send_signal(signal.SIGKILL)
            run.wait()
            now.get_by_text("stopped").wait_for()
            now.get_by_text("dispfl run --resume").wait_for()

        with program("run", "--resume", runs / "long") as run:
            now.get_by_text("running").wait_for()
            assert page.evaluate("window.loaded") == "once"  # all without loading it again
            run.terminate()
            run.wait()
            now.get_by_text("stopped").wait_for()

        shutil.rmtree(runs / "long")
        page.get_by_role("status").filter(has_text="deleted").wait_for()
        page.goto(address)
        page.get_by_text("No runs yet").wait_for()
        server.send_signal(signal.SIGINT)
        assert server.wait(20) == 0
        page.get_by_role("status").filter(has_text="connection").wait_for()


def test_list_run_and_comparison_are_readable_in_any_colours_at_any_width(
    page: "Page", write: Write, tmp_path: Path
) -> None:
    write("runs/five/dispfl/seed-0", [[0.5, 0.6], [0.6, 0.8]])
    write("runs/sweep/partition.samples_per_peer=100/seed-0", [[0.5, 0.6], [0.6, 0.8]])
    stopped = write(
        "runs/five/local/seed-0", [[0.4, 0.5], [0.5, 0.5]], rounds=3, method={"name": "local"}
    )
    (stopped / ".progress.json").write_text(
        '{"round": 2, "began": 1.0, "finished": [], "error": "The disk is full, says the system."}'
    )
    parts = [".activity", ".activity small", ".headline", "a", ".remark", "thead th", ".kicker"]
    with viewed(tmp_path / "runs") as place:
        assert place is not None
        for path in ("", "page/runs/five/dispfl/seed-0", "page/runs/five"):
            page.goto(place.address + path)
            assert unnamed_pictures(page) == 0
            assert unnamed_controls(page) == 0
            for scheme in ("light", "dark"):
                page.emulate_media(color_scheme=scheme)
                assert lowest_contrast(page, parts) > 4.5
            for width in (390, 1280):
                page.set_viewport_size({"width": width, "height": 844})
                assert page.evaluate("document.documentElement.scrollWidth") == width
                hidden = ".runs td, .runs th"
                assert page.locator(hidden).evaluate_all(BEYOND_THE_EDGE) == 0
        page.goto(place.address)
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")  # the first link of the list
        page.get_by_role("heading", name="Now").wait_for()


def test_a_reader_keeps_the_place_in_a_page_that_is_updated(
    page: "Page", write: Write, tmp_path: Path
) -> None:
    """The graph stays at round 1, the table at the right, and the focus at the same link."""
    path = write("runs/a", [[0.5, 0.6], [0.6, 0.7]], rounds=9, method={"name": "dispfl" * 9})
    write("runs/b", [[0.5, 0.6], [0.6, 0.8]])
    with viewed(tmp_path / "runs") as place:
        assert place is not None
        page.set_viewport_size({"width": 1000, "height": 844})
        page.goto(f"{place.address}page/runs/a")
        page.get_by_label("Round of the graph").press("ArrowLeft")
        page.locator("#results .scrolling").evaluate("box => box.scrollLeft = 10")
        page.get_by_label("Save By traffic as PNG").focus()
        append_round(path)
        rounds = page.locator("#results td[data-label=Rounds]")
        rounds.filter(has_text="3 of 9").wait_for()
        assert page.locator("g.round:not([display])").get_attribute("data-round") == "1"
        assert page.locator("#results .scrolling").evaluate("box => box.scrollLeft") == 10
        focused = "document.activeElement.getAttribute('aria-label')"
        assert page.evaluate(focused) == "Save By traffic as PNG"


def test_selected_text_can_be_copied_while_its_part_changes(
    page: "Page", write: Write, tmp_path: Path
) -> None:
    path = write("runs/a", [[0.5, 0.6], [0.6, 0.7]], rounds=9)
    with viewed(tmp_path / "runs") as place:
        assert place is not None
        page.goto(f"{place.address}page/runs/a")
        page.evaluate("getSelection().selectAllChildren(document.querySelector('#now .remark'))")
        append_round(path)
        page.locator("#results td[data-label=Rounds]", has_text="3 of 9").wait_for()
        assert page.evaluate("String(getSelection())").startswith("2 of 9 rounds finished")
        page.evaluate("getSelection().removeAllRanges()")
        page.locator("#now", has_text="3 of 9 rounds finished").wait_for()


def test_the_token_is_asked_for_once_and_leads_to_the_page_that_was_asked_for(
    page: "Page", write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after a link in a page of another host, such as a terminal in the browser."""
    write("runs/a", [[0.5, 0.6]])
    write("runs/b", [[0.4, 0.5]], method={"name": "local"})
    monkeypatch.setattr("dispfl.view.background.DEFAULT_HOST", "0.0.0.0")
    with viewed(tmp_path / "runs") as place:
        assert place is not None
        assert place.token
        address = f"{place.address}page/runs#hide=Local"
        page.goto(address)
        page.get_by_label("Token").fill("wrong")
        page.get_by_role("button", name="Open").click()
        page.get_by_role("alert").wait_for()
        page.get_by_label("Token").fill(place.token)
        page.get_by_role("button", name="Open").click()
        page.get_by_label("Dis-PFL", exact=True).wait_for()
        assert page.url == address
        assert not page.get_by_label("Local", exact=True).is_checked()
        page.goto("data:text/html,<a>")
        page.locator("a").evaluate("(link, href) => { link.href = href; link.click(); }", address)
        page.get_by_label("Dis-PFL", exact=True).wait_for()


def append_round(path: Path) -> None:
    """Repeat the last round of a handwritten run."""
    metrics = path / "metrics.jsonl"
    record = json.loads(metrics.read_text().splitlines()[-1])
    with metrics.open("a") as file:
        file.write(json.dumps(record | {"round": record["round"] + 1}) + "\n")


def test_without_scripts_a_live_page_is_the_report(
    browser: "Browser", write: Write, tmp_path: Path
) -> None:
    write("runs/a", [[0.5, 0.6], [0.6, 0.8]])
    context = browser.new_context(java_script_enabled=False)
    with viewed(tmp_path / "runs") as place:
        assert place is not None
        page = context.new_page()
        page.goto(f"{place.address}page/runs/a")
        assert page.locator("#results td.score").inner_text() == "0.700"
        assert page.locator("svg.chart").count() > 5
    context.close()
