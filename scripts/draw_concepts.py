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
from dispfl.topology import peer_names

HELD, EMPTY, LINE, TEXT, ACCENT = "#3b6fb6", "#edf1f7", "#9aa7b8", "#1f2937", "#c2571a"
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


def arrow(x1: float, y1: float, x2: float, y2: float, colour: str = LINE) -> str:
    """A line with a small head at its end."""
    angle = math.atan2(y2 - y1, x2 - x1)
    head = " ".join(
        f"{x2 - 8 * math.cos(angle + turn):.1f},{y2 - 8 * math.sin(angle + turn):.1f}"
        for turn in (0.4, -0.4)
    )
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"/>'
        f'<polygon points="{x2:.1f},{y2:.1f} {head}" fill="{colour}"/>'
    )


def cells(
    x: float,
    y: float,
    rows: Sequence[Sequence[str]],
    marked: Sequence[Sequence[bool]] | None = None,
) -> str:
    """A grid of coloured cells; marked ones have a frame."""
    found = []
    for i, row in enumerate(rows):
        for j, colour in enumerate(row):
            frame = (
                f' stroke="{ACCENT}" stroke-width="2"'
                if marked and marked[i][j]
                else f' stroke="{LINE}"'
            )
            place = (
                f'x="{x + j * CELL:g}" y="{y + i * CELL:g}" width="{CELL - 2}" height="{CELL - 2}"'
            )
            found.append(f'<rect {place} fill="{colour}"{frame}/>')
    return "".join(found)


def half(size: int, seed: int) -> torch.Tensor:
    """A random mask of density 0.5."""
    return random_mask(Layout(("layer",), ((size,),)), {"layer": 0.5}, rng=stream(seed, "picture"))


def mask_cells(mask: torch.Tensor) -> list[list[str]]:
    return [[HELD if held else EMPTY for held in row] for row in mask.tolist()]


def topologies() -> str:
    """Who receives whose models among eight peers; the random graph in two rounds."""
    kinds: list[tuple[str, Topology, int]] = [
        ("ring", Ring(), 0),
        ("grid", Grid(), 0),
        ("exponential", Exponential(), 0),
        ("full", Full(), 0),
        ("random, round 0", RandomRegular(degree=2), 0),
        ("random, round 1", RandomRegular(degree=2), 1),
    ]
    parts, radius, roster = [], 52, peer_names(8)
    for number, (name, topology, t) in enumerate(kinds):
        cx, cy = 90 + 170 * (number % 3), 85 + 180 * (number // 3)
        at = {
            peer: (
                cx + radius * math.sin(2 * math.pi * k / 8),
                cy - radius * math.cos(2 * math.pi * k / 8),
            )
            for k, peer in enumerate(roster)
        }
        graph = topology.neighbours(0, t, roster)
        for receiver, senders in graph.items():
            for sender in senders:
                (x1, y1), (x2, y2) = at[sender], at[receiver]
                length = math.hypot(x2 - x1, y2 - y1)
                ux, uy = (x2 - x1) / length, (y2 - y1) / length
                if (
                    sender in graph[receiver] and receiver in graph[sender]
                ):  # both ways: a plain line
                    parts.append(
                        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
                        f' stroke="{LINE}"/>'
                    )
                else:
                    parts.append(arrow(x1 + 9 * ux, y1 + 9 * uy, x2 - 9 * ux, y2 - 9 * uy))
        parts += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="8" fill="{HELD}"/>' for x, y in at.values()
        ]
        parts.append(text(cx, cy + 82, name))
    return svg(520, 360, parts)


def masks() -> str:
    """A mask of single weights and one of channels, of the same layer at density 0.5."""
    single = half(144, 0).view(12, 12)
    units = torch.zeros(2, 12, dtype=torch.bool)
    for side, row in enumerate(units):
        row[torch.randperm(12, generator=stream(side, "picture-units"))[:8]] = True
    whole = units[0][:, None] & units[1][None, :]
    parts = [cells(30, 40, mask_cells(single)), cells(290, 40, mask_cells(whole))]
    parts += [
        text(30 + 6 * CELL, 26, "structure = weights"),
        text(290 + 6 * CELL, 26, "structure = channels"),
    ]
    parts += [
        text(30 + 6 * CELL, 256, "any weight may be left out:"),
        text(30 + 6 * CELL, 274, "the kernels stay dense"),
    ]
    parts += [text(290 + 6 * CELL, 256, "whole rows and columns are left out:")]
    parts += [text(290 + 6 * CELL, 274, "what is held is a smaller dense layer")]
    return svg(520, 290, parts)


