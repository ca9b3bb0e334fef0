"""Line, bar and dot charts as SVG."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import ceil, floor, log10
from statistics import fmean
from typing import TypeVar

from dispfl.report.markup import Markup, coordinate, element, join_markup

MAX_POINTS = 200
"""More points would not be visible on a chart of this width."""
MAX_DOTS = 40
"""Lines with more points have no dots."""
MAX_NAMES = 16
"""The names of more bars would overlap."""
T = TypeVar("T")


@dataclass(frozen=True)
class LinearScale:
    """A linear map from values to coordinates."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """Return the coordinate of a value."""
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


@dataclass(frozen=True)
class ChartSize:
    """A chart's size and margins, in pixels at its natural width."""

    name: str
    width: float
    height: float
    left: float
    right: float
    top: float
    bottom: float


LARGE = ChartSize("large", 540, 320, 56, 14, 36, 54)
"""Two fit side by side in a desktop window, one on a phone, where the style sheet enlarges its
text."""
SMALL = ChartSize("small", 330, 200, 46, 8, 30, 40)
"""For several similar charts."""


@dataclass(frozen=True)
class ChartFrame:
    """The scales of a chart, with its grid, ticks and labels."""

    size: ChartSize
    x: LinearScale
    y: LinearScale
    drawing: Markup

    def svg(self, label: str, *marks: str) -> Markup:
        """Return the chart, with the grid below the marks. Screen readers read the label."""
        return svg(
            self.size.width, self.size.height, label, self.drawing, *marks, size=self.size.name
        )


def svg(width: float, height: float, label: str, *children: str, size: str = "") -> Markup:
    """Return an SVG image that scales with its column."""
    view = f"0 0 {coordinate(width)} {coordinate(height)}"
    return element(
        "svg", *children, class_=f"chart {size}".strip(), viewBox=view, role="img", aria_label=label
    )


def ticks(low: float, high: float, count: int = 5, whole: bool = False) -> list[tuple[float, str]]:
    """Return about `count` round numbers within a range, 1, 2 or 5 times a power of ten apart, with
    their text."""
    rough = (high - low) / count
    power = 10.0 ** floor(log10(rough))
    step = min(
        (power * times for times in (1, 2, 5, 10)), key=lambda near: abs(log10(near / rough))
    )
    if whole:
        step = max(1.0, step)
    decimals = max(0, -floor(log10(step) + 1e-9))
    multiples = range(ceil(low / step - 1e-9), floor(high / step + 1e-9) + 1)
    return [(k * step, f"{k * step:,.{decimals}f}".replace(",", "\u202f")) for k in multiples]


def padded(low: float, high: float) -> tuple[float, float]:
    """Return a range with a margin at both ends, which does not extend below zero unless the values
    do."""
    low, high = widened(low, high)
    margin = 0.05 * (high - low)
    return (max(0.0, low - margin) if low >= 0 else low - margin), high + margin


def widened(low: float, high: float) -> tuple[float, float]:
    """Return a range that is not empty."""
    half = 0.05 * max(1.0, abs(low))
    return (low, high) if high > low else (low - half, high + half)


def thin_out(values: Sequence[T], limit: int = MAX_POINTS) -> list[T]:
    """Return at most `limit` evenly spaced values, including the first and the last."""
    if len(values) <= limit:
        return list(values)
    return [values[round(number * (len(values) - 1) / (limit - 1))] for number in range(limit)]


def chart_frame(
    size: ChartSize,
    x_range: tuple[float, float],
    y_range: tuple[float, float],
    x_label: str,
    y_label: str,
    *,
    whole_x: bool = False,
    x_names: Sequence[tuple[float, str]] | None = None,
    mirrored: bool = False,
) -> ChartFrame:
    """Return axes for these ranges.

    `x_names` replace the numbers of x. With `mirrored`, the ticks of y have no sign, for bars in
    both directions.
    """
    x = LinearScale(*widened(*x_range), size.left, size.width - size.right)
    y = LinearScale(*widened(*y_range), size.height - size.bottom, size.top)
    across = f"H{coordinate(x.end)}"
    drawing = [element("text", y_label, class_="axis", x=2, y=size.top - 16)]
    for tick, text in ticks(y.low, y.high, count=5 if size is LARGE else 4):
        text = text.removeprefix("-") if mirrored else text
        drawing.append(
            element(
                "path", d=f"M{coordinate(x.start)} {coordinate(y(tick))}{across}", class_="grid"
            )
        )
        drawing.append(
            element("text", text, class_="tick y", x=size.left - 8, y=y(tick), dy="0.32em")
        )
    base = y(0) if y.low < 0 < y.high else y.start
    drawing.append(
        element("path", d=f"M{coordinate(x.start)} {coordinate(base)}{across}", class_="base")
    )
    for tick, text in ticks(x.low, x.high, whole=whole_x) if x_names is None else x_names:
        drawing.append(element("text", text, class_="tick x", x=x(tick), y=y.start + 8, dy="0.8em"))
    drawing.append(
        element("text", x_label, class_="axis x", x=(x.start + x.end) / 2, y=size.height - 8)
    )
    return ChartFrame(size, x, y, join_markup(drawing))


