"""Heat maps of label counts and graphs of the peers, as SVG."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import cos, hypot, pi, sin

from markupsafe import Markup

from dispfl.report.charts import coordinate, element, point, svg
from dispfl.report.runs import Links

LEVELS = 8
"""Colour levels of a heat map. Cells of one level are one path, which keeps large maps small."""
MAP_WIDTH = 540.0
MAP_LEFT = 40.0
MAP_TOP = 22.0
MAP_BOTTOM = 44.0
MAX_CELL_WIDTH = 36.0
GRAPH_WIDTH = 460.0
GRAPH_RADIUS = 186.0
CENTRE = (GRAPH_WIDTH / 2, GRAPH_WIDTH / 2)
MAX_ARROWS = 120
"""The arrow heads of more links would overlap."""
STEPS = (1, 2, 5, 10, 25, 50, 100)
"""Where all names do not fit, every second, fifth, ... is shown."""
MAX_LISTED = 12
"""Number of neighbours that a tooltip lists."""

Position = tuple[float, float]
Link = tuple[str, str]
"""Sender and receiver."""


@dataclass(frozen=True)
class HeatMap:
    """A column for each peer and a row for each class; a count of `most` has the full colour.

    Or a row for each of something else, such as peers.
    """

    counts: Sequence[Sequence[int]]
    """By peer and class."""
    names: Sequence[str]
    tooltips: Sequence[str]
    most: int
    columns: int
    """How many columns fit, so that maps side by side have cells of the same size."""
    row_title: str = "class"
    row_names: Sequence[str] = ()
    """By default numbers."""

    @property
    def classes(self) -> int:
        return len(self.counts[0])

    @property
    def cell_width(self) -> float:
        return min(MAX_CELL_WIDTH, (MAP_WIDTH - MAP_LEFT - 4) / self.columns)

    @property
    def cell_height(self) -> float:
        return max(2.5, min(18.0, 300 / self.classes))

    def left(self, column: float) -> float:
        return MAP_LEFT + column * self.cell_width

    def top(self, row: float) -> float:
        return MAP_TOP + row * self.cell_height

    def svg(self, label: str) -> Markup:
        """Return the drawing."""
        bottom = self.top(self.classes)
        drawn = [element("text", self.row_title, class_="axis", x=2, y=12)]
        for level in range(1, LEVELS + 1):
            drawn.append(self._cells(level))
        drawn += self._class_numbers()
        drawn += self._columns(bottom)
        drawn.append(
            element(
                "rect",
                class_="outline",
                x=MAP_LEFT,
                y=MAP_TOP,
                width=self.left(len(self.counts)) - MAP_LEFT,
                height=bottom - MAP_TOP,
            )
        )
        middle = self.left(len(self.counts) / 2)
        drawn.append(element("text", "peer", class_="axis x", x=middle, y=bottom + MAP_BOTTOM - 4))
        return svg(MAP_WIDTH, bottom + MAP_BOTTOM, label, *drawn, size="map")

    def _cells(self, level: int) -> Markup:
        """Return all cells of one colour level."""
        width = f"{self.cell_width:.2f}"
        shape = f"h{width}v{self.cell_height:.2f}h-{width}z"
        path = ""
        for k, counts in enumerate(self.counts):
            for row, count in enumerate(counts):
                if count and -(-count * LEVELS // self.most) == level:
                    path += f"M{point(self.left(k), self.top(row))}{shape}"
        return element("path", d=path, class_="cell", style=f"--intensity:{level / LEVELS:g}")

    def _class_numbers(self) -> Iterable[Markup]:
        every = _first_step(15 / self.cell_height)
        for row in range(0, self.classes, every):
            y = self.top(row + 0.5)
            name = self.row_names[row] if self.row_names else str(row)
            yield element("text", name, class_="tick y", x=MAP_LEFT - 6, y=y, dy="0.32em")

    def _columns(self, bottom: float) -> Iterable[Markup]:
        """Yield an invisible strip over each peer with its tooltip, and the names of some."""
        every = 2 if self.cell_width >= 30 else 5
        for k, (name, tooltip) in enumerate(zip(self.names, self.tooltips, strict=True)):
            yield element(
                "rect",
                element("title", tooltip),
                class_="tip",
                x=self.left(k),
                y=MAP_TOP,
                width=self.cell_width,
                height=bottom - MAP_TOP,
            )
            if k % every == 0:
                middle = self.left(k + 0.5)
                yield element("text", name, class_="tick x", x=middle, y=bottom + 6, dy="0.8em")


def peer_graph(
    links: Mapping[int, Links],
    roster: Sequence[str],
    absent: Collection[str],
    example: str,
    label: str,
    absence: str = "offline",
) -> Markup:
    """Return peers on a circle, with a link to each peer from those that it received from.

    `links` are those of the last rounds, by their numbers; all but the last round are hidden. Links
    to `example` are highlighted; those of models that were not received are dashed. Peers that are
    `absent` in the last round are hollow, and `absence` says why.
    """
    *_, last_round = links
    newest = links[last_round]
    receivers: dict[str, list[str]] = {peer: [] for peer in roster}
    for peer, senders in newest.received.items():
        for sender in senders:
            receivers[sender].append(peer)

    positions = circle_positions(roster)
    drawn = []
    for number, of_round in links.items():
        display = None if number == last_round else "none"
        drawn.append(
            element(
                "g",
                *_round_links(of_round, positions, example),
                class_="round",
                data_round=str(number),
                display=display,
            )
        )
    for peer in roster:
        senders = _first_few(newest.received.get(peer, []))
        state = f"received from {senders}; sent to {_first_few(receivers[peer])}"
        if peer in newest.missed:
            state += f"; missed {_first_few(newest.missed[peer])}"
        mark = ""
        if peer == example:
            mark = "highlighted"
        elif peer in absent:
            state = absence
            mark = "offline"
        drawn.append(_node(positions[peer], f"peer {peer}: {state}", mark, len(roster)))
    return svg(GRAPH_WIDTH, GRAPH_WIDTH, label, *drawn, *_names(roster), size="graph")


def _round_links(links: Links, positions: Mapping[str, Position], example: str) -> Iterable[Markup]:
    """Yield the links of a round: the usual ones, those that were missed, and the highlighted."""
    usual: list[Link] = []
    highlighted: list[Link] = []
    for peer, senders in links.received.items():
        for sender in senders:
            if peer == example:
                highlighted.append((sender, peer))
            else:
                usual.append((sender, peer))
    missed: list[Link] = []
    for peer, senders in links.missed.items():
        missed += [(sender, peer) for sender in senders]

    arrows = links.count <= MAX_ARROWS
    opacity = f"--link-opacity:{max(0.12, min(0.6, 60 / max(1, links.count))):.2f}"
    yield element("path", d=_links(usual, positions, arrows), class_="links", style=opacity)
    yield element("path", d=_links(missed, positions, arrows), class_="links missed")
    yield element("path", d=_links(highlighted, positions, arrows), class_="links highlighted")


def server_star(centre: str, roster: Sequence[str], cohort: Collection[str], label: str) -> Markup:
    """Return peers around a server; the links of its cohort are highlighted."""
    positions = circle_positions(roster)
    spokes = highlighted = ""
    nodes = []
    for peer in roster:
        spoke = f"M{point(*CENTRE)}L{point(*positions[peer])}"
        tooltip = f"peer {peer}"
        mark = ""
        if peer in cohort:
            highlighted += spoke
            tooltip += ": participated in the last round"
            mark = "highlighted"
        else:
            spokes += spoke
            tooltip += ": idle in the last round"
        nodes.append(_node(positions[peer], tooltip, mark, len(roster)))

    x, y = CENTRE
    drawn = [
        element("path", d=spokes, class_="links spokes"),
        element("path", d=highlighted, class_="links highlighted"),
        *nodes,
        element("circle", element("title", centre), class_="node hub", cx=x, cy=y, r=24),
        element("text", centre, class_="hub", x=x, y=y, dy="0.32em"),
    ]
    return svg(GRAPH_WIDTH, GRAPH_WIDTH, label, *drawn, *_names(roster), size="graph")


def range_bar(low: float, high: float, mean: float, css_class: str) -> Markup:
    """Return a line between two values in [0, 1] with a dot at the mean."""

    def x(value: float) -> float:
        return 6 + 108 * value

    line = f"M{coordinate(x(low))} 8H{coordinate(x(high))}"
    return element(
        "svg",
        element("path", d="M6 8H114", class_="rail"),
        element("path", d=line, class_=f"range-bar {css_class}"),
        element("circle", class_=f"dot {css_class}", cx=x(mean), cy=8, r=5),
        class_="ranges",
        viewBox="0 0 120 16",
        width=120,
        height=16,
        aria_hidden="true",
    )


def circle_positions(roster: Sequence[str], radius: float = GRAPH_RADIUS) -> dict[str, Position]:
    """Return positions on a circle, clockwise from the top."""
    x, y = CENTRE
    positions = {}
    for k, peer in enumerate(roster):
        angle = 2 * pi * k / len(roster)
        positions[peer] = (x + radius * sin(angle), y - radius * cos(angle))
    return positions


def _links(links: Sequence[Link], positions: Mapping[str, Position], arrows: bool) -> str:
    path = ""
    for sender, receiver in links:
        path += _link(positions[sender], positions[receiver], arrows)
    return path


def _link(start: Position, end: Position, arrow: bool) -> str:
    line = f"M{point(*start)}L{point(*end)}"
    length = hypot(end[0] - start[0], end[1] - start[1])
    if not arrow or length < 20:
        return line
    along_x = (end[0] - start[0]) / length
    along_y = (end[1] - start[1]) / length
    tip = (end[0] - 8 * along_x, end[1] - 8 * along_y)  # at the rim of the peer's dot
    back = (tip[0] - 7 * along_x, tip[1] - 7 * along_y)
    left = (back[0] + 3.5 * along_y, back[1] - 3.5 * along_x)
    right = (back[0] - 3.5 * along_y, back[1] + 3.5 * along_x)
    return f"{line}M{point(*left)}L{point(*tip)}L{point(*right)}"


def _node(position: Position, tooltip: str, mark: str, peers: int) -> Markup:
    """Return a dot with a tooltip, smaller if many peers would overlap."""
    radius = max(1.5, min(6.0, 0.45 * 2 * pi * GRAPH_RADIUS / peers))
    css_class = f"node {mark}".strip()
    title = element("title", tooltip)
    return element("circle", title, class_=css_class, cx=position[0], cy=position[1], r=radius)


def _names(roster: Sequence[str]) -> Iterable[Markup]:
    """Yield the names outside the circle; of many peers every second, fifth, ..."""
    every = _first_step(len(roster) / 32)
    positions = circle_positions(roster, GRAPH_RADIUS + 24)
    for peer in roster[::every]:
        x, y = positions[peer]
        yield element("text", peer, class_="tick name", x=x, y=y, dy="0.32em")


def _first_step(least: float) -> int:
    """Return how many rows or peers there are from one name to the next, if names need room."""
    for step in STEPS:
        if step >= least:
            return step
    return 1000


def _first_few(peers: Sequence[str]) -> str:
    if not peers:
        return "none"
    listed = ", ".join(peers[:MAX_LISTED])
    more = len(peers) - MAX_LISTED
    if more <= 0:
        return listed
    return f"{listed} and {more} more"
