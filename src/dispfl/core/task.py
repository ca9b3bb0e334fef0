"""The task that peers learn: its loss and its metrics."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor, nn
from torch.nn import functional

from dispfl.core.metric import METRICS, Metric, MetricLike, as_metrics, in_shape_of
from dispfl.errors import ConfigError

Loss = Callable[[Tensor, Tensor], Tensor]
TaskName = Literal["classification", "regression", "multilabel", "segmentation"]
CLASSIFICATION = (functional.cross_entropy, functional.nll_loss)
"""Losses of classification, whose metric is the accuracy unless stated; torch's modules too."""


def squared_error(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return the mean squared error: the loss of a regression."""
    return functional.mse_loss(
        in_shape_of(labels, outputs, "The loss squared_error"), labels.float()
    )


def labels_cross_entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return the binary cross-entropy over all labels, 0 or 1: the loss of a multi-label task."""
    logits = in_shape_of(labels, outputs, "The loss labels_cross_entropy")
    return functional.binary_cross_entropy_with_logits(logits, labels.float())


def pixel_cross_entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy over all pixels but ignored ones: the loss of a segmentation."""
    return functional.cross_entropy(outputs, labels.long())


LOSSES: dict[TaskName, Loss] = {
    "classification": functional.cross_entropy,
    "regression": squared_error,
    "multilabel": labels_cross_entropy,
    "segmentation": pixel_cross_entropy,
}
"""The loss of each task."""
TASK_METRICS: dict[TaskName, tuple[str, ...]] = {
    "classification": ("accuracy",),
    "regression": ("rmse", "mae", "r2"),
    "multilabel": ("multilabel_f1", "multilabel_accuracy"),
    "segmentation": ("mean_iou", "accuracy"),
}
"""The metrics of each task, the main one first."""


@dataclass(frozen=True)
class Task:
    """The loss to minimize and the metrics to report, the main one first.

    By default those of classification.
    """

    loss: Loss = functional.cross_entropy
    metrics: tuple[Metric, ...] = (METRICS["accuracy"],)

    @classmethod
    def of(
        cls,
        loss: Loss | None = None,
        metric: MetricLike | Sequence[MetricLike] | None = None,
        name: TaskName = "classification",
    ) -> "Task":
        """Return a task: by its name, with another loss, with one or several other metrics.

        Another loss needs a metric, except those of classification.
        """
        if loss is None:
            return cls(LOSSES[name], as_metrics(metric or TASK_METRICS[name]))
        if metric is not None:
            return cls(loss, as_metrics(metric))
        if loss not in CLASSIFICATION and not isinstance(loss, (nn.CrossEntropyLoss, nn.NLLLoss)):
            function = getattr(loss, "__name__", type(loss).__name__)
            raise ConfigError(
                f"The loss {function} needs a metric that fits it: give metric='rmse', another of"
                f" {', '.join(METRICS)}, or a function of your own.",
                key="metric",
            )
        return cls(loss)

    @property
    def metric(self) -> Metric:
        """The main metric."""
        return self.metrics[0]

    def with_unit(self, unit: "TargetUnit") -> "Task":
        """Return the task for targets in a unit of their own.

        The network learns standardized targets; metrics compare in the unit of the data.
        """
        metrics = tuple(metric.after(unit.restore) for metric in self.metrics)
        return replace(self, loss=UnitLoss(self.loss, unit), metrics=metrics)


@dataclass(frozen=True)
class TargetUnit:
    """The unit of numeric targets: the network's outputs are (target - mean) / std."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def standardize(self, labels: Tensor) -> Tensor:
        """Return targets as the network learns them."""
        mean, std = self._like(labels)
        return (labels - mean) / std

    def restore(self, outputs: Tensor) -> Tensor:
        """Return outputs of the network in the unit of the data."""
        mean, std = self._like(outputs)
        return outputs * std + mean

    def _like(self, values: Tensor) -> tuple[Tensor, Tensor]:
        return values.new_tensor(self.mean), values.new_tensor(self.std)


@dataclass(frozen=True)
class UnitLoss:
    """A loss on standardized targets."""

    loss: Loss
    unit: TargetUnit

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return self.loss(outputs, self.unit.standardize(labels))
