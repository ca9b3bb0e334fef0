"""The devices of a federation and the network between them: what a clock needs to know of both."""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from random import Random
from typing import Any, ClassVar
from zipfile import BadZipFile, is_zipfile

import numpy as np
from pydantic import Field, field_validator

from dispfl.clock.availability import (
    ALWAYS,
    DAY,
    HOUR,
    Availability,
    Windows,
    random_turns,
    read_traces,
)
from dispfl.clock.links import SECOND, UNLIMITED, Link
from dispfl.core.device_classes import Device, DeviceClass, assign_classes
from dispfl.core.rng import stream_seed
from dispfl.errors import ConfigError
from dispfl.files import read_regular
from dispfl.methods.base import SERVER
from dispfl.settings import Settings, did_you_mean

MEGABIT = 125_000
"""In bytes."""
MILLISECOND = 10**6
MICROSECOND = 10**3
WORLD = "world"
FEDSCALE_FLOPS = 6e8
"""What FedScale's `computation`, in ms per sample, counts as: a forward pass of MobileNetV2."""
MAX_DEVICES = 1_000_000
"""The most devices that a file may have."""


class Network(Settings):
    """The network between the devices of a fleet; what is not given is that of the preset."""

    table: ClassVar[str] = "network"
    latency: float | None = Field(default=None, ge=0)
    """Milliseconds that a message takes from one node to another, besides its transfer; with
    `latency_sigma` their median. Default: 0."""
    latency_sigma: float | None = Field(default=None, ge=0, le=3)
    """Draw the latency of each pair of nodes from a log-normal distribution with this sigma."""
    latencies: str | None = None
    """Take the latencies from a square matrix of round-trip times in ms: `world` (227 servers), or
    a CSV file; each node is one of its rows, drawn by the seed."""
    server_up: float | None = Field(default=None, gt=0)
    """Mbit/s that a server sends; unlimited if not given."""
    server_down: float | None = Field(default=None, gt=0)
    """Mbit/s that a server receives; unlimited if not given."""

    @field_validator("latencies")
    @classmethod
    def _absolute(cls, latencies: str | None) -> str | None:
        return absolute_file(latencies) if latencies and latencies != WORLD else latencies


def absolute_file(name: str) -> str:
    """Return the absolute path of a file; a name without an ending is that of a preset."""
    if not Path(name).suffix:
        return name
    return str(Path(name).expanduser().absolute())


@dataclass(frozen=True)
class Preset:
    """A fleet with a name."""

    about: str
    classes: Mapping[str, DeviceClass]
    network: Network
    path_mbps: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """Mbit/s of a transfer between devices of two classes, where the way limits it."""


