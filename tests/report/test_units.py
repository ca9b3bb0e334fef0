"""Bytes and FLOPs with the right unit."""

import pytest

from dispfl.report.units import BYTES, FLOPS, axis_unit, bytes_text, common_unit, flops_text


@pytest.mark.parametrize(
    ("values", "unit", "cells"),
    [
        ([2.5e6, 0.4e6], "MB", ["2.50", "0.40"]),
        ([2.5e6, 0.04e6], "kB", ["2\u202f500", "40"]),
        ([442_432, 884_896, 80_340, 0], "kB", ["442.4", "884.9", "80.3", "0"]),
        ([12.0], "B", ["12.00"]),
        ([3e9, 5e7], "MB", ["3\u202f000", "50"]),
        ([0.0, 0.0], "MB", ["0", "0"]),
        ([], "MB", []),
    ],
)
def test_a_column_has_the_unit_in_which_its_smallest_number_has_digits(
    values: list[float], unit: str, cells: list[str]
) -> None:
    found = common_unit(values, BYTES)
    assert (found.name, found.column(values)) == (unit, cells)


def test_a_number_in_a_sentence_has_its_own_unit() -> None:
    assert bytes_text(39_000) == "39.00 kB"
    assert bytes_text(848_000) == "0.85 MB"
    assert bytes_text(7) == "7.00 B"
    assert flops_text(57_620_000) == "57.62 MFLOPs"


def test_an_axis_has_the_unit_of_its_end() -> None:
    assert [axis_unit(end, FLOPS).name for end in (2e12, 5e8, 3.0, 0.5, 0)] == [
        "TFLOPs",
        "MFLOPs",
        "FLOPs",
        "FLOPs",
        "MFLOPs",
    ]
