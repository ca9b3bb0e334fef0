"""Who hears whom, drawn on a circle."""

from collections.abc import Collection, Mapping, Sequence
from math import cos, hypot, pi, sin

from dispfl.analysis.report.axes import svg
from dispfl.analysis.report.markup import Markup, compact, element

WIDTH, RADIUS = 460.0, 186.0
MOST_ARROWS = 120
"""With more links than this, arrow heads would only blot."""

Point = tuple[float, float]


def graph(
    heard: Mapping[str, Sequence[str]], roster: Sequence[str], away: Collection[str], example: str, label: str
) -> Markup:
    """Peers on a circle, a link from each peer to those that hear it; the links to one peer are picked out."""
    places = on_circle(roster)
    links = [(sender, peer) for peer, senders in heard.items() for sender in senders]
    arrows = len(links) <= MOST_ARROWS
    others = _links([link for link in links if link[1] != example], places, arrows)
    picked = _links([link for link in links if link[1] == example], places, arrows)
    faint = f"--faint:{max(0.12, min(0.6, 60 / max(1, len(links)))):.2f}"
    drawn = [
        element("path", d=others, class_="links", style=faint),
        element("path", d=picked, class_="links picked"),
    ]
    hearers: dict[str, list[str]] = {peer: [] for peer in roster}
    for sender, peer in links:
        hearers[sender].append(peer)
    for peer in roster:
        known = f"hears {_few(heard.get(peer, []))}; is heard by {_few(hearers[peer])}"
        title = f"peer {peer}: {'offline' if peer in away else known}"
        kind = "away" if peer in away else "picked" if peer == example else ""
        drawn.append(_node(places[peer], title, kind, len(roster)))
    return svg(WIDTH, WIDTH, label, *drawn, *_names(roster), size="graph")


def star(centre: str, roster: Sequence[str], active: Collection[str] | None, label: str) -> Markup:
    """Peers around a server; of the last round's cohort the links are picked out, where it is known."""
    places = on_circle(roster)
    middle = (WIDTH / 2, WIDTH / 2)
    spokes = {peer: f"M{_at(middle)}L{_at(places[peer])}" for peer in roster}
    chosen = set(active or ())
    drawn = [
        element("path", d="".join(spokes[peer] for peer in roster if peer not in chosen), class_="links spokes"),
        element("path", d="".join(spokes[peer] for peer in roster if peer in chosen), class_="links picked"),
    ]
    for peer in roster:
        said = "took part" if peer in chosen else "waited"
        title = f"peer {peer}" if active is None else f"peer {peer}: {said} in the last round"
        drawn.append(_node(places[peer], title, "picked" if peer in chosen else "", len(roster)))
    drawn.append(element("circle", element("title", centre), class_="node hub", cx=middle[0], cy=middle[1], r=24))
    drawn.append(element("text", centre, class_="hub", x=middle[0], y=middle[1], dy="0.32em"))
    return svg(WIDTH, WIDTH, label, *drawn, *_names(roster), size="graph")


def on_circle(roster: Sequence[str], radius: float = RADIUS) -> dict[str, Point]:
    """Places on a circle, the first at the top, then clockwise."""
    centre, found = WIDTH / 2, {}
    for k, peer in enumerate(roster):
        angle = 2 * pi * k / len(roster)
        found[peer] = (centre + radius * sin(angle), centre - radius * cos(angle))
    return found


def _links(links: Sequence[tuple[str, str]], places: Mapping[str, Point], arrows: bool) -> str:
    return "".join(_link(places[sender], places[peer], arrows) for sender, peer in links)


def _link(start: Point, end: Point, arrow: bool) -> str:
    line = f"M{_at(start)}L{_at(end)}"
    length = hypot(end[0] - start[0], end[1] - start[1])
    if not arrow or length < 20:
        return line
    along = ((end[0] - start[0]) / length, (end[1] - start[1]) / length)
    tip = (end[0] - 8 * along[0], end[1] - 8 * along[1])  # at the rim of the peer's dot
    back = (tip[0] - 7 * along[0], tip[1] - 7 * along[1])
    wings = [(back[0] + side * along[1], back[1] - side * along[0]) for side in (3.5, -3.5)]
    return f"{line}M{_at(wings[0])}L{_at(tip)}L{_at(wings[1])}"


def _node(place: Point, title: str, kind: str, among: int) -> Markup:
    """A dot with a title; smaller where there are so many that they would run into each other."""
    radius = max(1.5, min(6.0, 0.45 * 2 * pi * RADIUS / among))
    shape = {"cx": place[0], "cy": place[1], "r": radius}
    return element("circle", element("title", title), class_=f"node {kind}".strip(), **shape)


def _names(roster: Sequence[str]) -> list[Markup]:
    """The peers' names outside the circle: all of a few, every fifth or so of many."""
    every = next((step for step in (1, 2, 5, 10, 25, 50, 100) if len(roster) <= 32 * step), 1000)
    places = on_circle(roster, RADIUS + 24)
    shown = [(peer, *places[peer]) for peer in roster[::every]]
    return [element("text", peer, class_="tick name", x=x, y=y, dy="0.32em") for peer, x, y in shown]


def _few(peers: Sequence[str]) -> str:
    if not peers:
        return "nobody"
    return ", ".join(peers[:12]) + (f" and {len(peers) - 12} more" if len(peers) > 12 else "")


def _at(point: Point) -> str:
    return f"{compact(point[0])} {compact(point[1])}"
