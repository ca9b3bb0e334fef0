"""The HTML report: one self-contained page about run directories, and its section of settings."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dispfl.config import MADE_IN_PYTHON
from dispfl.errors import RunError
from dispfl.files import write_atomically
from dispfl.report.affinities import affinities_section
from dispfl.report.communication import topology_section, traffic_section
from dispfl.report.comparison import ComparisonRow
from dispfl.report.curves import curves_section, masks_section
from dispfl.report.html import Block, Details, Heading, HtmlPage, HtmlTable, Section
from dispfl.report.peers import labels_section, peers_section
from dispfl.report.results import ReportResults, group_runs
from dispfl.report.runs import RecordedRun, read_runs, relative_to_page
from dispfl.report.sections import privacy_section, results_section
from dispfl.report.summary import summary_block
from dispfl.report.timeline import time_section
from dispfl.report.wording import join_and, join_numbers, plural
from dispfl.terminal import printable

MAX_NAMED = 4
MAX_VALUE_LENGTH = 60
CONTENTS = {
    "results": "Results",
    "curves": "Curves",
    "time": "Time",
    "peers": "Peers",
    "traffic": "Traffic",
    "masks": "Masks",
    "labels": "Labels",
    "topology": "Topology",
    "affinities": "Affinities",
    "privacy": "Privacy",
    "settings": "Settings",
}
"""The anchors of the sections and their names in the table of contents.

Only pages about runs with affinities have that section, only those about runs with a clock that on
time, and only those about private or audited runs that on privacy.
"""
TABLE_TITLES = {
    "": "Run",
    "data": "Data",
    "partition": "Partition",
    "model": "Model",
    "topology": "Topology",
    "train": "Local training",
    "wire": "Messages",
    "network": "Network",
    "privacy": "Privacy",
}
HEADLINE_PARTS = {
    "data.name": "{}",
    "partition.name": "{}",
    "partition.alpha": "{}",
    "partition.classes": "of {} classes",
    "partition.groups": "of {} groups",
    "model.name": "{}",
    "topology.name": "{} topology",
    "topology.degree": "of degree {}",
}
"""How the most important settings appear in the line below the title."""


def write_report(paths: Iterable[Path], out: Path, against: str | None = None) -> None:
    """Write a page about run directories, including all that folders among these paths contain.

    The same runs give the same bytes. An existing page is replaced. `against` names the row that
    the others are compared with.
    """
    if out.is_dir():
        raise RunError(f"{out} is a folder; name the file to write, such as {out / 'report.html'}.")
    write_page(read_runs(paths), out, against)


def write_page(runs: Sequence[RecordedRun], out: Path, against: str | None = None) -> None:
    """Write the same page about runs that are read already."""
    page = printable(str(report_page(group_runs(runs, against), out)))
    write_atomically(out, page.encode())


def report_page(results: ReportResults, out: Path) -> HtmlPage:
    """Return the report, in which the paths of runs are relative to the folder of a file."""
    sections = [
        results_section(results),
        curves_section(results),
        time_section(results),
        peers_section(results),
        traffic_section(results),
        masks_section(results),
        labels_section(results),
        topology_section(results),
        affinities_section(results),
        privacy_section(results),
        settings_section(results, out),
    ]
    return HtmlPage(
        title=_title(results),
        headline=headline(results),
        sections=list(filter(None, sections)),
        contents=CONTENTS,
        summary=summary_block(results, out),
    )


def _title(results: ReportResults) -> str:
    labels = results.labels
    if len(labels) > MAX_NAMED:
        labels = [*labels[:2], f"{len(labels) - 2} others"]
    return join_and(labels)


def headline(results: ReportResults) -> str:
    """`16 peers · mnist · dirichlet 0.3 · cnn · random topology of degree 4 · 16 rounds · ...`."""
    settings = _common_settings(results)
    parts = []
    if "peers" in settings:
        parts.append(plural(int(settings["peers"]), "peer"))
    parts += _components(settings)
    if "rounds" in settings:
        parts.append(plural(int(settings["rounds"]), "round"))
    parts.append(plural(len({run.seed for run in results.runs}), "seed"))
    if any(run.made_in_python for run in results.runs):
        parts.append("made in Python")
    return " · ".join(parts)


def _components(settings: Mapping[str, str]) -> list[str]:
    """Return each component that all rows share, by name and its most important settings."""
    components: dict[str, str] = {}
    for key, text in HEADLINE_PARTS.items():
        table, _, field = key.partition(".")
        if field == "name" and key in settings:
            components[table] = text.format(settings[key])
        elif table in components and key in settings:
            components[table] += f" {text.format(settings[key])}"
    return list(components.values())


@dataclass(frozen=True)
class SettingsLists(Block):
    """Lists of settings by their titles."""

    template = "settings.html"
    lists: Sequence[tuple[str, Mapping[str, str]]]


def settings_section(results: ReportResults, out: Path) -> Section:
    """Return the common settings by table, the settings of each row, and the run directories."""
    common = _common_settings(results)
    lists = []
    for table, title in TABLE_TITLES.items():
        settings = _settings_of_table(common, table)
        if settings:
            lists.append((title, settings))
    for row in results.rows:
        lists.append((row.label, _settings_of_row(results, row)))
    section = Section("settings", "Settings")
    if results.differing:
        section.add(_differing_settings(results))
    section.add(SettingsLists(lists), _run_directories(results, out))
    return section


def _differing_settings(results: ReportResults) -> HtmlTable:
    """Return the settings outside the method's table in which rows differ."""
    headings = [Heading("Setting"), *map(Heading, results.labels)]
    table = HtmlTable("Settings that differ between rows", headings)
    for key, values in results.differing.items():
        table.rows.append([key, *(_shortened(values[label]) for label in results.labels)])
    return table


