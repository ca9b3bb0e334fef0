"""Fine-tuning: each peer trains the shared model on its own data before it is evaluated."""

from typing import ClassVar, Literal

from pydantic import Field

from dispfl.methods.base import FineTuning, Method
from dispfl.methods.dpsgd import DPSGD
from dispfl.methods.fedavg import FedAvg


class FineTuned(Method):
    """Adds fine-tuning to a method with a shared model.

    The tuned model is evaluated and discarded: the next round does not see it.
    """

    untuned: ClassVar[type[Method]]
    """The method without fine-tuning."""
    tune_epochs: int = Field(default=5, ge=1)
    """Local epochs of fine-tuning."""
    tune_every: int = Field(default=10, ge=1)
    """Interval of fine-tuning and evaluation, in rounds; both also follow the last round."""
    tune_rate: Literal["initial", "current"] = "initial"
    """The learning rate of round 0 (the authors' choice), or that of the present round."""

    @property
    def fine_tuning(self) -> FineTuning:
        return FineTuning(self.tune_epochs, self.tune_rate, self.tune_every)

    @property
    def training_method(self) -> Method:
        settings = self.untuned.model_fields.keys() - {"name"}
        return self.untuned(**{name: getattr(self, name) for name in settings})


class FedAvgFT(FineTuned, FedAvg):
    """The paper's baseline "FedAvg-FT": the global model, fine-tuned locally."""

    untuned: ClassVar[type[Method]] = FedAvg
    name: Literal["fedavg-ft"] = "fedavg-ft"  # type: ignore[assignment]


class DPSGDFT(FineTuned, DPSGD):
    """The paper's baseline "D-PSGD-FT": the consensus, fine-tuned locally."""

    untuned: ClassVar[type[Method]] = DPSGD
    name: Literal["dpsgd-ft"] = "dpsgd-ft"  # type: ignore[assignment]
