"""Draw the picture of README.md from a run of the demo: the graph, a mask, the learning curves.

    dispfl demo --out /tmp/demo
    python scripts/readme_picture.py /tmp/demo docs/images

Writes four SVG files: for wide and narrow screens, each for light and dark pages.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from dispfl import RandomRegular, Run, load_dataset

PEER = "004"
"""The peer whose neighbours and mask are shown."""
LAYER = "hidden.weight"
"""The largest layer, with 95 % of the weights; some rows and columns of it are shown."""
METHODS = {"dispfl": "Dis-PFL", "local": "Local", "dpsgd": "D-PSGD", "fedavg": "FedAvg"}
PANEL = 300.0
"""Width of one of the three panels."""


@dataclass(frozen=True)
class Theme:
    """Colours on a light or a dark page; the background is the page's own."""

    name: str
    text: str
    muted: str
    line: str
    card: str
    accent: str
    shades: tuple[str, ...]
    """Of a weight that 0, 1, ... neighbours hold too."""
    empty: str
    curves: Mapping[str, str]


LIGHT = Theme(
    name="light",
    text="#1f2328",
    muted="#59636e",
    line="#d5dbe2",
    card="#ffffff",
    accent="#1f6fd6",
    shades=("#f0a35e", "#b9d3f6", "#83b1ee", "#4d8fe2", "#1f6fd6"),
    empty="#eef1f5",
    curves={"dispfl": "#1f6fd6", "local": "#c2571a", "dpsgd": "#7a55c7", "fedavg": "#17836b"},
)
DARK = Theme(
    name="dark",
    text="#f0f6fc",
    muted="#9198a1",
    line="#3a424c",
    card="#161b22",
    accent="#58a6ff",
    shades=("#e08a45", "#1d3a63", "#27558f", "#3a7bcb", "#6cb2ff"),
    empty="#1a2028",
    curves={"dispfl": "#58a6ff", "local": "#f0883e", "dpsgd": "#b392f0", "fedavg": "#3fb99a"},
)


@dataclass(frozen=True)
class Demo:
    """What the picture shows of a run."""

    graph: Mapping[str, Sequence[str]]
    """Whom each peer receives from in the last round."""
    labels: Mapping[str, Sequence[int]]
    """Training samples of each class, by peer."""
    holders: Tensor
    """For some weights of one layer, how many neighbours hold them too; -1: the peer does not."""
    curves: Mapping[str, Sequence[float]]
    """The mean accuracy after each round, by method."""

    @classmethod
    def read(cls, folder: Path) -> "Demo":
        """Read the four runs of `dispfl demo`."""
        runs = {method: Run.load(folder / method) for method in METHODS}
        run = runs["dispfl"]
        settings = run.config["topology"]
        topology = RandomRegular(degree=settings["degree"])
        roster = run.metrics.roster
        graph = topology.neighbours(run.config["seed"], run.config["rounds"] - 1, roster)

        assert run.split is not None
        train_labels = load_dataset(run.config["data"]["name"]).train_labels
        counts = run.split.label_counts(train_labels, 10).tolist()

        own_mask = run.masks(PEER)[LAYER]
        neighbour_masks = [run.masks(neighbour)[LAYER] for neighbour in graph[PEER]]
        holders = torch.where(own_mask, torch.stack(neighbour_masks).sum(0), -1)

        curves = {}
        for method, finished in runs.items():
            curves[method] = [record["scores"]["accuracy"]["mean"] for record in finished.metrics]
        return cls(graph, dict(zip(roster, counts, strict=True)), holders[:20, 588:612], curves)


@dataclass
class Drawing:
    """SVG elements with their top left corner at (x, y)."""

    theme: Theme
    x: float
    y: float
    parts: list[str] = field(default_factory=list)

    def text(
        self, x: float, y: float, words: str, *, colour: str = "", size: float = 13.5, **style: str
    ) -> None:
        attributes = "".join(f' {key.replace("_", "-")}="{value}"' for key, value in style.items())
        self.parts.append(
            f'<text x="{self.x + x:.1f}" y="{self.y + y:.1f}" font-size="{size:g}" '
            f'fill="{colour or self.theme.text}"{attributes}>{words}</text>'
        )

    def line(self, points: Sequence[tuple[float, float]], colour: str, width: float = 1.0) -> None:
        places = " ".join(f"{self.x + x:.1f},{self.y + y:.1f}" for x, y in points)
        self.parts.append(
            f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="{width:g}" '
            'stroke-linejoin="round" stroke-linecap="round"/>'
        )

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str,
        stroke: str = "",
        radius: float = 0,
    ) -> None:
        frame = f' stroke="{stroke}" stroke-width="1.5"' if stroke else ""
        self.parts.append(
            f'<rect x="{self.x + x:.1f}" y="{self.y + y:.1f}" width="{width:g}" '
            f'height="{height:g}" rx="{radius:g}" fill="{fill}"{frame}/>'
        )

    def arrow(
        self, start: tuple[float, float], end: tuple[float, float], colour: str, width: float
    ) -> None:
        """A line that ends in a small head."""
        angle = math.atan2(end[1] - start[1], end[0] - start[0])
        self.line([start, end], colour, width)
        wings = [
            (end[0] - 8 * math.cos(angle + turn), end[1] - 8 * math.sin(angle + turn))
            for turn in (0.45, -0.45)
        ]
        self.line([wings[0], end, wings[1]], colour, width)

    def heading(self, title: str, *subtitle: str) -> None:
        self.text(0, 16, title, size=16, font_weight="600")
        for row, words in enumerate(subtitle):
            self.text(0, 37 + 18 * row, words, colour=self.theme.muted)


