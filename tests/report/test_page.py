"""The whole page: self-contained, safe, small and deterministic; also in a real browser."""

import json
import re
from base64 import b64encode
from collections.abc import Callable, Iterator
from hashlib import sha256
from io import BytesIO
from math import sin
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import pytest
from chromium import browser, lowest_contrast, unnamed_controls, unnamed_pictures
from html_cells import cells
from messages import refused
from PIL import Image

from dispfl.errors import RunError
from dispfl.report.html import page_script
from dispfl.report.page import CONTENTS, headline, settings_section, write_report
from dispfl.report.results import ReportResults, read_results

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

__all__ = ["browser"]
Write = Callable[..., Path]
SECTIONS = [name for name in CONTENTS if name not in ("affinities", "privacy", "time")]


def test_the_same_runs_give_the_same_bytes(write: Write, tmp_path: Path) -> None:
    paths = [write("a", [[0.5, 0.6]]), write("b", [[0.4, 0.7]], "local")]
    for name in ("one.html", "two.html"):
        write_report(paths, tmp_path / name)
    assert (tmp_path / "one.html").read_bytes() == (tmp_path / "two.html").read_bytes()


def test_text_from_files_cannot_become_tags(write: Write, tmp_path: Path) -> None:
    evil = """<script>alert('1')</script>" onload="x"""
    spread = {"mean": 0.5, "std": 0.0, "per_peer": [0.5, 0.5]}
    quantities = {"mixed": spread, "mask_change": spread, "epsilon": spread, "peer_seconds": spread}
    seen = {"received": 1, "far": 1, "distance": 1.0}
    written = {
        "record": {
            "failures": {evil: evil},
            "traffic": {evil: [1, 2], "000": [3, 4]},
            "senders": {evil: seen},
            **quantities,
        },
        "labels": [[1, 2], [3, 4]],
        "topology": {"name": evil},
        "metric": evil,
    }
    first = write("a<b>", [[0.5, 0.6]], f"m{evil}", data={"name": evil}, **written)
    write("c", [[0.5, 0.6]], f"n{evil}", data={"name": evil}, own={"cohort": 2}, **written)
    audit: dict[str, Any] = {"membership": [], "labels": [], "canaries": None}
    (first / "audit.json").write_text(json.dumps(audit))
    for paths in ([first], [first, tmp_path / "c"]):
        write_report(paths, tmp_path / "report.html")
        html = (tmp_path / "report.html").read_text()
        assert html.count("<script") == 1
        assert str(page_script()) in html
        assert 'onload="x' not in html
        assert "&lt;script&gt;alert(&#39;1&#39;)&lt;/script&gt;&#34; onload=&#34;x" in html
        assert "<b>" not in html


def test_the_page_loads_nothing(write: Write, tmp_path: Path) -> None:
    write_report([write("a", [[0.5]])], tmp_path / "report.html")
    html = (tmp_path / "report.html").read_text()
    assert not re.findall(r"https?:|//[a-z]|url\(|@import|<script src|<img", html)
    assert "default-src 'none'" in html


def test_the_only_script_that_may_run_is_the_one_on_the_page(write: Write, tmp_path: Path) -> None:
    write_report([write("a", [[0.5]])], tmp_path / "report.html")
    html = (tmp_path / "report.html").read_text()
    [script] = re.findall("<script>(.*?)</script>", html, re.DOTALL)
    digest = b64encode(sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}';" in html


def test_a_folder_is_rejected_as_output(write: Write, tmp_path: Path) -> None:
    with refused(RunError):
        write_report([write("a", [[0.5]])], tmp_path)


