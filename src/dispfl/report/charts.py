"""Line, bar and dot charts as SVG."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import ceil, floor, log10
from statistics import fmean
from typing import TypeVar

from markupsafe import Markup

from dispfl.report.wording import with_thousands

MAX_POINTS = 200
"""More points would not be visible on a chart of this width."""
MAX_DOTS = 40
"""Lines with more points have no dots."""
MAX_NAMES = 16
"""The names of more bars would overlap."""
T = TypeVar("T")
Attribute = str | float | None


def element(tag: str, *children: str, **attributes: Attribute) -> Markup:
    """`element("text", "a<b", class_="tick", x=2)` is `<text class="tick" x="2">a&lt;b</text>`.

    Attributes of None are omitted, numbers are coordinates. Text that is not `Markup` is escaped.
    """
    text = Markup("")
    for key, value in attributes.items():
        if value is None:
            continue
        if not isinstance(value, str):
            value = coordinate(value)
        text += Markup(' {}="{}"').format(key.rstrip("_").replace("_", "-"), value)
    return Markup(f"<{tag}{text}>{Markup().join(children)}</{tag}>")


def coordinate(number: float) -> str:
    """Return a coordinate with at most one decimal: a tenth of a pixel is fine enough."""
    text = f"{number:.1f}".removesuffix(".0")
    if text == "-0":
        return "0"
    return text


def point(x: float, y: float) -> str:
    """Return a position in a path."""
    return f"{coordinate(x)} {coordinate(y)}"


def svg(width: float, height: float, label: str, *children: str, size: str = "") -> Markup:
    """Return an SVG image that scales with its column. Screen readers read the label."""
    view = f"0 0 {point(width, height)}"
    css_class = f"chart {size}".strip()
    return element("svg", *children, class_=css_class, viewBox=view, role="img", aria_label=label)


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
    y_ticks: int
    """About how many."""


LARGE = ChartSize("large", 540, 320, 56, 14, 36, 54, y_ticks=5)
"""Two fit side by side in a desktop window, one on a phone.

