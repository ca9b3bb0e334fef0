"""Sections about single peers: their scores, and the labels of their data."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from dispfl.core.metric import Measure
from dispfl.report.charts import (
    LARGE,
    Bar,
    Curve,
    DotColumn,
    bar_chart,
    dot_chart,
    line_chart,
    thin_out,
)
from dispfl.report.comparison import ComparisonRow, most_seeds
from dispfl.report.diagrams import HeatMap
from dispfl.report.html import (
    Block,
    ColourLegend,
    Details,
    Figure,
    Figures,
    Heading,
    HtmlTable,
    Remark,
    Section,
    css_class,
)
from dispfl.report.labels import DATA_TABLES
from dispfl.report.peer_curves import distribution_by_round, peer_curves
from dispfl.report.results import (
    TIE,
    PeerWins,
    ReportResults,
    count_wins,
    scores_by_density,
    seconds_by_density,
)
from dispfl.report.runs import RecordedRun
from dispfl.report.senders import sender_blocks
from dispfl.report.wording import UNKNOWN, capitalized, format_seconds, plural
from dispfl.runs.prepare import shift_texts

MAX_BARS = 200
MAX_LISTED = 1000
PEERS_PER_MAP = 25
"""Two maps fit side by side on a desktop."""
MAX_MAPPED_PEERS = 100
MAX_SPLITS = 3
MAX_CLASSES = 12
"""Number of classes that a tooltip lists."""


def peers_section(results: ReportResults) -> Section:
    """Return the scores of every peer."""
    section = Section("peers", "Results per peer")
    evaluated = results.evaluated_rows
    measure = results.measure
    if not evaluated:
        section.remark("No peer has been evaluated.")
        return section

    groups: list[Figure] = []
    for row in evaluated:
        groups += _density_figures(row, measure)
        groups += _class_figures(row, measure)
    if len(evaluated) == 1:
        run = evaluated[0].scored_runs[0]
        colour = css_class(evaluated[0])
        first = _sorted_bars(run, measure, colour)
        section.add(Figures([first, *groups, distribution_by_round(run, measure, colour)]))
        curves = peer_curves(run, measure, colour)
        if curves:
            section.add(curves)
    else:
        section.add(ColourLegend(evaluated))
        figures = [_sorted_lines(evaluated, measure), *_wins_figure(results), *groups]
        section.add(Figures(figures))
        differences = list(_difference_figures(results))
        if differences:
            section.add(Figures(differences, "many"))
    section.add(*sender_blocks(results))
    section.add(_all_scores(evaluated, measure))
    return section


def _sorted_title(measure: Measure) -> str:
    return f"Peers sorted by {measure.name}"


def _worst_first(run: RecordedRun, measure: Measure) -> dict[str, float]:
    """Return the scores of a run's peers, the worst first."""
    return dict(sorted(run.scores.items(), key=lambda pair: measure.gain(pair[1], 0.0)))


def _sorted_lines(evaluated: Sequence[ComparisonRow], measure: Measure) -> Figure:
    """Draw every row's k-th worst score, mean over seeds."""
    curves = []
    for row in evaluated:
        by_seed = [_worst_first(run, measure).values() for run in row.scored_runs]
        curve = Curve(row.label, css_class(row))
        for rank, scores in enumerate(zip(*by_seed, strict=False), start=1):
            curve.add(float(rank), fmean(scores))
        curves.append(curve)
    note = "Each row sorts its own peers"
    if most_seeds(evaluated) > 1:
        note += "; mean over seeds"
    chart = line_chart(
        curves,
        "peers, worst to best",
        measure.name,
        whole_x=True,
        x_word="rank",
        y_format=measure.format,
    )
    return Figure(_sorted_title(measure), chart, f"{note}.")


def _sorted_bars(run: RecordedRun, measure: Measure, colour: str) -> Figure:
    """Draw one bar per peer of a single run."""
    scores = _worst_first(run, measure)
    bars = []
    for peer, score in scores.items():
        bars.append(Bar(peer, [(score, colour)], f"peer {peer}: {measure.text(score)}"))
    texts = list(map(measure.text, scores.values()))
    label = f"{measure.name} of every peer, from {texts[0]} to {texts[-1]}."
    shown = thin_out(bars, MAX_BARS)
    chart = bar_chart(shown, "peers, worst to best", measure.name, label, size=LARGE)
    return Figure(_sorted_title(measure), chart, f"Seed {run.seed}.")


