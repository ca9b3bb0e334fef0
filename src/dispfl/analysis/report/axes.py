"""Scales, ticks and the frame that every chart with axes stands in."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, log10

from dispfl.analysis.report.markup import Markup, compact, element, joined


@dataclass(frozen=True)
class Scale:
    """A straight line from values to coordinates."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """Where a value stands."""
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


@dataclass(frozen=True)
class Size:
    """A chart's outline and margins, in pixels at its natural width."""

    name: str
    width: float
    height: float
    left: float
    right: float
    top: float
    bottom: float


LARGE = Size("large", 540, 320, 56, 14, 36, 54)
"""Two beside each other fill a desktop window; on a phone one does, and the style sheet enlarges its letters."""
SMALL = Size("small", 330, 200, 46, 8, 30, 40)
"""One of several that look alike."""


@dataclass(frozen=True)
class Frame:
    """Where values stand in a chart, and the grid, ticks and labels around them."""

    size: Size
    x: Scale
    y: Scale
    drawing: Markup

    def svg(self, label: str, *marks: str) -> Markup:
        """The chart: grid below, marks above. The label is what a screen reader says in its place."""
        return svg(self.size.width, self.size.height, label, self.drawing, *marks, size=self.size.name)


def svg(width: float, height: float, label: str, *inside: str, size: str = "") -> Markup:
    """A picture that scales with its column."""
    view = f"0 0 {compact(width)} {compact(height)}"
    return element("svg", *inside, class_=f"chart {size}".strip(), viewBox=view, role="img", aria_label=label)


def ticks(low: float, high: float, count: int = 5, whole: bool = False) -> list[tuple[float, str]]:
    """About so many round numbers within a range, 1, 2 or 5 times a power of ten apart, as numbers and as text."""
    rough = (high - low) / count
    power = 10.0 ** floor(log10(rough))
    step = min((power * times for times in (1, 2, 5, 10)), key=lambda near: abs(log10(near / rough)))
    if whole:
        step = max(1.0, step)
    decimals = max(0, -floor(log10(step) + 1e-9))
    places = range(ceil(low / step - 1e-9), floor(high / step + 1e-9) + 1)
    return [(place * step, f"{place * step:,.{decimals}f}".replace(",", "\u202f")) for place in places]


def padded(low: float, high: float) -> tuple[float, float]:
    """A range with a little air at both ends; what is never negative stays so."""
    low, high = widened(low, high)
    air = 0.05 * (high - low)
    return (max(0.0, low - air) if low >= 0 else low - air), high + air


def widened(low: float, high: float) -> tuple[float, float]:
    """A range that is not empty."""
    half = 0.05 * max(1.0, abs(low))
    return (low, high) if high > low else (low - half, high + half)


def frame(
    size: Size,
    x_range: tuple[float, float],
    y_range: tuple[float, float],
    x_label: str,
    y_label: str,
    *,
    whole_x: bool = False,
    x_names: Sequence[tuple[float, str]] | None = None,
    mirrored: bool = False,
) -> Frame:
    """Axes for these ranges.

    `x_names` stand in place of the numbers of x. With `mirrored`, y is told by its size alone, for bars both ways.
    """
    x = Scale(*widened(*x_range), size.left, size.width - size.right)
    y = Scale(*widened(*y_range), size.height - size.bottom, size.top)
    across = f"H{compact(x.end)}"
    drawing = [element("text", y_label, class_="axis", x=2, y=size.top - 16)]
    for tick, text in ticks(y.low, y.high, count=5 if size is LARGE else 4):
        text = text.removeprefix("-") if mirrored else text
        drawing.append(element("path", d=f"M{compact(x.start)} {compact(y(tick))}{across}", class_="grid"))
        drawing.append(element("text", text, class_="tick y", x=size.left - 8, y=y(tick), dy="0.32em"))
    base = y(0) if y.low < 0 < y.high else y.start
    drawing.append(element("path", d=f"M{compact(x.start)} {compact(base)}{across}", class_="base"))
    for tick, text in ticks(x.low, x.high, whole=whole_x) if x_names is None else x_names:
        drawing.append(element("text", text, class_="tick x", x=x(tick), y=y.start + 8, dy="0.8em"))
    drawing.append(element("text", x_label, class_="axis x", x=(x.start + x.end) / 2, y=size.height - 8))
    return Frame(size, x, y, joined(drawing))
