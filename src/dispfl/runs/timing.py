"""The simulated time of a run: from the lines of its metrics, while it runs or afterwards.

What a round computes and sends is in its line (`kernel_flops`, `message_bytes`), so that the times
on any fleet follow from the lines alone. Learning does not depend on them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from dispfl.clock.availability import HOUR
from dispfl.clock.fleet import Fleet, Network, make_fleet
from dispfl.clock.links import SECOND
from dispfl.clock.schedule import Clock, ModelMessage, PeerTimes, RoundTimes, RoundWork
from dispfl.core.device_classes import read_classes
from dispfl.core.names import roster_of
from dispfl.core.quantities import SIMULATED
from dispfl.errors import ConfigError, RunError
from dispfl.experiment import Simulation
from dispfl.methods.base import SERVER
from dispfl.runs.links import decode_sizes
from dispfl.runs.metrics import Metrics, measured_values, spread


def fleet_of_config(config: Mapping[str, Any]) -> Fleet | None:
    """Return the fleet of a run's clock, from its config; None without a clock."""
    return make_fleet(
        config.get("fleet"),
        read_classes(config),
        Network(**config.get("network", {})),
        roster_of(config),
        int(config["seed"]),
    )


OF_A_CLOCK = ("fleet", "classes", "network")
"""The settings that a finished run can be timed with anew."""


def another_fleet(config: Mapping[str, Any], changes: Mapping[str, Any]) -> Fleet:
    """Return the fleet that some settings of a clock make of a run's peers.

    A changed fleet, or changed classes, leave nothing of the fleet that the run had.
    """
    if config.get("schedule") == "async":
        raise RunError(
            "The run has schedule=async, so that what its peers learn depends on their devices: run"
            " it again on another fleet."
        )
    if config.get("deadline") is not None:
        raise RunError(
            f"The run has deadline={config['deadline']:g}, so that which models are late depends on"
            " its devices: run it again on another fleet."
        )
    for key in changes:
        if key not in OF_A_CLOCK:
            raise ConfigError(
                f"{key} is no setting of a clock: {', '.join(OF_A_CLOCK)} can be changed without"
                " training again.",
                key=key,
            )
    own = {key: config[key] for key in OF_A_CLOCK if key in config}
    if "fleet" in changes or "classes" in changes:
        own = {}
    settings = Simulation(
        seed=config["seed"],
        peers=config["peers"],
        names=config.get("names", ()),
        **{**own, **changes, "network": {**own.get("network", {}), **changes.get("network", {})}},
    )
    fleet = settings.fleet_of(roster_of(config))
    if fleet is None:
        raise ConfigError("Name the devices of the clock: fleet=phones.", key="fleet")
    return fleet


def times_after(
    config: Mapping[str, Any],
    records: Sequence[Metrics],
    roster: Sequence[str],
    changes: Mapping[str, Any],
) -> tuple[list[Metrics], Fleet]:
    """Return a run's lines with their times after some changes of its clock, and its fleet then.

    Without changes they are those of the run, also where learning depends on them.
    """
    own_fleet = fleet_of_config(config)
    if own_fleet is not None and not changes:
        return list(records), own_fleet
    fleet = another_fleet(config, changes)
    return timed_records(records, fleet, roster), fleet


def timed_records(records: Sequence[Metrics], fleet: Fleet, roster: Sequence[str]) -> list[Metrics]:
    """Return the lines of a run's metrics with their times on another fleet."""
    clock = RunClock(fleet, roster)
    return [{**record, SIMULATED: clock.advance(record)} for record in records]


PHASES = ("computing", "transferring", "waiting", "offline")
"""How a peer spends a round."""


class RunClock:
    """The clock of a run: gives each line of its metrics the simulated times, in order."""

    def __init__(
        self, fleet: Fleet, roster: Sequence[str], records: Sequence[Metrics] = ()
    ) -> None:
        self.clock = Clock(fleet)
        self._roster = list(roster)
        for record in records:
            self.advance(record)

    def advance(self, record: Mapping[str, Any]) -> Metrics:
        """Return the simulated times of the next round, from its line of the metrics."""
        times = self.clock.advance(round_work(record, self._roster))
        return simulated_times(times, self.clock.fleet, self._roster)


def round_work(record: Mapping[str, Any], roster: Sequence[str]) -> RoundWork:
    """Return what a round computes and sends, from its line of the metrics."""
    t = record["round"]
    sizes = record.get("message_bytes")
    if sizes is None or "kernel_flops" not in record:
        lacking = "message_bytes" if sizes is None else "kernel_flops"
        raise RunError(
            f"Round {t} has no {lacking} in metrics.jsonl: the run is of an older version, of a"
            " real federation, or sends more than 100,000 messages in a round. Run it again with"
            " fleet=NAME."
        )
    nodes = list(roster)
    has_server = sizes.count(";") == len(nodes)
    if has_server:
        nodes.append(SERVER)
    messages = []
    for model in decode_sizes(sizes, nodes):
        messages.append(ModelMessage(*model))
    operations = {}
    kernel_flops = record["kernel_flops"] or {"per_peer": []}
    for peer, flops in zip(roster, kernel_flops["per_peer"], strict=False):
        if flops is not None:
            operations[peer] = max(0, int(flops))
    return RoundWork(operations, messages, has_server)


