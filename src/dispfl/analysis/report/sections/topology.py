"""Who hears whom: the graph of the last round, which the seed and the topology tell."""

from collections.abc import Sequence

from dispfl.analysis.report.blocks import figure, figures, remark, section
from dispfl.analysis.report.graph import graph, star
from dispfl.analysis.report.markup import Markup
from dispfl.analysis.report.reading import Run
from dispfl.analysis.report.results import Results, Series, settings
from dispfl.analysis.report.wording import counted, listed
from dispfl.errors import ConfigError
from dispfl.topology import TOPOLOGIES, Topology

MOST_LINKS = 6000
"""A drawing of more would be a blot, and a large one."""
SERVER = "server"


def topology_section(results: Results) -> Markup:
    """One drawing for every graph among the rows."""
    alike: dict[tuple[str, ...], list[Series]] = {}
    for series in results.series:
        alike.setdefault(_kind(series.runs[0]), []).append(series)
    drawn = [_drawing(series) for series in alike.values()]
    pictures = [part for part in drawn if isinstance(part, Markup)]
    sentences = [remark(part) for part in drawn if not isinstance(part, Markup)]
    return section("topology", "Who hears whom", *([figures(pictures)] if pictures else []), *sentences)


def _kind(run: Run) -> tuple[str, ...]:
    """What rows have in common whose graphs look the same."""
    if _silent(run):
        return ("nobody",)
    about = [str(run.seed), str(run.config["peers"]), str(len(run.records))]
    if _has_server(run):
        return (SERVER, *about, str(run.config["method"]["cohort"]), *_picked(run))
    own = settings(run)
    return ("gossip", *about, *(f"{key}={own[key]}" for key in sorted(own) if key.startswith("topology.")))


def _drawing(alike: Sequence[Series]) -> Markup | str:
    """A figure of rows with the same graph, or a sentence in its place."""
    run, labels = alike[0].runs[0], listed([series.label for series in alike])
    if _silent(run):
        return f"{labels}: nobody hears anybody."
    if _has_server(run):
        return _around_server(run, labels)
    topology = _topology(run)
    if isinstance(topology, str):
        return f"{labels}: {topology}"
    last, roster = len(run.records) - 1, run.roster
    heard = topology.heard(run.seed, last, roster)
    links = sum(map(len, heard.values()))
    where = f"round {last + 1} of seed {run.seed}"
    if links > MOST_LINKS:
        return f"{labels}: {counted(links, 'link')} in {where}, too many to draw."
    away = [peer for peer in roster if peer not in heard]
    example = next((peer for peer in roster if heard.get(peer)), "")
    note = f"{topology.name.capitalize()} topology in {where}: {_degrees([len(senders) for senders in heard.values()])}"
    note += f"; picked out: whom peer {example} hears" if example else ""
    note += f"; hollow: {counted(len(away), 'peer')} offline." if away else "."
    if any(series.runs[0].method == "fedfomo" for series in alike):
        note += " FedFOMO may hear others instead, of whom it has learnt that they help."
    return figure(labels, graph(heard, roster, away, example, f"{labels}. {note}"), note=note)


def _around_server(run: Run, labels: str) -> Markup:
    picked = _picked(run)
    cohort = run.config["method"]["cohort"]
    note = f"A server works with at most {counted(cohort, 'peer')} a round"
    note += f"; picked out: the {len(picked)} of round {len(run.records)} of seed {run.seed}." if picked else "."
    return figure(labels, star(SERVER, run.roster, picked or None, f"{labels}. {note}"), note=note)


def _picked(run: Run) -> Sequence[str]:
    """The peers that exchanged something with the server in the last round, where that was written down."""
    return sorted(node for node, load in run.records[-1].get("traffic", {}).items() if any(load) and node in run.roster)


def _silent(run: Run) -> bool:
    return not any(record["busiest"]["wire_mb"] for record in run.records)


def _has_server(run: Run) -> bool:
    """Only methods with a server have a cohort."""
    return type(run.config["method"].get("cohort")) is int


def _topology(run: Run) -> Topology | str:
    """The run's topology, or why it cannot be drawn."""
    table = run.config.get("topology")
    if not isinstance(table, dict) or table.get("name") not in TOPOLOGIES:
        return "a topology of its own, which cannot be drawn from the config."
    try:
        topology = TOPOLOGIES[table["name"]](**table)
        topology.check(run.config["peers"])
    except ConfigError as problem:
        return f"the config’s topology cannot be read. {problem}"
    return topology


def _degrees(degrees: Sequence[int]) -> str:
    low, high = min(degrees, default=0), max(degrees, default=0)
    return f"everyone hears {low}" if low == high else f"a peer hears {low} to {high}"
