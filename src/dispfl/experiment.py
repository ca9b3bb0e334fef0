"""The settings of a run, composed of the settings of its components.

    RunSettings          what every run has: seed, rounds, method, topology, train, ...
    ├── Simulation       a simulated run: workers, engine, attack, ...; the keywords of `Federation`
    └── NamedSettings    a run whose data and model are settings too
        ├── Experiment   both: a complete description of a simulated run; the keys of a config file
        └── SiteConfig   a real site (`dispfl.peer.setup.site_config`)

A table may be given by name alone (`method="dispfl"`). Every key has a default; the defaults
together are the demo. `config.py` makes an experiment from a TOML file and overrides.
"""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, SerializeAsAny, field_validator, model_validator

from dispfl.clock.fleet import Fleet, Network, absolute_file, make_fleet
from dispfl.core.device_classes import FIT, DeviceClass, Fit, assign_classes, classes_from_lists
from dispfl.core.flat_module import MemoryFormat, Precision, resolve_device
from dispfl.core.metric import METRICS, as_metric
from dispfl.core.names import MAX_PEERS, check_name, check_names, peer_names
from dispfl.core.staleness import Mode, Staleness
from dispfl.core.task import TASK_METRICS, Task, TaskName
from dispfl.core.train import Train
from dispfl.data.catalogue import describe
from dispfl.data.datasets import CustomData, Data
from dispfl.data.partition import Dirichlet, Partition
from dispfl.data.split import validation_samples
from dispfl.errors import ConfigError
from dispfl.extras import require
from dispfl.methods.base import Method, check_async, check_deadline, has_density_groups
from dispfl.methods.dispfl import DisPFL
from dispfl.models.settings import Model
from dispfl.privacy.steps import Privacy
from dispfl.registry import FUNCTIONS, REGISTRIES, choose
from dispfl.robust.attacks import POISONS, Attack, AttackName
from dispfl.robust.averages import check_byzantine, check_mixing_weights, check_protects
from dispfl.settings import Settings
from dispfl.topology import RandomRegular, Topology
from dispfl.user_functions import checked_name, import_reference
from dispfl.wire.codec import Wire

if TYPE_CHECKING:
    from dispfl.runs.callbacks import Callback
    from dispfl.runs.run import Run

DEFAULTS_OF_TASKS: dict[str, dict[str, str]] = {
    "regression": {"partition": "iid"},
    "multilabel": {"partition": "iid"},
    "segmentation": {"partition": "iid", "model": "unet"},
}
"""Defaults of tasks without one class for each sample, by which samples could be divided."""
MINUTES = re.compile(r"[0-9]{1,6}(\.[0-9]{1,3})?min")
EngineName = Literal["inprocess", "ray"]