def _common_settings(results: ReportResults) -> dict[str, str]:
    """Return the settings that all rows share, outside the method's table."""
    settings = results.rows[0].runs[0].settings
    common = {}
    for key, value in settings.items():
        if key not in results.differing and not key.startswith("method."):
            common[key] = value
    return common


def _settings_of_table(settings: Mapping[str, str], table: str) -> dict[str, str]:
    """Return the settings of one table, its name first."""
    of_table = {}
    for key, value in settings.items():
        name, _, field = key.rpartition(".")
        if name == table and field != MADE_IN_PYTHON:
            of_table[field] = _shortened(value)
    if "name" in of_table:
        of_table = {"name": of_table["name"], **of_table}
    return of_table


def _settings_of_row(results: ReportResults, row: ComparisonRow) -> dict[str, str]:
    settings = _settings_of_table(row.runs[0].settings, "method")
    for key, values in results.differing.items():
        settings[key] = _shortened(values[row.label])
    seeds = join_numbers(run.seed for run in row.runs)
    name = "seed" if len(row.runs) == 1 else "seeds"
    settings[name] = seeds
    return settings


def _shortened(value: str) -> str:
    if len(value) <= MAX_VALUE_LENGTH:
        return value
    return f"{value[:MAX_VALUE_LENGTH]}…"


def _run_directories(results: ReportResults, out: Path) -> Details:
    headings = [
        Heading("Run directory"),
        Heading("Row"),
        Heading("Seed", "number"),
        Heading("Rounds", "number"),
        Heading("Versions"),
    ]
    table = HtmlTable("Runs that this page is made from", headings)
    for row in results.rows:
        for run in row.runs:
            path = relative_to_page(out, run.path)
            rounds = f"{len(run.records)} of {run.config['rounds']}"
            table.rows.append([path, row.label, str(run.seed), rounds, _versions(run)])
    return Details("Run directories", table)


def _versions(run: RecordedRun) -> str:
    if run.summary is None:
        return "not finished"
    versions = run.summary.get("versions")
    if not isinstance(versions, dict):
        return "unknown"
    shown = []
    for name in ("dispfl", "python", "torch"):
        if name in versions:
            shown.append(f"{name} {versions[name]}")
    return ", ".join(shown)
