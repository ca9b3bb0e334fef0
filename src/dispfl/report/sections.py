"""Sections of the page: learning curves, mask changes, traffic and topology."""

import statistics
from collections.abc import Sequence

from dispfl.core.metric import Measure
from dispfl.errors import ConfigError
from dispfl.registry import TOPOLOGIES
from dispfl.report.charts import Bar, Curve, bar_chart, line_chart, thin_out
from dispfl.report.comparison import Budget, Sample, SeedRun, mean_curve, mean_over_seeds
from dispfl.report.diagrams import peer_graph, server_star
from dispfl.report.labels import flat_settings, join_and
from dispfl.report.markup import (
    Markup,
    colour_legend,
    figure,
    figures,
    format_amount,
    plural,
    remark,
    section,
)
from dispfl.report.results import ReportResults, ReportSeries
from dispfl.report.runs import Record, ReportRun
from dispfl.runs.metrics import main_scores
from dispfl.topology import Topology


def curves_section(results: ReportResults) -> Markup:
    """Return the scores by round and by traffic of the busiest node."""
    evaluated = [series for series in results.series if mean_curve(series.row, Budget.ROUNDS)[0]]
    if not evaluated:
        return section(
            "curves", "Learning curves", remark("No round has been evaluated in all seeds.")
        )
    y_label, y_format = f"{results.measure.name}, mean over peers", results.measure.format
    by_round = [
        curve for series in evaluated for curve in _by_round(series, alone=len(evaluated) == 1)
    ]
    left = figure(
        "By communication round",
        line_chart(
            by_round,
            "communication round",
            y_label,
            whole_x=True,
            x_word="round",
            y_format=y_format,
        ),
        note=_band_note(evaluated),
    )
    drawn, remarks = [left, *_seconds_figure(evaluated, y_label, y_format)], []
    if any(series.wire_mb for series in evaluated):
        drawn.append(
            figure(
                "By traffic",
                _traffic_chart(evaluated, y_label, y_format),
                note=_equal_traffic_note(results),
            )
        )
    else:
        remarks.append(remark("No peer sends anything, so there is no curve against traffic."))
    return section("curves", "Learning curves", colour_legend(evaluated), figures(drawn), *remarks)


def _by_round(series: ReportSeries, alone: bool) -> list[Curve]:
    rounds, mean, std = mean_curve(series.row, Budget.ROUNDS)
    if len(series.runs) > 1:
        return [Curve(series.label, series.css_class, rounds, mean, std)]
    if not alone:
        return [Curve(series.label, series.css_class, rounds, mean)]
    records = series.runs[0].records
    peer_std = [found["std"] for record in records if (found := main_scores(record))]
    curves = [Curve(series.label, series.css_class, rounds, mean, peer_std)]
    mixed = {r["round"] + 1.0: r["mixed"]["mean"] for r in records if r.get("mixed")}
    if mixed:
        label = "after mixing, before training"
        curves.append(Curve(label, series.css_class, [*mixed], [*mixed.values()], secondary=True))
    return curves


def _seconds_figure(evaluated: Sequence[ReportSeries], y_label: str, y_format: str) -> list[Markup]:
    """Return the scores by the seconds that a peer has computed, if all rows have measured them."""
    curves = []
    for series in evaluated:
        spent, mean, std = mean_curve(series.row, Budget.SECONDS)
        if not spent[-1]:
            return []
        curves.append(
            Curve(series.label, series.css_class, spent, mean, std if len(series.runs) > 1 else [])
        )
    x_label = "seconds that a peer has computed so far"
    chart = line_chart(curves, x_label, y_label, from_zero=True, x_unit="s", y_format=y_format)
    note = "Computing time of a peer, mean over peers; waiting and transfers are not included."
    return [figure("By seconds of computing", chart, note=note)]