class RunSettings(Settings):
    """The settings that every run has, simulated or real."""

    CHOICES: ClassVar[tuple[str, ...]] = (*REGISTRIES, *FUNCTIONS)
    """Tables with a choice of components."""
    SHORT: ClassVar[Mapping[str, str]] = {}
    """Tables that may be one text, and which of their keys it is."""

    seed: int = Field(default=0, ge=0)
    """Everything random derives from it."""
    rounds: int = Field(default=16, ge=1)
    """Communication rounds: the paper's T."""
    eval_every: int = Field(default=1, ge=1)
    """Evaluation interval, in rounds; models are also evaluated after the last round."""
    eval_train: bool = False
    """Evaluate the models on their peers' training data too, to see how well they generalize."""
    task: TaskName = "classification"
    """What is learned: one class of each sample, numbers (regression), any number of labels
    (multilabel), or the class of each pixel (segmentation)."""
    loss: str | None = None
    """`module:function` of outputs and labels, in place of the task's loss; it needs a `metric`."""
    metric: tuple[str, ...] = Field(default=("accuracy",), min_length=1)
    """What is measured on test data: names of built-in metrics, or `module:function`; the first is
    the main one. The default is that of the task."""
    device: str = "cpu"
    """Where peers train: cpu, cuda, cuda:1, mps, or auto for the fastest that the machine has."""
    precision: Precision = "float32"
    """bf16: forward and backward passes in bfloat16, where the hardware is fast with it; all else
    stays float32."""
    memory_format: MemoryFormat = "contiguous"
    """channels_last: activations of images have their channels last in memory, which is faster for
    some networks; weights, messages and files stay row-major."""
    method: SerializeAsAny[Method] = DisPFL()
    topology: SerializeAsAny[Topology] = RandomRegular()
    train: Train = Train()
    wire: Wire = Wire()
    privacy: Privacy = Privacy()
    staleness: Staleness = Staleness()

    @field_validator(
        "data", "model", "method", "topology", "partition", mode="before", check_fields=False
    )
    @classmethod
    def _choose(cls, value: Any, info: Any) -> Any:
        key = info.field_name
        field = cls.model_fields[key]
        component = choose(key, value, field.default)
        kind = field.annotation
        assert isinstance(kind, type)
        if not isinstance(component, kind):
            raise ConfigError(
                f"{key} must be a name, a table or a {kind.__name__}, got {value!r}.", key=key
            )
        return component

    @field_validator(
        "train",
        "wire",
        "privacy",
        "staleness",
        "network",
        "fit",
        "limits",
        "deadlines",
        mode="before",
        check_fields=False,
    )
    @classmethod
    def _table(cls, value: Any, info: Any) -> Any:
        kind = cls.model_fields[info.field_name].annotation
        assert isinstance(kind, type)
        if isinstance(value, kind):
            return value
        if not isinstance(value, Mapping):
            raise ConfigError(
                f"{info.field_name} must be a table, got {value!r}.", key=info.field_name
            )
        return kind(**value)

    @model_validator(mode="before")
    @classmethod
    def _metric_of_task(cls, values: Any) -> Any:
        """Choose the metrics of the task where none are given."""
        if not isinstance(values, dict) or values.get("metric") is not None:
            return values
        if values.get("loss") is not None:
            raise ConfigError(
                f"loss is {values['loss']}, which needs a metric that fits it: give metric=rmse,"
                f" another of {', '.join(METRICS)}, or module:function.",
                key="metric",
            )
        task = values.get("task", "classification")
        return {**values, "metric": TASK_METRICS.get(task, ("accuracy",))}

    @field_validator("loss")
    @classmethod
    def _names_a_function(cls, loss: str | None) -> str | None:
        return loss and checked_name(loss)

    @field_validator("train")
    @classmethod
    def _defaults_of_method(cls, train: Train, info: Any) -> Train:
        """Give the settings that the user has not set the method's defaults."""
        method = info.data.get("method")
        if method is None:  # it was refused
            return train
        defaults = dict(method.train_defaults)
        if train.optimizer != "sgd":
            defaults.pop("momentum", None)
        for key in train.model_fields_set:
            defaults.pop(key, None)
        return train.model_copy(update=defaults)

    @field_validator("metric", mode="before")
    @classmethod
    def _check_metrics(cls, value: Any) -> Any:
        if isinstance(value, str):
            value = [value]
        if isinstance(value, (list, tuple)):
            for name in value:
                if not (isinstance(name, str) and ":" in name):
                    as_metric(str(name))
        return value

    @field_validator("device")
    @classmethod
    def _check_device(cls, device: str) -> str:
        return resolve_device(device)

    @classmethod
    def from_values(cls, values: Mapping[str, Any], folder: Path | None = None) -> Self:
        """Build settings; the user's own components are looked up in the folder first."""
        components = {}
        for key in REGISTRIES:
            if key in values and key in cls.model_fields:
                default = cls.model_fields[key].default
                components[key] = choose(key, values[key], default, folder)
        return cls(**{**values, **components})

    def to_toml(self) -> dict[str, Any]:
        """Return the complete settings for a TOML file; components by their names in a config."""
        content = self.model_dump(mode="json", exclude_none=True)
        for key, registry in REGISTRIES.items():
            if key in content:
                content[key]["name"] = registry.name_of(getattr(self, key))
        if not content.get("network"):  # without a clock
            content.pop("network", None)
        if getattr(self, "fit", None) == Fit():
            content.pop("fit")
        if not self.is_async:
            content.pop("staleness")
        return content

    @property
    def is_async(self) -> bool:
        """Whether peers do not wait for each other."""
        return False

    def make_task(self, folder: Path | None = None) -> Task:
        """Return the loss and the metrics; a user's own ones are imported from the folder."""
        loss = None
        if self.loss is not None:
            loss = import_reference("loss", self.loss, folder)
        metrics = []
        for name in self.metric:
            is_reference = ":" in name
            metrics.append(import_reference("metric", name, folder) if is_reference else name)
        return Task.of(loss, metrics, self.task)

    def attack_among(self, roster: Sequence[str]) -> Attack | None:
        """Return the simulated attack and its Byzantine peers; None without one."""
        return None


