"""Sections about communication: the traffic of each node, and the graph of the last round."""

from collections.abc import Iterator, Mapping, Sequence

from dispfl.report.charts import Bar, bar_chart, thin_out
from dispfl.report.comparison import ComparisonRow, labels_of
from dispfl.report.diagrams import peer_graph, server_star
from dispfl.report.html import Block, Figure, Figures, Remark, Section, css_class
from dispfl.report.results import ReportResults
from dispfl.report.runs import SERVER, Links, RecordedRun
from dispfl.report.units import BYTES, axis_unit, bytes_text
from dispfl.report.wording import capitalized, join_and, number_range, plural

MAX_BARS = 200
MAX_LINKS = 6000
"""A drawing of more links would be large and illegible."""

MAX_ROUNDS = 12
"""The last rounds that a drawing can show one after another."""


# Traffic of each node

UpDown = tuple[float, float]
"""Bytes per round sent and received."""


def traffic_section(results: ReportResults) -> Section:
    """Return the bytes per round of each node, busiest first."""
    section = Section("traffic", "Traffic per node")
    shown: list[tuple[ComparisonRow, dict[str, UpDown]]] = []
    silent = []
    unknown = []
    for row in results.rows:
        traffic = _mean_traffic(row)
        if traffic is None:
            unknown.append(row.label)
        elif any(map(max, traffic.values())):
            shown.append((row, traffic))
        else:
            silent.append(row.label)

    if shown:
        section.add(*_traffic_charts(shown))
    if silent:
        section.remark(f"{join_and(silent)}: no node sends anything.")
    if unknown:
        rows = join_and(unknown)
        section.remark(f"{rows}: the metrics do not record the traffic of each node.")
    return section


def _traffic_charts(shown: Sequence[tuple[ComparisonRow, dict[str, UpDown]]]) -> Iterator[Block]:
    """Yield a remark, and one chart for each row, all on one scale."""
    note = (
        "Traffic per round on the wire, mean over rounds: sent above the line, received below it."
    )
    scale_note = "The busiest nodes come first."
    if len(shown) > 1:
        scale_note = "All charts have the same scale."
    yield Remark(f"{note} {scale_note}")

    y_range = _common_range([traffic for _, traffic in shown])
    figures = []
    for row, traffic in shown:
        figures.append(_traffic_figure(row, traffic, y_range))
    yield Figures(figures, "many")


def _mean_traffic(row: ComparisonRow) -> dict[str, UpDown] | None:
    """Return each node's traffic, mean over seeds; None if a run does not record it."""
    by_node: dict[str, list[UpDown]] = {}
    for run in row.runs:
        traffic = run.traffic
        if traffic is None:
            return None
        for node, up_down in traffic.items():
            by_node.setdefault(node, []).append(up_down)
    seeds = len(row.runs)
    means = {}
    for node, loads in by_node.items():
        ups, downs = zip(*loads, strict=True)
        means[node] = (sum(ups) / seeds, sum(downs) / seeds)
    return means


def _common_range(traffics: Sequence[Mapping[str, UpDown]]) -> tuple[float, float]:
    """Return the range from the most that a node receives, downwards, to the most it sends."""
    most_up = most_down = 0.0
    for traffic in traffics:
        for up, down in traffic.values():
            most_up = max(most_up, up)
            most_down = max(most_down, down)
    return -most_down, most_up


def _traffic_figure(
    row: ComparisonRow, traffic: dict[str, UpDown], y_range: tuple[float, float]
) -> Figure:
    unit = axis_unit(max(map(abs, y_range)), BYTES)
    low, high = y_range
    ranked = sorted(traffic.items(), key=lambda pair: (-max(pair[1]), pair[0]))
    bars = []
    colour = css_class(row)
    for node, (up, down) in ranked:
        parts = [(up / unit.scale, colour), (-down / unit.scale, f"{colour} below")]
        bars.append(Bar("", parts, f"{_node_name(node)}: {_up_and_down(up, down)}"))
    busiest, load = ranked[0]
    note = f"Busiest: {_node_name(busiest)}, {_up_and_down(*load)}."
    chart = bar_chart(
        thin_out(bars, MAX_BARS),
        "nodes, busiest first",
        f"{unit.name} per round",
        f"{row.label}. {note}",
        y_range=(low / unit.scale, high / unit.scale),
        mirrored=True,
    )
    return Figure(row.label, chart, note, [row])


def _up_and_down(up: float, down: float) -> str:
    return f"{bytes_text(up)} up, {bytes_text(down)} down"


