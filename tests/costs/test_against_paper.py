"""Every cost that the paper prints, found again; and that a wrong one would be noticed."""

from dataclasses import replace
from decimal import Decimal

import pytest

from dispfl.costs.against_paper import Figure, Verdict, sections
from dispfl.paper import Printed


@pytest.fixture(scope="module")
def figures() -> list[Figure]:
    return [figure for section in sections() for figure in section.figures]


def named(figure: Figure) -> tuple[str, str | None, str, str]:
    return figure.row.table, figure.row.topology, figure.row.method, figure.column


def test_all_116_analytic_figures_agree(figures: list[Figure]) -> None:
    """Tables 1, 2, 3, 4, 8, 9: 65 lines of 2 figures, without the 6 dashes of Local; 6 are SubFedAvg's, 2 misprints."""
    verdicts = [figure.verdict for figure in figures]
    assert {section.table.number for section in sections()} == {1, 2, 3, 4, 8, 9}
    assert len(figures) == 65 * 2 - 6
    assert verdicts.count(Verdict.OFF) == 0
    assert verdicts.count(Verdict.AGREES) == 116
    assert {f.row.method for f in figures if f.verdict is Verdict.TRAINED} == {"subfedavg"}


def test_the_misprints_are_a_lost_digit_and_a_blank_cell(figures: list[Figure]) -> None:
    assert {named(figure) for figure in figures if figure.verdict is Verdict.MISPRINT} == {
        ("tab:de-tiny", None, "local", "flops"),
        ("tab:de-cifar100", "ring", "dispfl", "flops"),
    }


def test_without_its_erratum_the_lost_digit_is_off(figures: list[Figure]) -> None:
    [lost] = [figure for figure in figures if named(figure) == ("tab:de-tiny", None, "local", "flops")]
    assert replace(lost, erratum=None).verdict is Verdict.OFF


@pytest.mark.parametrize(
    ("digits", "ours", "verdict"),
    [
        ("446.9", 449.13, Verdict.AGREES),  # half a percent of 446.9 is 2.2345
        ("446.9", 449.14, Verdict.OFF),
        ("7.0", 7.0999, Verdict.AGREES),  # one last digit is 0.1, more than half a percent
        ("7.0", 7.1001, Verdict.OFF),
        ("7.00", 7.0349, Verdict.AGREES),  # half a percent is 0.035, more than 0.01
        ("7.00", 7.0351, Verdict.OFF),
        ("7.0", 6.8999, Verdict.OFF),
    ],
)
def test_half_a_percent_or_one_last_digit_agrees(
    digits: str, ours: float, verdict: Verdict, figures: list[Figure]
) -> None:
    some = next(figure for figure in figures if figure.row.method == "dispfl")
    assert replace(some, printed=Printed(Decimal(digits)), ours=ours, erratum=None).verdict is verdict


def test_the_heterogeneous_table_is_compared_with_the_mean_over_nodes(figures: list[Figure]) -> None:
    """The mean of 0.2, 0.4, 0.6, 0.8 and 1 is 0.6."""
    [groups] = [
        figure
        for figure in figures
        if isinstance(figure.row.density, tuple) and (figure.row.model, figure.column) == ("resnet18", "comm")
    ]
    assert groups.ours == pytest.approx(0.6 * 446.958, rel=1e-5)
