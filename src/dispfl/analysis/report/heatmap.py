"""Heat maps of counts: one colour, more of it where there is more."""

from collections.abc import Sequence

from dispfl.analysis.report.axes import svg
from dispfl.analysis.report.markup import Markup, compact, element

LEVELS = 8
"""Steps of colour. Cells of one step are one path, so that a large map stays a small file."""
WIDTH, LEFT, TOP, BOTTOM = 540.0, 40.0, 22.0, 44.0
WIDEST = 36.0


def heat_map(
    counts: Sequence[Sequence[int]], names: Sequence[str], titles: Sequence[str], most: int, label: str, room: int
) -> Markup:
    """A column for each name, a row for each place in its counts; `most` has the full colour.

    `room` is for how many columns there is to be room, so that maps beside each other have cells of one size.
    """
    rows, width = len(counts[0]), min(WIDEST, (WIDTH - LEFT - 4) / room)
    height = max(2.5, min(18.0, 300 / rows))
    right, bottom = LEFT + len(counts) * width, TOP + rows * height
    drawn = [element("text", "class", class_="axis", x=2, y=12)]
    drawn += [_cells(counts, level, width, height, most) for level in range(1, LEVELS + 1)]
    every = next(step for step in (1, 2, 5, 10) if step * height >= 15)
    for row in range(0, rows, every):
        drawn.append(element("text", str(row), class_="tick y", x=LEFT - 6, y=TOP + (row + 0.5) * height, dy="0.32em"))
    for k, (name, title) in enumerate(zip(names, titles, strict=True)):
        left, tip = LEFT + k * width, element("title", title)
        drawn.append(element("rect", tip, class_="tip", x=left, y=TOP, width=width, height=rows * height))
        if k % (2 if width >= 30 else 5) == 0:
            drawn.append(element("text", name, class_="tick x", x=left + width / 2, y=bottom + 6, dy="0.8em"))
    drawn.append(element("rect", class_="outline", x=LEFT, y=TOP, width=right - LEFT, height=rows * height))
    drawn.append(element("text", "peer", class_="axis x", x=(LEFT + right) / 2, y=bottom + BOTTOM - 4))
    return svg(WIDTH, bottom + BOTTOM, label, *drawn, size="map")


def _cells(counts: Sequence[Sequence[int]], level: int, width: float, height: float, most: int) -> Markup:
    """All cells of one step of colour."""
    shape = f"h{width:.2f}v{height:.2f}h-{width:.2f}z"
    path = [
        f"M{compact(LEFT + k * width)} {compact(TOP + row * height)}{shape}"
        for k, column in enumerate(counts)
        for row, count in enumerate(column)
        if count and -(-count * LEVELS // most) == level
    ]
    return element("path", d="".join(path), class_="cell", style=f"--more:{level / LEVELS:g}")
