"""HTML as text."""

import pytest

from dispfl.report.markup import Markup, coordinate, element, join_markup


def test_plain_text_is_escaped_and_markup_is_not() -> None:
    assert element("p", "a<b", Markup("<b>c</b>")) == "<p>a&lt;b<b>c</b></p>"


def test_a_quote_cannot_end_an_attribute() -> None:
    assert element("a", title='x" onclick="y') == '<a title="x&quot; onclick=&quot;y"></a>'


def test_attributes_lose_their_last_underscore_and_none_is_omitted() -> None:
    assert element("i", class_="x", aria_hidden="true", id=None, width=1.25) == (
        '<i class="x" aria-hidden="true" width="1.2"></i>'
    )


def test_markup_inside_a_formatted_string_is_escaped_again() -> None:
    assert join_markup([f"{element('b', 'x')}"]) == "&lt;b&gt;x&lt;/b&gt;"


@pytest.mark.parametrize(
    ("number", "text"), [(2.0, "2"), (2.04, "2"), (2.06, "2.1"), (-0.01, "0"), (100.0, "100")]
)
def test_coordinates_have_at_most_one_decimal(number: float, text: str) -> None:
    assert coordinate(number) == text