On a phone, the style sheet enlarges its text.
"""
SMALL = ChartSize("small", 330, 200, 46, 8, 30, 40, y_ticks=4)
"""For several similar charts."""
Range = tuple[float, float]
Tick = tuple[float, str]
"""A value and its text."""


@dataclass(frozen=True)
class ChartFrame:
    """The scales of a chart, with its grid, ticks and labels."""

    size: ChartSize
    x: LinearScale
    y: LinearScale
    drawing: Markup

    def position(self, x: float, y: float) -> str:
        """Return the position of two values in a path."""
        return point(self.x(x), self.y(y))

    def level(self, y: float, from_x: float, to_x: float) -> str:
        """Return the path of a horizontal line between two coordinates."""
        return f"M{point(from_x, self.y(y))}H{coordinate(to_x)}"

    def svg(self, label: str, *marks: str) -> Markup:
        """Return the chart, with the grid below the marks."""
        size = self.size
        return svg(size.width, size.height, label, self.drawing, *marks, size=size.name)


def ticks(low: float, high: float, count: int = 5, whole: bool = False) -> list[Tick]:
    """Return about `count` round numbers within a range, 1, 2 or 5 times a power of ten apart."""
    rough = (high - low) / count
    power = 10.0 ** floor(log10(rough))
    steps = [power, 2 * power, 5 * power, 10 * power]
    step = min(steps, key=lambda candidate: abs(log10(candidate / rough)))
    if whole:
        step = max(1.0, step)
    decimals = max(0, -floor(log10(step) + 1e-9))
    texts = []
    for k in range(ceil(low / step - 1e-9), floor(high / step + 1e-9) + 1):
        texts.append((k * step, with_thousands(k * step, decimals)))
    return texts


def padded(low: float, high: float) -> Range:
    """Return a range with margins, which do not extend below zero unless the values do."""
    low, high = widened(low, high)
    margin = 0.05 * (high - low)
    bottom = low - margin
    if low >= 0:
        bottom = max(0.0, bottom)
    return bottom, high + margin


def widened(low: float, high: float) -> Range:
    """Return a range that is not empty."""
    if high > low:
        return low, high
    half = 0.05 * max(1.0, abs(low))
    return low - half, high + half


def thin_out(values: Sequence[T], limit: int = MAX_POINTS) -> list[T]:
    """Return at most `limit` evenly spaced values, including the first and the last."""
    if len(values) <= limit:
        return list(values)
    last = len(values) - 1
    spaced_values = []
    for number in range(limit):
        spaced_values.append(values[round(number * last / (limit - 1))])
    return spaced_values


def chart_frame(
    size: ChartSize,
    x_range: Range,
    y_range: Range,
    x_label: str,
    y_label: str,
    *,
    whole_x: bool = False,
    x_names: Sequence[Tick] | None = None,
    mirrored: bool = False,
) -> ChartFrame:
    """Return axes for these ranges.

    `x_names` replace the numbers of x. With `mirrored`, the ticks of y have no sign, for bars in
    both directions.
    """
    x = LinearScale(*widened(*x_range), size.left, size.width - size.right)
    y = LinearScale(*widened(*y_range), size.height - size.bottom, size.top)
    frame = ChartFrame(size, x, y, Markup(""))

    drawing = [element("text", y_label, class_="axis", x=2, y=size.top - 16)]
    for tick, text in ticks(y.low, y.high, size.y_ticks):
        if mirrored:
            text = text.removeprefix("-")
        drawing += [
            element("path", d=frame.level(tick, x.start, x.end), class_="grid"),
            element("text", text, class_="tick y", x=size.left - 8, y=y(tick), dy="0.32em"),
        ]
    base = 0.0 if y.low < 0 < y.high else y.low
    drawing.append(element("path", d=frame.level(base, x.start, x.end), class_="base"))
    if x_names is None:
        x_names = ticks(x.low, x.high, whole=whole_x)
    for tick, name in x_names:
        drawing.append(element("text", name, class_="tick x", x=x(tick), y=y.start + 8, dy="0.8em"))
    middle = (x.start + x.end) / 2
    drawing.append(element("text", x_label, class_="axis x", x=middle, y=size.height - 8))
    return replace(frame, drawing=Markup().join(drawing))


@dataclass
class Curve:
    """One line of a chart."""

    label: str
    css_class: str = ""
    """The class that gives a row its colour on the whole page."""
    x: list[float] = field(default_factory=list)
    y: list[float] = field(default_factory=list)
    spread: list[float] = field(default_factory=list)
    """Half the height of the band around each point; empty for no band."""
    constant: bool = False
    """Whether only the last value is drawn, from edge to edge, for a curve of no extent on x."""
    secondary: bool = False
    """Whether the line is thin and dashed."""
    band_only: bool = False
    """Whether there is no line, only its band."""

    def add(self, x: float, y: float, spread: float | None = None) -> None:
        """Add a point; all points of a curve have a spread, or none has one."""
        self.x.append(x)
        self.y.append(y)
        if spread is not None:
            self.spread.append(spread)

    @property
    def points(self) -> list[tuple[float, float, float]]:
        """Each point with its spread, which is 0 without a band."""
        spread = self.spread or [0.0] * len(self.y)
        return list(zip(self.x, self.y, spread, strict=True))

    @property
    def thinned(self) -> "Curve":
        return replace(self, x=thin_out(self.x), y=thin_out(self.y), spread=thin_out(self.spread))


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
    curves = [curve.thinned for curve in curves]
    x_range, y_range = _ranges(curves, from_zero)
    frame = chart_frame(LARGE, x_range, y_range, x_label, y_label, whole_x=whole_x)

    marks = []
    for curve in curves:
        if curve.spread:
            marks.append(_band(frame, curve))
    for curve in reversed(curves):  # the first of the legend is on top
        marks += _line(frame, curve)
    if x_word:
        marks.append(_strip_tips(frame, curves, x_word, y_format))
    else:
        marks.append(_dot_tips(frame, curves, x_unit, y_format))

    ends = []
    for curve in curves:
        if not curve.secondary and not curve.band_only:
            ends.append(f"{curve.label} {curve.y[-1]:{y_format}}")
    return frame.svg(f"{y_label} against {x_label}. Final values: {', '.join(ends)}.", *marks)


def _ranges(curves: Sequence[Curve], from_zero: bool) -> tuple[Range, Range]:
    """Return the ranges of x and y that hold all curves and their bands."""
    xs: list[float] = []
    values: list[float] = []
    edges: list[float] = []
    for curve in curves:
        if not curve.constant:
            xs += curve.x
        for _, y, spread in curve.points:
            values.append(y)
            edges += [y - spread, y + spread]
    xs = xs or [0.0, 1.0]
    if from_zero:
        xs.append(0.0)
    lowest = min(edges)
    if min(values) >= 0:  # no room for the part of a band that is below zero
        lowest = max(0.0, lowest)
    return (min(xs), max(xs)), padded(lowest, max(edges))


def _line(frame: ChartFrame, curve: Curve) -> list[Markup]:
    css_class = curve.css_class
    if curve.band_only:
        return []
    if curve.constant:
        path = frame.level(curve.y[-1], frame.x.start, frame.x.end)
        return [element("path", d=path, class_=f"line constant {css_class}")]
    points = [frame.position(x, y) for x, y, _ in curve.points]
    path = "M" + "L".join(points)
    if curve.secondary:
        return [element("path", d=path, class_=f"line secondary {css_class}")]
    line = element("path", d=path, class_=f"line {css_class}")
    if len(points) > MAX_DOTS:
        return [line]
    dots = "".join(f"M{position}h0" for position in points)
    return [line, element("path", d=dots, class_=f"dots {css_class}")]


def _band(frame: ChartFrame, curve: Curve) -> Markup:
    upper = []
    lower = []
    for x, y, spread in curve.points:
        upper.append(frame.position(x, y + spread))
        lower.append(frame.position(x, max(y - spread, frame.y.low)))
    path = "M" + "L".join([*upper, *reversed(lower)]) + "Z"
    return element("path", d=path, class_=f"band {curve.css_class}")


def _strip_tips(frame: ChartFrame, curves: Sequence[Curve], x_word: str, y_format: str) -> Markup:
    """Return an invisible strip over every x, with the values of all lines as its tooltip."""
    lines: dict[float, list[str]] = {}
    for curve in curves:
        for x, y, spread in curve.points:
            text = f"{curve.label}: {y:{y_format}}"
            if curve.spread:
                text += f" ± {spread:{y_format}}"
            lines.setdefault(x, [f"{x_word} {x:g}"]).append(text)

    xs = sorted(lines)
    edges = [frame.x.start]
    for before, after in pairwise(xs):
        edges.append(frame.x((before + after) / 2))
    edges.append(frame.x.end)

    strips = []
    top = frame.y.end
    height = frame.y.start - top
    for x, (left, right) in zip(xs, pairwise(edges), strict=True):
        title = element("title", "\n".join(lines[x]))
        strips.append(element("rect", title, x=left, y=top, width=right - left, height=height))
    return element("g", *strips, class_="tips")


def _dot_tips(frame: ChartFrame, curves: Sequence[Curve], unit: str, y_format: str) -> Markup:
    """Return invisible dots over points of each line, with their values as tooltips."""
    dots = []
    for curve in curves:
        if curve.constant:
            continue
        for x, y, _ in thin_out(curve.points, MAX_DOTS):
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
    y_range: Range | None = None,
    mirrored: bool = False,
) -> Markup:
    """Return bars side by side. Charts that share a scale are given the same `y_range`."""
    if y_range is None:
        values = [0.0]
        for bar in bars:
            values += [value for value, _ in bar.parts]
        y_range = (min(values), max(values))
    names: list[Tick] = []
    if len(bars) <= MAX_NAMES:
        names = [(float(k), bar.name) for k, bar in enumerate(bars)]
    x_range = (-0.5, len(bars) - 0.5)
    frame = chart_frame(size, x_range, y_range, x_label, y_label, x_names=names, mirrored=mirrored)

    gap = 0.2 if len(bars) <= 60 else 0.0
    marks = []
    for k, bar in enumerate(bars):
        marks.append(_bar(frame, k, bar, gap))
    return frame.svg(label, *marks)


def _bar(frame: ChartFrame, k: int, bar: Bar, gap: float) -> Markup:
    left = frame.x(k - 0.5 + gap / 2)
    width = frame.x(k + 0.5 - gap / 2) - left
    if not gap:
        width += 0.5  # overlaps the next bar, so that no seam is visible
    children = [element("title", bar.tooltip)]
    for value, css_class in bar.parts:
        top, bottom = sorted((frame.y(value), frame.y(0)))
        height = max(bottom - top, 0.5)
        children.append(
            element("rect", class_=f"bar {css_class}", x=left, y=top, width=width, height=height)
        )
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
    """Return a dot for every value and a line at every group's mean."""
    names: list[Tick] = []
    means = []
    values: list[float] = []
    for k, column in enumerate(columns):
        names.append((float(k), column.name))
        means.append(f"{column.name}: mean {column.mean:{y_format}}")
        values += column.values
    y_range = padded(min(values), max(values))
    frame = chart_frame(LARGE, (-0.5, len(columns) - 0.5), y_range, x_label, y_label, x_names=names)
    marks: list[Markup] = []
    for k, column in enumerate(columns):
        marks += _dots(frame, k, column, y_format)
    return frame.svg(f"{y_label} by {x_label}. {', '.join(means)}.", *marks)


def _dots(frame: ChartFrame, k: int, column: DotColumn, y_format: str) -> list[Markup]:
    """Return the dots of a group, spread sideways to stay visible, and the line of its mean."""
    marks = []
    css_class = f"dot {column.css_class}"
    for number, value in enumerate(column.values):
        jitter = ((number * 7) % 11 - 5) / 5 * 0.22  # the same every time
        title = element("title", f"{value:{y_format}}")
        x = frame.x(k + jitter)
        marks.append(element("circle", title, class_=css_class, cx=x, cy=frame.y(value), r=4))
    title = element("title", f"mean {column.mean:{y_format}}")
    path = frame.level(column.mean, frame.x(k - 0.32), frame.x(k + 0.32))
    marks.append(element("path", title, d=path, class_="mean"))
    return marks