@dataclass(frozen=True)
class Curve:
    """One line of a chart."""

    label: str
    css_class: str
    """The class that gives a row its colour on the whole page."""
    x: Sequence[float]
    y: Sequence[float]
    spread: Sequence[float] = field(default=())
    """Half the height of the band around each point; empty for no band."""
    constant: bool = False
    """Whether only the last value is drawn, from edge to edge, because the curve has no extent on
    x."""
    secondary: bool = False
    """Whether the line is thin and dashed."""


def line_chart(
    curves: Sequence[Curve],
    x_label: str,
    y_label: str,
    *,
    whole_x: bool = False,
    from_zero: bool = False,
    y_format: str = ".3f",
    x_word: str = "",
    x_unit: str = "",
) -> Markup:
    """Return lines with bands.

    With `x_word`, the name of an x that all lines share, the tooltip of an x shows the values of
    all lines; without it, the tooltip of a point shows the line's value at an x in `x_unit`.
    """
    curves = [_thin_out(curve) for curve in curves]
    xs = [x for curve in curves if not curve.constant for x in curve.x] or [0.0, 1.0]
    pairs = [(y, s) for curve in curves for y, s in zip(curve.y, _spread(curve), strict=True)]
    lowest, highest = min(y - s for y, s in pairs), max(y + s for y, s in pairs)
    if all(y >= 0 for y, _ in pairs):  # no room for the part of a band that is below zero
        lowest = max(0.0, lowest)
    frame = chart_frame(
        LARGE,
        (0.0 if from_zero else min(xs), max(xs)),
        padded(lowest, highest),
        x_label,
        y_label,
        whole_x=whole_x,
    )
    bands = [_band(frame, curve) for curve in curves if curve.spread]
    lines = [_line(frame, curve) for curve in reversed(curves)]  # the first of the legend is on top
    tips = (
        _strip_tips(frame, curves, x_word, y_format)
        if x_word
        else _dot_tips(frame, curves, x_unit, y_format)
    )
    ends = ", ".join(
        f"{curve.label} {curve.y[-1]:{y_format}}" for curve in curves if not curve.secondary
    )
    return frame.svg(f"{y_label} against {x_label}. Final values: {ends}.", *bands, *lines, tips)


def _thin_out(curve: Curve) -> Curve:
    return replace(curve, x=thin_out(curve.x), y=thin_out(curve.y), spread=thin_out(curve.spread))


def _spread(curve: Curve) -> Sequence[float]:
    return curve.spread or [0.0] * len(curve.y)


def _line(frame: ChartFrame, curve: Curve) -> Markup:
    css_class = curve.css_class
    if curve.constant:
        d = (
            f"M{coordinate(frame.x.start)}"
            f" {coordinate(frame.y(curve.y[-1]))}H{coordinate(frame.x.end)}"
        )
        return element("path", d=d, class_=f"line constant {css_class}")
    points = [
        f"{coordinate(frame.x(x))} {coordinate(frame.y(y))}"
        for x, y in zip(curve.x, curve.y, strict=True)
    ]
    line = element(
        "path", d="M" + "L".join(points), class_=f"line {'secondary ' * curve.secondary}{css_class}"
    )
    if curve.secondary or len(points) > MAX_DOTS:
        return line
    return join_markup(
        [
            line,
            element(
                "path", d="".join(f"M{point}h0" for point in points), class_=f"dots {css_class}"
            ),
        ]
    )


def _band(frame: ChartFrame, curve: Curve) -> Markup:
    triples = list(zip(curve.x, curve.y, curve.spread, strict=True))
    upper = [f"{coordinate(frame.x(x))} {coordinate(frame.y(y + s))}" for x, y, s in triples]
    lower = [
        f"{coordinate(frame.x(x))} {coordinate(frame.y(max(y - s, frame.y.low)))}"
        for x, y, s in reversed(triples)
    ]
    return element(
        "path", d="M" + "L".join([*upper, *lower]) + "Z", class_=f"band {curve.css_class}"
    )