class Simulation(RunSettings):
    """The settings of a simulated run, with any data and model; the keywords of `Federation`."""

    peers: int = Field(default=16, ge=1, le=MAX_PEERS)
    """Participants of the federation."""
    schedule: Mode = "sync"
    """sync: in each round a peer waits for the models of its neighbours. async: nobody waits; a
    peer takes its steps one after another, each with the models that have arrived."""
    names: tuple[str, ...] = ()
    """The peers' names; their alphabetical order is that of the roster. By default 000, 001, ...

    With partition=by_column they are the values of the column.
    """
    classes: dict[str, DeviceClass] = Field(default_factory=dict)
    """Classes of devices by name, each with its `share` of the peers or their names (`peers`), and
    with a `density`, and in `train` with `epochs`, `steps`, `batch_size` or `lr`, of its own.

    With `speed` (FLOP/s), `up` and `down` (Mbit/s), `watts`, `memory` (MB), and `on_hours` and
    `off_hours`, `daily` (22:00-06:00) or `availability` (a file), the run has a clock. Lists of
    values, such as train.epochs=[1,5], make classes of equal size.
    """
    fleet: str | None = None
    """The devices of a clock, dealt to the peers by the seed: hospitals, phones, edge-boards,
    cloud-regions, or a CSV or .npz file."""
    network: Network = Network()
    fit: Fit = Fit()
    hours_per_round: float | None = Field(default=None, gt=0, le=100_000)
    """With schedule=async: the simulated hours of a round, which ends with scores. By default as
    long as the median device computes in a step."""
    deadline: float | None = Field(default=None, gt=0, le=100_000_000)
    """Simulated seconds after which a peer goes on without the late models of a round; a later
    round averages them. By default it waits for all."""
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
    memory_limit: float | None = Field(default=None, gt=0)
    """How many GB of the peers' states stay in memory; the others are read from the run directory
    when a task needs them. By default all stay in memory."""
    checkpoint_every: int | str = 1
    """After how many rounds the states are saved, or after how many minutes, such as "10min"; those
    of the last round always are. With memory_limit every round is saved."""
    unseen_peers: int = Field(default=0, ge=0, le=MAX_PEERS)
    """Peers that do not take part, and join after the last round: `summary.json` has the scores of
    their models."""
    unseen_steps: int = Field(default=20, ge=1)
    """The local steps of an unseen peer."""
    average_buffers: bool = False
    """Average buffers, such as the running statistics of batch norm, over the received models, as
    weights are.

    By default they stay with each peer.
    """
    attack: AttackName = "none"
    """What Byzantine peers do; the scores of the other peers are reported."""
    byzantine: float = Field(default=0.0, ge=0, lt=1)
    """The share of Byzantine peers."""

    @model_validator(mode="before")
    @classmethod
    def _peers_are_named(cls, values: Any) -> Any:
        """Count the peers that are named, and refuse another number of them."""
        names = values.get("names")
        if not names:
            return values
        if isinstance(names, str):
            names = [names]
        names = check_names(names, "names")
        peers = values.get("peers", len(names))
        if peers != len(names):
            raise ConfigError(
                f"`names` has {len(names)} names, but peers is {peers}; name all of them, or omit"
                " `names`.",
                key="names",
            )
        return {**values, "names": names, "peers": len(names)}

    @model_validator(mode="before")
    @classmethod
    def _lists_make_classes(cls, values: Any) -> Any:
        train = values.get("train")
        if not isinstance(train, Mapping):
            return values
        scalars, classes = classes_from_lists(train)
        if classes and values.get("classes"):
            raise ConfigError(
                "`train` has lists, which make groups of peers, and there are `classes`; give each"
                " class its own value.",
                key="train",
            )
        return {**values, "train": scalars, **({"classes": classes} if classes else {})}

    @field_validator("classes", mode="before")
    @classmethod
    def _class_tables(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            raise ConfigError(f"classes must be a table of classes, got {value!r}.", key="classes")
        classes = {}
        for name, table in value.items():
            if not isinstance(table, (Mapping, DeviceClass)):
                raise ConfigError(
                    f"classes.{name} must be a table, such as {{share=0.5, density=0.2}}, got"
                    f" {table!r}.",
                    key="classes",
                )
            try:
                check_name("The name of a class", str(name))
                if isinstance(table, Mapping):
                    table = DeviceClass(**table)
            except ConfigError as problem:
                sentence = str(problem).replace("classes.NAME", f"classes.{name}")
                raise ConfigError(sentence, key="classes") from None
            classes[str(name)] = table
        return classes

    @field_validator("fleet")
    @classmethod
    def _absolute(cls, fleet: str | None) -> str | None:
        """Make a file's path absolute: a run may be resumed from another working directory."""
        return absolute_file(fleet) if fleet else None

    @property
    def is_async(self) -> bool:
        return self.schedule == "async"

    @property
    def roster(self) -> list[str]:
        """The names of all peers that take part, sorted."""
        return list(self.names) or peer_names(self.peers)

    def named(self, names: Sequence[str]) -> Self:
        """Return the settings with these names of the peers, where they have none."""
        if not names or self.names == tuple(names):
            return self
        if self.names:
            raise ConfigError(
                "`names` are not those that the data give the peers:"
                f" {', '.join(names[:10])}{', ...' if len(names) > 10 else ''}. Omit `names`.",
                key="names",
            )
        return self.model_copy(update={"names": tuple(names)})

    @field_validator("engine", mode="before")
    @classmethod
    def _check_engine(cls, engine: Any) -> Any:
        if engine == "ray":
            require("ray", "engine=ray")
        return engine

    def model_post_init(self, context: Any, /) -> None:
        """Fit the defaults to the number of peers, and refuse settings that contradict others."""
        topology = self.topology.resolved(self.peers)
        topology.check(self.peers)
        if getattr(self.method, "density", None) != FIT:
            self.method.densities(self.peers)
        method = self.method.resolved(topology, self.peers)
        if self.is_async:
            check_async(method, topology)
        elif self.deadline is not None:
            check_deadline(self.deadline, method, topology)
        check_byzantine(method, topology, self.peers)
        check_protects(method, topology, self.peers)
        check_mixing_weights(method, topology)
        object.__setattr__(self, "topology", topology)
        object.__setattr__(self, "method", method)

        self._check_classes()
        self._check_clock()
        self._check_hours_per_round()
        self._check_staleness()
        self._check_deadline()
        self._check_engine_fits()
        self._check_average_buffers()
        self._check_attack()

    def _check_classes(self) -> None:
        """Refuse classes that do not fit the peers; data may name the peers later."""
        by_name = any(device.peers for device in self.classes.values())
        if self.names or not by_name:
            assign_classes(self.classes, self.roster)
        for name, device in self.classes.items():
            if device.density is not None and not has_density_groups(self.method):
                raise ConfigError(
                    f"classes.{name}.density is {device.density:g}, but method {self.method.name}"
                    " has no density of each peer; omit it.",
                    key="classes",
                )

    @field_validator("checkpoint_every")
    @classmethod
    def _check_interval(cls, interval: int | str) -> int | str:
        if isinstance(interval, str):
            valid = MINUTES.fullmatch(interval) is not None
        else:
            valid = interval >= 1
        if not valid:
            raise ConfigError(
                "checkpoint_every must be a number of rounds from 1 on, such as 5, or of minutes,"
                f' such as "10min", got {interval}.',
                key="checkpoint_every",
            )
        return interval

    @property
    def checkpoint_minutes(self) -> float | None:
        """The minutes between two checkpoints; None if they are so many rounds apart."""
        if not isinstance(self.checkpoint_every, str):
            return None
        return float(self.checkpoint_every.removesuffix("min"))

    def _check_clock(self) -> None:
        """Refuse a fleet that cannot be made, and a network without one."""
        by_name = any(device.peers for device in self.classes.values())
        if self.names or not by_name:
            fleet = self.fleet_of(self.roster)
            if fleet is None and self.network != Network():
                raise ConfigError(
                    "network describes the links of a clock, but there is none; name its devices:"
                    " fleet=phones. To choose the network that is trained, use model=NAME.",
                    key="network",
                )

    def _check_hours_per_round(self) -> None:
        if self.hours_per_round is not None and not self.is_async:
            raise ConfigError(
                f"hours_per_round is {self.hours_per_round:g}, but schedule is sync, where a round"
                " lasts as long as its slowest peer; omit it, or use schedule=async.",
                key="hours_per_round",
            )

    def _check_staleness(self) -> None:
        """Refuse settings of staleness where nothing is stale."""
        if self.is_async:
            return
        for key, field in Staleness.model_fields.items():
            value = getattr(self.staleness, key)
            if value != field.default:
                raise ConfigError(
                    f"staleness.{key} is {str(value).lower()}, but schedule is sync, where no model"
                    " is stale; omit it, or use schedule=async.",
                    key=f"staleness.{key}",
                )

    def _check_deadline(self) -> None:
        """Refuse a deadline where nobody waits, without a clock, or with what needs all models."""
        if self.deadline is None:
            return
        problem = ""
        if self.is_async:
            problem = "schedule is async, where no peer waits; omit it, or use schedule=sync"
        elif not self.has_clock:
            problem = (
                "there are no devices by whose times models are late; name them: fleet=phones, or"
                " give classes a speed"
            )
        elif self.topology.offline_prob:
            problem = (
                f"topology.offline_prob is {self.topology.offline_prob:g}; with a deadline devices"
                " are offline by their classes (on_hours, daily): omit it"
            )
        elif self.wire.coding != "plain":
            problem = (
                f"wire.coding is {self.wire.coding}, where the size of a message is known only once"
                " it is sent; use wire.coding=plain"
            )
        elif self.average_buffers:
            problem = "average_buffers is true, which needs all models of a round; omit one of them"
        if problem:
            raise ConfigError(f"deadline is {self.deadline:g}, but {problem}.", key="deadline")

    def check_async_simulation(self) -> None:
        """Refuse an asynchronous simulation without devices, and what needs common rounds.

        Real peers (`dispfl up`) need neither.
        """
        if not self.is_async:
            return
        if not self.has_clock:
            raise ConfigError(
                "schedule is async, but there are no devices that differ in speed; name them:"
                " fleet=phones, or give classes a speed.",
                key="schedule",
            )
        if self.topology.offline_prob:
            raise ConfigError(
                f"topology.offline_prob is {self.topology.offline_prob:g}, but with schedule=async"
                " devices are offline by their classes (on_hours, daily); omit it.",
                key="topology.offline_prob",
            )
        if self.wire.coding != "plain":
            raise ConfigError(
                f"wire.coding is {self.wire.coding}, but with schedule=async the size of a message"
                " must be known before it is compressed; use wire.coding=plain.",
                key="wire.coding",
            )
        unfit = {"memory_limit": None, "vmap_peers": 1, "average_buffers": False}
        for key, default in unfit.items():
            value = getattr(self, key)
            if value != default:
                raise ConfigError(
                    f"{key} is {value}, which needs rounds that all peers begin together; omit it,"
                    " or use schedule=sync.",
                    key=key,
                )

    @property
    def has_clock(self) -> bool:
        """Whether the run has devices, by which a clock gives its rounds their times."""
        return self.fleet is not None or any(each.has_device for each in self.classes.values())

    def fleet_of(self, roster: Sequence[str]) -> Fleet | None:
        """Return the devices of these peers and the network between them; None without a clock."""
        return make_fleet(self.fleet, self.classes, self.network, roster, self.seed)

    def _check_engine_fits(self) -> None:
        if self.engine != "inprocess":
            reason = ""
            if self.memory_limit is not None:
                reason = f"memory_limit is {self.memory_limit:g}"
            if self.checkpoint_every != 1:
                reason = f"checkpoint_every is {self.checkpoint_every}"
            if reason:
                raise ConfigError(
                    f"{reason}, but engine={self.engine} saves all states after every round, to"
                    " restore those of a lost worker; omit it, or use engine=inprocess.",
                    key=reason.split()[0],
                )
        if self.vmap_peers > 1 and self.engine != "inprocess":
            raise ConfigError(
                f"vmap_peers is {self.vmap_peers}, but engine={self.engine} trains peers one by"
                " one; use engine=inprocess.",
                key="vmap_peers",
            )

    def _check_average_buffers(self) -> None:
        """Refuse to average buffers that peers do not receive from others."""
        if not self.average_buffers:
            return
        problem = ""
        if not self.method.gossips:
            problem = (
                "averages over the neighbours that a peer receives from; method"
                f" {self.method.name} has none. Omit it."
            )
        elif self.method.masks_channels:
            problem = "needs method.structure=weights: peers have different channels. Omit it."
        elif self.engine != "inprocess":
            problem = f"needs engine=inprocess, got engine={self.engine}: messages have no buffers."
        if problem:
            raise ConfigError(f"average_buffers {problem}", key="average_buffers")

    def _check_attack(self) -> None:
        if self.attack in POISONS and self.task != "classification":
            raise ConfigError(
                f"attack is {self.attack}, which changes classes, but task is {self.task}; use"
                " another attack, such as sign-flip.",
                key="attack",
            )
        if self.byzantine and self.attack == "none":
            raise ConfigError(
                f"byzantine is {self.byzantine:g}, but attack is none; name what these peers do:"
                " attack=sign-flip.",
                key="byzantine",
            )
        if self.attack != "none" and not self.byzantine:
            raise ConfigError(
                f"attack is {self.attack}, but byzantine is 0; give the share of Byzantine peers:"
                " byzantine=0.2.",
                key="attack",
            )

    def attack_among(self, roster: Sequence[str]) -> Attack | None:
        """Return the simulated attack and its Byzantine peers; None without one."""
        return Attack.of(self.attack, self.byzantine, roster, self.seed)


class NamedSettings(RunSettings):
    """The settings of a run whose data and model are settings too."""

    data: SerializeAsAny[Data] = Data(augment=False)
    model: SerializeAsAny[Model] = Model()


class Experiment(Simulation, NamedSettings):
    """A complete description of a simulated run."""

    partition: SerializeAsAny[Partition] = Dirichlet(alpha=0.3, samples_per_peer=96)

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_task(cls, values: Any) -> Any:
        """Choose a partition and a network that fit the task, where none are given."""
        if not isinstance(values, dict):
            return values
        return {**DEFAULTS_OF_TASKS.get(values.get("task", ""), {}), **values}

    def model_post_init(self, context: Any, /) -> None:
        """Fit the settings to each other as `Simulation` does; a column may name the peers."""
        super().model_post_init(context)
        if isinstance(self.data, CustomData):
            self.data.refuse(["reload"], "only a real site takes in new samples while it runs")
        object.__setattr__(self, "data", self.partition.data_settings(self.data))

    @property
    def training_samples(self) -> int:
        """The number of samples of a built-in data set that a peer trains on."""
        samples = self.partition.samples_per_peer
        if samples == "all":
            samples = describe(self.data.name).train // (self.peers + self.unseen_peers)
        return samples - validation_samples(samples, self.partition.validation)

    def run(
        self,
        out: str | Path | None = None,
        *,
        resume: bool = False,
        callbacks: "Sequence[Callback]" = (),
        progress: bool | None = None,
        fast: bool = False,
    ) -> "Run":
        """Run the experiment, as `dispfl run` does; with a run directory everything is saved.

        `resume` continues the run in that directory, if there is one. `callbacks`, `progress` and
        `fast` are as in `Federation.run`.
        """
        from dispfl.runs.execute import run_experiment  # which imports this module

        return run_experiment(
            self, out, resume=resume, callbacks=callbacks, progress=progress, fast=fast
        )
