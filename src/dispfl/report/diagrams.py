"""Heat maps of label counts and graphs of the peers, as SVG."""

from collections.abc import Collection, Mapping, Sequence
from math import cos, hypot, pi, sin

from dispfl.report.charts import svg
from dispfl.report.markup import Markup, coordinate, element

LEVELS = 8
"""Colour levels of a heat map. Cells of one level are one path, which keeps large maps small."""
MAP_WIDTH, MAP_LEFT, MAP_TOP, MAP_BOTTOM = 540.0, 40.0, 22.0, 44.0
MAX_CELL_WIDTH = 36.0
GRAPH_WIDTH, GRAPH_RADIUS = 460.0, 186.0
MAX_ARROWS = 120
"""The arrow heads of more links would overlap."""
MAX_LISTED = 12
"""Number of neighbours that a tooltip lists."""

Position = tuple[float, float]


def heat_map(
    counts: Sequence[Sequence[int]],
    names: Sequence[str],
    tooltips: Sequence[str],
    most: int,
    label: str,
    columns: int,
) -> Markup:
    """Return a column for each name and a row for each of its counts; a count of `most` has the
    full colour.

    `columns` is the number of columns that fit, so that maps side by side have cells of the same
    size.
    """
    rows, width = len(counts[0]), min(MAX_CELL_WIDTH, (MAP_WIDTH - MAP_LEFT - 4) / columns)
    height = max(2.5, min(18.0, 300 / rows))
    right, bottom = MAP_LEFT + len(counts) * width, MAP_TOP + rows * height
    drawn = [element("text", "class", class_="axis", x=2, y=12)]
    drawn += [_cells(counts, level, width, height, most) for level in range(1, LEVELS + 1)]
    every = next(step for step in (1, 2, 5, 10) if step * height >= 15)
    for row in range(0, rows, every):
        y = MAP_TOP + (row + 0.5) * height
        drawn.append(element("text", str(row), class_="tick y", x=MAP_LEFT - 6, y=y, dy="0.32em"))
    for k, (name, tooltip) in enumerate(zip(names, tooltips, strict=True)):
        left, title = MAP_LEFT + k * width, element("title", tooltip)
        drawn.append(
            element(
                "rect", title, class_="tip", x=left, y=MAP_TOP, width=width, height=rows * height
            )
        )
        if k % (2 if width >= 30 else 5) == 0:
            drawn.append(
                element("text", name, class_="tick x", x=left + width / 2, y=bottom + 6, dy="0.8em")
            )
    drawn.append(
        element(
            "rect",
            class_="outline",
            x=MAP_LEFT,
            y=MAP_TOP,
            width=right - MAP_LEFT,
            height=rows * height,
        )
    )
    drawn.append(
        element(
            "text", "peer", class_="axis x", x=(MAP_LEFT + right) / 2, y=bottom + MAP_BOTTOM - 4
        )
    )
    return svg(MAP_WIDTH, bottom + MAP_BOTTOM, label, *drawn, size="map")


