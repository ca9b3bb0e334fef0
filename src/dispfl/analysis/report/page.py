"""The page: its sections in order, its style, and nothing from anywhere else."""

from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path

from dispfl.analysis.report.markup import Markup, element, joined
from dispfl.analysis.report.results import Results, read_results
from dispfl.analysis.report.sections.curves import curves_section
from dispfl.analysis.report.sections.labels import labels_section
from dispfl.analysis.report.sections.masks import masks_section
from dispfl.analysis.report.sections.peers import peers_section
from dispfl.analysis.report.sections.setting import headline, setting_section
from dispfl.analysis.report.sections.summary import summary_section
from dispfl.analysis.report.sections.table import table_section
from dispfl.analysis.report.sections.topology import topology_section
from dispfl.analysis.report.sections.traffic import traffic_section
from dispfl.analysis.report.wording import listed
from dispfl.errors import RunError
from dispfl.runs.files import write_atomically

MOST_NAMED = 4
CONTENTS = {
    "results": "Results",
    "curves": "Curves",
    "peers": "Peers",
    "traffic": "Traffic",
    "masks": "Masks",
    "labels": "Labels",
    "topology": "Topology",
    "setting": "Setting",
}
"""The sections' anchors and what the list of contents calls them."""


def write_report(paths: Iterable[Path], out: Path) -> None:
    """Write a page about run directories, and about all that lie in folders among these paths.

    The same runs give the same bytes. A page that is there already is replaced.
    """
    if out.is_dir():
        raise RunError(f"{out} is a folder; name the file to write, such as {out / 'report.html'}.")
    results = read_results(paths)
    write_atomically(out, page(results, out).encode())


def page(results: Results, out: Path) -> str:
    """The whole document."""
    title = _title(results)
    contents = element("ul", *(element("li", element("a", text, href=f"#{name}")) for name, text in CONTENTS.items()))
    body = [
        element(
            "header",
            element("p", "dispfl report", class_="kicker"),
            element("h1", title),
            element("p", headline(results), class_="headline"),
            summary_section(results, out),
            element("nav", contents, aria_label="Contents"),
        ),
        element(
            "main",
            table_section(results),
            curves_section(results),
            peers_section(results),
            traffic_section(results),
            masks_section(results),
            labels_section(results),
            topology_section(results),
            setting_section(results, out),
        ),
    ]
    return f"<!doctype html>\n{element('html', _head(title), element('body', *body), lang='en')}\n"


def _title(results: Results) -> str:
    labels = [series.label for series in results.series]
    return listed(labels if len(labels) <= MOST_NAMED else [*labels[:2], f"{len(labels) - 2} others"])


def _head(title: str) -> Markup:
    """The policy forbids the page to load anything, whatever words the runs' files hold."""
    style = files("dispfl.analysis.report").joinpath("style.css").read_text(encoding="utf-8")
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    return element(
        "head",
        Markup('<meta charset="utf-8">'),
        Markup(f'<meta http-equiv="Content-Security-Policy" content="{policy}">'),
        Markup('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        Markup('<meta name="color-scheme" content="light dark">'),
        Markup('<link rel="icon" href="data:,">'),
        element("title", f"{title} – dispfl report"),
        joined([Markup(f"<style>\n{style}</style>")]),
    )
