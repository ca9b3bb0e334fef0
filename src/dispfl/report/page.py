"""The HTML report: one self-contained page about run directories, and its section of settings."""

from collections.abc import Iterable, Mapping
from importlib.resources import files
from pathlib import Path

from dispfl.errors import RunError
from dispfl.files import write_atomically
from dispfl.report.labels import flat_settings, join_and
from dispfl.report.markup import (
    Markup,
    details,
    element,
    html_table,
    join_markup,
    plural,
    relative_to_page,
    section,
)
from dispfl.report.peers import labels_section, peers_section
from dispfl.report.privacy_section import privacy_section
from dispfl.report.results import ReportResults, read_results
from dispfl.report.results_table import results_section
from dispfl.report.runs import ReportRun
from dispfl.report.sections import curves_section, masks_section, topology_section, traffic_section
from dispfl.report.summary import summary_block

MAX_NAMED = 4
MAX_VALUE_LENGTH = 60
CONTENTS = {
    "results": "Results",
    "curves": "Curves",
    "peers": "Peers",
    "traffic": "Traffic",
    "masks": "Masks",
    "labels": "Labels",
    "topology": "Topology",
    "settings": "Settings",
}
"""The anchors of the sections and their names in the table of contents; private or audited runs
have one more."""
TABLE_TITLES = {
    "": "Run",
    "data": "Data",
    "partition": "Partition",
    "model": "Model",
    "topology": "Topology",
    "train": "Local training",
}
HEADLINE_FORMATS = {
    "partition.alpha": "{}",
    "partition.classes": "of {} classes",
    "partition.groups": "of {} groups",
    "topology.degree": "of degree {}",
}
"""How the most important settings appear in the line below the title."""


def write_report(paths: Iterable[Path], out: Path) -> None:
    """Write a page about run directories, including all that folders among these paths contain.

    The same runs give the same bytes. An existing page is replaced.
    """
    if out.is_dir():
        raise RunError(f"{out} is a folder; name the file to write, such as {out / 'report.html'}.")
    results = read_results(paths)
    write_atomically(out, html_page(results, out).encode())


def html_page(results: ReportResults, out: Path) -> str:
    """Return the whole document."""
    title = _title(results)
    privacy, sections = privacy_section(results), list(CONTENTS.items())
    if privacy:
        sections.insert(-1, ("privacy", "Privacy"))
    contents = element(
        "ul", *(element("li", element("a", text, href=f"#{name}")) for name, text in sections)
    )
    body = [
        element(
            "header",
            element("p", "dispfl report", class_="kicker"),
            element("h1", title),
            element("p", headline(results), class_="headline"),
            summary_block(results, out),
            element("nav", contents, aria_label="Contents"),
        ),
        element(
            "main",
            results_section(results),
            curves_section(results),
            peers_section(results),
            traffic_section(results),
            masks_section(results),
            labels_section(results),
            topology_section(results),
            *([privacy] if privacy else []),
            settings_section(results, out),
        ),
    ]
    return f"<!doctype html>\n{element('html', _head(title), element('body', *body), lang='en')}\n"


def _title(results: ReportResults) -> str:
    labels = [series.label for series in results.series]
    return join_and(
        labels if len(labels) <= MAX_NAMED else [*labels[:2], f"{len(labels) - 2} others"]
    )


def _head(title: str) -> Markup:
    """Return the head, whose policy forbids the page to load anything, whatever the files of the
    runs contain."""
    style = files("dispfl.report").joinpath("style.css").read_text(encoding="utf-8")
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    return element(
        "head",
        Markup('<meta charset="utf-8">'),
        Markup(f'<meta http-equiv="Content-Security-Policy" content="{policy}">'),
        Markup('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        Markup('<meta name="color-scheme" content="light dark">'),
        Markup('<link rel="icon" href="data:,">'),
        element("title", f"{title} – dispfl report"),
        Markup(f"<style>\n{style}</style>"),
    )


def headline(results: ReportResults) -> str:
    """`16 peers · mnist · dirichlet 0.3 · cnn · random topology of degree 4 · 16 rounds · 3
    seeds`."""
    common = _common_settings(results)
    parts = []
    if "peers" in common:
        parts.append(plural(int(common["peers"]), "peer"))
    for name, noun in (("data", ""), ("partition", ""), ("model", ""), ("topology", " topology")):
        if f"{name}.name" in common:
            parameters = [
                text.format(common[key])
                for key, text in HEADLINE_FORMATS.items()
                if key in common and key.startswith(name)
            ]
            parts.append(" ".join([common[f"{name}.name"] + noun, *parameters]))
    if "rounds" in common:
        parts.append(plural(int(common["rounds"]), "round"))
    parts.append(plural(len({run.seed for run in results.runs}), "seed"))
    if any(run.made_in_python for run in results.runs):
        parts.append("made in Python")
    return " · ".join(parts)


def settings_section(results: ReportResults, out: Path) -> Markup:
    """Return the common settings by table, the settings of each row, and the run directories."""
    common = _common_settings(results)
    groups = []
    for name, title in TABLE_TITLES.items():
        keys = [key for key in common if key.rpartition(".")[0] == name and key != "made_in_python"]
        if keys:
            groups.append(
                _settings_list(title, {key.rpartition(".")[2]: common[key] for key in keys})
            )
    for series in results.series:
        first = flat_settings(series.runs[0].config)
        own = {
            key.removeprefix("method."): first[key] for key in first if key.startswith("method.")
        }
        own |= {key: values[series.label] for key, values in results.differing.items()}
        own["seed" if len(series.runs) == 1 else "seeds"] = ", ".join(
            str(run.seed) for run in series.runs
        )
        groups.append(_settings_list(series.label, own))
    return section(
        "settings",
        "Settings",
        element("div", *groups, class_="settings"),
        _run_directories(results, out),
    )


def _common_settings(results: ReportResults) -> dict[str, str]:
    """Return the settings that all rows share, outside the method's table."""
    settings = flat_settings(results.series[0].runs[0].config)
    return {
        key: value
        for key, value in settings.items()
        if key not in results.differing and not key.startswith("method.")
    }


def _settings_list(title: str, pairs: Mapping[str, str]) -> Markup:
    name_first = sorted(pairs.items(), key=lambda pair: pair[0] != "name")
    items = join_markup(
        join_markup([element("dt", key), element("dd", _shortened(value))])
        for key, value in name_first
    )
    return element("div", element("h3", title), element("dl", items))


def _shortened(value: str) -> str:
    return value if len(value) <= MAX_VALUE_LENGTH else f"{value[:MAX_VALUE_LENGTH]}…"


def _run_directories(results: ReportResults, out: Path) -> Markup:
    headings = [
        ("Run directory", ""),
        ("Row", ""),
        ("Seed", "number"),
        ("Rounds", "number"),
        ("Versions", ""),
    ]
    rows = []
    for series in results.series:
        for run in series.runs:
            rounds = f"{len(run.records)} of {run.config['rounds']}"
            rows.append(
                [
                    relative_to_page(out, run.path),
                    series.label,
                    str(run.seed),
                    rounds,
                    _versions(run),
                ]
            )
    return details(
        "Run directories", html_table("Runs that this page is made from", headings, rows, "plain")
    )


def _versions(run: ReportRun) -> str:
    versions = (run.summary or {}).get("versions")
    if not isinstance(versions, dict):
        return "not finished" if run.summary is None else "unknown"
    return ", ".join(
        f"{name} {version}"
        for name, version in versions.items()
        if name in ("dispfl", "torch", "python")
    )
