"""An experiment: the components' own settings composed, from a TOML file and `key=value` words.

    seed, rounds, peers, threads, together, device, precision, engine, eval_every          top-level keys
    data, partition, model, method, topology, train, wire             tables, each the settings of its component

A table may be given by name alone (`method=dispfl`). Everything has a default: with none changed this is the demo.
"""

import os
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, SerializeAsAny, ValidationInfo, field_validator

from dispfl.core.live import Precision, resolve_device
from dispfl.core.rng import stream
from dispfl.core.train import Samples, Train
from dispfl.data.datasets import Data, Pictures
from dispfl.data.own.samples import OwnSamples
from dispfl.data.own.settings import OwnData
from dispfl.data.partition import PARTITIONS, Dirichlet, Partition, Split
from dispfl.described import setting_of
from dispfl.engines.choice import EngineName, check_engine
from dispfl.engines.together import check_together
from dispfl.errors import ConfigError
from dispfl.methods.base import Method
from dispfl.methods.dispfl import DisPFL
from dispfl.methods.registry import METHODS
from dispfl.models.own import OwnModel
from dispfl.models.registry import Model
from dispfl.roster import roster_names
from dispfl.runs.directory import MADE_IN_PYTHON
from dispfl.settings import Settings, did_you_mean
from dispfl.tables import OWN, Choices, as_table, chosen
from dispfl.topology import TOPOLOGIES, RandomRegular, Topology
from dispfl.wire.codec import Wire
from dispfl.work import PeerData, Setting

TABLES: dict[str, Choices] = {
    "data": {"": Data, "own": OwnData},
    "partition": PARTITIONS,
    "model": {"": Model, "own": OwnModel},
    "method": METHODS,
    "topology": TOPOLOGIES,
    "train": {"": Train},
    "wire": {"": Wire},
}
"""The settings of each table, by the table's `name` where there is a choice of them; "" stands for all other names."""

ASIDE = {
    "smallest_density": "It is an option for real sites, dispfl peer init --smallest-density; here everyone's density "
    "is known: method.density=0.3,0.5."
}
"""Keys of other places, and where these are."""


class Experiment(Settings):
    """A complete, runnable description of a simulated run."""

    seed: int = Field(default=0, ge=0)
    """Everything random derives from it."""
    rounds: int = Field(default=16, ge=1)
    peers: int = Field(default=16, ge=1)
    threads: int = Field(default_factory=lambda: os.cpu_count() or 1, ge=1)
    """How many peers train at once, each on one thread."""
    together: int = Field(default=1, ge=1)
    """How many peers with as many samples learn as one stack of their models: faster where models are tiny.

    Results agree with those of together=1 up to rounding only, and so do those of a run that was stopped in a round.
    """
    device: Literal["auto", "cpu", "cuda", "mps"] = "cpu"
    precision: Precision = "float32"
    """bf16: forward and backward passes in bfloat16, where the hardware is fast with it; all else stays float32."""
    engine: EngineName = "inprocess"
    """Who does the work: threads of this process, or Ray's processes here or on a cluster."""
    eval_every: int = Field(default=1, ge=1)
    """Score all peers every so many rounds, and after the last."""
    data: SerializeAsAny[Data] = Data(augment=False)
    partition: SerializeAsAny[Partition] = Dirichlet(alpha=0.3, samples=96)
    model: SerializeAsAny[Model] = Model()
    method: SerializeAsAny[Method] = DisPFL()
    topology: SerializeAsAny[Topology] = RandomRegular.at_most(4)
    train: Train = Train(batch=32)
    wire: Wire = Wire()

    @field_validator(*TABLES, mode="before")
    @classmethod
    def _choose(cls, value: Any, info: Any) -> Any:
        key = info.field_name
        return chosen(key, value, TABLES[key], cls.model_fields[key].default)

    @field_validator("topology")
    @classmethod
    def _fit(cls, topology: Topology, info: ValidationInfo) -> Topology:
        return topology.fitted(info.data["peers"]) if "peers" in info.data else topology

    @field_validator("engine")
    @classmethod
    def _installed(cls, engine: str) -> str:
        check_engine(engine)
        return engine

    @field_validator("device")
    @classmethod
    def _available(cls, device: str) -> str:
        return resolve_device(device)

    def model_post_init(self, context: Any, /) -> None:
        """Refuse settings that do not fit each other."""
        check_together(self.together, self.engine)
        self.topology.check(self.peers)
        self.method.densities(self.peers)

    def to_toml(self) -> dict[str, Any]:
        """The complete config as TOML can hold it."""
        return self.model_dump(mode="json", exclude_none=True)

    def split(self, data: Pictures | OwnSamples) -> Split:
        """Who gets which samples."""
        rng = stream(self.seed, "partition")
        return self.partition.split(data.train_labels, data.test_labels, self.peers, rng=rng)

    def setting(self, data: Pictures | OwnSamples, split: Split) -> Setting:
        """What the rounds need."""

        def dealt(train: Samples, test: Samples) -> dict[str, PeerData]:
            names = roster_names(self.peers)
            return {
                name: PeerData(train.take(learned), test.take(judged))
                for name, learned, judged in zip(names, split.train, split.test, strict=True)
            }

        return setting_of(self, data, dealt, together=self.together)


