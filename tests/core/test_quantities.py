"""The declared quantities: their values in a line of the metrics, and what a report keeps."""

from dataclasses import fields
from typing import Any

import pytest

from dispfl.core.quantities import ROUND_QUANTITIES, Quantity, Shape
from dispfl.core.report import EVALUATIONS, PEER_QUANTITIES, QUANTITIES, Passes, Report

SPREAD = {"mean": 0.5, "std": 0.5, "per_peer": [0.0, 1.0]}
SCORES = {"f1": {"higher_is_better": True, "format": ".3f", **SPREAD}}


def test_every_quantity_has_a_name_of_its_own_and_a_meaning() -> None:
    names = [quantity.name for quantity in QUANTITIES]
    assert len(set(names)) == len(names)
    assert all(quantity.meaning for quantity in QUANTITIES)


def test_every_quantity_of_peers_is_an_attribute_of_a_report_that_is_not_measured_at_first() -> (
    None
):
    report = Report()
    assert [getattr(report, quantity.name) for quantity in PEER_QUANTITIES] == [None] * len(
        PEER_QUANTITIES
    )
    declared = {quantity.name for quantity in PEER_QUANTITIES}
    assert {field.name for field in fields(Report) if field.type == float | None} <= declared


def a_full_report() -> Report:
    """A report in which every quantity has its own value."""
    report = Report(scores={"f1": 0.9}, passes=[Passes(1, [2])])
    for number, field in enumerate(field for field in fields(Report) if field.default is None):
        setattr(report, field.name, float(number))
    report.distances, report.far, report.failure = {"001": 1.0}, ["001"], "It broke."
    return report


def test_a_round_without_evaluation_keeps_the_measurements_of_training() -> None:
    report = a_full_report()
    without = report.without_evaluation()
    assert without.scores == {}
    for quantity in PEER_QUANTITIES:
        kept = None if quantity.evaluation else getattr(report, quantity.name)
        assert getattr(without, quantity.name) == kept, quantity.name
    assert (without.failure, without.far) == ("It broke.", ["001"])


def test_the_evaluation_of_another_model_replaces_what_it_measured_and_nothing_else() -> None:
    report = a_full_report()
    assert report.with_evaluation(Report(scores={"f1": 0.1})).mixed == report.mixed
    evaluation = Report(scores={"f1": 0.1}, failure="The evaluation broke.")
    for quantity in EVALUATIONS:
        setattr(evaluation, quantity.name, -1.0)
    evaluation.overlap = -1.0  # not measured by evaluating
    merged = report.with_evaluation(evaluation)
    assert merged.scores == {"f1": 0.1}
    assert {getattr(merged, quantity.name) for quantity in EVALUATIONS} == {-1.0}
    assert (merged.overlap, merged.train_loss) == (report.overlap, report.train_loss)
    assert merged.failure == "It broke."
    assert Report().with_evaluation(evaluation).failure == "The evaluation broke."


def test_a_value_is_looked_up_inside_its_object() -> None:
    [wire_mb] = [quantity for quantity in ROUND_QUANTITIES if quantity.name == "busiest.wire_mb"]
    assert wire_mb.value({"busiest": {"wire_mb": 2.5}}) == 2.5
    assert wire_mb.value({"busiest": None}) is None
    assert wire_mb.value({}) is None
    assert wire_mb.group == "busiest"


@pytest.mark.parametrize(
    ("shape", "value", "numbers", "spreads"),
    [
        (Shape.PEERS, SPREAD, {"x": 0.5}, {"x": SPREAD}),
        (Shape.PEERS, None, {}, {}),
        (Shape.METRICS, SCORES, {"f1": 0.5}, SCORES),
        (Shape.LOGGED, {"similarity": SPREAD}, {"similarity": 0.5}, {"similarity": SPREAD}),
        (Shape.LOGGED, None, {}, {}),
        (Shape.NUMBER, 3.0, {"x": 3.0}, {}),
        (Shape.NAME, "000", {}, {}),
        (Shape.REASONS, {"000": "It broke."}, {"x": 1}, {}),
        (Shape.NODES, {"000": {"far": 1}}, {}, {}),
        (Shape.TRAFFIC, {"000": [1, 2]}, {}, {}),
    ],
)
def test_a_value_as_single_numbers_and_as_spreads(
    shape: Shape, value: Any, numbers: dict[str, float], spreads: dict[str, Any]
) -> None:
    quantity = Quantity("x", shape, "a test")
    assert shape.accepts(value, peers=2)
    assert quantity.numbers({"x": value}) == numbers
    assert quantity.spreads({"x": value}) == spreads


@pytest.mark.parametrize(
    ("shape", "value"),
    [
        (Shape.PEERS, {**SPREAD, "per_peer": [0.5]}),
        (Shape.PEERS, {**SPREAD, "mean": float("nan")}),
        (Shape.PEERS, 0.5),
        (Shape.METRICS, {"f1": SPREAD}),
        (Shape.METRICS, None),
        (Shape.NUMBER, None),
        (Shape.NUMBER, True),
        (Shape.NAME, 3),
        (Shape.REASONS, []),
        (Shape.TRAFFIC, {"000": [1, 2, 3]}),
    ],
)
def test_another_shape_is_refused(shape: Shape, value: Any) -> None:
    assert not shape.accepts(value, peers=2)
