"""Draw the pictures of docs/concepts.md as SVG files, from the package's own topologies and masks.

python scripts/draw_concepts.py docs/images
"""

import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from dispfl import (
    Exponential,
    Full,
    Grid,
    Layout,
    RandomRegular,
    Ring,
    Topology,
    gossip_average,
    random_mask,
    stream,
)
from dispfl.round.exchange import Graph
from dispfl.topology import peer_names

HELD = "#3b6fb6"
EMPTY = "#edf1f7"
LINE = "#9aa7b8"
TEXT = "#1f2937"
ACCENT = "#c2571a"
SHADES = (EMPTY, "#a9c3e6", "#6d98d0", HELD)
"""Of a weight that 0, 1, 2 or 3 peers hold."""
CELL = 16


def svg(width: float, height: float, parts: Iterable[str]) -> str:
    """A picture on a white card, so that it can be read on dark pages too."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}"'
        f' width="{width:g}" font-family="system-ui, sans-serif" font-size="13"'
        f' fill="{TEXT}">\n<rect width="{width:g}" height="{height:g}" rx="8" fill="white"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def text(
    x: float, y: float, content: str, anchor: str = "middle", size: int = 13, colour: str = TEXT
) -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size}"'
        f' fill="{colour}">{content}</text>'
    )


def line(x1: float, y1: float, x2: float, y2: float, colour: str = LINE) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"/>'


def arrow(x1: float, y1: float, x2: float, y2: float, colour: str = LINE) -> str:
    """A line with a small head at its end."""
    angle = math.atan2(y2 - y1, x2 - x1)
    corners = [f"{x2:.1f},{y2:.1f}"]
    for turn in (0.4, -0.4):
        x = x2 - 8 * math.cos(angle + turn)
        y = y2 - 8 * math.sin(angle + turn)
        corners.append(f"{x:.1f},{y:.1f}")
    head = f'<polygon points="{" ".join(corners)}" fill="{colour}"/>'
    return line(x1, y1, x2, y2, colour) + head


def cells(
    x: float,
    y: float,
    rows: Sequence[Sequence[str]],
    marked: Sequence[Sequence[bool]] | None = None,
) -> str:
    """A grid of coloured cells; marked ones have a frame."""
    rectangles = []
    for i, row in enumerate(rows):
        for j, colour in enumerate(row):
            stroke = f'stroke="{LINE}"'
            if marked and marked[i][j]:
                stroke = f'stroke="{ACCENT}" stroke-width="2"'
            rectangles.append(
                f'<rect x="{x + j * CELL:g}" y="{y + i * CELL:g}"'
                f' width="{CELL - 2}" height="{CELL - 2}" fill="{colour}" {stroke}/>'
            )
    return "".join(rectangles)


def half(size: int, seed: int) -> torch.Tensor:
    """A random mask of density 0.5."""
    return random_mask(Layout(("layer",), ((size,),)), {"layer": 0.5}, rng=stream(seed, "picture"))


def mask_cells(mask: torch.Tensor) -> list[list[str]]:
    """The colours of a mask's weights, row by row."""
    colours = {True: HELD, False: EMPTY}
    return [[colours[is_held] for is_held in row] for row in mask.tolist()]


