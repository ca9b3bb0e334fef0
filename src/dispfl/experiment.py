"""The settings of a run, composed of the settings of its components.

    seed, rounds, peers, workers, vmap_peers, device, precision, engine, eval_every, eval_train,  top-level keys
    metric, average_buffers, unseen_peers, unseen_steps, attack, byzantine
    data, partition, model, method, topology, train, wire, privacy    tables, each the settings of its component

A table may be given by name alone (`method="dispfl"`). Every key has a default; the defaults
together are the demo. `config.py` makes an experiment from a TOML file and overrides.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, SerializeAsAny, field_validator

from dispfl.core.flat_module import Precision, resolve_device
from dispfl.core.metric import as_metric, as_metrics
from dispfl.core.rng import stream
from dispfl.core.samples import Samples
from dispfl.core.task import Task
from dispfl.core.train import Train
from dispfl.costs.estimate import CostInputs
from dispfl.data.catalogue import describe
from dispfl.data.datasets import Data
from dispfl.data.labelled import LabelledDataset
from dispfl.data.partition import Dirichlet, Partition
from dispfl.data.split import Split, validation_samples
from dispfl.errors import ConfigError, PartitionError
from dispfl.extras import require
from dispfl.methods.base import GossipMethod, Method
from dispfl.methods.dispfl import DisPFL
from dispfl.models.settings import CustomModel, Model
from dispfl.privacy.steps import Privacy
from dispfl.registry import FUNCTIONS, REGISTRIES, choose
from dispfl.robust.attacks import Attack, AttackName, poisoned
from dispfl.robust.averages import check_byzantine
from dispfl.round.context import PeerData, RunContext
from dispfl.settings import Settings
from dispfl.topology import RandomRegular, Topology, peer_names
from dispfl.user_functions import import_reference
from dispfl.wire.codec import Wire

if TYPE_CHECKING:
    from dispfl.runs.callbacks import OnRound
    from dispfl.runs.run import Run

EngineName = Literal["inprocess", "ray"]


class RunSettings(Settings):
    """The settings that a simulated experiment and a real site have in common."""

    CHOICES: ClassVar[tuple[str, ...]] = (*REGISTRIES, *FUNCTIONS)
    """Tables with a choice of components."""

    seed: int = Field(default=0, ge=0)
    """Everything random derives from it."""
    rounds: int = Field(default=16, ge=1)
    """Communication rounds: the paper's T."""
    eval_every: int = Field(default=1, ge=1)
    """Evaluation interval, in rounds; models are also evaluated after the last round."""
    eval_train: bool = False
    """Evaluate the models on their peers' training data too, as they are: how much of what they
    learned generalizes."""
    metric: tuple[str, ...] = Field(default=("accuracy",), min_length=1)
    """What is measured on test data: names of built-in metrics, or `module:function`; the first is
    the main one."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "cpu"
    """Where peers train; auto: the fastest device that the machine has."""
    precision: Precision = "float32"
    """bf16: forward and backward passes in bfloat16, where the hardware is fast with it; all else
    stays float32."""
    data: SerializeAsAny[Data] = Data(augment=False)
    model: SerializeAsAny[Model] = Model()
    method: SerializeAsAny[Method] = DisPFL()
    topology: SerializeAsAny[Topology] = RandomRegular.at_most(4)
    train: Train = Train(batch_size=32)
    wire: Wire = Wire()
    privacy: Privacy = Privacy()

    @field_validator(
        "data", "model", "method", "topology", "partition", mode="before", check_fields=False
    )
    @classmethod
    def _choose(cls, value: Any, info: Any) -> Any:
        return choose(info.field_name, value, cls.model_fields[info.field_name].default)

    @field_validator(
        "train", "wire", "privacy", "limits", "deadlines", mode="before", check_fields=False
    )
    @classmethod
    def _table(cls, value: Any, info: Any) -> Any:
        if isinstance(value, Settings):
            return value
        if not isinstance(value, Mapping):
            raise ConfigError(
                f"{info.field_name} must be a table, got {value!r}.", key=info.field_name
            )
        kind = cls.model_fields[info.field_name].annotation
        assert isinstance(kind, type)
        return kind(**value)

    @field_validator("metric", mode="before")
    @classmethod
    def _known_metrics(cls, value: Any) -> Any:
        names = [value] if isinstance(value, str) else value
        for name in names if isinstance(names, (list, tuple)) else ():
            if not (isinstance(name, str) and ":" in name):
                as_metric(str(name))
        return names

    @field_validator("device")
    @classmethod
    def _available(cls, device: str) -> str:
        return resolve_device(device)

    @classmethod
    def from_values(cls, values: Mapping[str, Any], folder: Path | None = None) -> Self:
        """Build settings; the user's own components are looked up in the folder first."""
        chosen = {
            key: choose(key, values[key], cls.model_fields[key].default, folder)
            for key in REGISTRIES
            if key in values and key in cls.model_fields
        }
        return cls(**{**values, **chosen})

    def to_toml(self) -> dict[str, Any]:
        """Return the complete settings as TOML can hold them; components by their names in a
        config."""
        content = self.model_dump(mode="json", exclude_none=True)
        for key, registry in REGISTRIES.items():
            if key in content:
                content[key]["name"] = registry.name_of(getattr(self, key))
        return content

    def context(
        self,
        data: LabelledDataset,
        assign: Callable[[Samples, Samples], Mapping[str, PeerData]],
        *,
        folder: Path | None = None,
        vmap_peers: int = 1,
        average_buffers: bool = False,
        remote_peers: Sequence[str] = (),
    ) -> RunContext:
        """Return the context of the rounds; `assign` divides the training and test data between
        peers.

        A custom network is imported from the folder, and checked on two samples first.
        """
        folder = folder or Path.cwd()  # a Ray worker has another current directory
        train, test = data.samples(augment=self.data.augment)
        shape, classes, model = data.shape, len(data.classes), self.model
        if self.privacy.enabled and getattr(self.data, "standardize", False):
            raise ConfigError(
                "privacy does not cover data.standardize, which computes means from the training"
                " data; scale the data by constants instead, and leave it false.",
                key="privacy",
            )
        if isinstance(model, CustomModel):
            model.check_network(next(train.batches(2))[0], classes, folder)
        return RunContext(
            model=lambda: model.network(shape, classes, folder),
            peers=assign(train, test),
            method=self.method,
            topology=self.topology,
            train=self.train,
            task=self.task(folder),
            seed=self.seed,
            rounds=self.rounds,
            eval_every=self.eval_every,
            eval_train=self.eval_train,
            device=self.device,
            precision=self.precision,
            wire=self.wire,
            privacy=self.privacy,
            vmap_peers=vmap_peers,
            average_buffers=average_buffers,
            remote_peers=remote_peers,
        )

    def task(self, folder: Path | None = None) -> Task:
        """Return the loss and the metrics; a metric of the user's own is imported from the
        folder."""
        own = [
            import_reference("metric", name, folder) if ":" in name else name
            for name in self.metric
        ]
        return Task(metrics=as_metrics(own))


