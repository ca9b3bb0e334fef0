"""From what an experiment or a site's plan says to what its rounds need."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from dispfl.core.live import Precision
from dispfl.core.train import Samples, Task, Train
from dispfl.data.datasets import Data, Pictures
from dispfl.data.own.samples import OwnSamples
from dispfl.methods.base import Method
from dispfl.models.own import OwnModel
from dispfl.models.registry import Model
from dispfl.topology import Topology
from dispfl.wire.codec import Wire
from dispfl.work import PeerData, Setting


class Described(Protocol):
    """What experiments and plans both say: fields of the same names. Properties here, as both are frozen."""

    @property
    def seed(self) -> int: ...
    @property
    def rounds(self) -> int: ...
    @property
    def eval_every(self) -> int: ...
    @property
    def device(self) -> str: ...
    @property
    def precision(self) -> Precision: ...
    @property
    def data(self) -> Data: ...
    @property
    def model(self) -> Model: ...
    @property
    def method(self) -> Method: ...
    @property
    def topology(self) -> Topology: ...
    @property
    def train(self) -> Train: ...
    @property
    def wire(self) -> Wire: ...


def setting_of(
    described: Described,
    data: Pictures | OwnSamples,
    dealt: Callable[[Samples, Samples], Mapping[str, PeerData]],
    *,
    folder: Path | None = None,
    together: int = 1,
    elsewhere: Sequence[str] = (),
) -> Setting:
    """The setting of the rounds; `dealt` says whose the training and test data are.

    A network of the user's own is imported from the folder, and tried on two samples before anything is made for it.
    """
    train, test = data.samples(augment=described.data.augment)
    shape, classes, model = data.shape, len(data.classes), described.model
    if isinstance(model, OwnModel):
        model.try_on(next(train.batches(2))[0], classes, folder)
    return Setting(
        model=lambda: model.network(shape, classes, folder),
        peers=dealt(train, test),
        method=described.method,
        topology=described.topology,
        train=described.train,
        task=Task(),
        seed=described.seed,
        rounds=described.rounds,
        eval_every=described.eval_every,
        device=described.device,
        precision=described.precision,
        wire=described.wire,
        together=together,
        elsewhere=elsewhere,
    )
