"""Metrics: names, directions and formats, and the built-in ones computed by hand."""

from collections.abc import Callable
from math import sqrt

import pytest
import torch
from messages import refused
from torch import Tensor, nn
from torch.nn import functional

from dispfl.core.metric import METRICS, Measure, Metric, as_metrics
from dispfl.core.task import Task
from dispfl.errors import ConfigError


def one_hot(*classes: int) -> Tensor:
    """Outputs whose largest is that of these classes."""
    return functional.one_hot(torch.tensor(classes), 3).float()


FOUR = one_hot(0, 0, 1, 2), torch.tensor([0, 0, 0, 1])
"""Three of class 0, of which two are found; one of class 1, which is taken for class 2."""


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("accuracy", 2 / 4),
        ("balanced_accuracy", (2 / 3 + 0) / 2),  # class 0: 2 of 3; class 1: 0 of 1
        (
            "macro_f1",
            (2 * 2 / (2 + 3) + 0 + 0) / 3,
        ),  # class 0: 2 right, 2 found, 3 wanted; classes 1 and 2: 0 right
    ],
)
def test_metrics_of_classification(name: str, expected: float) -> None:
    assert METRICS[name](*FOUR) == pytest.approx(expected)
    assert METRICS[name].higher_is_better


def test_the_accuracy_of_sequences_is_that_of_all_their_labels() -> None:
    """Two sequences of two labels, three classes in dimension 1: three of four are right."""
    outputs = torch.stack([one_hot(0, 1).T, one_hot(2, 2).T])
    assert METRICS["accuracy"](outputs, torch.tensor([[0, 1], [2, 0]])) == 0.75


@pytest.mark.parametrize(
    ("name", "expected"), [("mse", (1 + 9) / 2), ("rmse", sqrt(5)), ("mae", 2)]
)
@pytest.mark.parametrize("shape", [(2,), (2, 1)])
def test_errors_of_regression_are_better_when_lower_whatever_the_shape_of_one_output(
    name: str, expected: float, shape: tuple[int, ...]
) -> None:
    """Errors of 1 and 3; comparing (2, 1) with (2,) as torch does would compare each output with
    both labels."""
    assert METRICS[name](
        torch.tensor([2.0, 1.0]).reshape(shape), torch.tensor([1.0, 4.0])
    ) == pytest.approx(expected)
    assert not METRICS[name].higher_is_better


def test_metrics_of_several_labels_per_sample() -> None:
    """Found 1 0 / 1 1, wanted 1 1 / 0 1: two of four agree; two right ones of three found and three
    wanted."""
    outputs, labels = torch.tensor([[2.0, -1.0], [1.0, 3.0]]), torch.tensor([[1, 1], [0, 1]])
    assert METRICS["multilabel_accuracy"](outputs, labels) == 0.5
    assert METRICS["multilabel_f1"](outputs, labels) == pytest.approx(2 * 2 / (3 + 3))
    assert METRICS["multilabel_f1"](-torch.ones(1, 2), torch.zeros(1, 2)) == 0


def test_outputs_of_another_shape_than_the_labels_are_refused() -> None:
    sentence = (
        r"The metric rmse needs outputs and labels of the same shape, got \(4, 3\) and \(4,\)\."
    )
    with pytest.raises(ConfigError, match=sentence):
        METRICS["rmse"](*FOUR)


def auc(outputs: Tensor, labels: Tensor) -> float:
    return 0.5


def my_rmse(outputs: Tensor, labels: Tensor) -> float:
    return 0.5


def far(outputs: Tensor, labels: Tensor) -> float:
    return 0.5


@pytest.mark.parametrize(("function", "higher"), [(auc, True), (my_rmse, False)])
def test_a_functions_name_may_say_its_direction(
    function: Callable[[Tensor, Tensor], float], higher: bool
) -> None:
    (metric,) = as_metrics(function)
    assert (metric.name, metric.higher_is_better) == (function.__name__, higher)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            far,
            (
                "Is a higher or a lower far better? Say it: Metric(far, higher_is_better=True), or"
                " False."
            ),
        ),
        (
            lambda *_: 0.5,
            (
                "A metric needs a name: Metric(<lambda>, name=..., higher_is_better=True), got"
                " '<lambda>'."
            ),
        ),
        ("acuracy", "metric 'acuracy' does not exist. Did you mean accuracy?"),
        (3, "A metric is a function of outputs and labels, got 3."),
        ([], "`metric` is empty; give at least one metric, such as 'accuracy'."),
        (
            ["mse", "mse"],
            "Two metrics have the same name, got mse, mse; give Metric(..., name=...).",
        ),
    ],
)
def test_what_is_no_metric_or_has_no_direction_is_refused(given: object, sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        as_metrics(given)  # type: ignore[arg-type]
    assert str(refused.value) == sentence


@pytest.mark.parametrize("format_", ["", ".3", "d", ">8.3f", "+.3f", "s", "{}"])
def test_only_formats_of_numbers_are_accepted(format_: str) -> None:
    with refused(ConfigError, key="metric"):
        Metric(auc, format=format_)


def test_values_are_printed_in_the_metrics_format() -> None:
    assert Metric(auc, format=".1%").text(0.8567) == "85.7%"
    assert Metric(my_rmse, "error", format=".2e").text(12345) == "1.23e+04"
    assert Metric(auc).text(None) == "–"


def test_better_is_lower_where_lower_is_better() -> None:
    low, high = Measure("mse", higher_is_better=False), Measure("f1", higher_is_better=True)
    assert (low.best([3, 1, 2]), low.worst([3, 1, 2])) == (1, 3)
    assert (high.best([3, 1, 2]), high.worst([3, 1, 2])) == (3, 1)
    assert (low.gain(1, 3), high.gain(1, 3)) == (2, -2)
    assert [low.reaches(value, 0.5) for value in (0.4, 0.5, 0.6)] == [True, True, False]
    assert [high.reaches(value, 0.5) for value in (0.4, 0.5, 0.6)] == [False, True, True]


@pytest.mark.parametrize(
    "loss", [functional.cross_entropy, functional.nll_loss, nn.CrossEntropyLoss()]
)
def test_a_loss_of_classification_has_the_accuracy_as_its_metric(
    loss: Callable[[Tensor, Tensor], Tensor],
) -> None:
    assert Task.of(loss).metric.name == "accuracy"


def test_any_other_loss_without_a_metric_is_refused() -> None:
    with refused(ConfigError, key="metric"):
        Task.of(functional.mse_loss)
    assert [metric.name for metric in Task.of(functional.mse_loss, ["rmse", "mae"]).metrics] == [
        "rmse",
        "mae",
    ]