class Experiment(RunSettings):
    """A complete description of a simulated run."""

    peers: int = Field(default=16, ge=1)
    """Participants of the federation."""
    workers: int = Field(default_factory=lambda: os.cpu_count() or 1, ge=1)
    """How many peers train at once: threads of this process, or Ray's processes."""
    vmap_peers: int = Field(default=1, ge=1)
    """How many peers with equally many samples train as one stack of models: faster where models
    are tiny.

    Results are equal to those of vmap_peers=1 up to rounding only, and so are those of a run
    interrupted in a round.
    """
    engine: EngineName = "inprocess"
    """What runs the peers: threads of this process, or Ray's processes here or on a cluster."""
    unseen_peers: int = Field(default=0, ge=0)
    """Peers that do not take part, and join after the last round: `summary.json` has the scores of
    their models."""
    unseen_steps: int = Field(default=20, ge=1)
    """The local steps of an unseen peer."""
    average_buffers: bool = False
    """Average buffers, such as the running statistics of batch norm, over the received models, as
    weights are.

    By default they stay with each peer.
    """
    partition: SerializeAsAny[Partition] = Dirichlet(alpha=0.3, samples_per_peer=96)
    attack: AttackName = "none"
    """What Byzantine peers do; the others' accuracies are reported."""
    byzantine: float = Field(default=0.0, ge=0, lt=1)
    """The share of Byzantine peers."""

    @field_validator("engine", mode="before")
    @classmethod
    def _check_engine(cls, engine: Any) -> Any:
        return check_engine(engine)

    def model_post_init(self, context: Any, /) -> None:
        """Fit the default degree to the number of peers, and refuse settings that do not fit each
        other."""
        object.__setattr__(self, "topology", self.topology.resolved(self.peers))
        object.__setattr__(self, "data", self.partition.data_settings(self.data))
        check_vmap_peers(self.vmap_peers, self.engine)
        check_average_buffers(self.average_buffers, self.method, self.engine)
        self.topology.check(self.peers)
        self.method.densities(self.peers)
        object.__setattr__(self, "method", self.method.resolved(self.topology, self.peers))
        check_byzantine(self.method, self.topology, self.peers)
        if self.byzantine and self.attack == "none":
            raise ConfigError(
                f"byzantine is {self.byzantine:g}, but attack is none; say how they lie:"
                " attack=sign-flip.",
                key="byzantine",
            )
        if self.attack != "none" and not self.byzantine:
            raise ConfigError(
                f"attack is {self.attack}, but byzantine is 0; say how many of the peers lie:"
                " byzantine=0.2.",
                key="attack",
            )

    def run(
        self,
        out: str | Path | None = None,
        *,
        resume: bool = False,
        on_round: "OnRound | Sequence[OnRound] | None" = None,
        progress: bool | None = None,
    ) -> "Run":
        """Run the experiment, as `dispfl run` does; with a run directory everything is saved.

        `resume` continues the run in that directory, if there is one. `on_round` and `progress` are
        as in `Federation`.
        """
        from dispfl.runs.execute import run_experiment  # which imports this module

        return run_experiment(self, out, resume=resume, on_round=on_round, progress=progress)

    @property
    def training_samples(self) -> int:
        """The number of samples of a built-in data set that a peer trains on."""
        given = self.partition.samples_per_peer
        everyone = self.peers + self.unseen_peers
        samples = describe(self.data.name).train // everyone if given == "all" else given
        return samples - validation_samples(samples, self.partition.validation)

    def cost_inputs(self) -> CostInputs:
        """Return the inputs of a cost estimate."""
        return CostInputs(
            model=self.model,
            data=describe(self.data.name),
            method=self.method,
            topology=self.topology,
            peers=self.peers,
            samples=self.training_samples,
            train=self.train,
            wire=self.wire,
            seed=self.seed,
            validation=bool(self.partition.validation),
        )

    def split(self, data: LabelledDataset) -> Split:
        """Return which samples each peer gets."""
        rng = stream(self.seed, "partition")
        try:
            split = self.partition.split_data(data, self.peers + self.unseen_peers, rng=rng)
        except PartitionError as problem:
            if not self.unseen_peers:
                raise
            counts = f"These are peers={self.peers} and unseen_peers={self.unseen_peers}."
            raise PartitionError(f"{problem} {counts}") from None
        return split.without_last(self.unseen_peers)

    def split_context(self, data: LabelledDataset, split: Split) -> RunContext:
        """Return the context of the rounds with the data divided by a split."""
        extra: dict[str, Any] = {"unseen_steps": self.unseen_steps}

        names = peer_names(self.peers)
        attack = extra["attack"] = Attack.of(self.attack, self.byzantine, names, self.seed)

        def assign(train: Samples, test: Samples) -> dict[str, PeerData]:
            if split.global_test is not None:
                extra["global_test"] = test.take(split.global_test)
            if split.unseen is not None:
                unseen = [f"new-{name}" for name in peer_names(self.unseen_peers)]
                extra["unseen"] = _peer_data(unseen, split.unseen, train, test)
            peers = _peer_data(names, split, train, test)
            for attacker in attack.byzantine if attack else ():
                byzantine_peers = poisoned(peers[attacker].train, self.attack, len(data.classes))
                peers[attacker] = replace(peers[attacker], train=byzantine_peers)
            return peers

        context = self.context(
            data, assign, vmap_peers=self.vmap_peers, average_buffers=self.average_buffers
        )
        return replace(context, **extra)