@dataclass(frozen=True)
class WinBar:
    """The shares of peers for which a row is best, alone and tied."""

    label: str
    css_class: str
    count: PeerWins

    @property
    def won(self) -> float:
        return self.count.wins / self.count.peers

    @property
    def tied(self) -> float:
        return self.count.ties / self.count.peers


@dataclass
class WinBars(Block):
    """One bar for each row."""

    template = "wins.html"
    bars: list[WinBar] = field(default_factory=list)


def _wins_figure(results: ReportResults) -> Iterator[Figure]:
    """Show for how many peers each row is the best."""
    counts = count_wins(results)
    if not counts:
        return
    block = WinBars()
    for row in results.rows:
        block.bars.append(WinBar(row.label, css_class(row), counts[row.label]))
    over = plural(counts[results.rows[0].label].peers, "peer")
    seeds = len(results.common_seeds)
    if seeds > 1:
        over += f" over {seeds} seeds"
    note = f"Out of {over}; ties are lighter."
    yield Figure("Number of peers for which each row is best", block, note)


def _difference_figures(results: ReportResults) -> Iterator[Figure]:
    """Compare the leader with each other row, peer by peer, if the peers are the same."""
    if not results.comparable:
        return
    leader, *rivals = results.rows
    lowest = highest = 0.0
    compared = []
    for rival in rivals:
        differences = _differences(results, leader, rival)
        if differences:
            compared.append((rival, differences))
            highest = max(highest, differences[0][0])
            lowest = min(lowest, differences[-1][0])
    for rival, differences in compared:
        yield _difference_figure(results, leader, rival, differences, (lowest, highest))


def _differences(
    results: ReportResults, leader: ComparisonRow, rival: ComparisonRow
) -> list[tuple[float, str]]:
    """Return the difference and the name of each peer, the largest first."""
    differences = []
    for seed in results.common_seeds:
        rival_scores = rival.by_seed[seed].scores
        for peer, score in leader.by_seed[seed].scores.items():
            if peer not in rival_scores:
                continue
            name = f"peer {peer}"
            if len(results.common_seeds) > 1:
                name += f", seed {seed}"
            differences.append((score - rival_scores[peer], name))
    return sorted(differences, reverse=True)


def _difference_figure(
    results: ReportResults,
    leader: ComparisonRow,
    rival: ComparisonRow,
    differences: Sequence[tuple[float, str]],
    y_range: tuple[float, float],
) -> Figure:
    measure = results.measure
    bars = []
    better = worse = 0
    for value, peer in differences:
        gain = measure.gain(value, 0.0)
        better += gain > TIE
        worse += gain < -TIE
        winner = leader if gain > 0 else rival
        bars.append(Bar("", [(value, css_class(winner))], f"{peer}: {value:+{measure.format}}"))
    note = f"Better for {better} of {plural(len(differences), 'peer')}, worse for {worse}."
    title = f"{leader.label} minus {rival.label}"
    shown = thin_out(bars, MAX_BARS)
    chart = bar_chart(shown, "peers", measure.name, f"{title}. {note}", y_range=y_range)
    return Figure(title, chart, note, [leader, rival])


def _density_figures(row: ComparisonRow, measure: Measure) -> Iterator[Figure]:
    """Yield the scores by density, and the computing times if they were measured."""
    groups = scores_by_density(row)
    if not groups:
        return
    columns = []
    means = []
    for density, scores in groups.items():
        column = DotColumn(f"{density:g}", scores, css_class(row))
        columns.append(column)
        means.append(f"{measure.text(column.mean)} at {column.name}")
    x_label = "density: share of weights that a peer keeps"
    chart = dot_chart(columns, x_label, measure.name, measure.format)
    note = f"Dots are peers, lines are group means: {', '.join(means)}."
    yield Figure(f"{row.label} by density", chart, note, [row])
    if seconds_by_density(row).keys() == groups.keys():
        yield _seconds_figure(row, measure)