def _strip_tips(frame: ChartFrame, curves: Sequence[Curve], x_word: str, y_format: str) -> Markup:
    """Return an invisible strip over every x, with the values of all lines as its tooltip."""
    values: dict[float, list[str]] = {}
    for curve in curves:
        for x, y, s in zip(curve.x, curve.y, _spread(curve), strict=True):
            text = f"{y:{y_format}}" + (f" ± {s:{y_format}}" if curve.spread else "")
            values.setdefault(x, []).append(f"{curve.label}: {text}")
    xs = sorted(values)
    edges = [frame.x.start, *(frame.x((a + b) / 2) for a, b in pairwise(xs)), frame.x.end]
    top, height = frame.y.end, frame.y.start - frame.y.end
    strips = []
    for x, (left, right) in zip(xs, pairwise(edges), strict=True):
        title = element("title", "\n".join([f"{x_word} {x:g}", *values[x]]))
        strips.append(element("rect", title, x=left, y=top, width=right - left, height=height))
    return element("g", *strips, class_="tips")


def _dot_tips(frame: ChartFrame, curves: Sequence[Curve], unit: str, y_format: str) -> Markup:
    """Return invisible dots over points of each line, with their values as tooltips."""
    dots = []
    for curve in curves:
        if curve.constant:
            continue
        for x, y in thin_out(list(zip(curve.x, curve.y, strict=True)), MAX_DOTS):
            title = element("title", f"{curve.label}: {y:{y_format}} at {x:.4g} {unit}")
            dots.append(element("circle", title, cx=frame.x(x), cy=frame.y(y), r=7))
    return element("g", *dots, class_="tips")


@dataclass(frozen=True)
class Bar:
    """The bars at one place of x, each from zero to a value, with its CSS class."""

    name: str
    parts: Sequence[tuple[float, str]]
    tooltip: str


def bar_chart(
    bars: Sequence[Bar],
    x_label: str,
    y_label: str,
    label: str,
    *,
    size: ChartSize = SMALL,
    y_range: tuple[float, float] | None = None,
    mirrored: bool = False,
) -> Markup:
    """Return bars side by side. Charts that share a scale are given the same `y_range`."""
    values = [value for bar in bars for value, _ in bar.parts]
    low, high = y_range or (min(0.0, *values), max(0.0, *values))
    names = [(float(k), bar.name) for k, bar in enumerate(bars)] if len(bars) <= MAX_NAMES else []
    frame = chart_frame(
        size,
        (-0.5, len(bars) - 0.5),
        (low, high),
        x_label,
        y_label,
        x_names=names,
        mirrored=mirrored,
    )
    gap = 0.2 if len(bars) <= 60 else 0.0
    return frame.svg(label, *(_bar(frame, k, bar, gap) for k, bar in enumerate(bars)))


def _bar(frame: ChartFrame, k: int, bar: Bar, gap: float) -> Markup:
    left, right = frame.x(k - 0.5 + gap / 2), frame.x(k + 0.5 - gap / 2)
    children = [element("title", bar.tooltip)]
    for value, css_class in bar.parts:
        top, bottom = sorted((frame.y(value), frame.y(0)))
        width = (
            right - left + (0 if gap else 0.5)
        )  # overlaps the next bar, so that no seam is visible
        shape = {"x": left, "y": top, "width": width, "height": max(bottom - top, 0.5)}
        children.append(element("rect", class_=f"bar {css_class}", **shape))
    return element("g", *children)


@dataclass(frozen=True)
class DotColumn:
    """The values of one group, drawn as dots above its name."""

    name: str
    values: Sequence[float]
    css_class: str

    @property
    def mean(self) -> float:
        return fmean(self.values)


def dot_chart(
    columns: Sequence[DotColumn], x_label: str, y_label: str, y_format: str = ".3f"
) -> Markup:
    """Return a dot for every value and a line at every group's mean; dots are spread sideways to
    stay visible."""
    values = [value for column in columns for value in column.values]
    names = [(float(k), column.name) for k, column in enumerate(columns)]
    y_range = padded(min(values), max(values))
    frame = chart_frame(LARGE, (-0.5, len(columns) - 0.5), y_range, x_label, y_label, x_names=names)
    drawn = []
    for k, column in enumerate(columns):
        for number, value in enumerate(column.values):
            offset = ((number * 7) % 11 - 5) / 5 * 0.22  # deterministic jitter
            shape = {"cx": frame.x(k + offset), "cy": frame.y(value), "r": 4.0}
            drawn.append(
                element(
                    "circle",
                    element("title", f"{value:{y_format}}"),
                    class_=f"dot {column.css_class}",
                    **shape,
                )
            )
        line = (
            f"M{coordinate(frame.x(k - 0.32))}"
            f" {coordinate(frame.y(column.mean))}H{coordinate(frame.x(k + 0.32))}"
        )
        drawn.append(
            element(
                "path", element("title", f"mean {column.mean:{y_format}}"), d=line, class_="mean"
            )
        )
    means = ", ".join(f"{column.name}: mean {column.mean:{y_format}}" for column in columns)
    return frame.svg(f"{y_label} by {x_label}. {means}.", *drawn)
