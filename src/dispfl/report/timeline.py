"""Who computes, transfers and waits when, by a fleet's clock: for the page, and as a figure."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import Markup

from dispfl.core.quantities import SIMULATED
from dispfl.report.charts import LinearScale, element, svg, ticks
from dispfl.report.comparison import ComparisonRow
from dispfl.report.curves import quantity_figures
from dispfl.report.html import Figure, Figures, Heading, HtmlTable, Section
from dispfl.report.results import ReportResults
from dispfl.report.runs import RecordedRun
from dispfl.report.units import HOURS, Unit, axis_unit, duration_text
from dispfl.report.wording import UNKNOWN, format_short
from dispfl.runs.timing import PHASES, ClassTimes, times_by_class

MAX_PEERS = 24
"""Peers that a timeline shows: of more, some of each class."""
MAX_ROUNDS = 6
"""Rounds that a timeline shows, from the first on."""
WIDTH = 560.0
LEFT = 130.0
ROW = 15.0
BOTTOM = 58.0
SENDING = "sending"
"""What a peer that does not wait does beside computing."""
WITHOUT_WAITING = ("computing", SENDING, "offline")
COLOURS = {
    "computing": "C0",
    "transferring": "C1",
    SENDING: "C1",
    "waiting": "0.85",
    "offline": "0.5",
}
"""Of the figure for papers."""
NOTE = (
    "Within a round, times offline, waiting, transfers and computing are drawn one after another,"
    " though they may alternate."
)

NOTE_WITHOUT_WAITING = (
    "Of each round it is drawn how long a peer is offline, how long it computes, and how long its"
    " models leave meanwhile, not when in the round."
)


class Phase(NamedTuple):
    """A part of a peer's round."""

    name: str
    """One of `PHASES`, or `SENDING`."""
    start: float
    """In hours."""
    hours: float


def shown_phases(run: RecordedRun) -> Sequence[str]:
    """Return the phases that a run's timeline has."""
    return WITHOUT_WAITING if run.config.get("schedule") == "async" else PHASES


def timeline(run: RecordedRun, peer: int) -> Iterator[Phase]:
    """Yield how a peer, given by its position, spends the first rounds."""
    links = run.links(0)
    has_server = links is not None and links.has_server
    order = ("transferring", "computing", "waiting", "offline") if has_server else PHASES[::-1]
    for record in run.records[:MAX_ROUNDS]:
        times = record[SIMULATED]
        if times["end"] is None or times["end"]["per_peer"][peer] is None:
            continue
        seconds = {phase: _seconds(times[phase], peer) for phase in PHASES}
        start = times["end"]["per_peer"][peer] - sum(seconds.values())
        for phase in order:
            if seconds[phase]:
                yield Phase(phase, start / 3600, seconds[phase] / 3600)
            start += seconds[phase]
        sending = _seconds(times[SENDING], peer)
        if sending:  # drawn upon the computing, which is the last in the round
            yield Phase(SENDING, (start - sending) / 3600, sending / 3600)


def _seconds(spread: Mapping[str, Any] | None, peer: int) -> float:
    return (spread and spread["per_peer"][peer]) or 0.0