def _class_figures(row: ComparisonRow, measure: Measure) -> Iterator[Figure]:
    """Yield a table of the classes of devices, if there are any."""
    scores: dict[str, list[float]] = {}
    seconds: dict[str, list[float]] = {}
    for run in row.runs:
        for peer, name in run.class_of.items():
            if peer in run.scores:
                scores.setdefault(name, []).append(run.scores[peer])
            if peer in run.peer_seconds:
                seconds.setdefault(name, []).append(run.peer_seconds[peer])
    if not scores:
        return
    metric = capitalized(measure.name)
    headings = [Heading("Class")]
    for title in ("Peers", metric, "Lowest", "Seconds"):
        headings.append(Heading(title, "number"))
    table = HtmlTable(f"{metric} and seconds of each class", headings)
    peers = Counter(row.runs[0].class_of.values())
    for name, values in scores.items():
        lowest = min(values) if measure.higher_is_better else max(values)
        mean_seconds = format_seconds(fmean(seconds[name])) if name in seconds else UNKNOWN
        cells = [name, str(peers[name]), measure.text(fmean(values)), measure.text(lowest)]
        table.rows.append([*cells, mean_seconds])
    note = "Means over the peers of a class; the lowest is its worst peer. Seconds are per round."
    yield Figure(f"{row.label} by class of device", table, note, [row])


def _seconds_figure(row: ComparisonRow, measure: Measure) -> Figure:
    """Return a table with the score and the computing time of each group of peers."""
    metric = capitalized(measure.name)
    headings = [Heading("Density")]
    for title in ("Peers", metric, "Seconds", "Ratio"):
        headings.append(Heading(title, "number"))
    table = HtmlTable(f"{metric} and seconds of each group", headings)

    densities = list((row.runs[0].densities or {}).values())
    scores = scores_by_density(row)
    seconds = seconds_by_density(row)
    densest = fmean(seconds[max(seconds)])
    for density, peer_seconds in seconds.items():
        mean_seconds = fmean(peer_seconds)
        ratio = UNKNOWN
        if densest:
            ratio = f"{mean_seconds / densest:.2f}"
        table.rows.append(
            [
                f"{density:g}",
                str(densities.count(density)),
                measure.text(fmean(scores[density])),
                format_seconds(mean_seconds),
                ratio,
            ]
        )
    note = (
        "Seconds that a peer computes in a round, mean over the group; the ratio is to the densest"
        " group."
    )
    return Figure(f"{row.label}: computing time by density", table, note, [row])


def _all_scores(evaluated: Sequence[ComparisonRow], measure: Measure) -> Details:
    """Return a collapsed table of all scores."""
    headings = [Heading("Peer")]
    peers: dict[tuple[int, str], None] = {}
    seeds = set()
    for row in evaluated:
        headings.append(Heading(row.label, "number"))
        for run in row.runs:
            seeds.add(run.seed)
            for peer in run.roster:
                peers[run.seed, peer] = None

    caption = "Scores of all peers"
    if len(peers) > MAX_LISTED:
        caption += f", the first {MAX_LISTED} of {len(peers)}"
    table = HtmlTable(caption, headings)
    for seed, peer in list(peers)[:MAX_LISTED]:
        name = peer
        if len(seeds) > 1:
            name += f" (seed {seed})"
        scores = [_score_of(row, seed, peer) for row in evaluated]
        table.rows.append([name, *map(measure.text, scores)])
    return Details("All scores as a table", table)


def _score_of(row: ComparisonRow, seed: int, peer: str) -> float | None:
    run = row.by_seed.get(seed)
    if run is None:
        return None
    return run.scores.get(peer)


# The labels of the peers' data


def labels_section(results: ReportResults) -> Section:
    """Return one heat map of class counts for every 25 peers of each split."""
    section = Section("labels", "Label distribution")
    splits = _splits(results)
    for name, run in list(splits.items())[:MAX_SPLITS]:
        if len(splits) > 1:
            section.remark(name)
        section.add(*_label_maps(run))
        shifts = _shift_remark(run)
        if shifts:
            section.remark(shifts)
    if len(splits) > MAX_SPLITS:
        section.remark(f"{plural(len(splits) - MAX_SPLITS, 'more split')} not shown.")
    return section


