"""What is measured on test data: metrics with a name, a direction and a format, and the built-in
ones."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import functional

from dispfl.errors import ConfigError
from dispfl.settings import did_you_mean

MetricFunction = Callable[[Tensor, Tensor], float]
"""From all outputs and labels of a peer's test data to a number."""
HIGHER = {
    "acc", "accuracy", "auc", "auprc", "auroc", "bleu", "dice", "f1", "iou", "ndcg", "precision", "r2", "recall",
}  # fmt: skip
LOWER = {
    "brier",
    "cer",
    "ece",
    "err",
    "error",
    "loss",
    "mae",
    "mape",
    "mse",
    "nll",
    "perplexity",
    "rmse",
    "wer",
}
"""Words in the names of functions that say in which direction they are better."""


@dataclass(frozen=True)
class Measure:
    """What a number measures: its name, whether a higher or a lower number is better, and how to
    print it."""

    name: str
    higher_is_better: bool
    format: str = ".3f"

    def text(self, value: float | None) -> str:
        """Return a value as it is printed, or a dash for None."""
        return "–" if value is None else f"{value:{self.format}}"

    def gain(self, value: float, other: float) -> float:
        """Return by how much a value is better than another: negative if it is worse."""
        return value - other if self.higher_is_better else other - value

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
    """A measure with the function that computes it, from all outputs and labels of a peer's test
    data.

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
        own = getattr(function, "__name__", type(function).__name__)
        name = own if name is None else name
        if not isinstance(name, str) or not name or not name.isprintable() or name == "<lambda>":
            raise ConfigError(
                f"A metric needs a name: Metric({own}, name=..., higher_is_better=True), got"
                f" {name!r}.",
                key="metric",
            )
        if higher_is_better is None:
            higher_is_better = _direction(name)
        if not is_number_format(format):
            raise ConfigError(
                f"The format of the metric {name} must be like .3f, .1% or .2e, got {format!r}.",
                key="metric",
            )
        super().__init__(name, higher_is_better, format)
        object.__setattr__(self, "function", function)

    def __call__(self, outputs: Tensor, labels: Tensor) -> float:
        return float(self.function(outputs, labels))


MetricLike = Metric | MetricFunction | str
"""A metric, a function whose name says its direction, or the name of a built-in metric."""


def as_metrics(given: MetricLike | Sequence[MetricLike]) -> tuple[Metric, ...]:
    """Return metrics that are given as one or several, the main one first."""
    several = [*given] if isinstance(given, (list, tuple)) else [given]
    metrics = tuple(as_metric(one) for one in several)
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


def as_metric(given: Any) -> Metric:
    """Return a metric that is given as such, as a function or by name."""
    if isinstance(given, Metric):
        return given
    if not isinstance(given, str):
        return Metric(given)
    if given not in METRICS:
        raise ConfigError(
            f"metric {given!r} does not exist. {did_you_mean(given, METRICS)}", key="metric"
        )
    return METRICS[given]


def _direction(name: str) -> bool:
    words = {word.lower() for word in name.replace("-", "_").replace(" ", "_").split("_")}
    higher, lower = bool(words & HIGHER), bool(words & LOWER)
    if higher == lower:
        raise ConfigError(
            f"Is a higher or a lower {name} better? Say it: Metric({name}, higher_is_better=True),"
            " or False.",
            key="metric",
        )
    return higher


def accuracy(outputs: Tensor, labels: Tensor) -> float:
    """Return the share of labels that have the largest output."""
    return int((outputs.argmax(1) == labels).sum()) / labels.numel()


def balanced_accuracy(outputs: Tensor, labels: Tensor) -> float:
    """Return the accuracy on the samples of each class, mean over the classes in the labels."""
    right, classes = outputs.argmax(1) == labels, sorted(set(labels.flatten().tolist()))
    return sum(float(right[labels == one].float().mean()) for one in classes) / len(classes)


def macro_f1(outputs: Tensor, labels: Tensor) -> float:
    """Return the F1 score of each class, mean over the classes in the labels and the
    predictions."""
    found = outputs.argmax(1)
    classes = sorted({*labels.flatten().tolist(), *found.flatten().tolist()})
    return sum(_f1(found == one, labels == one) for one in classes) / len(classes)


def multilabel_accuracy(outputs: Tensor, labels: Tensor) -> float:
    """Return the share of labels, 0 or 1, of all samples that the sign of their output predicts."""
    outputs = _like(outputs, labels, "multilabel_accuracy")
    return float(((outputs > 0) == (labels > 0.5)).float().mean())


def multilabel_f1(outputs: Tensor, labels: Tensor) -> float:
    """Return the F1 score over all labels, 0 or 1, of all samples (micro average); positive outputs
    predict 1."""
    return _f1(_like(outputs, labels, "multilabel_f1") > 0, labels > 0.5)


def mse(outputs: Tensor, labels: Tensor) -> float:
    """Return the mean squared error over all outputs."""
    return float(functional.mse_loss(_like(outputs, labels, "mse"), labels.float()))


def rmse(outputs: Tensor, labels: Tensor) -> float:
    """Return the root of the mean squared error."""
    return float(functional.mse_loss(_like(outputs, labels, "rmse"), labels.float()).sqrt())


def mae(outputs: Tensor, labels: Tensor) -> float:
    """Return the mean absolute error over all outputs."""
    return float(functional.l1_loss(_like(outputs, labels, "mae"), labels.float()))


def _f1(found: Tensor, wanted: Tensor) -> float:
    """Return 2 TP / (2 TP + FP + FN); 0 where nothing is found or wanted."""
    both, either = int((found & wanted).sum()), int(found.sum()) + int(wanted.sum())
    return 2 * both / either if either else 0.0


def _like(outputs: Tensor, labels: Tensor, name: str) -> Tensor:
    """Return the outputs in the labels' shape: (n, 1) is taken as (n,); torch would compare each
    with all."""
    if outputs.shape == (*labels.shape, 1) or labels.shape == (*outputs.shape, 1):
        return outputs.reshape(labels.shape)
    if outputs.shape != labels.shape:
        raise ConfigError(
            f"The metric {name} needs outputs and labels of the same shape, got"
            f" {tuple(outputs.shape)} and {tuple(labels.shape)}."
        )
    return outputs


METRICS = {
    metric.name: metric
    for metric in map(
        Metric,
        (accuracy, balanced_accuracy, macro_f1, multilabel_accuracy, multilabel_f1, mse, rmse, mae),
    )
}
"""The built-in metrics."""