def _cells(
    counts: Sequence[Sequence[int]], level: int, width: float, height: float, most: int
) -> Markup:
    """Return all cells of one colour level."""
    shape = f"h{width:.2f}v{height:.2f}h-{width:.2f}z"
    path = [
        f"M{coordinate(MAP_LEFT + k * width)} {coordinate(MAP_TOP + row * height)}{shape}"
        for k, column in enumerate(counts)
        for row, count in enumerate(column)
        if count and -(-count * LEVELS // most) == level
    ]
    return element("path", d="".join(path), class_="cell", style=f"--intensity:{level / LEVELS:g}")


def peer_graph(
    neighbours: Mapping[str, Sequence[str]],
    roster: Sequence[str],
    offline: Collection[str],
    example: str,
    label: str,
) -> Markup:
    """Return peers on a circle, with a link to each peer from its neighbours; those to `example`
    are highlighted."""
    positions = circle_positions(roster)
    links = [(sender, peer) for peer, senders in neighbours.items() for sender in senders]
    arrows = len(links) <= MAX_ARROWS
    others = _links([link for link in links if link[1] != example], positions, arrows)
    highlighted = _links([link for link in links if link[1] == example], positions, arrows)
    opacity = f"--link-opacity:{max(0.12, min(0.6, 60 / max(1, len(links)))):.2f}"
    drawn = [
        element("path", d=others, class_="links", style=opacity),
        element("path", d=highlighted, class_="links highlighted"),
    ]
    receivers: dict[str, list[str]] = {peer: [] for peer in roster}
    for sender, peer in links:
        receivers[sender].append(peer)
    for peer in roster:
        exchange = (
            f"receives from {_first_few(neighbours.get(peer, []))}; sends to"
            f" {_first_few(receivers[peer])}"
        )
        tooltip = f"peer {peer}: {'offline' if peer in offline else exchange}"
        kind = "offline" if peer in offline else "highlighted" if peer == example else ""
        drawn.append(_node(positions[peer], tooltip, kind, len(roster)))
    return svg(GRAPH_WIDTH, GRAPH_WIDTH, label, *drawn, *_names(roster), size="graph")


def server_star(
    centre: str, roster: Sequence[str], cohort: Collection[str] | None, label: str
) -> Markup:
    """Return peers around a server; the links of the last round's cohort are highlighted if it is
    known."""
    positions = circle_positions(roster)
    middle = (GRAPH_WIDTH / 2, GRAPH_WIDTH / 2)
    spokes = {peer: f"M{_pair(middle)}L{_pair(positions[peer])}" for peer in roster}
    chosen = set(cohort or ())
    drawn = [
        element(
            "path",
            d="".join(spokes[peer] for peer in roster if peer not in chosen),
            class_="links spokes",
        ),
        element(
            "path",
            d="".join(spokes[peer] for peer in roster if peer in chosen),
            class_="links highlighted",
        ),
    ]
    for peer in roster:
        state = "participated" if peer in chosen else "idle"
        tooltip = f"peer {peer}" if cohort is None else f"peer {peer}: {state} in the last round"
        drawn.append(
            _node(positions[peer], tooltip, "highlighted" if peer in chosen else "", len(roster))
        )
    drawn.append(
        element(
            "circle", element("title", centre), class_="node hub", cx=middle[0], cy=middle[1], r=24
        )
    )
    drawn.append(element("text", centre, class_="hub", x=middle[0], y=middle[1], dy="0.32em"))
    return svg(GRAPH_WIDTH, GRAPH_WIDTH, label, *drawn, *_names(roster), size="graph")


def circle_positions(roster: Sequence[str], radius: float = GRAPH_RADIUS) -> dict[str, Position]:
    """Return positions on a circle, clockwise from the top."""
    centre, positions = GRAPH_WIDTH / 2, {}
    for k, peer in enumerate(roster):
        angle = 2 * pi * k / len(roster)
        positions[peer] = (centre + radius * sin(angle), centre - radius * cos(angle))
    return positions


def _links(
    links: Sequence[tuple[str, str]], positions: Mapping[str, Position], arrows: bool
) -> str:
    return "".join(_link(positions[sender], positions[peer], arrows) for sender, peer in links)


def _link(start: Position, end: Position, arrow: bool) -> str:
    line = f"M{_pair(start)}L{_pair(end)}"
    length = hypot(end[0] - start[0], end[1] - start[1])
    if not arrow or length < 20:
        return line
    along = ((end[0] - start[0]) / length, (end[1] - start[1]) / length)
    tip = (end[0] - 8 * along[0], end[1] - 8 * along[1])  # at the rim of the peer's dot
    back = (tip[0] - 7 * along[0], tip[1] - 7 * along[1])
    wings = [(back[0] + side * along[1], back[1] - side * along[0]) for side in (3.5, -3.5)]
    return f"{line}M{_pair(wings[0])}L{_pair(tip)}L{_pair(wings[1])}"


def _node(position: Position, tooltip: str, kind: str, peers: int) -> Markup:
    """Return a dot with a tooltip, smaller if many peers would overlap."""
    radius = max(1.5, min(6.0, 0.45 * 2 * pi * GRAPH_RADIUS / peers))
    shape = {"cx": position[0], "cy": position[1], "r": radius}
    return element("circle", element("title", tooltip), class_=f"node {kind}".strip(), **shape)


def _names(roster: Sequence[str]) -> list[Markup]:
    """Return the names outside the circle: of all peers, or of every second, fifth, ... if there
    are many."""
    every = next((step for step in (1, 2, 5, 10, 25, 50, 100) if len(roster) <= 32 * step), 1000)
    positions = circle_positions(roster, GRAPH_RADIUS + 24)
    shown = [(peer, *positions[peer]) for peer in roster[::every]]
    return [
        element("text", peer, class_="tick name", x=x, y=y, dy="0.32em") for peer, x, y in shown
    ]


def _first_few(peers: Sequence[str]) -> str:
    if not peers:
        return "none"
    more = f" and {len(peers) - MAX_LISTED} more" if len(peers) > MAX_LISTED else ""
    return ", ".join(peers[:MAX_LISTED]) + more


def _pair(position: Position) -> str:
    return f"{coordinate(position[0])} {coordinate(position[1])}"