def read_toml(path: Path) -> dict[str, Any]:
    """A config file as nested dicts."""
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError:
        hint = "" if path.suffix == ".toml" else f" To set {path}, write {path}=VALUE."
        raise ConfigError(f"The config file {path} does not exist.{hint}") from None
    except (OSError, UnicodeDecodeError) as problem:
        raise ConfigError(f"The config file {path} cannot be read: {problem}.") from None
    except tomllib.TOMLDecodeError as problem:
        raise ConfigError(f"The config file {path} is not valid TOML: {problem}.") from None


def compose(config: Mapping[str, Any], words: Iterable[str] = ()) -> Experiment:
    """An experiment: the defaults, under a config, under `key=value` words."""
    if MADE_IN_PYTHON in config:
        raise ConfigError("This run was made in Python; go on with it there: Federation(...).run(..., resume=True).")
    said: dict[str, Any] = {}
    for key, value in sorted((_parse(word) for word in words), key=lambda pair: "." in pair[0]):
        table, dot, field = key.partition(".")
        if dot:
            said[table] = {**as_table(table, said.get(table, {})), field: value}
        else:
            said[table] = value
    # A file may describe the user's own data whose path a word gives.
    for key in OWN.keys() & said.keys() & config.keys():
        below, above = as_table(key, config[key]), as_table(key, said[key])
        if above.get("name") == "own" and "name" not in below:
            said[key] = {**below, **above}
    peers = said.get("peers", config.get("peers", Experiment.model_fields["peers"].default))
    stated = any("degree" in as_table("topology", source.get("topology", {})) for source in (config, said))
    defaults = Experiment() if stated else Experiment(peers=peers)  # a default degree depends on how many there are
    values = _overlay(_overlay(defaults.to_toml(), config), said)
    for key in values:
        if key not in Experiment.model_fields:
            if key in ASIDE:
                raise ConfigError(f"Unknown key {key}. {ASIDE[key]}")
            inside = [known for known in _all_keys() if known.endswith(f".{key}")]  # lr is train.lr
            raise ConfigError(f"Unknown key {key}. {did_you_mean(inside[0] if inside else key, _all_keys())}")
    return Experiment(**values)


def _overlay(base: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    """The top's keys over the base's. A table with another name (`method=local`) leaves nothing of the base's."""
    values = dict(base)
    for key, value in top.items():
        if key in TABLES:
            table, under = as_table(key, value), values.get(key, {})
            same = table.get("name", under.get("name")) == under.get("name")
            value = {**under, **table} if same else table
        values[key] = value
    return values


def _parse(word: str) -> tuple[str, Any]:
    """`method.density=0.2` to its key and value; values are TOML, or a list with commas, or a plain text."""
    key, equals, text = word.partition("=")
    if not equals or not key:
        raise ConfigError(f"Expected key=value, got {word!r}; for example method.density=0.2.")
    return key.strip(), _value(text.strip())


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return [_value(part.strip()) for part in text.split(",")] if "," in text else text


def _all_keys() -> list[str]:
    tables = [cls for choices in TABLES.values() for cls in choices.values()]
    inside = dict.fromkeys(f"{cls.table}.{field}" for cls in tables for field in cls.model_fields)
    return [*Experiment.model_fields, *inside]


def differing_keys(one: Experiment, other: Experiment) -> dict[str, tuple[Any, Any]]:
    """The dotted keys in which two experiments differ, with both values."""
    a, b = (_flat(experiment.to_toml()) for experiment in (one, other))
    return {key: (a.get(key), b.get(key)) for key in sorted(a.keys() | b.keys()) if a.get(key) != b.get(key)}


def _flat(tables: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tables.items():
        flat |= {f"{key}.{field}": v for field, v in value.items()} if isinstance(value, Mapping) else {key: value}
    return flat