def _traffic_chart(evaluated: Sequence[ReportSeries], y_label: str, y_format: str) -> Markup:
    curves = []
    for series in evaluated:
        spent, mean, std = mean_curve(series.row, Budget.BYTES)
        silent = spent[-1] == 0
        band = std if len(series.runs) > 1 and not silent else []
        label = f"{series.label}, which sends nothing" if silent else series.label
        curves.append(Curve(label, series.css_class, spent, mean, band, constant=silent))
    x_label = "MB through the busiest node so far, on the wire"
    return line_chart(curves, x_label, y_label, from_zero=True, x_unit="MB", y_format=y_format)


def _band_note(evaluated: Sequence[ReportSeries]) -> str:
    if any(len(series.runs) > 1 for series in evaluated):
        return "Mean over seeds; the band is one standard deviation over seeds."
    if len(evaluated) > 1:
        return "One seed each."
    mixed = any(record.get("mixed") for record in evaluated[0].runs[0].records)
    return (
        "The band is one standard deviation over"
        f" peers{'; dashed: after mixing, before training' if mixed else ''}."
    )


def _equal_traffic_note(results: ReportResults) -> str:
    """Give the score of each sending row at the total traffic of the cheapest run of its seed."""
    sending = [series for series in results.series if series.wire_mb]
    silent = [series.label for series in results.series if not series.wire_mb]
    dotted = (
        f" Dotted: {join_and(silent)}, which {'sends' if len(silent) == 1 else 'send'} nothing."
        if silent
        else ""
    )
    if not all(series.seeds.keys() == sending[0].seeds.keys() for series in sending):
        return dotted.strip()
    if len(sending) == 1:
        total = sending[0].row.mean(lambda run: run.points[-1].wire_mb)
        return f"{format_amount(total)} MB in total.{dotted}"
    limits: dict[int, float] = {}
    for run in (run for series in sending for run in series.row.runs):
        limits[run.seed] = min(run.points[-1].wire_mb, limits.get(run.seed, run.points[-1].wire_mb))
    scores = [
        f"{series.label} {_score_within(series.row.runs, limits, results.measure)}"
        for series in sending
    ]
    limit = sum(limits.values()) / len(limits)
    return f"After equal traffic, {format_amount(limit)} MB: {', '.join(scores)}.{dotted}"


def _score_within(runs: Sequence[SeedRun], limits: dict[int, float], measure: Measure) -> str:
    points = [run.within(Budget.BYTES, limits[run.seed]).final for run in runs]
    known = [point.score for point in points if point is not None and point.score is not None]
    return (
        measure.text(sum(known) / len(known))
        if len(known) == len(runs)
        else "not evaluated by then"
    )


def masks_section(results: ReportResults) -> Markup:
    """Return the share of kept weights that each round replaces, and the share that neighbours keep
    too."""
    changing = [
        series for series in results.series if _mask_curve(series, "mask_change", several=False)
    ]
    if not changing:
        return section(
            "masks",
            "Mask changes",
            remark("No method here prunes and regrows weights in every round."),
        )
    drawn = [
        _mask_figure(results, "mask_change", "Weights pruned and regrown per round"),
        _mask_figure(results, "overlap", "Kept weights that the neighbours keep too"),
    ]
    others = [series.label for series in results.series if series not in changing]
    parts = [colour_legend(changing)] if len(results.series) > 1 else []
    parts.append(figures([part for part in drawn if part]))
    if others:
        parts.append(
            remark(f"Not recorded for {join_and(others)}: no pruning and regrowing in every round.")
        )
    return section("masks", "Mask changes", *parts)


def _mask_figure(results: ReportResults, key: str, title: str) -> Markup | None:
    several = any(len(series.runs) > 1 for series in results.series)
    curves = [curve for series in results.series if (curve := _mask_curve(series, key, several))]
    if not curves:
        return None
    chart = line_chart(
        curves, "communication round", "share of kept weights", whole_x=True, x_word="round"
    )
    over = "seeds" if several else "peers"
    return figure(
        title, chart, note=f"Mean over peers; the band is one standard deviation over {over}."
    )


