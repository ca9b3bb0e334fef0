"""Line charts."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TypeVar

from dispfl.analysis.report.axes import LARGE, Frame, frame, padded
from dispfl.analysis.report.markup import Markup, compact, element, joined

MOST_POINTS = 200
"""More would not be seen on a chart of this width."""
MOST_DOTS = 40
"""A line of more points has no dots on it."""
T = TypeVar("T")


@dataclass(frozen=True)
class Curve:
    """One line: what it is called, how it is painted, and its points."""

    label: str
    paint: str
    """The class that gives a row its colour on the whole page."""
    x: Sequence[float]
    y: Sequence[float]
    spread: Sequence[float] = field(default=())
    """Half the height of the band around each point; empty for none."""
    level: bool = False
    """Whether it is one value, drawn from edge to edge: what something reaches that has no place on x."""
    aside: bool = False
    """Whether it is drawn thin and dashed, as something beside the point."""


def thinned(values: Sequence[T], most: int = MOST_POINTS) -> list[T]:
    """So many of the values at most, evenly apart, the first and the last among them."""
    if len(values) <= most:
        return list(values)
    return [values[round(number * (len(values) - 1) / (most - 1))] for number in range(most)]


def line_chart(
    curves: Sequence[Curve],
    x_label: str,
    y_label: str,
    *,
    whole_x: bool = False,
    from_zero: bool = False,
    decimals: int = 3,
    x_word: str = "",
    x_unit: str = "",
) -> Markup:
    """Lines with bands. Pointing at an x tells all lines' values there, where they share x, called `x_word`.

    Where they do not, pointing at a line tells its value at an x in `x_unit`.
    """
    curves = [_thin(curve) for curve in curves]
    xs = [x for curve in curves if not curve.level for x in curve.x] or [0.0, 1.0]
    pairs = [(y, s) for curve in curves for y, s in zip(curve.y, _spread(curve), strict=True)]
    lowest, highest = min(y - s for y, s in pairs), max(y + s for y, s in pairs)
    if all(y >= 0 for y, _ in pairs):  # a band below what can be would only make room for nothing
        lowest = max(0.0, lowest)
    place = frame(
        LARGE,
        (0.0 if from_zero else min(xs), max(xs)),
        padded(lowest, highest),
        x_label,
        y_label,
        whole_x=whole_x,
    )
    under = [_band(place, curve) for curve in curves if curve.spread]
    over = [_line(place, curve) for curve in reversed(curves)]  # the first in the legend lies on top
    tips = _strips(place, curves, x_word, decimals) if x_word else _dots(place, curves, x_unit, decimals)
    ends = ", ".join(f"{curve.label} {curve.y[-1]:.{decimals}f}" for curve in curves if not curve.aside)
    return place.svg(f"{y_label} against {x_label}. At the end: {ends}.", *under, *over, tips)


def _thin(curve: Curve) -> Curve:
    return replace(curve, x=thinned(curve.x), y=thinned(curve.y), spread=thinned(curve.spread))


def _spread(curve: Curve) -> Sequence[float]:
    return curve.spread or [0.0] * len(curve.y)


def _line(place: Frame, curve: Curve) -> Markup:
    if curve.level:
        d = f"M{compact(place.x.start)} {compact(place.y(curve.y[-1]))}H{compact(place.x.end)}"
        return element("path", d=d, class_=f"line level {curve.paint}")
    points = [f"{compact(place.x(x))} {compact(place.y(y))}" for x, y in zip(curve.x, curve.y, strict=True)]
    line = element("path", d="M" + "L".join(points), class_=f"line {'aside ' if curve.aside else ''}{curve.paint}")
    if curve.aside or len(points) > MOST_DOTS:
        return line
    return joined([line, element("path", d="".join(f"M{point}h0" for point in points), class_=f"dots {curve.paint}")])


def _band(place: Frame, curve: Curve) -> Markup:
    triples = list(zip(curve.x, curve.y, curve.spread, strict=True))
    upper = [f"{compact(place.x(x))} {compact(place.y(y + s))}" for x, y, s in triples]
    lower = [f"{compact(place.x(x))} {compact(place.y(max(y - s, place.y.low)))}" for x, y, s in reversed(triples)]
    return element("path", d="M" + "L".join([*upper, *lower]) + "Z", class_=f"band {curve.paint}")


def _strips(place: Frame, curves: Sequence[Curve], x_word: str, decimals: int) -> Markup:
    """An unseen strip over every x, with all lines' values as its title."""
    values: dict[float, list[str]] = {}
    for curve in curves:
        for x, y, s in zip(curve.x, curve.y, _spread(curve), strict=True):
            said = f"{y:.{decimals}f}" + (f" ± {s:.{decimals}f}" if curve.spread else "")
            values.setdefault(x, []).append(f"{curve.label}: {said}")
    xs = sorted(values)
    edges = [place.x.start, *(place.x((a + b) / 2) for a, b in pairwise(xs)), place.x.end]
    top, height = place.y.end, place.y.start - place.y.end
    strips = []
    for x, (left, right) in zip(xs, pairwise(edges), strict=True):
        title = element("title", "\n".join([f"{x_word} {x:g}", *values[x]]))
        strips.append(element("rect", title, x=left, y=top, width=right - left, height=height))
    return element("g", *strips, class_="strips")


def _dots(place: Frame, curves: Sequence[Curve], unit: str, decimals: int) -> Markup:
    """An unseen dot over some points of each line, with its values as its title."""
    dots = []
    for curve in curves:
        if curve.level:
            continue
        for x, y in thinned(list(zip(curve.x, curve.y, strict=True)), MOST_DOTS):
            title = element("title", f"{curve.label}: {y:.{decimals}f} at {x:.4g} {unit}")
            dots.append(element("circle", title, cx=place.x(x), cy=place.y(y), r=7))
    return element("g", *dots, class_="strips")