def topologies() -> str:
    """Who receives whose models among eight peers; the random graph in two rounds."""
    drawings: list[tuple[str, Topology, int]] = [
        ("ring", Ring(), 0),
        ("grid", Grid(), 0),
        ("exponential", Exponential(), 0),
        ("full", Full(), 0),
        ("random, round 0", RandomRegular(degree=2), 0),
        ("random, round 1", RandomRegular(degree=2), 1),
    ]
    parts = []
    for number, (name, topology, t) in enumerate(drawings):
        centre_x = 90 + 170 * (number % 3)
        centre_y = 85 + 180 * (number // 3)
        graph = topology.neighbours(0, t, peer_names(8))
        parts += graph_on_circle(graph, centre_x, centre_y, radius=52)
        parts.append(text(centre_x, centre_y + 82, name))
    return svg(520, 360, parts)


def graph_on_circle(graph: Graph, centre_x: float, centre_y: float, radius: float) -> list[str]:
    """The peers on a circle, with an arrow to each receiver; a plain line goes both ways."""
    places = {}
    for k, peer in enumerate(sorted(graph)):
        angle = 2 * math.pi * k / len(graph)
        places[peer] = (centre_x + radius * math.sin(angle), centre_y - radius * math.cos(angle))

    parts = []
    for receiver, senders in graph.items():
        for sender in senders:
            x1, y1 = places[sender]
            x2, y2 = places[receiver]
            if receiver in graph[sender]:
                parts.append(line(x1, y1, x2, y2))
            else:
                length = math.hypot(x2 - x1, y2 - y1)
                dx = 9 * ((x2 - x1) / length)
                dy = 9 * ((y2 - y1) / length)
                parts.append(arrow(x1 + dx, y1 + dy, x2 - dx, y2 - dy))
    for x, y in places.values():
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="8" fill="{HELD}"/>')
    return parts


def masks() -> str:
    """A mask of single weights and one of channels, of the same layer at density 0.5."""
    weight_mask = half(144, 0).view(12, 12)
    units = torch.zeros(2, 12, dtype=torch.bool)
    for side, row in enumerate(units):
        row[torch.randperm(12, generator=stream(side, "picture-units"))[:8]] = True
    channel_mask = units[0][:, None] & units[1][None, :]

    weights_x = 30 + 6 * CELL
    channels_x = 290 + 6 * CELL
    parts = [
        cells(30, 40, mask_cells(weight_mask)),
        cells(290, 40, mask_cells(channel_mask)),
        text(weights_x, 26, "structure = weights"),
        text(channels_x, 26, "structure = channels"),
        text(weights_x, 256, "any weight may be left out:"),
        text(weights_x, 274, "the kernels stay dense"),
        text(channels_x, 256, "whole rows and columns are left out:"),
        text(channels_x, 274, "what is held is a smaller dense layer"),
    ]
    return svg(520, 290, parts)


def one_round() -> str:
    """Mix, learn, evolve: the steps of a peer on a toy layer of 24 weights, by the package."""
    rows, columns = 4, 6
    m_k, *neighbour_masks = [half(24, seed) for seed in (1, 2, 3)]
    all_masks = [m_k, *neighbour_masks]
    assert all(int(mask.sum()) == 12 for mask in all_masks)
    weights = [torch.where(mask, 1.0, 0.0) for mask in all_masks]
    mixed = gossip_average(weights, all_masks, m_k)
    assert torch.equal(mixed, weights[0])  # all hold ones

    holders = torch.stack(all_masks).sum(0)
    alone = m_k & (holders == 1)
    shades = torch.where(m_k, holders, 0).view(rows, columns).tolist()
    mixed_cells = [[SHADES[count] for count in row] for row in shades]

    next_mask = m_k.clone()
    next_mask[m_k.nonzero()[:3].flatten()] = False
    next_mask[(~m_k).nonzero()[-3:].flatten()] = True
    changed = m_k ^ next_mask

    def grid(mask: torch.Tensor) -> list[list[str]]:
        return mask_cells(mask.view(rows, columns))

    def marks(flags: torch.Tensor) -> list[list[bool]]:
        marked: list[list[bool]] = flags.view(rows, columns).tolist()
        return marked

    width = columns * CELL
    height = rows * CELL
    x = [24, 190, 356, 522]
    centres = [left + width / 2 for left in x]
    middle = 116 + height / 2
    parts = [
        text(centres[0], 24, "neighbours"),
        cells(x[0], 36, grid(neighbour_masks[0])),
        cells(x[0], 116, grid(neighbour_masks[1])),
        text(centres[0], 212, "ourselves"),
        cells(x[0], 222, grid(m_k)),
    ]
    for y in (36, 116, 222):
        end_y = middle + (y - 116) * 0.15
        parts.append(arrow(x[0] + width + 8, y + height / 2, x[1] - 10, end_y))
    parts += [
        text(centres[1], 104, "1  mix"),
        cells(x[1], 116, mixed_cells, marks(alone)),
        text(centres[1], 200, "average over the", size=12),
        text(centres[1], 216, "peers that hold it", size=12),
        text(centres[2], 104, "2  learn"),
        cells(x[2], 116, grid(m_k)),
        text(centres[2], 200, "local SGD on the", size=12),
        text(centres[2], 216, "held weights", size=12),
        text(centres[3], 104, "3  evolve"),
        cells(x[3], 116, grid(next_mask), marks(changed)),
        text(centres[3], 200, "prune the smallest,", size=12),
        text(centres[3], 216, "regrow as many", size=12),
        arrow(x[1] + width + 6, middle, x[2] - 8, middle),
        arrow(x[2] + width + 6, middle, x[3] - 8, middle),
    ]
    frames = "framed in 1: held by ourselves alone; framed in 3: changed"
    parts.append(text(x[1], 270, "darker: held by more peers", "start", 12))
    parts.append(text(x[1], 288, frames, "start", 12, ACCENT))
    return svg(640, 304, parts)


def main(folder: Path) -> None:
    """Write all pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "topologies.svg").write_text(topologies())
    (folder / "masks.svg").write_text(masks())
    (folder / "round.svg").write_text(one_round())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
