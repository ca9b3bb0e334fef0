"""Classes of devices: named groups of peers with a density and training settings of their own."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isclose
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import Field, field_validator, model_validator

from dispfl.core.names import check_names, roster_of
from dispfl.core.train import Train
from dispfl.errors import ConfigError
from dispfl.settings import Settings

BY_GROUP = ("epochs", "steps", "batch_size", "lr")
"""Keys of `train` that may be lists: one value for each of several groups of peers."""


class ClassTraining(Settings):
    """Training settings of a class, in place of those of `train`."""

    table: ClassVar[str] = "classes.NAME.train"
    epochs: int | None = Field(default=None, ge=1)
    steps: int | None = Field(default=None, ge=1)
    batch_size: int | None = Field(default=None, ge=1)
    lr: float | None = Field(default=None, gt=0)

    def applied_to(self, train: Train) -> Train:
        """Return the settings of a peer of the class, from those of all peers."""
        changes = self.model_dump(exclude_none=True)
        if self.epochs is not None and self.steps is None:
            changes["steps"] = None  # which would count instead
        return train.model_copy(update=changes) if changes else train


class Device(Settings):
    """What a clock needs to know of a device; see `clock/fleet.py`."""

    table: ClassVar[str] = "classes.NAME"
    speed: float | None = Field(default=None, gt=0)
    """Floating-point operations per second that it reaches in training."""
    up: float | None = Field(default=None, gt=0)
    """Mbit/s that it sends; unlimited if not given."""
    down: float | None = Field(default=None, gt=0)
    """Mbit/s that it receives; unlimited if not given."""
    watts: float | None = Field(default=None, ge=0)
    """What it draws while it computes."""
    memory: float | None = Field(default=None, gt=0)
    """MB (1e6 bytes) that it has for training; `method.density=fit` chooses a model that fits."""
    on_hours: float | None = Field(default=None, ge=0.001, le=100_000)
    """With `off_hours`: it is online in turns of random length, with this mean."""
    off_hours: float | None = Field(default=None, ge=0.001, le=100_000)
    """The mean length of the turns in between."""
    daily: str | None = None
    """When it is online each day, such as 22:00-06:00; a run starts at midnight."""
    availability: str | None = None
    """When it is online, from a CSV file with the columns `device`, `on` and `off`: the hours at
    which each of several devices goes on- and offline. Each peer has one, drawn by the seed."""

    @property
    def has_device(self) -> bool:
        """Whether something about the device is given."""
        return any(getattr(self, key) is not None for key in Device.model_fields)

    @property
    def daily_minutes(self) -> tuple[int, int]:
        """The minutes of the day at which it goes on- and offline."""
        match = _DAILY.fullmatch(self.daily or "")
        assert match is not None
        from_hour, from_minute, to_hour, to_minute = map(int, match.groups())
        return 60 * from_hour + from_minute, 60 * to_hour + to_minute

    @field_validator("daily")
    @classmethod
    def _check_daily(cls, daily: str | None) -> str | None:
        if daily is not None and not _DAILY.fullmatch(daily):
            raise ValueError(f"must be two times of the day, such as 22:00-06:00, got {daily!r}.")
        return daily

    @field_validator("availability")
    @classmethod
    def _absolute(cls, availability: str | None) -> str | None:
        """Make a file's path absolute: a run may be resumed from another working directory."""
        return availability and str(Path(availability).expanduser().absolute())

    @model_validator(mode="after")
    def _check_availability(self) -> Self:
        if (self.on_hours is None) != (self.off_hours is None):
            raise ConfigError(
                "classes.NAME.on_hours and off_hours belong together; give both, or omit both.",
                key="classes",
            )
        given = [
            key for key in ("daily", "on_hours", "availability") if getattr(self, key) is not None
        ]
        if len(given) > 1:
            raise ConfigError(
                f"classes.NAME.{' and '.join(given)} both say when devices are online; omit one.",
                key="classes",
            )
        if self.daily is not None and len(set(self.daily_minutes)) == 1:
            raise ConfigError(
                f"classes.NAME.daily is {self.daily}, which ends when it begins; omit it if devices"
                " are always online.",
                key="classes",
            )
        return self


_DAILY = re.compile(r"([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-3]):([0-5]\d)")


class DeviceClass(Device):
    """A class of devices: which peers it has, and what they do differently."""

    share: float | None = Field(default=None, gt=0, le=1)
    """Its share of the peers that no class names, in the order of the roster."""
    peers: tuple[str, ...] = ()
    """Its peers by name, instead of a share."""
    density: float | None = Field(default=None, gt=0, le=1)
    """Share of weights that its peers keep, in place of `method.density`."""
    train: ClassTraining = ClassTraining()

    @field_validator("peers", mode="before")
    @classmethod
    def _check_peers(cls, peers: Any) -> Any:
        return check_names([peers] if isinstance(peers, str) else peers, "classes")

    @model_validator(mode="after")
    def _either_share_or_peers(self) -> Self:
        if self.peers and self.share is not None:
            raise ConfigError(
                "A class has a share or peers, not both; omit one of them.", key="classes"
            )
        return self