def _shift_remark(run: RecordedRun) -> str:
    """`Feature shift: turned by 0°: peers 000, 003; turned by 90°: ...`; empty without any."""
    peers_by_shift: dict[str, list[str]] = {}
    for peer, text in shift_texts(run.config).items():
        peers_by_shift.setdefault(text, []).append(peer)
    if not peers_by_shift:
        return ""
    parts = []
    for text, peers in sorted(peers_by_shift.items()):
        names = ", ".join(peers[:PEERS_PER_MAP])
        if len(peers) > PEERS_PER_MAP:
            names += f" and {len(peers) - PEERS_PER_MAP} more"
        parts.append(f"{text}: {names}")
    return f"Images of each peer, in training and test (seed {run.seed}): {'; '.join(parts)}."


def _splits(results: ReportResults) -> dict[str, RecordedRun]:
    """Return one run, of the lowest seed, for every way in which the data is split."""
    splits: dict[str, RecordedRun] = {}
    for run in sorted(results.runs, key=lambda run: run.seed):
        parts = []
        for key, value in run.settings.items():
            if key.startswith(DATA_TABLES) or key == "peers":
                parts.append(f"{key} {value}")
        splits.setdefault(", ".join(parts), run)
    return splits


def _label_maps(run: RecordedRun) -> Iterator[Block]:
    """Yield a remark and the maps of a run's split."""
    counts = run.label_counts()
    if counts is None:
        remark = "No split was saved with the run."
        if run.made_in_python:
            remark = (
                "No split was saved, because the federation was made in Python with its own data."
            )
        yield Remark(remark)
        return
    if len(counts[0]) == 1:  # numbers, not classes
        yield Remark(f"{_sizes(counts, 'training sample')} (seed {run.seed}).")
        return
    shown = counts[:MAX_MAPPED_PEERS]
    most = max(map(max, counts)) or 1
    yield Remark(" ".join(_labels_note(run, counts, len(shown), most)))
    figures = []
    for start in range(0, len(shown), PEERS_PER_MAP):
        figures.append(_label_map(run.roster, shown, start, most))
    yield Figures(figures)


def _labels_note(
    run: RecordedRun, counts: Sequence[Sequence[int]], shown: int, most: int
) -> Iterator[str]:
    counted = COUNTED.get(str(run.config.get("task")), "training sample")
    yield f"{_sizes(counts, counted)}, in {len(counts[0])} classes (seed {run.seed})."
    unit = counted.rpartition(" ")[2]
    yield f"The stronger the colour, the more {unit}s of that class; the largest count is {most}."
    if shown < len(counts):
        yield f"The first {shown} peers are shown."


COUNTED = {"multilabel": "positive label", "segmentation": "pixel"}
"""What the counts of a task's classes count, if not samples."""


def _sizes(counts: Sequence[Sequence[int]], unit: str) -> str:
    """`8 peers, 96 training samples each`, or with different numbers of them."""
    totals = set(map(sum, counts))
    sizes = f"different numbers of {unit.rpartition(' ')[2]}s"
    if len(totals) == 1:
        sizes = f"{plural(totals.pop(), unit)} each"
    return f"{plural(len(counts), 'peer')}, {sizes}"


def _label_map(
    roster: Sequence[str], counts: Sequence[Sequence[int]], start: int, most: int
) -> Figure:
    mapped = counts[start : start + PEERS_PER_MAP]
    names = roster[start : start + len(mapped)]
    tooltips = list(map(_labels_tooltip, names, mapped))
    title = f"Peer {names[0]}"
    if len(names) > 1:
        title = f"Peers {names[0]} to {names[-1]}"
    label = f"Training samples of each class. {title}. The largest count is {most}."
    drawing = HeatMap(mapped, names, tooltips, most, min(PEERS_PER_MAP, len(counts)))
    return Figure(title, drawing.svg(label))


def _labels_tooltip(name: str, counts: Sequence[int]) -> str:
    lines = [f"peer {name}: {plural(sum(counts), 'sample')}"]
    classes = [label for label, count in enumerate(counts) if count]
    classes.sort(key=lambda label: -counts[label])
    for label in classes[:MAX_CLASSES]:
        lines.append(f"class {label}: {counts[label]}")
    if len(classes) > MAX_CLASSES:
        lines.append(f"and {len(classes) - MAX_CLASSES} more classes")
    return "\n".join(lines)