def _peer_data(
    names: Sequence[str], split: Split, train: Samples, test: Samples
) -> dict[str, PeerData]:
    held_out: list[Samples | None] = [train.take(rows) for rows in split.validation]
    rows = zip(names, split.train, split.test, held_out or [None] * len(names), strict=True)
    return {
        name: PeerData(train.take(mine), test.take(tested), validation)
        for name, mine, tested, validation in rows
    }


def check_engine(engine: Any) -> EngineName:
    """Return the engine; refuse one that does not exist or is not installed."""
    match engine:
        case "inprocess":
            return "inprocess"
        case "ray":
            require("ray", "engine=ray")
            return "ray"
    raise ConfigError(f"engine must be 'inprocess' or 'ray', got {engine!r}.", key="engine")


def check_vmap_peers(vmap_peers: int, engine: str) -> None:
    """Refuse stacks of peers with an engine that does not support them."""
    if vmap_peers > 1 and engine != "inprocess":
        raise ConfigError(
            f"vmap_peers is {vmap_peers}, but engine={engine} trains peers one by one; use"
            " engine=inprocess.",
            key="vmap_peers",
        )


def check_average_buffers(average: bool, method: Method, engine: str) -> None:
    """Refuse to average buffers where peers receive from no neighbours, and where messages do not
    contain them."""
    if not average:
        return
    if not isinstance(method, GossipMethod) or not method.communicates:
        raise ConfigError(
            "average_buffers averages over the neighbours that a peer receives from; method"
            f" {method.name} has none. Omit it.",
            key="average_buffers",
        )
    if method.masks_channels:
        raise ConfigError(
            "average_buffers needs method.structure=weights: peers have different channels."
            " Omit it.",
            key="average_buffers",
        )
    if engine != "inprocess":
        raise ConfigError(
            f"average_buffers needs engine=inprocess, got engine={engine}: messages have no"
            " buffers.",
            key="average_buffers",
        )
