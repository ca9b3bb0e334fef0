"""Metrics of test data: a name, a direction and a format; and the built-in metrics."""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from dispfl.errors import ConfigError
from dispfl.settings import did_you_mean

MetricFunction = Callable[[Tensor, Tensor], float]
"""From all outputs and labels of a peer's test data to a number."""
HIGHER = {
    "acc", "accuracy", "auc", "auprc", "auroc", "bleu", "dice", "f1", "iou", "miou", "ndcg",
    "precision",
    "r2", "recall",
}  # fmt: skip
LOWER = {
    "brier", "cer", "ece", "err", "error", "loss", "mae", "mape", "mse", "nll", "perplexity",
    "rmse", "wer",
}  # fmt: skip
"""Words in the names of functions that say in which direction they are better."""


@dataclass(frozen=True)
class Measure:
    """What a number measures: its name, which direction is better, and how to print it."""

    name: str
    higher_is_better: bool
    format: str = ".3f"
    scale: float = 1.0
    """What values are multiplied with to be printed."""

    def __post_init__(self) -> None:
        # It may come from a file: `.99999999f` would take minutes for each number.
        if not is_number_format(self.format):
            raise ConfigError(
                f"The format of the metric {self.name} must be like .3f, .1% or .2e, got"
                f" {self.format!r}.",
                key="metric",
            )

    def text(self, value: float | None) -> str:
        """Return a value as it is printed, or a dash for None."""
        if value is None:
            return "–"
        return f"{self.scale * value:{self.format}}"

    def signed_text(self, value: float) -> str:
        """Return a difference as it is printed, with its sign."""
        return f"{self.scale * value:+{self.format}}"

    def in_percent(self) -> "Measure":
        """Return the same measure of shares, printed in percent."""
        return Measure(f"{self.name} (%)", self.higher_is_better, ".1f", 100.0)

    def gain(self, value: float, other: float) -> float:
        """Return by how much a value is better than another: negative if it is worse."""
        if self.higher_is_better:
            return value - other
        return other - value

    def best(self, values: Iterable[float]) -> float:
        """Return the best of some values."""
        return max(values) if self.higher_is_better else min(values)

    def worst(self, values: Iterable[float]) -> float:
        """Return the worst of some values."""
        return min(values) if self.higher_is_better else max(values)

    def reaches(self, value: float, target: float) -> bool:
        """Whether a value is at least as good as a target."""
        return self.gain(value, target) >= 0


def is_number_format(text: object) -> bool:
    """Whether a text is a format of Python's for numbers, without width and sign."""
    return isinstance(text, str) and re.fullmatch(r",?\.\d\d?[eEfFgG%]", text) is not None


class Metric(Measure):
    """A measure with the function that computes it from all outputs and labels of test data.

    Without a name it is called as its function. `higher_is_better` may be omitted where the name
    says it, as in `auc` or `my_rmse`. `format` is a format of Python's: `.3f`, `.1%`.
    """

    function: MetricFunction

    def __init__(
        self,
        function: MetricFunction,
        name: str | None = None,
        higher_is_better: bool | None = None,
        format: str = ".3f",  # noqa: A002
    ) -> None:
        if not callable(function):
            raise ConfigError(
                f"A metric is a function of outputs and labels, got {function!r}.", key="metric"
            )
        function_name = getattr(function, "__name__", type(function).__name__)
        if name is None:
            name = function_name
        if not isinstance(name, str) or not name or not name.isprintable() or name == "<lambda>":
            raise ConfigError(
                f"A metric needs a name: Metric({function_name}, name=...,"
                f" higher_is_better=True), got {name!r}.",
                key="metric",
            )
        if higher_is_better is None:
            higher_is_better = _direction(name)
        super().__init__(name, higher_is_better, format)
        object.__setattr__(self, "function", function)

    def __call__(self, outputs: Tensor, labels: Tensor) -> float:
        return float(self.function(outputs, labels))

    def after(self, change: Callable[[Tensor], Tensor]) -> "Metric":
        """Return the same metric of changed outputs."""
        changed = ChangedOutputs(self.function, change)
        return Metric(changed, self.name, self.higher_is_better, self.format)


@dataclass(frozen=True)
class ChangedOutputs:
    """The function of a metric whose outputs are changed first."""

    function: MetricFunction
    change: Callable[[Tensor], Tensor]

    def __call__(self, outputs: Tensor, labels: Tensor) -> float:
        return self.function(self.change(outputs), labels)


MetricLike = Metric | MetricFunction | str
"""A metric, a function whose name says its direction, or the name of a built-in metric."""


def as_metrics(metric: MetricLike | Sequence[MetricLike]) -> tuple[Metric, ...]:
    """Return one or several metrics as a tuple, the main one first."""
    if not isinstance(metric, (list, tuple)):
        return (as_metric(metric),)
    metrics = tuple(map(as_metric, metric))
    names = [metric.name for metric in metrics]
    if not metrics:
        raise ConfigError(
            "`metric` is empty; give at least one metric, such as 'accuracy'.", key="metric"
        )
    if len(set(names)) < len(names):
        raise ConfigError(
            f"Two metrics have the same name, got {', '.join(names)}; give Metric(..., name=...).",
            key="metric",
        )
    return metrics


def as_metric(metric: Any) -> Metric:
    """Return a metric: one itself, of a function, or a built-in one by name."""
    if isinstance(metric, Metric):
        return metric
    if not isinstance(metric, str):
        return Metric(metric)
    if metric not in METRICS:
        raise ConfigError(
            f"metric {metric!r} does not exist. {did_you_mean(metric, METRICS)}", key="metric"
        )
    return METRICS[metric]