def draw_graph(panel: Drawing, demo: Demo) -> None:
    """The peers on a circle, with their label histograms; one peer's neighbours are highlighted."""
    theme = panel.theme
    panel.heading(
        "Models travel, data stays",
        "A new random graph in every round,",
        "no server. Bars: each peer's labels.",
    )
    centre_x, centre_y, radius = 144, 196, 118
    roster = sorted(demo.graph)
    places = {}
    for k, peer in enumerate(roster):
        angle = 2 * math.pi * k / len(roster)
        places[peer] = (centre_x + radius * math.sin(angle), centre_y - radius * math.cos(angle))

    for receiver, senders in demo.graph.items():
        for sender in senders:
            if receiver != PEER:
                panel.line([places[sender], places[receiver]], theme.line, 0.8)
    for sender in demo.graph[PEER]:
        panel.arrow(places[sender], between(places[sender], places[PEER], 24), theme.accent, 2.2)

    for peer, (x, y) in places.items():
        active = peer == PEER or peer in demo.graph[PEER]
        frame = theme.accent if active else theme.line
        fill = theme.accent if active else theme.muted
        panel.box(x - 18, y - 12, 36, 24, theme.card, frame, 5)
        counts = demo.labels[peer]
        for label, count in enumerate(counts):
            height = 18 * count / max(counts)
            panel.box(x - 14.5 + 3 * label, y + 9 - height, 2, height, fill)


def between(
    start: tuple[float, float], end: tuple[float, float], distance: float
) -> tuple[float, float]:
    """Return the point at a distance before the end of a line."""
    length = math.hypot(end[0] - start[0], end[1] - start[1])
    share = 1 - distance / length
    return start[0] + share * (end[0] - start[0]), start[1] + share * (end[1] - start[1])


def draw_mask(panel: Drawing, demo: Demo) -> None:
    """Some weights of one peer, shaded by how many of its neighbours hold them too."""
    theme = panel.theme
    panel.heading(
        "Each peer has its own mask",
        "It keeps half of the weights, and",
        "averages those that it shares.",
    )
    cell = 10.8
    for row, line in enumerate(demo.holders.tolist()):
        for column, holders in enumerate(line):
            colour = theme.empty if holders < 0 else theme.shades[holders]
            panel.box(column * cell, 70 + row * cell, cell - 1.5, cell - 1.5, colour, radius=1.5)

    y = 70 + len(demo.holders) * cell + 18
    panel.box(0, y - 9, 10, 10, theme.shades[0], radius=1.5)
    panel.text(15, y, "its own alone", colour=theme.muted, size=12.5)
    for step, shade in enumerate(theme.shades[1:]):
        panel.box(114 + 11.5 * step, y - 9, 10, 10, shade, radius=1.5)
    panel.text(165, y, "shared with 1 to 4", colour=theme.muted, size=12.5)


def draw_curves(panel: Drawing, demo: Demo) -> None:
    """The accuracy of four methods by round, with their final values."""
    theme = panel.theme
    panel.heading(
        "Peers gain from each other",
        "Mean accuracy (%) by round, with half",
        "of the bytes of FedAvg and D-PSGD.",
    )
    left, right, top, bottom = 24.0, 180.0, 76.0, 290.0
    low, high = 0.3, 0.9

    def at(t: int, score: float) -> tuple[float, float]:
        x = left + (right - left) * t / (len(demo.curves["dispfl"]) - 1)
        return x, bottom - (bottom - top) * (score - low) / (high - low)

    for percent in (40, 60, 80):
        _, y = at(0, percent / 100)
        panel.line([(left, y), (right, y)], theme.line, 0.8)
        panel.text(left - 8, y + 4, str(percent), colour=theme.muted, size=12, text_anchor="end")
    for number in (1, 8, 16):
        x, _ = at(number - 1, low)
        panel.text(x, bottom + 18, str(number), colour=theme.muted, size=12, text_anchor="middle")

    previous = top - 30
    for method in sorted(demo.curves, key=lambda method: -demo.curves[method][-1]):
        scores = demo.curves[method]
        colour = theme.curves[method]
        width, weight = (3.0, "600") if method == "dispfl" else (1.8, "400")
        panel.line([at(t, score) for t, score in enumerate(scores)], colour, width)
        _, y = at(len(scores) - 1, scores[-1])
        previous = max(y + 4, previous + 18)
        words = f"{METHODS[method]} {100 * scores[-1]:.0f} %"
        panel.text(right + 9, previous, words, colour=colour, size=13.5, font_weight=weight)


def picture(demo: Demo, theme: Theme, *, narrow: bool) -> str:
    """Return the three panels side by side, or one below the other."""
    if narrow:
        width, height = PANEL + 24, 1010.0
        corners = [(14.0, 8.0), (14.0, 366.0), (14.0, 694.0)]
    else:
        width, height = 3 * PANEL + 96, 346.0
        corners = [(14.0 + column * (PANEL + 42), 10.0) for column in range(3)]
    parts = []
    for draw, (x, y) in zip((draw_graph, draw_mask, draw_curves), corners, strict=True):
        panel = Drawing(theme, x, y)
        draw(panel, demo)
        parts += panel.parts
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        f'width="{width:g}" height="{height:g}" '
        'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif">\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def main(runs: Path, folder: Path) -> None:
    """Write all variants."""
    demo = Demo.read(runs)
    for theme in (LIGHT, DARK):
        (folder / f"demo-{theme.name}.svg").write_text(picture(demo, theme, narrow=False))
        (folder / f"demo-narrow-{theme.name}.svg").write_text(picture(demo, theme, narrow=True))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
