"""Our estimates agree with every cost printed in the paper, and a wrong one is detected."""

from collections.abc import Sequence
from dataclasses import replace
from decimal import Decimal

import pytest

from dispfl.paper.printed import PrintedNumber
from dispfl.paper.printed_costs import ComparedCost, CostTable, CostVerdict, compare_costs


@pytest.fixture(scope="module")
def tables() -> Sequence[CostTable]:
    return compare_costs()


@pytest.fixture(scope="module")
def costs(tables: Sequence[CostTable]) -> list[ComparedCost]:
    return [cost for table in tables for cost in table.costs]


def named(cost: ComparedCost) -> tuple[str, str | None, str, str]:
    return cost.row.table, cost.row.topology, cost.row.method, cost.column


def test_all_116_analytic_costs_agree(
    tables: Sequence[CostTable], costs: list[ComparedCost]
) -> None:
    """Tables 1, 2, 3, 4, 8, 9: 65 lines of 2 costs without the 6 dashes of Local; 6 of SubFedAvg, 2
    misprints."""
    verdicts = [cost.verdict for cost in costs]
    assert {table.table.number for table in tables} == {1, 2, 3, 4, 8, 9}
    assert len(costs) == 65 * 2 - 6
    assert verdicts.count(CostVerdict.OFF) == 0
    assert verdicts.count(CostVerdict.AGREES) == 116
    assert {f.row.method for f in costs if f.verdict is CostVerdict.TRAINED} == {"subfedavg"}


def test_the_misprints_are_a_lost_digit_and_a_blank_cell(costs: list[ComparedCost]) -> None:
    assert {named(cost) for cost in costs if cost.verdict is CostVerdict.MISPRINT} == {
        ("tab:de-tiny", None, "local", "flops"),
        ("tab:de-cifar100", "ring", "dispfl", "flops"),
    }


def test_the_lost_digit_is_off_without_its_erratum(costs: list[ComparedCost]) -> None:
    [lost] = [cost for cost in costs if named(cost) == ("tab:de-tiny", None, "local", "flops")]
    assert replace(lost, erratum=None).verdict is CostVerdict.OFF


@pytest.mark.parametrize(
    ("digits", "ours", "verdict"),
    [
        ("446.9", 449.13, CostVerdict.AGREES),  # half a percent of 446.9 is 2.2345
        ("446.9", 449.14, CostVerdict.OFF),
        ("7.0", 7.0999, CostVerdict.AGREES),  # one last digit is 0.1, more than half a percent
        ("7.0", 7.1001, CostVerdict.OFF),
        ("7.00", 7.0349, CostVerdict.AGREES),  # half a percent is 0.035, more than 0.01
        ("7.00", 7.0351, CostVerdict.OFF),
        ("7.0", 6.8999, CostVerdict.OFF),
    ],
)
def test_costs_agree_within_half_a_percent_or_one_last_digit(
    digits: str, ours: float, verdict: CostVerdict, costs: list[ComparedCost]
) -> None:
    some = next(cost for cost in costs if cost.row.method == "dispfl")
    assert (
        replace(some, printed=PrintedNumber(Decimal(digits)), ours=ours, erratum=None).verdict
        is verdict
    )


def test_the_heterogeneous_table_is_compared_with_the_mean_over_nodes(
    costs: list[ComparedCost],
) -> None:
    """The mean of 0.2, 0.4, 0.6, 0.8 and 1 is 0.6."""
    [groups] = [
        cost
        for cost in costs
        if isinstance(cost.row.density, tuple)
        and (cost.row.model, cost.column) == ("resnet18", "comm")
    ]
    assert groups.ours == pytest.approx(0.6 * 446.958, rel=1e-5)