def _direction(name: str) -> bool:
    words = set(name.lower().replace("-", "_").replace(" ", "_").split("_"))
    higher = bool(words & HIGHER)
    lower = bool(words & LOWER)
    if higher == lower:
        raise ConfigError(
            f"Is a higher or a lower {name} better? Say it: Metric({name}, higher_is_better=True),"
            " or False.",
            key="metric",
        )
    return higher


IGNORED_LABEL = -100
"""The label that torch's cross-entropy ignores; metrics of classes and pixels ignore it too."""


def accuracy(outputs: Tensor, labels: Tensor) -> float:
    """Return the share of labels that have the largest output."""
    counted = int((labels != IGNORED_LABEL).sum())
    if not counted:
        return math.nan
    return int((outputs.argmax(1) == labels).sum()) / counted


def mean_iou(outputs: Tensor, labels: Tensor) -> float:
    """Return the overlap of predicted and actual pixels of a class, mean over the classes.

    That is their intersection divided by their union, over all images; classes that are neither
    predicted nor actual are left out.
    """
    counted = labels != IGNORED_LABEL
    predicted = outputs.argmax(1)[counted]
    actual = labels[counted].long()
    size = outputs.shape[1]
    pairs = torch.bincount(actual * size + predicted, minlength=size * size).view(size, size)
    intersection = pairs.diagonal().double()
    union = pairs.sum(0) + pairs.sum(1) - intersection
    present = union > 0
    return float((intersection[present] / union[present]).mean())


def balanced_accuracy(outputs: Tensor, labels: Tensor) -> float:
    """Return the accuracy on the samples of each class, mean over the classes in the labels."""
    correct = outputs.argmax(1) == labels
    classes = sorted(set(labels.flatten().tolist()))
    accuracies = [float(correct[labels == label].float().mean()) for label in classes]
    return sum(accuracies) / len(classes)


def macro_f1(outputs: Tensor, labels: Tensor) -> float:
    """Return the F1 score of each class, mean over the classes in labels and predictions."""
    predicted = outputs.argmax(1)
    classes = sorted({*labels.flatten().tolist(), *predicted.flatten().tolist()})
    scores = [_f1(predicted == label, labels == label) for label in classes]
    return sum(scores) / len(classes)


def multilabel_accuracy(outputs: Tensor, labels: Tensor) -> float:
    """Return the share of labels, 0 or 1, of all samples that the sign of their output predicts."""
    outputs = in_shape_of(labels, outputs, "The metric multilabel_accuracy")
    return float(((outputs > 0) == (labels > 0.5)).float().mean())


def multilabel_f1(outputs: Tensor, labels: Tensor) -> float:
    """Return the F1 score over all labels, 0 or 1, of all samples (micro average).

    Positive outputs predict 1.
    """
    return _f1(in_shape_of(labels, outputs, "The metric multilabel_f1") > 0, labels > 0.5)


def mse(outputs: Tensor, labels: Tensor) -> float:
    """Return the mean squared error over all outputs."""
    return float(
        functional.mse_loss(in_shape_of(labels, outputs, "The metric mse"), labels.float())
    )


def rmse(outputs: Tensor, labels: Tensor) -> float:
    """Return the root of the mean squared error."""
    return float(
        functional.mse_loss(in_shape_of(labels, outputs, "The metric rmse"), labels.float()).sqrt()
    )


def mae(outputs: Tensor, labels: Tensor) -> float:
    """Return the mean absolute error over all outputs."""
    return float(functional.l1_loss(in_shape_of(labels, outputs, "The metric mae"), labels.float()))


def r2(outputs: Tensor, labels: Tensor) -> float:
    """Return the share of the variance of the labels that is explained, mean over the targets.

    1 is perfect; 0 is as good as predicting the mean of the test labels.
    """
    outputs = in_shape_of(labels, outputs, "The metric r2").double()
    actual = labels.double()
    squared_errors = ((outputs - actual) ** 2).sum(0)
    variance = ((actual - actual.mean(0)) ** 2).sum(0)
    return float((1 - squared_errors / variance).mean())


def _f1(predicted: Tensor, actual: Tensor) -> float:
    """Return 2 TP / (2 TP + FP + FN); 0 where nothing is predicted or actual."""
    true_positives = int((predicted & actual).sum())
    total = int(predicted.sum()) + int(actual.sum())
    if total == 0:
        return 0.0
    return 2 * true_positives / total


def in_shape_of(labels: Tensor, outputs: Tensor, name: str) -> Tensor:
    """Return the outputs in the labels' shape: (n, 1) is taken as (n,).

    Torch would compare each output with all labels. Errors begin with `name`: "The metric rmse".
    """
    if outputs.shape == (*labels.shape, 1) or labels.shape == (*outputs.shape, 1):
        return outputs.reshape(labels.shape)
    if outputs.shape != labels.shape:
        raise ConfigError(
            f"{name} needs outputs and labels of the same shape, got"
            f" {tuple(outputs.shape)} and {tuple(labels.shape)}."
        )
    return outputs


_FUNCTIONS = [
    accuracy, balanced_accuracy, macro_f1, multilabel_accuracy, multilabel_f1, mean_iou, mse, rmse,
    mae, r2,
]  # fmt: skip
METRICS = {function.__name__: Metric(function) for function in _FUNCTIONS}
"""The built-in metrics."""
SHARES = METRICS.keys() - {"mse", "rmse", "mae", "r2"}
"""Those with values from 0 to 1."""