def _mask_curve(series: ReportSeries, key: str, several: bool) -> Curve | None:
    """Return the mean over peers and seeds, with the spread over seeds, or over peers if no row has
    several seeds."""
    rounds, mean, std = mean_over_seeds(
        [[_sample(record, key) for record in run.records] for run in series.runs]
    )
    if not rounds:
        return None
    if len(series.runs) == 1:
        std = (
            []
            if several
            else [record[key]["std"] for record in series.runs[0].records if record.get(key)]
        )
    return Curve(series.label, series.css_class, rounds, mean, std)


def _sample(record: Record, key: str) -> Sample:
    return (record["round"] + 1.0, record[key]["mean"]) if record.get(key) else None


MAX_BARS = 200
MAX_LINKS = 6000
"""A drawing of more links would be large and illegible."""
SERVER = "server"
UpDown = tuple[float, float]
"""Megabytes per round sent and received."""


def traffic_section(results: ReportResults) -> Markup:
    """Return the megabytes per round of each node, busiest first."""
    loads = {series.label: _mean_traffic(series) for series in results.series}
    unknown = [series.label for series in results.series if loads[series.label] is None]
    silent = [series.label for series in results.series if loads[series.label] == {}]
    shown = [series for series in results.series if loads[series.label]]
    remarks = []
    if silent:
        remarks.append(remark(f"{join_and(silent)}: no node sends anything."))
    if unknown:
        remarks.append(
            remark(f"{join_and(unknown)}: the metrics do not record the traffic of each node.")
        )
    if not shown:
        return section("traffic", "Traffic per node", *remarks)
    all_loads = [load for series in shown for load in (loads[series.label] or {}).values()]
    y_range = (-max(down for _, down in all_loads), max(up for up, _ in all_loads))
    drawn = [_traffic_figure(series, loads[series.label] or {}, y_range) for series in shown]
    note = (
        "Megabytes per round on the wire, mean over rounds: sent above the line, received below"
        " it. "
    )
    note += "All charts have the same scale." if len(shown) > 1 else "The busiest nodes come first."
    return section("traffic", "Traffic per node", remark(note), figures(drawn, "many"), *remarks)


def _mean_traffic(series: ReportSeries) -> dict[str, UpDown] | None:
    """Return each node's traffic, mean over seeds; empty if no node sends anything, None if it is
    not recorded."""
    by_seed = [run.traffic for run in series.runs]
    known = [traffic for traffic in by_seed if traffic is not None]
    if len(known) < len(by_seed):
        return None
    mean = {
        node: (
            statistics.fmean(traffic.get(node, (0.0, 0.0))[0] for traffic in known),
            statistics.fmean(traffic.get(node, (0.0, 0.0))[1] for traffic in known),
        )
        for node in dict.fromkeys(node for traffic in known for node in traffic)
    }
    return mean if any(max(load) for load in mean.values()) else {}


def _traffic_figure(
    series: ReportSeries, loads: dict[str, UpDown], y_range: tuple[float, float]
) -> Markup:
    ranked = sorted(loads.items(), key=lambda pair: (-max(pair[1]), pair[0]))
    bars = [
        Bar(
            "",
            [(up, series.css_class), (-down, f"{series.css_class} below")],
            f"{_node_name(node)}: {format_amount(up)} MB up, {format_amount(down)} MB down",
        )
        for node, (up, down) in ranked
    ]
    busiest, (up, down) = ranked[0]
    note = (
        f"Busiest: {_node_name(busiest)}, {format_amount(up)} MB up, {format_amount(down)} MB down."
    )
    chart = bar_chart(
        thin_out(bars, MAX_BARS),
        "nodes, busiest first",
        "MB per round",
        f"{series.label}. {note}",
        y_range=y_range,
        mirrored=True,
    )
    return figure(series.label, chart, note=note)


def _node_name(node: str) -> str:
    return f"peer {node}" if node.isdecimal() else f"the {node}"


def topology_section(results: ReportResults) -> Markup:
    """Return one drawing for every distinct graph of the last round; the seed and the topology
    determine it."""
    groups: dict[tuple[str, ...], list[ReportSeries]] = {}
    for series in results.series:
        groups.setdefault(_graph_key(series.runs[0]), []).append(series)
    drawn = [_draw(group) for group in groups.values()]
    drawings = [part for part in drawn if isinstance(part, Markup)]
    sentences = [remark(part) for part in drawn if not isinstance(part, Markup)]
    return section("topology", "Topology", *([figures(drawings)] if drawings else []), *sentences)