FIT = "fit"
"""In place of a density: that which fits the device of each peer (`costs/capacity.py`)."""


class Fit(Settings):
    """How `method.density=fit` chooses the density of each peer."""

    table: ClassVar[str] = "fit"
    round_time: float | None = Field(default=None, gt=0)
    """Seconds in which a peer shall train and exchange models in a round; by default those of the
    median device at density 0.5."""
    floor: float = Field(default=0.1, gt=0, le=1)
    """The smallest density, also of a device that needs longer with it."""
    step: float = Field(default=0.05, ge=0.001, le=1)
    """Densities are the floor and so many steps."""

    @property
    def densities(self) -> list[float]:
        """The densities to choose from, in order; the last is 1."""
        steps = int((1 - self.floor) / self.step + 1e-9)
        densities = [round(self.floor + index * self.step, 6) for index in range(steps + 1)]
        if densities[-1] < 1:
            densities.append(1.0)
        return densities


@dataclass(frozen=True)
class FittedPeer:
    """The density of a peer, and how long its round takes with it."""

    density: float
    seconds: float


@dataclass(frozen=True)
class FittedDensities:
    """The densities that fit the devices of a run."""

    round_time: float
    """The common time of a round, in seconds."""
    peers: Mapping[str, FittedPeer]

    @property
    def densities(self) -> dict[str, float]:
        """The density of each peer."""
        return {name: peer.density for name, peer in self.peers.items()}


def classes_from_lists(train: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the training settings without lists, and the classes that the lists make.

    g values make g groups of peers, in roster order, whose sizes differ by at most one.
    """
    lists = {}
    for key in BY_GROUP:
        if isinstance(train.get(key), (list, tuple)):
            lists[key] = train[key]
    lengths = {len(values) for values in lists.values()}
    if not lists:
        return dict(train), {}
    if len(lengths) > 1 or 0 in lengths:
        keys = ", ".join(f"train.{key}" for key in lists)
        raise ConfigError(
            f"{keys}: lists make groups of peers, so give them the same number of values, at least"
            " one.",
            key=f"train.{next(iter(lists))}",
        )
    [count] = lengths
    classes = {}
    for index in range(count):
        settings = {key: values[index] for key, values in lists.items()}
        classes[f"group-{index + 1}"] = {"share": 1 / count, "train": settings}
    scalars = {key: value for key, value in train.items() if key not in lists}
    return scalars, classes


def assign_classes(classes: Mapping[str, DeviceClass], roster: Sequence[str]) -> dict[str, str]:
    """Return the name of each peer's class, in roster order; empty without classes."""
    if not classes:
        return {}
    class_of: dict[str, str] = {}
    for name, device in classes.items():
        for peer in device.peers:
            if peer not in roster or peer in class_of:
                problem = "is in two classes" if peer in class_of else "is no peer of this run"
                raise ConfigError(f"classes.{name}.peers: {peer} {problem}.", key="classes")
            class_of[peer] = name

    unnamed = [peer for peer in roster if peer not in class_of]
    bounds = _bounds(classes, unnamed)
    for index, peer in enumerate(unnamed):
        for name, bound in bounds.items():
            if index + 1e-9 < bound * len(unnamed):
                class_of[peer] = name
                break
    for name in classes:
        if name not in class_of.values():
            raise ConfigError(
                f"classes.{name} has none of the {len(roster)} peers; give it a larger share, or"
                " omit it.",
                key="classes",
            )
    return {peer: class_of[peer] for peer in roster}


def _bounds(classes: Mapping[str, DeviceClass], unnamed: Sequence[str]) -> dict[str, float]:
    """Return where the share of each class ends; a class without share and peers has the rest."""
    shares = {name: device.share for name, device in classes.items() if not device.peers}
    total = sum(share for share in shares.values() if share is not None)
    without_share = [name for name, share in shares.items() if share is None]
    problem = ""
    if len(without_share) > 1:
        problem = f"{' and '.join(without_share)} have neither a share nor peers; one class may"
    elif without_share and total >= 1:
        problem = f"the shares leave nothing to {without_share[0]}; lower them"
    elif not without_share and unnamed and not isclose(total, 1, abs_tol=1e-6):
        problem = (
            f"the shares sum to {total:g}, not to 1; change them, or omit that of one class, which"
            " then has the other peers"
        )
    if problem:
        raise ConfigError(f"classes: {problem}.", key="classes")

    bounds = {}
    end = 0.0
    for name, share in shares.items():
        end += 1 - total if share is None else share
        bounds[name] = end
    if bounds:
        bounds[name] = 1.0
    return bounds


def read_classes(config: Mapping[str, Any]) -> dict[str, DeviceClass]:
    """Return the classes of a simulated run, from its config."""
    return {name: DeviceClass(**table) for name, table in config.get("classes", {}).items()}


def class_of_each(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the name of each peer's class, from the config of a simulated run."""
    classes = read_classes(config)
    return assign_classes(classes, roster_of(config)) if classes else {}
