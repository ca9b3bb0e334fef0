"""Numbers and lists in sentences and cells."""

from pathlib import Path

import pytest

from dispfl.analysis.report.wording import flops_unit, listed, seen_from, share_of, size


def test_lists_end_with_and() -> None:
    assert [listed(words) for words in (["a"], ["a", "b"], ["a", "b", "c"])] == ["a", "a and b", "a, b and c"]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0.00"), (0.000536, "0.00054"), (0.9, "0.90"), (223.04, "223.0"), (111_500.4, "111\u202f500")],
)
def test_sizes_have_as_many_digits_as_they_deserve(value: float, text: str) -> None:
    assert size(value) == text


@pytest.mark.parametrize(
    ("flops", "unit"), [(8.3e12, (1e12, "TFLOPs")), (5.4e8, (1e9, "GFLOPs")), (5e4, (1e6, "MFLOPs"))]
)
def test_flops_are_told_in_the_unit_of_the_largest(flops: float, unit: tuple[float, str]) -> None:
    assert flops_unit([1.0, flops]) == unit


def test_shares_are_percent_below_one_and_times_above() -> None:
    assert share_of(1, 4, "X") == "25 % of X’s"
    assert share_of(3, 2, "X") == "1.5 times X’s"
    assert share_of(100, 100.1, "X") == "as much as X’s"


def test_a_run_is_named_as_seen_from_the_pages_folder(tmp_path: Path) -> None:
    assert seen_from(tmp_path / "out" / "page.html", tmp_path / "out" / "a" / "seed-0") == "a/seed-0"
    assert seen_from(tmp_path / "page.html", tmp_path) == tmp_path.name
