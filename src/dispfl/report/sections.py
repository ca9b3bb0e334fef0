"""Sections of the page: results, learning curves, masks, traffic, topology and privacy."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from markupsafe import Markup

from dispfl.core.quantities import Quantity
from dispfl.core.report import QUANTITIES
from dispfl.errors import ConfigError, RunError
from dispfl.registry import TOPOLOGIES
from dispfl.report.charts import Bar, Curve, bar_chart, line_chart, thin_out
from dispfl.report.comparison import (
    ComparisonRow,
    Sample,
    connections_by_label,
    flops_by_label,
    labels_of,
    mean_curve,
    mean_over_seeds,
    most_seeds,
    smallest_totals,
)
from dispfl.report.diagrams import peer_graph, range_bar, server_star
from dispfl.report.differences import Difference, paired_over
from dispfl.report.html import (
    Block,
    Cell,
    ColourLegend,
    Figure,
    Figures,
    Heading,
    HtmlTable,
    Remark,
    RowLabel,
    Section,
    css_class,
)
from dispfl.report.labels import connections_note, flops_note
from dispfl.report.results import ReportResults, silence_note, split_by_traffic
from dispfl.report.runs import Budget, RecordedRun
from dispfl.report.wording import (
    UNKNOWN,
    capitalized,
    flops_unit_of_largest,
    format_amount,
    format_number,
    format_seconds,
    join_and,
    number_range,
    plural,
)
from dispfl.runs.metrics import last, main_scores, measured_values
from dispfl.topology import Topology

MAX_BARS = 200
MAX_LINKS = 6000
"""A drawing of more links would be large and illegible."""
SERVER = "server"


# The results table


@dataclass(frozen=True)
class DifferenceCell(Block):
    """`-0.031, behind`, and below it `[-0.045, -0.017]`."""

    template = "difference.html"
    mean: str
    verdict: str
    interval: str


@dataclass(frozen=True)
class RangeCell(Block):
    """A line from the worst to the best peer, and both scores."""

    template = "range.html"
    drawing: Markup
    text: str


def results_section(results: ReportResults) -> Section:
    """Return a table with the score and the costs of every row, best first."""
    measure = results.measure
    scale, unit = flops_unit_of_largest(results.flops_per_peer)
    caption = f"{capitalized(measure.name)} and costs"
    if len(results.rows) > 1:
        caption += ", best first"
    headings = list(_result_headings(results, unit))
    table = HtmlTable(caption, headings, kind="cards", scrolling=True)
    for number, row in enumerate(results.rows):
        table.rows.append(list(_result_cells(results, row, scale)))
        if results.comparison.is_best(row):
            table.best.add(number)

    section = Section("results", "Results")
    section.add(table)
    section.remark(" ".join(_results_legend(results)))
    return section


def _result_headings(results: ReportResults, flops_unit: str) -> Iterator[Heading]:
    score = capitalized(results.measure.name)
    if results.several_seeds:
        score += " ± std over seeds"
    references = results.comparison.reference_labels
    yield Heading("Method")
    yield Heading(score, "number score")
    if len(references) == 1:
        yield Heading(f"Difference to {references[0]}", "number difference")
    elif references:
        yield Heading("Difference to the reference of the same data", "number difference")
    yield Heading("Worst to best peer", "range")
    for name in results.comparison.extras:
        yield Heading(capitalized(name), "number")
    costs = ("Busiest MB/round", "On wire MB/round", f"{flops_unit} per peer", "Seconds per peer")
    for title in (*costs, "Rounds", "Time s"):
        yield Heading(title, "number")


def _result_cells(results: ReportResults, row: ComparisonRow, flops_scale: float) -> Iterator[Cell]:
    measure = results.measure
    yield RowLabel(row)
    if row.score_std is None:
        yield measure.text(row.score)
    else:
        yield f"{measure.text(row.score)} ± {measure.text(row.score_std)}"
    if results.comparison.reference_labels:
        yield _difference_cell(results, results.comparison.differences.get(row.label))
    yield _range_cell(results, row)
    for name in results.comparison.extras:
        yield format_number(row.extra(name), 3)
    yield format_amount(row.paper_mb)
    yield format_amount(row.wire_mb)
    yield format_amount(row.flops_per_peer / flops_scale)
    yield format_seconds(row.seconds_per_peer)
    rounds = number_range(row.rounds_of_runs, "–")
    if row.unfinished:
        rounds += f" of {row.runs[0].config['rounds']}"
    yield rounds
    yield f"{row.seconds:.1f}"


def _difference_cell(results: ReportResults, difference: Difference | None) -> Cell:
    if difference is None:
        return UNKNOWN
    measure = results.measure
    return DifferenceCell(
        difference.mean_text(measure),
        difference.verdict(measure),
        difference.interval_text(measure),
    )


def _range_cell(results: ReportResults, row: ComparisonRow) -> Cell:
    """Return a line from the worst to the best peer with a dot at the mean, all on one scale."""
    measure = results.measure
    scores = _peer_scores(row.runs)
    if not scores or row.score is None:
        return UNKNOWN
    all_scores = _peer_scores(results.runs)
    low = min(all_scores)
    extent = max(all_scores) - low or 1

    def share(score: float) -> float:
        return (score - low) / extent

    drawing = range_bar(share(min(scores)), share(max(scores)), share(row.score), css_class(row))
    text = f"{measure.worst(scores):.2f} to {measure.best(scores):.2f}"
    return RangeCell(drawing, text)


def _peer_scores(runs: Sequence[RecordedRun]) -> list[float]:
    scores: list[float] = []
    for run in runs:
        scores += run.scores.values()
    return scores


def _results_legend(results: ReportResults) -> Iterator[str]:
    """Yield the sentences below the table."""
    measure = results.measure
    rows = results.rows
    metric = capitalized(measure.name)
    if not measure.higher_is_better:
        metric += " (lower is better)"
    spread = ""
    if results.several_seeds:
        seeds = results.comparison.most_seeds
        spread = f"; ± is the sample standard deviation over {seeds} seeds"
    yield (
        f"{metric}: mean over the peers, each on its own test data, in the last evaluated"
        f" round{spread}."
    )
    if results.comparison.differences:
        yield f"Difference: {paired_over(results.comparison.differences)}"
    connections = connections_note(connections_by_label(rows))
    if len(rows) > 1 and connections:
        yield connections
    yield (
        "MB: megabytes (10⁶ bytes) per round through the busiest node, first as the paper counts"
        " them (values only), then on the wire (as sent). FLOPs: training of one peer in one round."
    )
    yield flops_note(flops_by_label(rows))
    yield (
        "Seconds per peer: computing time of a peer’s whole step in one round. Time: wall time of"
        " all rounds."
    )


# Learning curves


def curves_section(results: ReportResults) -> Section:
    """Return the scores by round, by seconds of computing and by traffic of the busiest node."""
    section = Section("curves", "Learning curves")
    evaluated = [row for row in results.rows if mean_curve(row, Budget.ROUNDS).x]
    if not evaluated:
        section.remark("No round has been evaluated in all seeds.")
        return section

    figures = [_figure_by_round(results, evaluated)]
    if all(row.runs[0].points[-1].peer_seconds for row in evaluated):
        figures.append(_figure_by_seconds(results, evaluated))
    sending, _ = split_by_traffic(evaluated)
    if sending:
        figures.append(_figure_by_traffic(results, evaluated))
    figures += _quantity_figures(results, "curves")
    section.add(ColourLegend(evaluated), Figures(figures))
    if not sending:
        section.remark("No peer sends anything, so there is no curve against traffic.")
    return section


def _figure_by_round(results: ReportResults, evaluated: Sequence[ComparisonRow]) -> Figure:
    curves = _score_curves(evaluated, Budget.ROUNDS)
    note = "One seed each."
    if most_seeds(evaluated) > 1:
        note = "Mean over seeds; the band is one standard deviation over seeds."
    elif len(evaluated) == 1:
        curves = _curves_of_run(evaluated[0])
        note = "The band is one standard deviation over peers."
        if len(curves) > 1:
            note = f"{note[:-1]}; dashed: after mixing, before training."
    chart = line_chart(
        curves,
        "communication round",
        _score_label(results),
        whole_x=True,
        x_word="round",
        y_format=results.measure.format,
    )
    return Figure("By communication round", chart, note)


def _score_label(results: ReportResults) -> str:
    return f"{results.measure.name}, mean over peers"


def _score_curves(rows: Sequence[ComparisonRow], budget: Budget) -> list[Curve]:
    """Return the scores by what was spent, with a band over seeds where there are several."""
    curves = []
    for row in rows:
        mean = mean_curve(row, budget)
        curve = Curve(row.label, css_class(row), mean.x, mean.mean)
        if len(row.runs) > 1:
            curve.spread = mean.std
        curves.append(curve)
    return curves


def _curves_of_run(row: ComparisonRow) -> list[Curve]:
    """Return the scores of the only run with a band over peers, and those after mixing."""
    trained = Curve(row.label, css_class(row))
    mixed = Curve("after mixing, before training", css_class(row), secondary=True)
    for record in row.runs[0].records:
        number = record["round"] + 1.0
        scores = main_scores(record)
        if scores:
            trained.add(number, scores["mean"], scores["std"])
        if record.get("mixed"):
            mixed.add(number, record["mixed"]["mean"])
    if not mixed.x:
        return [trained]
    return [trained, mixed]


def _figure_by_seconds(results: ReportResults, evaluated: Sequence[ComparisonRow]) -> Figure:
    chart = line_chart(
        _score_curves(evaluated, Budget.SECONDS),
        "seconds that a peer has computed so far",
        _score_label(results),
        from_zero=True,
        x_unit="s",
        y_format=results.measure.format,
    )
    note = "Computing time of a peer, mean over peers; waiting and transfers are not included."
    return Figure("By seconds of computing", chart, note)


def _figure_by_traffic(results: ReportResults, evaluated: Sequence[ComparisonRow]) -> Figure:
    curves = _score_curves(evaluated, Budget.BYTES)
    for row, curve in zip(evaluated, curves, strict=True):
        if not row.wire_mb:
            curve.label += ", which sends nothing"
            curve.constant = True
            curve.spread = []
    chart = line_chart(
        curves,
        "MB through the busiest node so far, on the wire",
        _score_label(results),
        from_zero=True,
        x_unit="MB",
        y_format=results.measure.format,
    )
    return Figure("By traffic", chart, " ".join(_traffic_notes(results)))


def _traffic_notes(results: ReportResults) -> Iterator[str]:
    """Give the score of each sending row at the total traffic of the cheapest run of its seed."""
    sending, silent = split_by_traffic(results.rows)
    if len(sending) == 1:
        total = fmean(run.points[-1].wire_mb for run in sending[0].runs)
        yield f"{format_amount(total)} MB in total."
    elif all(row.by_seed.keys() == sending[0].by_seed.keys() for row in sending):
        yield _scores_at_equal_traffic(results, sending)
    if silent:
        yield f"Dotted: {silence_note(silent, ', which')}."


def _scores_at_equal_traffic(results: ReportResults, sending: Sequence[ComparisonRow]) -> str:
    limits = smallest_totals(sending, Budget.BYTES)
    scores = []
    for row in sending:
        score = row.within(Budget.BYTES, limits).score
        text = "not evaluated by then"
        if score is not None:
            text = results.measure.text(score)
        scores.append(f"{row.label} {text}")
    limit = format_amount(fmean(limits.values()))
    return f"After equal traffic, {limit} MB: {', '.join(scores)}."


# Mask changes, and other quantities that have a figure


def masks_section(results: ReportResults) -> Section:
    """Return the share of kept weights that rounds replace, and that neighbours keep too."""
    section = Section("masks", "Mask changes")
    figures = list(_quantity_figures(results, "masks"))
    if not figures:
        section.remark("No method here prunes and regrows weights in every round.")
        return section
    changing = []
    unchanging = []
    for row in results.rows:
        if last(row.runs[0].records, "mask_change"):
            changing.append(row)
        else:
            unchanging.append(row.label)
    if len(results.rows) > 1:
        section.add(ColourLegend(changing))
    section.add(Figures(figures))
    if unchanging:
        rows = join_and(unchanging)
        section.remark(f"Not recorded for {rows}: no pruning and regrowing in every round.")
    return section


def _quantity_figures(results: ReportResults, section: str) -> Iterator[Figure]:
    """Yield a chart by round of each recorded quantity that is declared for a section."""
    over = "seeds" if results.several_seeds else "peers"
    for quantity in QUANTITIES:
        figure = quantity.figure
        if figure is None or figure.section != section:
            continue
        curves = []
        for row in results.rows:
            curve = _quantity_curve(row, quantity, results.several_seeds)
            if curve.x:
                curves.append(curve)
        if curves:
            chart = line_chart(
                curves, "communication round", figure.y_label, whole_x=True, x_word="round"
            )
            note = f"Mean over peers; the band is one standard deviation over {over}."
            yield Figure(figure.title, chart, note)


def _quantity_curve(row: ComparisonRow, quantity: Quantity, band_over_seeds: bool) -> Curve:
    """Return the mean over peers and seeds, with the spread over seeds or over peers."""
    seeds: list[list[Sample]] = []
    peer_stds = []
    for run in row.runs:
        samples: list[Sample] = []
        for record in run.records:
            values = quantity.value(record)
            if values:
                samples.append((record["round"] + 1.0, values["mean"]))
                peer_stds.append(values["std"])
            else:
                samples.append(None)
        seeds.append(samples)

    mean = mean_over_seeds(seeds)
    curve = Curve(row.label, css_class(row), mean.x, mean.mean)
    if len(row.runs) > 1:
        curve.spread = mean.std
    elif not band_over_seeds:
        curve.spread = peer_stds
    return curve


# Traffic of each node

UpDown = tuple[float, float]
"""Megabytes per round sent and received."""


def traffic_section(results: ReportResults) -> Section:
    """Return the megabytes per round of each node, busiest first."""
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
        "Megabytes per round on the wire, mean over rounds: sent above the line, received below it."
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
    ranked = sorted(traffic.items(), key=lambda pair: (-max(pair[1]), pair[0]))
    bars = []
    colour = css_class(row)
    for node, (up, down) in ranked:
        parts = [(up, colour), (-down, f"{colour} below")]
        bars.append(Bar("", parts, f"{_node_name(node)}: {_up_and_down(up, down)}"))
    busiest, load = ranked[0]
    note = f"Busiest: {_node_name(busiest)}, {_up_and_down(*load)}."
    chart = bar_chart(
        thin_out(bars, MAX_BARS),
        "nodes, busiest first",
        "MB per round",
        f"{row.label}. {note}",
        y_range=y_range,
        mirrored=True,
    )
    return Figure(row.label, chart, note)


def _up_and_down(up: float, down: float) -> str:
    return f"{format_amount(up)} MB up, {format_amount(down)} MB down"


def _node_name(node: str) -> str:
    if node.isdecimal():
        return f"peer {node}"
    return f"the {node}"


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
    """Return a key that rows with the same graph share; seed and topology determine it."""
    if _is_silent(run):
        return ("silent",)
    key = [str(run.seed), str(run.config["peers"]), str(len(run.records))]
    if _has_server(run):
        return (SERVER, *key, str(run.config["method"]["cohort"]), *_cohort(run))
    for setting, value in sorted(run.settings.items()):
        if setting.startswith("topology."):
            key.append(f"{setting}={value}")
    return ("gossip", *key)


def _draw(group: Sequence[ComparisonRow]) -> Figure | Remark:
    """Return a figure for rows with the same graph, or a sentence in its place."""
    run = group[0].runs[0]
    labels = join_and(labels_of(group))
    if _is_silent(run):
        return Remark(f"{labels}: no peer receives anything.")
    if _has_server(run):
        return _draw_server(run, labels)
    try:
        topology = _topology(run)
    except ConfigError as problem:
        return Remark(f"{labels}: {problem}")

    neighbours = topology.online_neighbours(run.seed, len(run.records) - 1, run.roster)
    links = sum(map(len, neighbours.values()))
    if links > MAX_LINKS:
        count = plural(links, "link")
        return Remark(f"{labels}: {count} in {_last_round(run)}, too many to draw.")

    example = ""
    offline = []
    for peer in run.roster:
        if peer not in neighbours:
            offline.append(peer)
        elif neighbours[peer] and not example:
            example = peer
    note = f"{topology.name.capitalize()} topology in {_last_round(run)}: {_degrees(neighbours)}"
    if example:
        note += f"; highlighted: the neighbours of peer {example}"
    if offline:
        note += f"; hollow: {plural(len(offline), 'peer')} offline"
    note += "."
    if any(row.runs[0].method == "fedfomo" for row in group):
        note += " FedFOMO may instead choose other peers whose models have helped."
    graph = peer_graph(neighbours, run.roster, offline, example, f"{labels}. {note}")
    return Figure(labels, graph, note)


def _last_round(run: RecordedRun) -> str:
    return f"round {len(run.records)} of seed {run.seed}"


def _draw_server(run: RecordedRun, labels: str) -> Figure:
    cohort = _cohort(run)
    note = f"A server selects at most {plural(run.config['method']['cohort'], 'peer')} per round"
    if cohort:
        peers = plural(len(cohort), "peer")
        note += f"; highlighted: the cohort of {_last_round(run)} ({peers})"
    note += "."
    star = server_star(SERVER, run.roster, cohort or None, f"{labels}. {note}")
    return Figure(labels, star, note)


def _cohort(run: RecordedRun) -> list[str]:
    """Return the peers that exchanged data with the server in the last round, if recorded."""
    traffic = run.records[-1].get("traffic", {})
    return [peer for peer in run.roster if any(traffic.get(peer, ()))]


def _is_silent(run: RecordedRun) -> bool:
    return run.points[-1].wire_mb == 0


def _has_server(run: RecordedRun) -> bool:
    """Return whether the method has a cohort, as only server methods do."""
    return type(run.config["method"].get("cohort")) is int


def _topology(run: RecordedRun) -> Topology:
    """Return the run's topology; a `ConfigError` says why it cannot be drawn."""
    table = run.config.get("topology")
    if not isinstance(table, dict) or table.get("name") not in TOPOLOGIES:
        raise ConfigError("a custom topology, which cannot be drawn from the config.")
    settings = dict(table)
    name = settings.pop("name")
    try:
        topology = TOPOLOGIES[name](**settings)
        topology.check(run.config["peers"])
    except ConfigError as problem:
        raise ConfigError(f"the config’s topology cannot be read. {problem}") from problem
    return topology


