"""The task that peers learn: its loss and its metrics."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional

from dispfl.core.metric import METRICS, Metric, MetricLike, as_metrics
from dispfl.errors import ConfigError

CLASSIFICATION = (functional.cross_entropy, functional.nll_loss)
"""Losses of classification, whose metric is the accuracy unless stated; torch's modules too."""


@dataclass(frozen=True)
class Task:
    """The loss to minimize and the metrics to report, the main one first.

    By default those of classification.
    """

    loss: Callable[[Tensor, Tensor], Tensor] = functional.cross_entropy
    metrics: tuple[Metric, ...] = (METRICS["accuracy"],)

    @classmethod
    def of(
        cls,
        loss: Callable[[Tensor, Tensor], Tensor],
        metric: MetricLike | Sequence[MetricLike] | None = None,
    ) -> "Task":
        """Return the task of a loss, and of one or several metrics.

        Only losses of classification have a default metric.
        """
        if metric is not None:
            return cls(loss, as_metrics(metric))
        if loss not in CLASSIFICATION and not isinstance(loss, (nn.CrossEntropyLoss, nn.NLLLoss)):
            name = getattr(loss, "__name__", type(loss).__name__)
            raise ConfigError(
                f"The loss {name} needs a metric that fits it: give metric='rmse', another of"
                f" {', '.join(METRICS)}, or a function of your own.",
                key="metric",
            )
        return cls(loss)

    @property
    def metric(self) -> Metric:
        """The main metric."""
        return self.metrics[0]