def _graph_key(run: ReportRun) -> tuple[str, ...]:
    """Return a key that rows with the same graph share."""
    if _is_silent(run):
        return ("silent",)
    common = [str(run.seed), str(run.config["peers"]), str(len(run.records))]
    if _has_server(run):
        return (SERVER, *common, str(run.config["method"]["cohort"]), *_cohort(run))
    settings = flat_settings(run.config)
    topology = [f"{key}={settings[key]}" for key in sorted(settings) if key.startswith("topology.")]
    return ("gossip", *common, *topology)


def _draw(group: Sequence[ReportSeries]) -> Markup | str:
    """Return a figure for rows with the same graph, or a sentence in its place."""
    run, labels = group[0].runs[0], join_and([series.label for series in group])
    if _is_silent(run):
        return f"{labels}: no peer receives anything."
    if _has_server(run):
        return _draw_server(run, labels)
    topology = _topology(run)
    if isinstance(topology, str):
        return f"{labels}: {topology}"
    last, roster = len(run.records) - 1, run.roster
    neighbours = topology.online_neighbours(run.seed, last, roster)
    links = sum(map(len, neighbours.values()))
    where = f"round {last + 1} of seed {run.seed}"
    if links > MAX_LINKS:
        return f"{labels}: {plural(links, 'link')} in {where}, too many to draw."
    offline = [peer for peer in roster if peer not in neighbours]
    example = next((peer for peer in roster if neighbours.get(peer)), "")
    degrees = _degrees([len(senders) for senders in neighbours.values()])
    note = f"{topology.name.capitalize()} topology in {where}: {degrees}"
    note += f"; highlighted: the neighbours of peer {example}" if example else ""
    note += f"; hollow: {plural(len(offline), 'peer')} offline." if offline else "."
    if any(series.runs[0].method == "fedfomo" for series in group):
        note += " FedFOMO may instead choose other peers whose models have helped."
    return figure(
        labels, peer_graph(neighbours, roster, offline, example, f"{labels}. {note}"), note=note
    )


def _draw_server(run: ReportRun, labels: str) -> Markup:
    cohort = _cohort(run)
    note = f"A server selects at most {plural(run.config['method']['cohort'], 'peer')} per round"
    where = f"round {len(run.records)} of seed {run.seed}"
    note += (
        f"; highlighted: the cohort of {where} ({plural(len(cohort), 'peer')})." if cohort else "."
    )
    return figure(
        labels, server_star(SERVER, run.roster, cohort or None, f"{labels}. {note}"), note=note
    )


def _cohort(run: ReportRun) -> Sequence[str]:
    """Return the peers that exchanged data with the server in the last round, if the metrics record
    it."""
    return sorted(
        node
        for node, load in run.records[-1].get("traffic", {}).items()
        if any(load) and node in run.roster
    )


def _is_silent(run: ReportRun) -> bool:
    return not any(record["busiest"]["wire_mb"] for record in run.records)


def _has_server(run: ReportRun) -> bool:
    """Return whether the method has a cohort, as only server methods do."""
    return type(run.config["method"].get("cohort")) is int


def _topology(run: ReportRun) -> Topology | str:
    """Return the run's topology, or the reason why it cannot be drawn."""
    table = run.config.get("topology")
    if not isinstance(table, dict) or table.get("name") not in TOPOLOGIES:
        return "a custom topology, which cannot be drawn from the config."
    try:
        topology = TOPOLOGIES[table["name"]](
            **{key: value for key, value in table.items() if key != "name"}
        )
        topology.check(run.config["peers"])
    except ConfigError as problem:
        return f"the config’s topology cannot be read. {problem}"
    return topology


def _degrees(degrees: Sequence[int]) -> str:
    low, high = min(degrees, default=0), max(degrees, default=0)
    return (
        f"every peer has {plural(low, 'neighbour')}"
        if low == high
        else f"peers have {low} to {high} neighbours"
    )
