"""Bars from zero, one way or both, and dots in columns."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from dispfl.analysis.report.axes import LARGE, SMALL, Frame, Size, frame, padded
from dispfl.analysis.report.markup import Markup, compact, element

MOST_NAMES = 16
"""Where there are more bars, their names would run into each other."""


@dataclass(frozen=True)
class Bar:
    """What stands at one place of x: bars from zero to each value, with the class that paints it."""

    name: str
    parts: Sequence[tuple[float, str]]
    title: str
    """What pointing at it says."""


def bar_chart(
    bars: Sequence[Bar],
    x_label: str,
    y_label: str,
    label: str,
    *,
    size: Size = SMALL,
    reach: tuple[float, float] | None = None,
    mirrored: bool = False,
) -> Markup:
    """Bars side by side. `reach` is the range of y, given where several charts are to share one."""
    values = [value for bar in bars for value, _ in bar.parts]
    low, high = reach or (min(0.0, *values), max(0.0, *values))
    names = [(float(k), bar.name) for k, bar in enumerate(bars)] if len(bars) <= MOST_NAMES else []
    place = frame(size, (-0.5, len(bars) - 0.5), (low, high), x_label, y_label, x_names=names, mirrored=mirrored)
    gap = 0.2 if len(bars) <= 60 else 0.0
    drawn = [_bar(place, k, bar, gap) for k, bar in enumerate(bars)]
    return place.svg(label, *drawn)


def _bar(place: Frame, k: int, bar: Bar, gap: float) -> Markup:
    left, right = place.x(k - 0.5 + gap / 2), place.x(k + 0.5 - gap / 2)
    inside = [element("title", bar.title)]
    for value, paint in bar.parts:
        top, bottom = sorted((place.y(value), place.y(0)))
        width = right - left + (0 if gap else 0.5)  # a little over its neighbour, so that no seam shows
        shape = {"x": left, "y": top, "width": width, "height": max(bottom - top, 0.5)}
        inside.append(element("rect", class_=f"bar {paint}", **shape))
    return element("g", *inside)


@dataclass(frozen=True)
class Column:
    """Dots above one name: a group's values."""

    name: str
    values: Sequence[float]
    paint: str

    @property
    def mean(self) -> float:
        return fmean(self.values)


def dot_columns(columns: Sequence[Column], x_label: str, y_label: str, *, size: Size = LARGE) -> Markup:
    """Every value a dot, every group's mean a line; dots of a group are spread a little so that each is seen."""
    every = [value for column in columns for value in column.values]
    names = [(float(k), column.name) for k, column in enumerate(columns)]
    reach = padded(min(every), max(every))
    place = frame(size, (-0.5, len(columns) - 0.5), reach, x_label, y_label, x_names=names)
    drawn = []
    for k, column in enumerate(columns):
        for number, value in enumerate(column.values):
            aside = ((number * 7) % 11 - 5) / 5 * 0.22  # a fixed order that looks like none
            tip = element("title", f"{value:.3f}")
            drawn.append(
                element("circle", tip, class_=f"dot {column.paint}", cx=place.x(k + aside), cy=place.y(value), r=4)
            )
        line = f"M{compact(place.x(k - 0.32))} {compact(place.y(column.mean))}H{compact(place.x(k + 0.32))}"
        drawn.append(element("path", element("title", f"mean {column.mean:.3f}"), d=line, class_="mean"))
    said = ", ".join(f"{column.name}: mean {column.mean:.3f}" for column in columns)
    return place.svg(f"{y_label} by {x_label}. {said}.", *drawn)