def test_an_existing_page_is_replaced(write: Write, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    out.write_text("old")
    write_report([write("a", [[0.5]])], out)
    assert out.read_text().startswith("<!doctype html>")


def test_a_page_of_100_peers_and_500_rounds_stays_below_half_a_megabyte(
    write: Write, tmp_path: Path
) -> None:
    scores = [[0.5 + 0.3 * sin(peer + t / 100) for peer in range(100)] for t in range(500)]
    traffic = {f"{peer:03d}": [1_000_000, 900_000 + peer] for peer in range(100)}
    labels = [[(peer + label) % 7 for label in range(10)] for peer in range(100)]
    topology = {"name": "random", "degree": 10}
    path = write("a", scores, labels=labels, topology=topology, record={"traffic": traffic})
    write_report([path], tmp_path / "report.html")
    assert (tmp_path / "report.html").stat().st_size < 500_000


def test_federations_made_in_python_have_all_sections(write: Write, tmp_path: Path) -> None:
    path = write("a", [[0.5, 0.6]], made_in_python=True, metric="f1", samples=[3, 4])
    config = (path / "config.toml").read_text()
    (path / "config.toml").write_text(re.sub(r"\[(data|partition)\]\n(\w.*\n)+", "", config))
    write_report([path], tmp_path / "report.html")
    html = (tmp_path / "report.html").read_text()
    assert re.findall(r'<section id="(\w+)"', html) == SECTIONS
    assert "2 peers · ring topology · 1 round · 1 seed · made in Python" in html
    assert "f1, mean over peers" in html


def two_rows(write: Write) -> ReportResults:
    paths = [
        write(
            "runs/a",
            [[0.5]],
            "dispfl",
            own={"density": 0.5},
            topology={"name": "random", "degree": 4},
        ),
        write(
            "runs/b", [[0.4]], "local", train={"lr": 0.1}, topology={"name": "random", "degree": 4}
        ),
    ]
    return read_results(paths)


def test_the_headline_has_the_settings_that_all_rows_share(write: Write) -> None:
    line = headline(two_rows(write))
    assert line == "1 peer · mnist · dirichlet 0.3 · random topology of degree 4 · 1 round · 1 seed"


def test_the_settings_list_common_values_and_those_of_each_row(
    write: Write, tmp_path: Path
) -> None:
    html = str(settings_section(two_rows(write), tmp_path / "report.html"))
    pairs = re.findall(r"<dt>([^<]*)</dt><dd>([^<]*)</dd>", html)
    assert ("alpha", "0.3") in pairs
    assert ("density", "0.5") in pairs
    assert [value for key, value in pairs if key == "train.lr"] == ["not set", "0.1"]
    assert cells(html)[0] == ["train.lr", "not set", "0.1"]
    assert cells(html.rpartition("<table")[2])[0] == [
        "runs/a",
        "Dis-PFL",
        "0",
        "1 of 1",
        "dispfl 0.1.0",
    ]


def a_comparison(write: Write, tmp_path: Path) -> Path:
    """Two methods, two seeds, in the layout of `compare`, and their page."""
    record: dict[str, Any] = {
        "traffic": {"000": [9, 9], "001": [9, 9]},
        "failures": {"000": "It broke & <stopped>."},
    }
    for seed in (0, 1):
        labels = [[4, 1], [0, 5]]
        write(
            f"out/dispfl/seed-{seed}",
            [[0.5, 0.7], [0.6, 0.8 + seed / 10]],
            "dispfl",
            seed,
            labels=labels,
            record=record,
        )
        write(
            f"out/local/seed-{seed}", [[0.4, 0.6], [0.5, 0.7]], "local", seed, mb=0, labels=labels
        )
    write_report([tmp_path / "out"], tmp_path / "report.html")
    return tmp_path / "report.html"


@pytest.fixture
def page(browser: "Browser", write: Write, tmp_path: Path) -> Iterator["Page"]:
    """The page on a phone; closing it checks that nothing was requested and no error was logged."""
    context = browser.new_context(viewport={"width": 390, "height": 844}, color_scheme="dark")
    opened = context.new_page()
    requests: list[str] = []
    errors: list[str] = []
    opened.on("request", lambda request: requests.append(request.url))
    opened.on("console", lambda message: errors.append(message.text))
    opened.on("pageerror", lambda error: errors.append(str(error)))
    path = a_comparison(write, tmp_path)
    opened.goto(path.as_uri())
    yield opened
    context.close()
    assert errors == []
    assert [url for url in requests if not url.startswith("data:")] == [path.as_uri()]


def test_the_browser_shows_every_section_and_the_contents_link_to_them(page: "Page") -> None:
    for name in SECTIONS:
        assert page.locator(f"section#{name} h2").is_visible()
    assert page.locator("nav a").evaluate_all("links => links.map(link => link.hash)") == [
        f"#{name}" for name in SECTIONS
    ]
    assert (
        page.locator("aside.caveats").inner_text().endswith("First reason: It broke & <stopped>.")
    )


def test_the_table_in_the_browser_has_the_numbers_of_the_runs(page: "Page", tmp_path: Path) -> None:
    """The means of the last rounds: (0.6 + 0.8) / 2 and (0.6 + 0.9) / 2, so 0.725; 0.5 and 0.7, so
    0.6 twice."""
    rows = page.locator("#results tbody tr")
    shown = [row.locator("td.score").inner_text() for row in rows.all()]
    assert shown == ["0.725 ± 0.035", "0.600 ± 0.000"]
    lines = (tmp_path / "out/dispfl/seed-0/metrics.jsonl").read_text().splitlines()
    cell = rows.first.locator('td[data-label="On wire MB/round"]')
    assert cell.inner_text() == f"{json.loads(lines[-1])['busiest']['wire_mb']:.2f}"


@pytest.mark.parametrize("width", [390, 700, 1000, 1280])
def test_the_page_never_scrolls_sideways(page: "Page", width: int) -> None:
    page.set_viewport_size({"width": width, "height": 844})
    page.evaluate("document.querySelectorAll('details').forEach(part => part.open = true)")
    assert page.evaluate("document.documentElement.scrollWidth") == width
    too_wide = (
        "[...document.querySelectorAll('svg')].filter(part => part.getBoundingClientRect().right >"
        " innerWidth)"
    )
    assert page.evaluate(f"{too_wide}.length") == 0


def test_a_wide_table_scrolls_and_the_page_does_not(
    browser: "Browser", write: Write, tmp_path: Path
) -> None:
    spent = {"mean": 1.5, "std": 0.0, "per_peer": [1.5, 1.5]}
    write_report([write("a", [[0.5, 0.6]], record={"epsilon": spent})], tmp_path / "report.html")
    page = browser.new_page(viewport={"width": 390, "height": 844})
    page.goto((tmp_path / "report.html").as_uri())
    assert page.locator("#privacy table").is_visible()
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    page.close()


def test_every_image_has_a_label_or_is_hidden_from_screen_readers(page: "Page") -> None:
    assert unnamed_pictures(page) == 0
    assert unnamed_controls(page) == 0
    assert page.locator("svg[role=img]").count() > 5


def test_light_and_dark_differ_and_both_have_contrast(page: "Page") -> None:
    parts = [".lead", ".headline", "nav a", ".remark", "figcaption span", "thead th", "dt"]
    parts += [".tools button", ".choices label"]
    papers = []
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        assert lowest_contrast(page, parts) > 4.5
        papers.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert papers[0] != papers[1]


def three_rows(write: Write, tmp_path: Path) -> str:
    """A comparison of three rows with two metrics; its page's address."""
    for name, accuracy, f1 in (("dispfl", 0.8, 0.3), ("local", 0.7, 0.5), ("dpsgd", 0.6, 0.4)):
        f1_scores = {"mean": f1, "std": 0.0, "per_peer": [f1] * 6}
        path = write(f"out/{name}/seed-0", [[accuracy - 0.1] * 6, [accuracy] * 6], name)
        lines = []
        for line in (path / "metrics.jsonl").read_text().splitlines():
            record = json.loads(line)
            record["scores"]["f1"] = {"higher_is_better": True, "format": ".3f", **f1_scores}
            lines.append(json.dumps(record) + "\n")
        (path / "metrics.jsonl").write_text("".join(lines))
    write_report([tmp_path / "out"], tmp_path / "report.html")
    return (tmp_path / "report.html").as_uri()


def test_rows_reference_and_metric_are_chosen_by_keyboard_and_kept_in_the_address(
    browser: "Browser", write: Write, tmp_path: Path
) -> None:
    """Against D-PSGD, whose accuracy is 0.6, Dis-PFL is 0.2 ahead."""
    context = browser.new_context()
    page = context.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(three_rows(write, tmp_path))
    rows = page.locator("#results .cards tbody tr:visible th")
    assert rows.all_inner_texts() == ["Dis-PFL", "Local", "D-PSGD"]
    page.get_by_label("Local", exact=True).focus()
    page.keyboard.press("Space")
    page.get_by_label("Compare with").select_option("D-PSGD")
    page.get_by_label("Metric").select_option("f1")
    for _ in range(2):  # as chosen, and again from the address
        assert rows.all_inner_texts() == ["D-PSGD", "Dis-PFL"]  # by f1
        difference = page.locator("#results .cards tbody tr:visible td.difference").nth(1)
        assert difference.inner_text().startswith("+0.200, ahead")
        assert page.get_by_text("Difference to D-PSGD").count() == 1
        shown = page.locator("#curves figure:visible figcaption strong").all_inner_texts()
        assert "F1 by communication round" in shown
        assert "By communication round" not in shown
        assert page.locator("#curves .line.r1:visible").count() == 0
        page.reload()
    page.locator("nav a", has_text="Traffic").click()
    assert "reference=D-PSGD" in page.url  # a link to a section does not lose the choices
    assert errors == []
    context.close()


def test_a_picture_is_saved_as_svg_with_its_colours_and_as_png(
    browser: "Browser", write: Write, tmp_path: Path
) -> None:
    write_report([write("a", [[0.5, 0.6], [0.6, 0.7]])], tmp_path / "report.html")
    context = browser.new_context(accept_downloads=True)
    page = context.new_page()
    page.goto((tmp_path / "report.html").as_uri())
    saved = {}
    for kind in ("SVG", "PNG"):
        with page.expect_download() as download:
            page.get_by_label(f"Save By communication round as {kind}").click()
        saved[kind] = Path(download.value.path()).read_bytes()
        assert download.value.suggested_filename == f"by-communication-round.{kind.lower()}"
    drawing = ElementTree.fromstring(saved["SVG"])
    strokes = {element.get("stroke") for element in drawing.iter()}
    assert "rgb(31, 95, 191)" in strokes  # the first colour of the style sheet
    assert not any(element.get("class") for element in drawing.iter() if element is not drawing)
    image = Image.open(BytesIO(saved["PNG"]))
    assert image.size == (3 * (540 + 16), 3 * (320 + 16))  # with a margin of 8
    assert (
        image.convert("L").histogram()[:100] != [0] * 100
    )  # something is drawn on the white paper
    context.close()


def test_a_saved_picture_names_the_rows_that_are_shown(
    browser: "Browser", write: Write, tmp_path: Path
) -> None:
    page = browser.new_page()
    page.goto(f"{three_rows(write, tmp_path)}#hide=Local")
    drawing = saved_svg(page, "Save By communication round as SVG")
    texts = [element.text for element in drawing.findall(".//{*}text")]
    assert texts[-2:] == ["Dis-PFL", "D-PSGD"]
    assert drawing.get("height") == str(320 + 30 + 16)  # with the line of the names and a margin
    page.close()


def test_the_charts_of_all_peers_are_saved_in_their_order(
    browser: "Browser", write: Write, tmp_path: Path
) -> None:
    path = write("a", [[0.9, 0.2, 0.5], [0.6, 0.3, 0.7]])
    write_report([path], tmp_path / "report.html")
    page = browser.new_page()
    page.goto((tmp_path / "report.html").as_uri())
    page.get_by_label("Sort by name").click()
    drawing = saved_svg(page, "Save Peers as SVG")
    texts = [element.text for element in drawing.findall(".//{*}text")]
    assert texts == ["000", "0.600", "001", "0.300", "002", "0.700"]
    assert len(drawing.findall(".//{*}svg")) == 3
    page.close()


def saved_svg(page: "Page", label: str) -> ElementTree.Element:
    """The picture that a button saves."""
    with page.expect_download() as download:
        page.get_by_label(label).click()
    return ElementTree.fromstring(Path(download.value.path()).read_bytes())


def test_the_graph_plays_the_last_rounds_and_peers_are_sorted(
    browser: "Browser", write: Write, tmp_path: Path
) -> None:
    path = write("a", [[0.9, 0.2, 0.5], [0.6, 0.3, 0.7]])
    write_report([path], tmp_path / "report.html")
    page = browser.new_page()
    page.goto((tmp_path / "report.html").as_uri())
    peers = page.locator(".multiples li > span:first-child")
    assert peers.all_inner_texts() == ["001", "000", "002"]  # the worst first
    page.get_by_label("Sort by name").click()
    assert peers.all_inner_texts() == ["000", "001", "002"]
    page.get_by_label("Sort by change").click()
    assert peers.all_inner_texts() == ["000", "001", "002"]  # -0.3, +0.1, +0.2
    slider = page.get_by_label("Round of the graph")
    assert slider.get_attribute("aria-valuetext") == "round 2"
    slider.press("ArrowLeft")
    assert slider.get_attribute("aria-valuetext") == "round 1"
    note = "Who received from whom in round 1. The marks of the peers are those of round 2."
    assert page.locator("#topology figcaption span").inner_text() == note
    slider.press("ArrowRight")
    assert "Ring topology in round 2" in page.locator("#topology figcaption span").inner_text()
    slider.press("ArrowLeft")
    shown = page.locator("g.round:not([display])")
    assert shown.get_attribute("data-round") == "1"
    page.close()