def _node_name(node: str) -> str:
    return "the server" if node == SERVER else f"peer {node}"


# The graph of the last round


def topology_section(results: ReportResults) -> Section:
    """Return one drawing for every distinct graph of the last round."""
    groups: dict[tuple[str, ...], list[ComparisonRow]] = {}
    for row in results.rows:
        groups.setdefault(_graph_key(row.runs[0]), []).append(row)
    figures = []
    remarks = []
    for group in groups.values():
        drawn = _draw(group)
        if isinstance(drawn, Figure):
            figures.append(drawn)
        else:
            remarks.append(drawn)
    section = Section("topology", "Topology")
    if figures:
        section.add(Figures(figures))
    section.add(*remarks)
    return section


def _graph_key(run: RecordedRun) -> tuple[str, ...]:
    """Return a key that rows share if the same peers received the same models."""
    if _is_silent(run):
        return ("silent",)
    newest = run.records[-1]
    links = str(newest.get("links"))
    missed = str(newest.get("missed_links"))
    schedule = str(run.config.get("schedule"))
    return (_topology_name(run), schedule, str(run.seed), str(len(run.records)), links, missed)


def _draw(group: Sequence[ComparisonRow]) -> Figure | Remark:
    """Return a figure for rows with the same graph, or a sentence in its place."""
    run = group[0].runs[0]
    labels = join_and(labels_of(group))
    if _is_silent(run):
        return Remark(f"{labels}: no peer receives anything.")
    links = run.links(-1)
    if links is None:
        return Remark(f"{labels}: the metrics do not record who received whose model.")
    if links.has_server:
        return _draw_server(run, links, labels)
    if links.count > MAX_LINKS:
        count = plural(links.count, "link")
        return Remark(f"{labels}: {count} in {_last_round(run)}, too many to draw.")

    not_received = "requested, but not received"
    absence = "offline"
    if run.config.get("schedule") == "async":  # a round is a time, in which a peer makes its steps
        not_received = "not averaged"
        absence = "without a finished step"
    example = ""
    absent = []
    for peer in run.roster:
        if peer not in links.received:
            absent.append(peer)
        elif links.received[peer] and not example:
            example = peer
    note = f"{_topology_name(run)}{_last_round(run)}: {_degrees(links.received)}"
    if example:
        note += f"; highlighted: what peer {example} received"
    missed = sum(map(len, links.missed.values()))
    if missed:
        note += f"; dashed: {plural(missed, 'model')} {not_received}"
    if absent:
        note += f"; hollow: {plural(len(absent), 'peer')} {absence}"
    note = f"{capitalized(note)}."
    label = f"{labels}. {note}"
    graph = peer_graph(_last_links(run), run.roster, absent, example, label, absence)
    return Figure(labels, graph, note)


def _last_links(run: RecordedRun) -> dict[int, Links]:
    """Return the links of the last rounds by their numbers, as many as a drawing can hold."""
    by_round: dict[int, Links] = {}
    count = 0
    for t in range(len(run.records) - 1, max(-1, len(run.records) - 1 - MAX_ROUNDS), -1):
        links = run.links(t)
        if links is None or links.has_server or count + links.count > MAX_LINKS:
            break
        count += links.count
        by_round[run.records[t]["round"] + 1] = links
    return dict(reversed(by_round.items()))


def _topology_name(run: RecordedRun) -> str:
    """Return a beginning of a sentence that names the run's topology, if it has a name."""
    table = run.config.get("topology")
    name = table.get("name") if isinstance(table, dict) else None
    return f"{name} topology in " if isinstance(name, str) else ""


def _last_round(run: RecordedRun) -> str:
    return f"round {len(run.records)} of seed {run.seed}"


def _draw_server(run: RecordedRun, links: Links, labels: str) -> Figure:
    cohort = [peer for peer in run.roster if peer in links.received]
    peers = plural(len(cohort), "peer")
    note = f"Highlighted: the server’s cohort of {_last_round(run)} ({peers})."
    star = server_star(SERVER, run.roster, cohort, f"{labels}. {note}")
    return Figure(labels, star, note)


def _is_silent(run: RecordedRun) -> bool:
    return run.points[-1].wire_mb == 0


def _degrees(received: Mapping[str, Sequence[str]]) -> str:
    degrees = list(map(len, received.values())) or [0]
    if min(degrees) == max(degrees):
        return f"every peer received {plural(degrees[0], 'model')}"
    return f"peers received {number_range(degrees)} models"
