"""Numbers and lists in sentences and cells."""

from pathlib import Path

import pytest

from dispfl.report.runs import relative_to_page
from dispfl.report.wording import (
    format_amount,
    format_ratio,
    format_seconds,
    join_and,
)


def test_lists_end_with_and() -> None:
    assert [join_and(words) for words in (["a"], ["a", "b"], ["a", "b", "c"])] == [
        "a",
        "a and b",
        "a, b and c",
    ]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0.00"),
        (0.000536, "0.00054"),
        (0.9, "0.90"),
        (223.04, "223.0"),
        (111_500.4, "111\u202f500"),
    ],
)
def test_amounts_have_a_sensible_number_of_digits(value: float, text: str) -> None:
    assert format_amount(value) == text


def test_ratios_are_percent_below_one_and_factors_above() -> None:
    assert format_ratio(1, 4, "X") == "25 % of X’s"
    assert format_ratio(3, 2, "X") == "1.5 times X’s"
    assert format_ratio(100, 100.1, "X") == "as much as X’s"


def test_run_directories_are_relative_to_the_folder_of_the_page(tmp_path: Path) -> None:
    assert (
        relative_to_page(tmp_path / "out" / "page.html", tmp_path / "out" / "a" / "seed-0")
        == "a/seed-0"
    )
    assert relative_to_page(tmp_path / "page.html", tmp_path) == tmp_path.name


def test_seconds_have_a_sensible_number_of_digits() -> None:
    values = (0.0, 0.000536, 0.0865, 1.25, 123.45, None)
    assert [format_seconds(value) for value in values] == [
        "0.000",
        "0.00054",
        "0.086",
        "1.250",
        "123.5",
        "–",
    ]