def simulated_times(times: RoundTimes, fleet: Fleet, roster: Sequence[str]) -> Metrics:
    """Return the times of a round as a line of the metrics has them."""
    of_peers = [_peer_times(times.peers.get(peer)) for peer in roster]
    spreads = {}
    for name in ("end", *PHASES, "sending", "busy"):
        spreads[name] = spread([of_peer.get(name) for of_peer in of_peers])
    joules = 0.0
    has_watts = True
    for peer, of_peer in zip(roster, of_peers, strict=True):
        watts = fleet.devices[peer].watts
        if watts is None:
            has_watts = False
        else:
            joules += watts * of_peer.get("computing", 0.0)
    return {
        "hours": times.end / HOUR,
        **spreads,
        "energy": joules / 3600 if has_watts else None,
        "classes": _means_by_class(of_peers, [fleet.class_of[peer] for peer in roster]),
    }


def _peer_times(times: PeerTimes | None) -> dict[str, float]:
    """Return how a peer spends a round, in seconds; nothing if it takes no part."""
    if times is None:
        return {}
    values = {name: getattr(times, name) / SECOND for name in ("end", *PHASES)}
    if times.end > times.start:
        values["busy"] = times.computing / (times.end - times.start)
    if times.sending is not None:
        values["sending"] = times.sending / SECOND
    if times.steps is not None:
        values["steps"] = times.steps
    return values


def _means_by_class(
    of_peers: Sequence[Mapping[str, float]], class_names: Sequence[str]
) -> dict[str, dict[str, float | None]]:
    """Return how the peers of each class spend a round, mean over those that took part."""
    names = [*PHASES, "busy"]
    if any("steps" in of_peer for of_peer in of_peers):
        names += ["sending", "steps"]
    by_class: dict[str, dict[str, float | None]] = {name: {} for name in sorted(set(class_names))}
    for name in names:
        measured: dict[str, list[float]] = {class_name: [] for class_name in by_class}
        for class_name, of_peer in zip(class_names, of_peers, strict=True):
            if name in of_peer:
                measured[class_name].append(of_peer[name])
        for class_name, values in measured.items():
            by_class[class_name][name] = fmean(values) if values else None
    return by_class


@dataclass(frozen=True)
class ClassTimes:
    """How the peers of a class of devices spend a run, mean over its peers."""

    name: str
    peers: int
    hours: Mapping[str, float]
    """Hours of each phase."""
    sending: float | None = None
    """Where nobody waits: hours in which its models leave, while it computes."""
    steps: float | None = None
    """Where nobody waits: how many steps it takes."""

    @property
    def busy(self) -> float:
        """The share of its time in which a peer computes."""
        total = sum(self.hours.values())
        return self.hours["computing"] / total if total else 0.0


def times_by_class(
    records: Sequence[Mapping[str, Any]], roster: Sequence[str], class_of: Mapping[str, str]
) -> list[ClassTimes]:
    """Return how the peers of each class spend the rounds of a run with a clock, by name."""
    by_class: dict[str, list[int]] = {}
    for position, peer in enumerate(roster):
        by_class.setdefault(class_of.get(peer, "all"), []).append(position)
    classes = []
    for name, positions in sorted(by_class.items()):
        simulated = [record[SIMULATED] for record in records]
        hours = {}
        for phase in PHASES:
            hours[phase] = _total([times[phase] for times in simulated], positions) / 3600
        sending = None
        steps = None
        if any(times["sending"] for times in simulated):
            sending = _total([times["sending"] for times in simulated], positions) / 3600
            steps = _total([record["steps"] for record in records], positions)
        classes.append(ClassTimes(name, len(positions), hours, sending, steps))
    return classes


def _total(spreads: Sequence[Mapping[str, Any] | None], positions: Sequence[int]) -> float:
    """Return the sum of a quantity over rounds, mean over the peers at these positions."""
    total = 0.0
    for of_round in spreads:
        if of_round is not None:
            total += sum(of_round["per_peer"][position] or 0.0 for position in positions)
    return total / len(positions)


def summarize_times(
    records: Sequence[Mapping[str, Any]], roster: Sequence[str], class_of: Mapping[str, str]
) -> Metrics | None:
    """Return the simulated times of a whole run, as its summary has them; None without a clock."""
    timed = [record for record in records if record.get(SIMULATED)]
    if not timed:
        return None
    simulated = [record[SIMULATED] for record in timed]
    busy = []
    energy = 0.0
    has_energy = True
    for times in simulated:
        if times["busy"]:
            busy += measured_values(times["busy"])
        has_energy = has_energy and times["energy"] is not None
        energy += times["energy"] or 0.0
    classes = []
    for of_class in times_by_class(timed, roster, class_of):
        values: Metrics = {"class": of_class.name, "peers": of_class.peers}
        for phase, hours in of_class.hours.items():
            values[f"{phase}_hours"] = hours
        values["busy"] = of_class.busy
        if of_class.steps is not None:
            values["sending_hours"] = of_class.sending
            values["steps"] = of_class.steps
        classes.append(values)
    return {
        "hours": simulated[-1]["hours"],
        "hours_per_round": simulated[-1]["hours"] / len(simulated),
        "busy": fmean(busy) if busy else None,
        "energy": energy if has_energy else None,
        "classes": classes,
    }