@dataclass(frozen=True)
class Fleet:
    """The device of every peer, and the network between them."""

    devices: Mapping[str, Device]
    class_of: Mapping[str, str]
    """The name of each peer's class."""
    network: Network = field(default_factory=Network)
    seed: int = 0
    path_mbps: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """Mbit/s of a transfer between devices of two classes, where the way limits it."""
    round_trips: Sequence[Sequence[float]] = ()
    """A matrix of round-trip times in ms, if latencies are taken from one."""
    traces: Mapping[str, Sequence[Availability]] = field(default_factory=dict)
    """When the devices of each file are online."""
    _availabilities: dict[str, Availability] = field(default_factory=dict)

    @property
    def peers(self) -> list[str]:
        """The peers' names."""
        return list(self.devices)

    def uplink(self, node: str) -> Link:
        """Return a new uplink of a node."""
        device = self.devices.get(node)
        megabits = self.network.server_up if device is None else device.up
        return Link(_bytes_per_second(megabits), self.availability(node))

    def downlink(self, node: str) -> Link:
        """Return a new downlink of a node."""
        device = self.devices.get(node)
        megabits = self.network.server_down if device is None else device.down
        return Link(_bytes_per_second(megabits), self.availability(node))

    def path_limit(self, sender: str, receiver: str) -> int:
        """Return the bytes per second of one transfer that the way between two nodes allows."""
        if not self.path_mbps or SERVER in (sender, receiver):
            return UNLIMITED
        classes = (self.class_of[sender], self.class_of[receiver])
        return _bytes_per_second(self.path_mbps.get(classes))

    def computing_time(self, peer: str, operations: int) -> int:
        """Return the nanoseconds that a peer's device needs for some operations, rounded up."""
        speed = self.devices[peer].speed
        assert speed is not None
        return -(-operations * SECOND // max(1, round(speed)))

    def latency(self, sender: str, receiver: str) -> int:
        """Return the nanoseconds that a message takes to the receiver, besides its transfer."""
        if self.round_trips:
            row = self._place(sender)
            column = self._place(receiver)
            return round(self.round_trips[row][column] * MILLISECOND / 2)
        median = self.network.latency or 0.0
        sigma = self.network.latency_sigma or 0.0
        if sigma:
            pair = sorted((sender, receiver))
            random = Random(stream_seed(self.seed, "latency", *pair))
            median *= random.lognormvariate(0, sigma)
        # Whole microseconds: the last bit of an exponential, which machines may disagree on, does
        # not change those.
        return round(median * MILLISECOND / MICROSECOND) * MICROSECOND

    def _place(self, node: str) -> int:
        return stream_seed(self.seed, "place", node) % len(self.round_trips)

    def availability(self, node: str) -> Availability:
        """Return when a node is online; a server always is."""
        if node not in self.devices:
            return ALWAYS
        if node not in self._availabilities:
            seed = stream_seed(self.seed, "availability", node)
            device = self.devices[node]
            if device.availability is not None:
                devices = self.traces[device.availability]
                self._availabilities[node] = devices[seed % len(devices)]
            else:
                self._availabilities[node] = availability_of(device, seed)
        return self._availabilities[node]


def _bytes_per_second(megabits: float | None) -> int:
    return UNLIMITED if megabits is None else max(1, round(megabits * MEGABIT))


def availability_of(device: Device, seed: int) -> Availability:
    """Return when a device is online."""
    if device.on_hours is not None and device.off_hours is not None:
        return random_turns(round(device.on_hours * HOUR), round(device.off_hours * HOUR), seed)
    if device.daily is None:
        return ALWAYS
    begin, end = device.daily_minutes
    minute = DAY // (24 * 60)
    if begin < end:
        return Windows([(begin * minute, end * minute)])
    return Windows([(0, end * minute), (begin * minute, DAY)])


def make_fleet(
    fleet: str | None,
    classes: Mapping[str, DeviceClass],
    network: Network,
    roster: Sequence[str],
    seed: int,
) -> Fleet | None:
    """Return the fleet of a run: a preset, a file, or its classes of devices; None: no clock.

    The devices of a preset or a file are dealt to the peers by the seed, those of classes to the
    peers of each class.
    """
    if fleet:
        check_one_fleet(fleet, classes)
        if Path(fleet).suffix in (".csv", ".npz"):
            made = _fleet_of_file(Path(fleet), network, roster, seed)
        else:
            made = _fleet_of_preset(fleet, network, roster, seed)
    elif any(device.has_device for device in classes.values()):
        made = _fleet_of_classes(classes, network, roster, seed)
    else:
        return None
    traces = {}
    for device in made.devices.values():
        if device.availability is not None and device.availability not in traces:
            traces[device.availability] = read_traces(Path(device.availability))
    made = replace(made, traces=traces)
    if made.network.latencies:
        return replace(made, round_trips=read_latencies(made.network.latencies))
    return made


def _fleet_of_classes(
    classes: Mapping[str, DeviceClass], network: Network, roster: Sequence[str], seed: int
) -> Fleet:
    class_of = assign_classes(classes, roster)
    for name, device in classes.items():
        if device.speed is None:
            raise ConfigError(
                f"classes.{name} has no speed, which other classes have: give its FLOP/s, such as"
                " speed=20e9.",
                key="classes",
            )
    devices = {peer: classes[class_of[peer]] for peer in roster}
    return Fleet(devices, class_of, network, seed)


def check_one_fleet(fleet: str, classes: Mapping[str, DeviceClass]) -> None:
    """Refuse a fleet beside classes that describe devices, too."""
    for name, device in classes.items():
        if device.has_device:
            raise ConfigError(
                f"fleet is {fleet}, but classes.{name} describes devices too; omit one of them.",
                key="fleet",
            )


def _fleet_of_preset(name: str, network: Network, roster: Sequence[str], seed: int) -> Fleet:
    from dispfl.clock.presets import PRESETS, preset

    if name not in PRESETS:
        raise ConfigError(
            f"fleet={name} does not exist. {did_you_mean(name, PRESETS)} Or name a .csv or .npz"
            " file of devices.",
            key="fleet",
        )
    chosen = preset(name)
    order = _shuffled(roster, seed)
    class_of = {}
    for position, peer in enumerate(order):
        class_of[peer] = _class_at((position + 0.5) / len(order), chosen.classes)
    devices = {peer: chosen.classes[class_of[peer]] for peer in roster}
    given = network.model_dump(exclude_none=True)
    network = chosen.network.model_copy(update=given)
    return Fleet(
        devices, {peer: class_of[peer] for peer in roster}, network, seed, chosen.path_mbps
    )


def _shuffled(roster: Sequence[str], seed: int) -> list[str]:
    return sorted(roster, key=lambda peer: stream_seed(seed, "fleet", peer))


def _class_at(position: float, classes: Mapping[str, DeviceClass]) -> str:
    """Return the class in whose share of all peers a position between 0 and 1 is."""
    end = 0.0
    names = list(classes)
    for name in names:
        end += classes[name].share or 0.0
        if position < end:
            return name
    return names[-1]


# Files


def _fleet_of_file(path: Path, network: Network, roster: Sequence[str], seed: int) -> Fleet:
    """Deal the devices of a file to the peers, each once as long as there are enough."""
    rows = read_devices(path)
    order = sorted(range(len(rows)), key=lambda row: stream_seed(seed, "fleet", row))
    devices = {}
    class_of = {}
    for position, peer in enumerate(roster):
        class_of[peer], devices[peer] = rows[order[position % len(order)]]
    return Fleet(devices, class_of, network, seed)


def read_devices(path: Path) -> list[tuple[str, Device]]:
    """Return the class and the properties of each device of a CSV or .npz file.

    Its columns are fields of `Device` and `class`, or FedScale's `computation` (ms per sample) and
    `communication` (kbit/s).
    """
    columns = _read_columns(path)
    lengths = {len(values) for values in columns.values()}
    if len(lengths) != 1 or not 1 <= max(lengths) <= MAX_DEVICES:
        raise ConfigError(
            f"{path} has columns of {', '.join(map(str, sorted(lengths)))} devices; give all the"
            f" same number, 1 to {MAX_DEVICES:,}.",
            key="fleet",
        )
    known = {*Device.model_fields, "class", "computation", "communication"}
    for name in columns:
        if name not in known:
            raise ConfigError(
                f"{path}: unknown column {name!r}. {did_you_mean(name, known)}", key="fleet"
            )
    devices = []
    for number, values in enumerate(zip(*columns.values(), strict=True), start=1):
        devices.append(_device(path, number, dict(zip(columns, values, strict=True))))
    return devices


def _device(path: Path, number: int, values: dict[str, Any]) -> tuple[str, Device]:
    name = str(values.pop("class", "devices"))
    where = f"{path}, device {number}"
    properties: dict[str, Any] = {}
    for key, value in values.items():
        if key in ("daily", "availability"):
            properties[key] = str(value)
            continue
        amount = _number(where, key, value)
        match key:
            case "computation":
                properties["speed"] = FEDSCALE_FLOPS / (amount / 1000)
            case "communication":
                properties |= {"up": amount / 1000, "down": amount / 1000}
            case _:
                properties[key] = amount
    if "speed" not in properties:
        raise ConfigError(
            f"{where} has no speed; give the column speed (FLOP/s) or computation (ms per sample).",
            key="fleet",
        )
    try:
        return name, Device(**properties)
    except ConfigError as problem:
        sentence = str(problem).replace("classes.NAME.", "")
        raise ConfigError(f"{where}: {sentence}", key="fleet") from None


def _number(where: str, key: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number) or (number <= 0 and key != "watts"):
        raise ConfigError(
            f"{where}: {key} must be a number above 0, got {str(value)[:40]!r}.", key="fleet"
        )
    return number


def _read_columns(path: Path) -> dict[str, Sequence[Any]]:
    try:
        content = read_regular(path)
        if path.suffix == ".npz":
            if not is_zipfile(io.BytesIO(content)):
                raise ValueError("it is no .npz file, or only a part of one; copy it again")
            with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
                return {name: arrays[name].ravel().tolist() for name in arrays.files}
        rows = list(csv.DictReader(io.StringIO(content.decode("utf-8-sig")), strict=True))
    except (OSError, ValueError, EOFError, BadZipFile, csv.Error) as problem:
        raise ConfigError(
            f"fleet={path} cannot be read as a table of devices: {_reason(problem)}.", key="fleet"
        ) from None
    if not rows:
        raise ConfigError(f"fleet={path} has no devices.", key="fleet")
    for number, row in enumerate(rows, start=1):
        if None in row or None in row.values():
            raise ConfigError(
                f"{path}, device {number} does not have one value for each column.", key="fleet"
            )
    return {name: [row[name] for row in rows] for name in rows[0]}


def _reason(problem: Exception) -> str:
    """Return what is wrong with a file, without its name."""
    if isinstance(problem, OSError) and problem.strerror:
        return problem.strerror
    if "allow_pickle" in str(problem):  # numpy's advice, which would run code of the file
        return "it has Python objects, which are not unpickled; save columns of numbers and texts"
    return str(problem)


def read_latencies(source: str) -> list[list[float]]:
    """Return a square matrix of round-trip times in ms: the bundled one, or that of a CSV file."""
    if source == WORLD:
        trace = files("dispfl.clock").joinpath("traces/world_rtt.npz").read_bytes()
        with np.load(io.BytesIO(trace), allow_pickle=False) as arrays:
            return [[tenths / 10 for tenths in row] for row in arrays["tenths_of_ms"].tolist()]
    try:
        text = read_regular(Path(source)).decode("utf-8-sig")
    except (OSError, ValueError) as problem:
        raise ConfigError(
            f"network.latencies={source} cannot be read: {_reason(problem)}. Give {WORLD}, or a CSV"
            " file.",
            key="network.latencies",
        ) from None
    rows = [row for row in csv.reader(io.StringIO(text)) if row]
    matrix = []
    for number, row in enumerate(rows, start=1):
        if len(row) != len(rows):
            raise ConfigError(
                f"{source}, row {number} has {len(row)} values, but there are {len(rows)} rows; a"
                " matrix of latencies is square.",
                key="network.latencies",
            )
        matrix.append([_round_trip(source, number, value) for value in row])
    if not matrix:
        raise ConfigError(f"network.latencies={source} is empty.", key="network.latencies")
    return matrix


def _round_trip(source: str, row: int, text: str) -> float:
    try:
        milliseconds = float(text)
    except ValueError:
        milliseconds = math.nan
    if not math.isfinite(milliseconds) or milliseconds < 0:
        raise ConfigError(
            f"{source}, row {row}: {text[:40]!r} is no round-trip time in ms; give a number of at"
            " least 0.",
            key="network.latencies",
        )
    return milliseconds
