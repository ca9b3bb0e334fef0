"""The setting: what all rows have in common, what they differ in, and where the runs are."""

from collections.abc import Mapping
from pathlib import Path

from dispfl.analysis.report.blocks import details, section, table
from dispfl.analysis.report.markup import Markup, element, joined
from dispfl.analysis.report.reading import Run
from dispfl.analysis.report.results import Results, settings
from dispfl.analysis.report.wording import counted, seen_from

TITLES = {
    "": "Run",
    "data": "Data",
    "partition": "Partition",
    "model": "Model",
    "topology": "Topology",
    "train": "Local training",
}
HEADLINE = {
    "partition.alpha": "{}",
    "partition.classes": "of {} classes",
    "partition.groups": "of {} groups",
    "topology.degree": "of degree {}",
}
"""How settings that matter most are told in the line below the title."""
LONGEST = 60


def headline(results: Results) -> str:
    """The setting in one line: `16 peers · mnist · dirichlet 0.3 · cnn · random topology of degree 4 · 16 rounds`."""
    common = _common(results)
    words = []
    if "peers" in common:
        words.append(counted(int(common["peers"]), "peer"))
    for name, noun in (("data", ""), ("partition", ""), ("model", ""), ("topology", " topology")):
        if f"{name}.name" in common:
            own = [how.format(common[key]) for key, how in HEADLINE.items() if key in common and key.startswith(name)]
            words.append(" ".join([common[f"{name}.name"] + noun, *own]))
    if "rounds" in common:
        words.append(counted(int(common["rounds"]), "round"))
    words.append(counted(len({run.seed for run in results.runs}), "seed"))
    if any(run.made_in_python for run in results.runs):
        words.append("made in Python")
    return " · ".join(words)


def setting_section(results: Results, out: Path) -> Markup:
    """Every setting, by table."""
    common = _common(results)
    groups = []
    for name, title in TITLES.items():
        own = {key: common[key] for key in common if key.rpartition(".")[0] == name and key != "made_in_python"}
        if own:
            groups.append(_list(title, {key.rpartition(".")[2]: value for key, value in own.items()}))
    for series in results.series:
        first = settings(series.runs[0])
        own = {key.removeprefix("method."): first[key] for key in first if key.startswith("method.")}
        own |= {key: values[series.label] for key, values in results.differing.items()}
        own["seed" if len(series.runs) == 1 else "seeds"] = ", ".join(str(run.seed) for run in series.runs)
        groups.append(_list(series.label, own))
    return section("setting", "Setting", element("div", *groups, class_="settings"), _runs(results, out))


def _common(results: Results) -> dict[str, str]:
    """What is the same in all rows, outside the method's table."""
    own = settings(results.series[0].runs[0])
    return {key: own[key] for key in own if key not in results.differing and not key.startswith("method.")}


def _list(title: str, pairs: Mapping[str, str]) -> Markup:
    named_first = sorted(pairs.items(), key=lambda pair: pair[0] != "name")
    items = joined(joined([element("dt", key), element("dd", _shortened(value))]) for key, value in named_first)
    return element("div", element("h3", title), element("dl", items))


def _shortened(value: str) -> str:
    return value if len(value) <= LONGEST else f"{value[:LONGEST]}…"


def _runs(results: Results, out: Path) -> Markup:
    headings = [("Run directory", ""), ("Row", ""), ("Seed", "number"), ("Rounds", "number"), ("Made with", "")]
    rows = []
    for series in results.series:
        for run in series.runs:
            rounds = f"{len(run.records)} of {run.config['rounds']}"
            rows.append([seen_from(out, run.path), series.label, str(run.seed), rounds, _versions(run)])
    return details("The run directories", table("Where the numbers come from", headings, rows, "plain"))


def _versions(run: Run) -> str:
    versions = (run.summary or {}).get("versions")
    if not isinstance(versions, dict):
        return "not finished" if run.summary is None else "not known"
    return ", ".join(f"{name} {version}" for name, version in versions.items() if name in ("dispfl", "torch", "python"))