def shown_peers(roster: Sequence[str], class_of: Mapping[str, str]) -> list[int]:
    """Return the positions of the peers to show, ordered by class: all, or some of each class."""
    positions = sorted(range(len(roster)), key=lambda each: (class_of.get(roster[each], ""), each))
    if len(positions) <= MAX_PEERS:
        return positions
    return [positions[number * len(positions) // MAX_PEERS] for number in range(MAX_PEERS)]


def _end(run: RecordedRun) -> float:
    """Return when the shown rounds end, in hours."""
    return max(record[SIMULATED]["hours"] for record in run.records[:MAX_ROUNDS]) or 1e-9


def time_section(results: ReportResults) -> Section | None:
    """Return how devices spend the simulated time; None if no run has a clock."""
    clocked = [row for row in results.rows if row.hours is not None]
    if not clocked:
        return None
    section = Section("time", "Simulated time")
    section.add(_class_table(clocked))
    figures = list(quantity_figures(results, "time"))
    for row in clocked:
        drawing = _timeline_svg(row.runs[0], row.runs[0].device_class_of)
        note = NOTE_WITHOUT_WAITING if SENDING in shown_phases(row.runs[0]) else NOTE
        figures.append(Figure(f"{row.label}: the first rounds", drawing, note, [row]))
    section.add(Figures(figures))
    return section


def _class_table(rows: Sequence[ComparisonRow]) -> HtmlTable:
    headings = [Heading("row"), Heading("class of devices")]
    headings += [Heading(name, "number") for name in ("peers", *PHASES, "busy")]
    title = "How the devices of each class spend a run, mean over its peers"
    has_steps = any(SENDING in shown_phases(row.runs[0]) for row in rows)
    if has_steps:
        headings += [Heading(name, "number") for name in (SENDING, "steps")]
        title += "; who does not wait sends while it computes"
    table = HtmlTable(title, headings)
    for row in rows:
        run = row.runs[0]
        for of_class in times_by_class(run.records, run.roster, run.device_class_of):
            durations = [duration_text(of_class.hours[phase]) for phase in PHASES]
            cells = [row.label, of_class.name, str(of_class.peers)]
            cells += [*durations, f"{of_class.busy:.0%}"]
            if has_steps:
                cells += _beside(of_class)
            table.rows.append(cells)
    return table


def _beside(of_class: ClassTimes) -> list[str]:
    """Return the cells of what only peers do that do not wait."""
    if of_class.sending is None or of_class.steps is None:
        return [UNKNOWN, UNKNOWN]
    return [duration_text(of_class.sending), format_short(of_class.steps, 1)]


def _timeline_svg(run: RecordedRun, class_of: Mapping[str, str]) -> Markup:
    peers = shown_peers(run.roster, class_of)
    end = _end(run)
    unit = axis_unit(end, HOURS)
    scale = LinearScale(0, end / unit.scale, LEFT, WIDTH - 12)
    height = ROW * len(peers)
    drawn = []
    for number, peer in enumerate(peers):
        name = run.roster[peer]
        y = number * ROW + 1
        label = f"{name}, {class_of[name]}" if name in class_of else name
        drawn.append(element("text", label, class_="tick y", x=LEFT - 6, y=y + ROW / 2, dy="0.3em"))
        for phase in timeline(run, peer):
            drawn.append(_bar(phase, label, y, scale, unit))
    for value, text in ticks(0, end / unit.scale):
        drawn.append(element("text", text, class_="tick x", x=scale(value), y=height + 16))
    middle = (LEFT + WIDTH) / 2
    drawn.append(element("text", unit.name, class_="axis x", x=middle, y=height + 32))
    for number, phase_name in enumerate(shown_phases(run)):
        x = LEFT + 105 * number
        drawn.append(
            element("rect", class_=phase_name, x=x, y=height + BOTTOM - 14, width=12, height=10)
        )
        drawn.append(element("text", phase_name, class_="tick", x=x + 18, y=height + BOTTOM - 5))
    return svg(WIDTH, height + BOTTOM, "Who computes, transfers and waits when", *drawn, size="map")


def _bar(phase: Phase, label: str, y: float, scale: LinearScale, unit: Unit) -> Markup:
    left = scale(phase.start / unit.scale)
    right = scale((phase.start + phase.hours) / unit.scale)
    title = element("title", f"{label}: {phase.name} {duration_text(phase.hours)}")
    height = ROW - 3
    if phase.name == SENDING:
        height /= 3
    return element("rect", title, class_=phase.name, x=left, y=y, width=right - left, height=height)


def draw_timeline(run: RecordedRun, class_of: Mapping[str, str], to: Path) -> None:
    """Draw the same as a figure for a paper, with matplotlib."""
    from matplotlib.figure import Figure as Drawing
    from matplotlib.patches import Patch

    from dispfl.report.plots import literal, save_figure

    peers = shown_peers(run.roster, class_of)
    unit = axis_unit(_end(run), HOURS)
    drawing = Drawing(figsize=(7, 1.4 + 0.17 * len(peers)), layout="constrained")
    axes = drawing.subplots()
    for row, peer in enumerate(peers):
        for phase in timeline(run, peer):
            is_sending = phase.name == SENDING
            axes.barh(
                row - 0.4,
                phase.hours / unit.scale,
                left=phase.start / unit.scale,
                height=0.27 if is_sending else 0.8,
                align="edge",
                color=COLOURS[phase.name],
            )
    names = [run.roster[peer] for peer in peers]
    labels = [literal(f"{name}, {class_of[name]}") for name in names]
    axes.set_yticks(range(len(peers)), labels, fontsize="x-small")
    axes.invert_yaxis()
    axes.set(xlabel=f"simulated {unit.name}", xlim=(0, _end(run) / unit.scale))
    patches = [Patch(color=COLOURS[name], label=name) for name in shown_phases(run)]
    drawing.legend(
        handles=patches,
        loc="outside lower center",
        ncols=len(patches),
        fontsize="small",
        frameon=False,
    )
    save_figure(drawing, to)