def _degrees(neighbours: Mapping[str, Sequence[str]]) -> str:
    degrees = list(map(len, neighbours.values())) or [0]
    if min(degrees) == max(degrees):
        return f"every peer has {plural(degrees[0], 'neighbour')}"
    return f"peers have {number_range(degrees)} neighbours"


# Privacy: what each run has spent, and what its audit has shown

PRIVACY_NOTE = (
    "AUC: how well members of the training data are told from others by attacking the personal"
    " model, and what a neighbour received of it; 0.5 is a blind guess. Epsilon is at least what"
    " canaries have shown, with 95 % confidence, and at most what was accounted. Distance: of class"
    " histograms guessed from masks at best, and in brackets without masks; 0 is exact."
)
PRIVACY_HEADINGS = (
    Heading("Row"),
    Heading("Seed", "number"),
    Heading("AUC, model", "number"),
    Heading("AUC, received", "number"),
    Heading("Distance, masks", "number"),
    Heading("Epsilon at least", "number"),
    Heading("Epsilon at most", "number"),
)


def privacy_section(results: ReportResults) -> Section | None:
    """Return a row for each run that is private or was audited; None if there is none."""
    table = HtmlTable("Privacy of the runs", PRIVACY_HEADINGS)
    for row in results.rows:
        for run in row.runs:
            audit = _read_audit(run)
            spent = last(run.records, "epsilon")
            if audit or spent:
                cells = audit or ["not audited"] * 4
                table.rows.append([row.label, str(run.seed), *cells, _accounted(spent)])
    if not table.rows:
        return None
    section = Section("privacy", "Privacy")
    section.add(table)
    section.remark(PRIVACY_NOTE)
    return section


def _accounted(spent: Mapping[str, Any] | None) -> str:
    if not spent:
        return "not private"
    return f"{max(measured_values(spent)):.2f}"


def _read_audit(run: RecordedRun) -> list[str] | None:
    """Return the cells of a run's audit; None if it was not audited."""
    file = run.path / "audit.json"
    try:
        return _audit_cells(json.loads(file.read_text()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise RunError(
            f"{file} cannot be read: {problem}. Repeat: dispfl audit {run.path}"
        ) from problem


def _audit_cells(audit: Mapping[str, Any]) -> list[str]:
    """Return how well members were recognized, labels guessed, and canaries detected."""
    auc = {attack["view"]: attack["auc"]["value"] for attack in audit["membership"]}
    masks = UNKNOWN
    if audit["labels"]:
        guess = min(audit["labels"], key=lambda labels: float(labels["distance"]))
        masks = f"{guess['distance']:.2f} ({guess['baseline']:.2f})"
    canaries = audit["canaries"]
    return [
        format_number(auc.get("personal model"), 3),
        format_number(auc.get("what a neighbour received"), 3),
        masks,
        format_number(canaries and canaries["epsilon"], 2),
    ]