def one_round() -> str:
    """Mix, learn, evolve: the steps of one peer on a toy layer of 24 weights, computed with the
    package."""
    rows, columns, keep = 4, 6, 12
    drawn = [half(24, seed) for seed in (1, 2, 3)]
    assert all(int(mask.sum()) == keep for mask in drawn)
    weights = [torch.where(mask, 1.0, 0.0) for mask in drawn]
    mixed = gossip_average(weights, drawn, drawn[0])
    assert torch.equal(mixed, weights[0])  # all hold ones
    holders = torch.stack(drawn).sum(0)
    alone = drawn[0] & (holders == 1)
    pruned = drawn[0].nonzero()[:3].flatten()
    grown = (~drawn[0]).nonzero()[-3:].flatten()
    after = drawn[0].clone()
    after[pruned], after[grown] = False, True
    changed = torch.zeros(24, dtype=torch.bool)
    changed[pruned] = changed[grown] = True

    def grid(mask: torch.Tensor) -> list[list[str]]:
        return mask_cells(mask.view(rows, columns))

    def shades() -> list[list[str]]:
        colours = {0: EMPTY, 1: "#a9c3e6", 2: "#6d98d0", 3: HELD}
        return [
            [colours[int(n)] if ours else EMPTY for n, ours in zip(line, own, strict=True)]
            for line, own in zip(
                holders.view(rows, columns), drawn[0].view(rows, columns), strict=True
            )
        ]

    wide, high = columns * CELL, rows * CELL
    x = [24, 190, 356, 522]
    parts = [
        text(x[0] + wide / 2, 24, "neighbours"),
        cells(x[0], 36, grid(drawn[1])),
        cells(x[0], 116, grid(drawn[2])),
    ]
    parts += [text(x[0] + wide / 2, 212, "ourselves"), cells(x[0], 222, grid(drawn[0]))]
    for y in (36, 116, 222):
        parts.append(
            arrow(x[0] + wide + 8, y + high / 2, x[1] - 10, 116 + high / 2 + (y - 116) * 0.15)
        )
    parts += [
        text(x[1] + wide / 2, 104, "1  mix"),
        cells(x[1], 116, shades(), alone.view(rows, columns).tolist()),
    ]
    parts += [
        text(x[1] + wide / 2, 200, "average over the", size=12),
        text(x[1] + wide / 2, 216, "peers that hold it", size=12),
    ]
    parts += [text(x[2] + wide / 2, 104, "2  learn"), cells(x[2], 116, grid(drawn[0]))]
    parts += [
        text(x[2] + wide / 2, 200, "local SGD on the", size=12),
        text(x[2] + wide / 2, 216, "held weights", size=12),
    ]
    marked = changed.view(rows, columns).tolist()
    parts += [text(x[3] + wide / 2, 104, "3  evolve"), cells(x[3], 116, grid(after), marked)]
    parts += [
        text(x[3] + wide / 2, 200, "prune the smallest,", size=12),
        text(x[3] + wide / 2, 216, "regrow as many", size=12),
    ]
    for left, right in ((1, 2), (2, 3)):
        parts.append(arrow(x[left] + wide + 6, 116 + high / 2, x[right] - 8, 116 + high / 2))
    parts.append(text(x[1], 270, "darker: held by more peers", "start", 12))
    parts.append(
        text(
            x[1],
            288,
            "framed in 1: held by ourselves alone; framed in 3: changed",
            "start",
            12,
            ACCENT,
        )
    )
    return svg(640, 304, parts)


def main(folder: Path) -> None:
    """Write all pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, picture in (("topologies", topologies), ("masks", masks), ("round", one_round)):
        (folder / f"{name}.svg").write_text(picture())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
