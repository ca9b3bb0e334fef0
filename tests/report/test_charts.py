"""Charts as text: coordinates, tooltips and labels."""

import re

import pytest
from markupsafe import Markup

from dispfl.report.charts import (
    LARGE,
    MAX_POINTS,
    Bar,
    Curve,
    DotColumn,
    LinearScale,
    bar_chart,
    chart_frame,
    coordinate,
    dot_chart,
    element,
    line_chart,
    padded,
    thin_out,
    ticks,
)


@pytest.mark.parametrize(
    ("low", "high", "texts"),
    [
        (0.0, 1.0, ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        (0.43, 0.87, ["0.5", "0.6", "0.7", "0.8"]),
        (-446.0, 446.0, ["-400", "-200", "0", "200", "400"]),
        (
            0.0,
            60_000.0,
            [
                "0",
                "10\u202f000",
                "20\u202f000",
                "30\u202f000",
                "40\u202f000",
                "50\u202f000",
                "60\u202f000",
            ],
        ),
    ],
)
def test_ticks_are_round_numbers_within_the_range(
    low: float, high: float, texts: list[str]
) -> None:
    assert [text for _, text in ticks(low, high)] == texts


def test_ticks_of_rounds_are_whole() -> None:
    assert [text for _, text in ticks(1, 3, whole=True)] == ["1", "2", "3"]


def test_a_scale_maps_its_ends_to_its_ends() -> None:
    scale = LinearScale(1, 3, 100, 200)
    assert [scale(1), scale(2), scale(3)] == [100, 150, 200]


def test_an_empty_range_is_widened() -> None:
    frame = chart_frame(LARGE, (1, 1), (0.5, 0.5), "x", "y")
    assert frame.y.low < 0.5 < frame.y.high
    assert frame.x.low < 1 < frame.x.high


def test_margins_do_not_extend_below_zero_unless_values_do() -> None:
    assert padded(0.0, 1.0) == (0.0, 1.05)
    assert padded(-1.0, 1.0) == pytest.approx((-1.1, 1.1))


def test_thinning_keeps_the_first_and_the_last() -> None:
    assert thin_out(range(1001), 5) == [0, 250, 500, 750, 1000]
    assert thin_out([1, 2], 5) == [1, 2]


def titles(chart: str) -> list[str]:
    return re.findall(r"<title>(.*?)</title>", chart, re.DOTALL)


def test_the_tooltip_of_a_round_shows_every_line() -> None:
    chart = line_chart(
        [Curve("a", "s0", [1, 2], [0.5, 0.6], [0.1, 0.1]), Curve("b", "s1", [1, 2], [0.3, 0.4])],
        "round",
        "accuracy",
        x_word="round",
    )
    assert titles(chart) == [
        "round 1\na: 0.500 ± 0.100\nb: 0.300",
        "round 2\na: 0.600 ± 0.100\nb: 0.400",
    ]
    assert 'aria-label="accuracy against round. Final values: a 0.600, b 0.400."' in chart


def test_lines_without_a_common_x_have_tooltips_at_their_points() -> None:
    chart = line_chart([Curve("a", "s0", [1.5, 3], [0.5, 0.6])], "MB", "accuracy", x_unit="MB")
    assert titles(chart) == ["a: 0.500 at 1.5 MB", "a: 0.600 at 3 MB"]


def test_a_long_line_is_thinned_and_has_no_dots() -> None:
    rounds = [float(t) for t in range(5000)]
    chart = line_chart(
        [Curve("a", "s0", rounds, [t / 5000 for t in rounds])], "round", "accuracy", x_word="round"
    )
    (path,) = re.findall(r'd="M([^"]*)" class="line s0"', chart)
    assert len(path.split("L")) == MAX_POINTS
    assert "dots" not in chart


def test_a_row_that_sends_nothing_is_a_horizontal_line_from_edge_to_edge() -> None:
    curves = [
        Curve("a", "s0", [1, 2], [0.5, 0.6]),
        Curve("local", "s1", [0, 0], [0.1, 0.55], constant=True),
    ]
    chart = line_chart(curves, "MB", "accuracy", from_zero=True, x_unit="MB")
    (line,) = re.findall(r'd="M(\S+) (\S+)H(\S+)" class="line constant s1"', chart)
    assert (line[0], line[2]) == ("56", "526")


def heights(chart: str) -> list[float]:
    return [float(h) for h in re.findall(r'<rect class="bar[^>]* height="([^"]*)"', chart)]


def test_bars_are_as_high_as_their_values() -> None:
    bars = [Bar("a", [(1.0, "s0")], "one"), Bar("b", [(0.5, "s0")], "half")]
    one, half = heights(bar_chart(bars, "x", "y", "label"))
    assert one == 2 * half
    assert one == 200 - 30 - 40  # the chart without its margins


def test_bars_in_both_directions_start_at_zero_and_share_a_given_scale() -> None:
    bars = [Bar("a", [(1.0, "s0"), (-1.0, "s0 below")], "both")]
    up, down = heights(bar_chart(bars, "x", "y", "label", y_range=(-2.0, 2.0), mirrored=True))
    assert up == down == pytest.approx((200 - 30 - 40) / 4, abs=0.1)


def test_columns_of_dots_have_a_line_at_their_mean() -> None:
    chart = dot_chart(
        [DotColumn("0.2", [0.4, 0.6], "s0"), DotColumn("0.8", [0.9], "s0")], "density", "accuracy"
    )
    assert chart.count("<circle") == 3
    assert "0.2: mean 0.500, 0.8: mean 0.900" in chart


def test_plain_text_is_escaped_and_markup_is_not() -> None:
    assert element("p", "a<b", Markup("<b>c</b>")) == "<p>a&lt;b<b>c</b></p>"


def test_a_quote_cannot_end_an_attribute() -> None:
    assert element("a", title='x" onclick="y') == '<a title="x&#34; onclick=&#34;y"></a>'


def test_attributes_lose_their_last_underscore_and_none_is_omitted() -> None:
    assert element("i", class_="x", aria_hidden="true", id=None, width=1.25) == (
        '<i class="x" aria-hidden="true" width="1.2"></i>'
    )


def test_markup_inside_a_formatted_string_is_escaped_again() -> None:
    assert element("p", f"{element('b', 'x')} and") == "<p>&lt;b&gt;x&lt;/b&gt; and</p>"


@pytest.mark.parametrize(
    ("number", "text"), [(2.0, "2"), (2.04, "2"), (2.06, "2.1"), (-0.01, "0"), (100.0, "100")]
)
def test_coordinates_have_at_most_one_decimal(number: float, text: str) -> None:
    assert coordinate(number) == text
